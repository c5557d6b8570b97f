"""Programs that each rank runs to measure local norms in communication hooks."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mfwrap import MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from support.attached_runs import new_accelerator
from support.small_networks import Classifier, LinearProbe, labelled_batches

__all__ = [
    "HOOKS",
    "OPTIONS",
    "STEPS_OF_5",
    "Parts",
    "assert_own_norms",
    "share",
    "train_by_hand_without_no_sync",
    "train_gan",
    "train_partly_distributed",
    "train_with_handler",
    "train_with_hook",
    "train_with_options",
    "train_with_unused",
]

LOSS_SCALE = 2.0**10
STEPS_OF_5 = torch.tensor([5.0, 10.0])
"""Gradient norms on ranks 0 and 1, whose inputs are (3, 4) times 1 and 2."""

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 1e-5},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused found": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}
"""Keyword arguments of DistributedDataParallel by name."""


def share(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a rank in a step."""
    [batch] = labelled_batches(1, seed=10 * step + rank)
    return batch


def _classifier() -> nn.Module:
    torch.manual_seed(0)
    return Classifier()


def _weights(network: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in network.parameters()]


def _cell(network: nn.Module, **settings: Any) -> MFTrainOneStepCell:
    optimizer = SGD(network.parameters(), lr=0.1, fused=True)
    settings = {"scale_sense": LOSS_SCALE, "use_clip_grad": True, "local_norm": True, **settings}
    return MFTrainOneStepCell(network, optimizer, **settings)


def _train(rank: int, network: nn.Module, **settings: Any) -> dict[str, Any]:
    cell = _cell(network, **settings)
    before, local_norms, global_norms = [], [], []
    for step in range(3):
        before.append(_weights(network))
        output = cell(*share(step, rank))
        local_norms += [output.local_norm] if hasattr(output, "local_norm") else []
        global_norms.append(output.global_norm)
    return {
        "before": before,
        "local_norms": torch.stack(local_norms) if local_norms else None,
        "global_norms": torch.stack(global_norms),
        "weights": _weights(network),
    }


def train_with_options(rank: int, name: str) -> dict[str, Any]:
    """Train with named options of DistributedDataParallel, and accumulate if torch allows it."""
    network = DistributedDataParallel(_classifier(), **OPTIONS[name])
    # With a static graph, DistributedDataParallel must reduce the gradients of the first backward,
    # so a first update with two micro-batches is not possible.
    accumulation = 1 if name == "static graph" else 2
    return _train(rank, network, gradient_accumulation_steps=accumulation)


def _compressing() -> tuple[Any, Callable[..., Any]]:
    return None, default_hooks.fp16_compress_hook


def _by_power_iteration() -> tuple[Any, Callable[..., Any]]:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    return state, powerSGD_hook.powerSGD_hook


HOOKS = {"fp16": _compressing, "power SGD": _by_power_iteration}
"""Functions that create a communication hook of torch and its state."""


def train_with_hook(rank: int, name: str) -> dict[str, Any]:
    """Train with a communication hook in three ways, and return the results by name.

    - ``"ours"``: The cell gets the hook and measures local norms.
    - ``"theirs"``: The hook is registered with torch.
    - ``"without norms"``: The cell gets the hook and measures no local norms.
    """
    torch.manual_seed(0)
    ours = _train(rank, DistributedDataParallel(_classifier()), communication_hook=HOOKS[name]())
    network = DistributedDataParallel(_classifier())
    network.register_comm_hook(*HOOKS[name]())
    theirs = _train(rank, network, local_norm=False)
    network = DistributedDataParallel(_classifier())
    without = _train(rank, network, local_norm=False, communication_hook=HOOKS[name]())
    return {"ours": ours, "theirs": theirs, "without norms": without}


class _PartlyUsed(nn.Module):
    """A network with three layers, which different ranks use.

    All ranks use the first layer, only the last rank uses the second, and no rank uses the third.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = LinearProbe()
        self.seldom_used = LinearProbe()
        self.never_used = LinearProbe()

    def forward(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.used(inputs)
        is_last = distributed.get_rank() == distributed.get_world_size() - 1
        return loss + self.seldom_used(2 * inputs) if is_last else loss


def train_with_unused(rank: int) -> dict[str, Any]:
    """Train a network with a layer that only one rank uses, and a layer that no rank uses."""
    network = DistributedDataParallel(_PartlyUsed(), find_unused_parameters=True)
    cell = _cell(network, max_grad_norm=float("inf"))
    outputs = [cell(torch.tensor([[3.0, 4.0]]) * (1 + rank)) for _ in range(2)]
    return {
        "local_norms": torch.stack([output.local_norm for output in outputs]),
        "weights": _weights(network),
    }


class Parts(nn.Module):
    """A network with two distributed parts, and one part that is not reduced over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = DistributedDataParallel(LinearProbe())
        self.own = LinearProbe()
        self.second = DistributedDataParallel(LinearProbe())

    def forward(self, inputs: Tensor, own_factor: Tensor | float = 1.0) -> Tensor:
        loss: Tensor = self.first(inputs) + self.second(2 * inputs)
        return loss + self.own(inputs) * own_factor


def train_partly_distributed(rank: int) -> dict[str, Any]:
    """Train `Parts`, with a NaN on rank 1 in the part that is not reduced over ranks."""
    cell = _cell(Parts(), max_grad_norm=1.0)
    network = cell.network
    outputs, weights = [], [_weights(network)]
    for step in range(3):
        factor = float("nan") if (rank, step) == (1, 1) else 1.0
        outputs.append(cell(torch.tensor([[3.0, 4.0]]) * (1 + rank), factor))
        weights.append(_weights(network))
    return {
        "local_norms": torch.stack([output.local_norm for output in outputs]),
        "global_norms": torch.stack([output.global_norm for output in outputs]),
        "overflows": [output.overflow.item() for output in outputs],
        "weights": weights,
    }


def _attached(**settings: Any) -> tuple[Any, Any]:
    accelerator = new_accelerator(**settings.pop("accelerator", {}))
    step = attach(accelerator, StepConfig(local_norm=True), scale_sense=LOSS_SCALE, **settings)
    return accelerator, step


def train_with_handler(rank: int, name: str) -> dict[str, Any]:
    """Train an attached loop with the communication hook that `name` selects.

    Args:
        rank: Rank of this process.
        name: ``"fp16"`` sets a hook with accelerate's handler. ``"given"`` and ``"given, plain"``
            pass a hook to `attach`. ``"none"`` and ``"plain"`` set no hook.
    """
    handlers = {
        "none": [],
        "plain": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        "fp16": [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)],
        "given": [],
        "given, plain": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    }
    hook = _compressing() if name.startswith("given") else None
    accelerator, step = _attached(
        accelerator={"kwargs_handlers": handlers[name], "gradient_accumulation_steps": 2},
        communication_hook=hook,
    )
    network = _classifier()
    optimizer = SGD(network.parameters(), lr=0.1, fused=True)
    network, optimizer = accelerator.prepare(network, optimizer)
    before, local_norms, global_norms = [], [], []
    for update in range(3):
        before.append(_weights(network))
        inputs, labels = share(update, rank)
        for part in zip(inputs.chunk(2), labels.chunk(2), strict=True):
            with accelerator.accumulate(network):
                accelerator.backward(network(*part))
                if accelerator.sync_gradients:
                    global_norms.append(accelerator.clip_grad_norm_(network.parameters(), 1.0))
                optimizer.step()
                optimizer.zero_grad()
        local_norms.append(step.last_output.local_norm)
    step.detach()
    accelerator.backward(network(*share(0, rank)))
    [(hook, state)] = network._comm_hooks
    return {
        "before": before,
        "local_norms": torch.stack(local_norms),
        "global_norms": torch.stack(global_norms),
        "hook": hook.__name__,
        "seen after detaching": len(state.squares),
        "handlers": [type(handler).__name__ for handler in handlers[name]],
    }


def train_by_hand_without_no_sync(rank: int) -> dict[str, Any]:
    """Run two backwards before an update without ``no_sync``, so that both reduce gradients."""
    accelerator, step = _attached()
    network = LinearProbe()
    network, optimizer = accelerator.prepare(network, SGD(network.parameters(), lr=0.0))
    for factor in (1.0, 10.0):
        accelerator.backward(network(torch.tensor([[3.0, 4.0]]) * factor * (1 + rank)))
    optimizer.step()
    return {"local_norm": step.last_output.local_norm}


class _Gan(nn.Module):
    """A generator and a discriminator in one network."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = LinearProbe()
        self.discriminator = LinearProbe()

    def forward(self, inputs: Tensor, *, both: bool) -> Tensor:
        loss: Tensor = self.discriminator(inputs)
        return loss + self.generator(2 * inputs) if both else loss


def train_gan(rank: int) -> dict[str, Any]:
    """Update discriminator and generator in turn; the generator's loss depends on both."""
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator, step = _attached(accelerator={"kwargs_handlers": [handler]})
    network = _Gan()
    halves = network.discriminator, network.generator
    network, *optimizers = accelerator.prepare(
        network, *(SGD(half.parameters(), lr=0.1, fused=True) for half in halves)
    )
    inputs = torch.tensor([[3.0, 4.0]]) * (1 + rank)
    local_norms = []
    for turn in range(4):
        optimizer = optimizers[turn % 2]
        # Each optimizer zeroes only the gradients of its own half. The generator's loss also leaves
        # gradients in the discriminator; the discriminator's optimizer zeroes them in the next
        # turn.
        optimizer.zero_grad()
        accelerator.backward(network(inputs * (1 + turn), both=turn % 2 == 1))
        optimizer.step()
        local_norms.append(step.last_output.local_norm)
    return {"local_norms": torch.stack(local_norms)}


def _own_norms(results: dict[str, Any], rank: int) -> Tensor:
    """Return the expected local norms of a rank, computed in float64 with plain torch."""
    norms = []
    for step, weights in enumerate(results["before"]):
        network = Classifier().double()
        for parameter, weight in zip(network.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        inputs, labels = share(step, rank)
        network(inputs.double(), labels).backward()
        norms.append(torch.stack([parameter.grad.norm() for parameter in network.parameters()]))
    return torch.stack(norms)


def assert_own_norms(results: list[dict[str, Any]]) -> None:
    """Fail unless each rank has its own local norms, and all ranks have the same global norms."""
    for rank, result in enumerate(results):
        torch.testing.assert_close(
            result["local_norms"].double(), _own_norms(result, rank), rtol=1e-5, atol=0
        )
    first, second = results
    assert not torch.allclose(first["local_norms"], second["local_norms"], rtol=0.01)
    assert torch.equal(first["global_norms"], second["global_norms"])
