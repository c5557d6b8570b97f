"""Trainings whose steps are run twice, with bits that are flipped in one of the runs."""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerControl, TrainerState

from mfwrap.callbacks import RecomputeCheck
from support.small_llama import byte_batch, small_llama

__all__ = [
    "Fault",
    "Planter",
    "bfloat16",
    "drawn_faults",
    "found_on_ranks",
    "network_of_one_layer",
    "run",
    "train",
]

MICRO_BATCHES = 2
FIRST = 3
"""First step that is judged: the two before are measured."""


@dataclass(frozen=True)
class Fault:
    """A bit that is flipped in one run of one micro-batch of a step."""

    step: int
    kind: str
    """``"output"``, ``"weight"`` (while the module reads it), ``"gradient of output"`` or
    ``"gradient of weight"``."""

    module: str
    micro_batch: int = 0
    run: int = 0
    """0 is the step itself."""

    element: int = 0
    bit: int = 0
    rank: int = 0

    @property
    def place(self) -> dict[str, Any]:
        """What the record must say."""
        where = "gradient" if self.kind.startswith("gradient") else "activation"
        name = f"{self.module}.weight" if self.kind == "gradient of weight" else self.module
        place = {"where": where, "name": name, "micro_batch": self.micro_batch}
        return {"step": self.step, "ranks": [self.rank], **place}


def drawn_faults(
    number: int, *, seed: int, num_ranks: int = 1, kinds: Sequence[str] = ()
) -> list[Fault]:
    """Draw a fault for each step from the third on."""
    drawn = random.Random(seed)  # noqa: S311  (not cryptographic)
    known = kinds or ("output", "weight", "gradient of output", "gradient of weight")
    faults = []
    for step in range(FIRST, FIRST + number):
        kind = drawn.choice(known)
        fault = Fault(
            step,
            kind,
            drawn.choice(_modules(kind)),
            micro_batch=drawn.randrange(MICRO_BATCHES),
            run=drawn.randrange(2),
            element=drawn.randrange(10**6),
            # Exponents stay as they are, so that the training goes on; the sign of a weight shows.
            bit=31 if kind == "weight" else drawn.randrange(23),
            rank=drawn.randrange(num_ranks),
        )
        faults.append(fault)
    return faults


def _modules(kind: str) -> list[str]:
    """Return modules that make what they return themselves, and, for weights, read all of it."""
    linear = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
    inner = (*linear, "mlp.gate_proj", "mlp.down_proj", "input_layernorm")
    names = [f"model.layers.0.{name}" for name in inner]
    if kind.endswith("output"):
        names += ["model.layers.0", "model.embed_tokens", "lm_head"]
    return names


def network_of_one_layer() -> nn.Module:
    """Return a small Llama with a single layer."""
    torch.manual_seed(0)
    network = small_llama()
    network.config.num_hidden_layers = 1
    network.model.layers = network.model.layers[:1]
    return network


class Planter:
    """Flip the bits of faults in a network.

    Args:
        network: Network without wrappers, which must not have the check's hooks yet.
        faults: What to flip.
    """

    def __init__(self, network: nn.Module, faults: Iterable[Fault]) -> None:
        self.step = 0
        self._calls = 0
        self.num_planted = 0
        network.register_forward_pre_hook(lambda *_: self._count())
        modules = dict(network.named_modules())
        for fault in faults:
            module = modules[fault.module]
            if fault.kind == "weight":
                module.register_forward_pre_hook(partial(self._flip_weight, fault, counts=True))
                module.register_forward_hook(partial(self._flip_weight, fault))
            elif fault.kind == "gradient of weight":
                module.weight.register_hook(partial(self._flipped, fault))
            else:
                module.register_forward_hook(partial(self._flip_output, fault))

    def begin_step(self, step: int) -> None:
        self.step, self._calls = step, 0

    def _count(self) -> None:
        self._calls += 1

    def is_due(self, fault: Fault) -> bool:
        place = divmod(self._calls - 1, MICRO_BATCHES)
        return self.step == fault.step and place == (fault.run, fault.micro_batch)

    def _flipped(self, fault: Fault, tensor: Tensor) -> Tensor | None:
        if not self.is_due(fault):
            return None
        self.num_planted += 1
        flipped = tensor.clone()
        flip(flipped, fault)
        return flipped

    def _flip_output(self, fault: Fault, _: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        if fault.kind == "output":
            return self._flipped(fault, output)
        if self.is_due(fault):
            output.register_hook(partial(self._flipped, fault))
        return None

    def _flip_weight(self, fault: Fault, module: nn.Module, *_: Any, counts: bool = False) -> None:
        if self.is_due(fault):
            self.num_planted += counts
            flip(module.weight, fault)


def flip(tensor: Tensor, fault: Fault) -> None:
    """Flip a bit of a float32 tensor in place."""
    bits = tensor.data.view(torch.int32).view(-1)
    mask = torch.tensor(1 << fault.bit if fault.bit < 31 else -(1 << 31), dtype=torch.int32)
    bits[fault.element % len(bits)] ^= mask.to(bits.device)


def tokens(step: int, micro_batch: int, rank: int = 0) -> dict[str, Tensor]:
    """Return a micro-batch of bytes."""
    return byte_batch([9, 7], start=(40 * step + 16 * micro_batch + 5 * rank) % 1000)


Batch = Callable[[int, int], Mapping[str, Tensor]]


def train(
    check: RecomputeCheck | None,
    network: nn.Module,
    num_steps: int,
    *,
    faults: Iterable[Fault] = (),
    batch: Batch = tokens,
    model: nn.Module | None = None,
    loss_of: Callable[[Any], Tensor] = lambda output: output.loss,
    before_forward: Callable[[int], None] = lambda _: None,
    around_forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    planter: Callable[[nn.Module, Iterable[Fault]], Planter] = Planter,
) -> list[Tensor]:
    """Train in a plain loop with two micro-batches a step, and send the events to the check.

    Returns:
        Losses, gradients of each step, weights and buffers.
    """
    model = model or network
    planted = planter(network, faults)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state, control = TrainerState(max_steps=num_steps), TrainerControl()
    found: list[Tensor] = []

    def send(event: str) -> None:
        if check is not None:
            getattr(check, event)(None, state, control, model=model)

    send("on_train_begin")
    for step in range(1, num_steps + 1):
        planted.begin_step(step)
        send("on_step_begin")
        for number in range(MICRO_BATCHES):
            before_forward(number)
            with around_forward():
                loss = loss_of(model(**batch(step, number)))
            (loss / MICRO_BATCHES).backward()
            found.append(loss.detach())
        send("on_pre_optimizer_step")
        found += [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        state.global_step = step
        send("on_step_end")
    send("on_train_end")
    # The backward of checkpointed modules repeats their forward, with its fault.
    assert planted.num_planted >= len(list(faults)), planted.num_planted
    return [*found, *(weight.detach() for weight in model.parameters()), *network.buffers()]


def run(folder: Path, faults: Sequence[Fault], **settings: Any) -> list[Tensor]:
    """Train a small Llama with faults and a check in each step."""
    num_steps = max((fault.step for fault in faults), default=FIRST)
    check = RecomputeCheck(1, folder=folder, **settings)
    return train(check, network_of_one_layer(), num_steps, faults=faults)


def found_on_ranks(rank: int, folder: str, layout: str, number: int) -> list[bool]:
    """Train on two ranks with faults, each on one rank, and without the check; compare the two."""
    num_ranks = torch.distributed.get_world_size()
    faults = drawn_faults(number, seed=2, num_ranks=num_ranks, kinds=_KINDS[layout])
    own = [fault for fault in faults if fault.rank == rank and fault.run == 1]
    results = []
    for check, planted in (
        (RecomputeCheck(1, folder=folder), [fault for fault in faults if fault.rank == rank]),
        # Faults in the second run must not change the training.
        (RecomputeCheck(1, folder=f"{folder}/second"), own),
        (None, []),
    ):
        network = network_of_one_layer()
        model: Any = network
        if layout == "DDP":
            model = DistributedDataParallel(network)
        else:
            fully_shard(model.model.layers[0])
            fully_shard(network)
        found = train(
            check,
            network,
            FIRST + number - 1,
            faults=planted,
            batch=partial(tokens, rank=rank),
            model=model,
            before_forward=partial(_reduce_last, model),
        )
        results.append([getattr(each, "_local_tensor", each) for each in found])
    pairs = zip(*results[1:], strict=True)
    return [torch.equal(ours, theirs) for ours, theirs in pairs]


_KINDS: dict[str, tuple[str, ...]] = {"DDP": (), "FSDP2": ("output", "gradient of output")}


def _reduce_last(model: Any, micro_batch: int) -> None:
    is_last = micro_batch == MICRO_BATCHES - 1
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = is_last  # as `no_sync` does
    else:
        model.set_requires_gradient_sync(is_last)


@contextlib.contextmanager
def bfloat16() -> Iterator[None]:
    """Compute in bfloat16 within the block."""
    with torch.autocast("cpu", torch.bfloat16):
        yield
