"""Check before the first update that all ranks agree, and that a checkpoint fits on the disk."""

import dataclasses
import hashlib
import logging
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.collectives import gather_objects, ranks_of
from mfwrap.collectives.places import named_ranks

_PACKAGES = (
    *("mfwrap", "torch", "accelerate", "transformers", "datasets", "numpy", "peft", "safetensors"),
    *("tokenizers", "trl"),
)
_MOST_NAMED = 5
"""Largest number of disagreements that an error names."""

_logger = logging.getLogger("mfwrap")

Facts = Mapping[str, Mapping[str, str]]
"""Facts by topic and name, for example ``{"versions": {"torch": "2.13.0"}}``."""


def check_ranks_agree(
    facts: Facts, problems: Sequence[str] = (), group: Any = None, warned: Sequence[str] = ()
) -> None:
    """Raise the same error on all ranks if the ranks disagree or if a rank has a problem.

    Call it on all ranks of the group. It gathers one small object from each rank, and the details
    only if the ranks disagree.

    Args:
        facts: What must be the same on all ranks.
        problems: Sentences that say what keeps this rank from training.
        group: Process group; ``None`` for all ranks.
        warned: Topics of `facts` whose differences are only logged.

    Raises:
        RuntimeError: If the ranks disagree, or if a rank has a problem. The message names the ranks
            for each disagreement and each problem.
    """
    # Hash the facts: with thousands of ranks and parameters, the facts themselves are too large.
    hashes = {topic: _hash(names) for topic, names in facts.items()}
    ranks = ranks_of(group)
    gathered = gather_objects((hashes, tuple(problems)), group)
    by_problem = _by_value(ranks, [problems for _, problems in gathered])
    found = [f"{problem} ({named_ranks(those)})" for problem, those in by_problem.items()]
    # Take the topics of all ranks: each rank then has the same list, even if it lacks a topic.
    topics = dict.fromkeys(topic for of_rank, _ in gathered for topic in of_rank)
    differing = [t for t in topics if len({of_rank.get(t) for of_rank, _ in gathered}) > 1]
    if differing:
        own = {topic: dict(facts.get(topic, {})) for topic in differing}
        for topic, sentence in _disagreements(ranks, gather_objects(own, group)):
            if topic in warned:
                _logger.warning("ranks differ: %s", sentence)
            else:
                found.append(sentence)
    if found:
        more = len(found) - _MOST_NAMED
        shown = [*found[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]
        msg = f"cannot start training: {'; '.join(shown)}"
        raise RuntimeError(msg)


def _hash(names: Mapping[str, str]) -> str:
    content = "\n".join(f"{name}={value}" for name, value in names.items())
    return hashlib.sha256(content.encode()).hexdigest()


def _by_value(ranks: Sequence[int], of_ranks: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Return the ranks that have each value."""
    found: dict[str, list[int]] = {}
    for rank, values in zip(ranks, of_ranks, strict=True):
        for value in values:
            found.setdefault(value, []).append(rank)
    return found


def _disagreements(
    ranks: Sequence[int], of_ranks: Sequence[Mapping[str, Mapping[str, str]]]
) -> list[tuple[str, str]]:
    """Return topic and sentence for each fact that differs between ranks."""
    found = []
    for topic in of_ranks[0]:
        names = dict.fromkeys(name for facts in of_ranks for name in facts.get(topic, {}))
        for name in names:
            values = [[facts.get(topic, {}).get(name, "missing")] for facts in of_ranks]
            by_value = _by_value(ranks, values)
            if len(by_value) > 1:
                parts = [f"{value} on {named_ranks(those)}" for value, those in by_value.items()]
                found.append((topic, f"{topic}: {name} is {' but '.join(parts)}"))
    return found


def step_facts(
    networks: Sequence[nn.Module], optimizers: Sequence[Optimizer], settings: Any
) -> dict[str, dict[str, str]]:
    """Return what must be the same on all ranks that update the same networks.

    Args:
        networks: Networks that are trained.
        optimizers: Optimizers of the networks.
        settings: Settings of the step: an instance of a dataclass.
    """
    facts = {"settings of the step": setting_facts(settings), "versions": version_facts()}
    for number, network in enumerate(networks):
        facts["network" if len(networks) == 1 else f"network {number}"] = model_facts(network)
    for number, optimizer in enumerate(optimizers):
        topic = "optimizer" if len(optimizers) == 1 else f"optimizer {number}"
        facts[topic] = optimizer_facts(optimizer)
    return facts


def model_facts(network: nn.Module) -> dict[str, str]:
    """Describe each parameter and buffer by shape and dtype, and say which parameters are frozen.

    Sharded parameters are described by their full shape.
    """
    facts = {}
    for name, parameter in network.named_parameters():
        trained = "" if parameter.requires_grad else ", frozen"
        facts[f"parameter {name}"] = f"{_dtype(parameter)}{list(parameter.shape)}{trained}"
    for name, buffer in network.named_buffers():
        facts[f"buffer {name}"] = f"{_dtype(buffer)}{list(buffer.shape)}"
    return facts


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def optimizer_facts(optimizer: Optimizer) -> dict[str, str]:
    """Return an optimizer's class, and for each group its settings and number of parameters."""
    facts = {"class": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            text = str(len(value)) if name == "params" else _plain(value)
            facts[f"{name} of group {number}"] = text
    return facts


def setting_facts(settings: Any, leave_out: Iterable[str] = ()) -> dict[str, str]:
    """Return the fields of a dataclass as text.

    Args:
        settings: Instance of a dataclass.
        leave_out: Names of fields that may differ between ranks.
    """
    names = {field.name for field in dataclasses.fields(settings)} - set(leave_out)
    return {name: _plain(getattr(settings, name)) for name in sorted(names)}


def _plain(value: object) -> str:
    """Return a value as text that is the same in every process."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    text = str(value)
    # The text of a function, or of an object without a `__repr__`, has its address.
    return str(getattr(value, "__qualname__", type(value).__name__)) if " at 0x" in text else text


def num_batches(loader: Any) -> int | None:
    """Return the number of batches of a data loader; ``None`` if it is unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def version_facts() -> dict[str, str]:
    """Return the versions of Python and of the imported packages that a training depends on."""
    facts = {"python": platform.python_version()}
    for name in _PACKAGES:
        if name in sys.modules:
            facts[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return facts


def disk_problem(folder: Path, num_bytes: int) -> str | None:
    """Return a sentence if a folder's disk has less space than one checkpoint needs.

    Args:
        folder: Run folder; it need not exist yet.
        num_bytes: Least size of a checkpoint.
    """
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free >= num_bytes:
        return None
    return (
        f"a checkpoint takes at least {_size(num_bytes)}, but {folder} has {_size(free)} of free "
        "space; free some space or choose another folder"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def checkpoint_bytes(
    network: nn.Module, optimizer: Optimizer | None = None, *, has_average: bool = False
) -> int:
    """Return the least number of bytes that a checkpoint takes.

    Counts the weights, one copy of the trained weights for an average, and the state that
    optimizers are known to keep for each weight: two copies with ``betas``, one with ``momentum``.
    State of other optimizers is not counted. With an adapter of peft, only the trained weights are
    saved.

    Args:
        network: Network whose weights are saved.
        optimizer: Optimizer whose state is saved; ``None`` for none.
        has_average: Whether the checkpoint holds an average of the weights.
    """
    trained = _num_bytes(p for p in network.parameters() if p.requires_grad)
    total = trained if hasattr(network, "peft_config") else _num_bytes(network.parameters())
    if has_average:
        total += trained
    for group in [] if optimizer is None else optimizer.param_groups:
        copies = 2 if "betas" in group else int(bool(group.get("momentum")))
        # `AdamWeightDecay` can have a float32 state for half-precision weights.
        total += copies * _num_bytes(group["params"], 4 if group.get("fp32_state") else 1)
    return total


def _num_bytes(tensors: Iterable[Tensor], smallest: int = 1) -> int:
    return sum(tensor.numel() * max(tensor.element_size(), smallest) for tensor in tensors)
