"""A random training: network, settings of the step, optimizer, data and injected faults."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

__all__ = [
    "BLOCKS",
    "FAULTS",
    "OPTIMIZERS",
    "Batch",
    "Case",
    "Fault",
    "RandomNetwork",
    "new_network",
    "new_optimizer",
    "rate_factor",
]

NUM_FEATURES = 3
NUM_ROWS = 4

BLOCKS = ("linear", "tied", "frozen", "unused", "scalar", "bfloat16", "float64")
"""Kinds of the blocks that a network is made of, after a first linear block."""

FAULTS = {
    "nan loss": (math.nan, 0.0),
    "inf loss": (math.inf, 0.0),
    "nan gradient": (1.0, math.nan),
    "inf gradient": (1.0, -math.inf),
    "spike": (1e4, 0.0),
}
"""By name of a fault: a factor of the loss, and a value that is added to one gradient element."""

# An eps of 1e-3 keeps Adam's update a smooth function of the gradient. With the default of 1e-8,
# the sign of a gradient that rounds to about zero would decide the direction of a whole update.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "fused AdamW": (AdamW, {"eps": 1e-3, "weight_decay": 0.1, "fused": True}),
    "fused Adam": (Adam, {"eps": 1e-3, "amsgrad": True, "fused": True}),
    "fused SGD": (SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    "fused SGD dampening": (SGD, {"momentum": 0.9, "dampening": 0.5, "fused": True}),
    "fused Adagrad": (Adagrad, {"initial_accumulator_value": 0.5, "fused": True}),
    "foreach AdamW": (AdamW, {"eps": 1e-3, "foreach": True}),
    "SGD": (SGD, {"momentum": 0.9, "weight_decay": 0.1, "fused": False}),
    "RMSprop": (RMSprop, {"eps": 1e-1, "momentum": 0.5}),
}


class Fault(NamedTuple):
    """A fault of one micro-batch of one rank."""

    update: int
    rank: int
    micro_batch: int
    kind: str


class Batch(NamedTuple):
    """Arguments of one call of the network."""

    inputs: Tensor
    targets: Tensor
    counted: Tensor
    """1 for each row that is a target of a per-token loss, 0 for the others."""
    factor: Tensor
    poison: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training. All values are numbers, texts and tuples, so that a case can go to a rank."""

    seed: int
    blocks: tuple[str, ...] = ()
    optimizer: str = "fused AdamW"
    second_rate: float | None = None
    """Learning rate of a second parameter group, which has all parameters but the first."""
    max_norm: float | None = None
    """Clipping limit; ``None`` means no clipping and no norm in the output."""
    threshold: float | None = None
    """Smallest norm that is a spike; ``None`` means that no update is skipped for its norm."""
    accumulation: int = 1
    scale: tuple[Any, ...] = ("number", 1.0)
    """Kind of the loss scale and its arguments."""
    average: tuple[Any, ...] | None = None
    """Decay, whether it warms up, and ``update_every``; ``None`` means no average."""
    per_token: bool = False
    groups: str | None = None
    num_ranks: int = 1
    num_updates: int = 4
    faults: tuple[Fault, ...] = ()

    @property
    def is_rounded(self) -> bool:
        """Whether some weights are in bfloat16, so that numbers agree only roughly."""
        return "bfloat16" in self.blocks

    def micro_batches(self, update: int, rank: int) -> list[Batch]:
        """Return the micro-batches of one update of one rank."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * update + rank)
        batches = []
        for index in range(self.accumulation):
            inputs = torch.randn(NUM_ROWS, NUM_FEATURES, generator=generator)
            targets = torch.randn(NUM_ROWS, generator=generator)
            counted = torch.rand(NUM_ROWS, generator=generator) < 0.4
            factor, poison = 1.0, 0.0
            for fault in self.faults:
                if fault[:3] == (update, rank, index):
                    factor, poison = FAULTS[fault.kind]
            numbers = (torch.full((), number) for number in (factor, poison))
            batches.append(Batch(inputs, targets, counted.float(), *numbers))
        return batches

    def plain(self) -> dict[str, Any]:
        """Return the case as a dict of plain values."""
        return dataclasses.asdict(self) | {"faults": [tuple(fault) for fault in self.faults]}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Case":
        """Return the case of a dict of plain values."""
        faults = tuple(Fault(*fault) for fault in plain["faults"])
        return cls(**plain | {"faults": faults})


class _Poison(torch.autograd.Function):
    """Zero, whose gradient is `value` at the parameter's last element and 0 elsewhere."""

    @staticmethod
    def forward(context: Any, parameter: Tensor, value: Tensor) -> Tensor:
        context.save_for_backward(parameter, value)
        return parameter.new_zeros(())

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor, None]:
        parameter, value = context.saved_tensors
        poisoned = torch.zeros_like(parameter)
        poisoned.view(-1)[-1] = value
        return poisoned, None


class _Block(nn.Module):
    def __init__(self, kind: str, first: nn.Linear | None) -> None:
        super().__init__()
        self.kind = kind
        if kind == "scalar":
            self.gain = nn.Parameter(torch.ones(()))
            return
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        if kind == "tied" and first is not None:
            self.linear.weight = first.weight
        if kind == "frozen":
            self.linear.requires_grad_(requires_grad=False)
        if kind in {"bfloat16", "float64"}:
            self.linear.to(getattr(torch, kind))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kind == "unused":
            return inputs
        if self.kind == "scalar":
            return inputs * self.gain
        outputs = self.linear(inputs.to(self.linear.weight.dtype))
        return inputs + torch.tanh(outputs).to(inputs.dtype)


class RandomNetwork(nn.Module):
    """A network of residual blocks with a squared error as its loss."""

    def __init__(self, kinds: tuple[str, ...], *, per_token: bool) -> None:
        super().__init__()
        self.per_token = per_token
        self.blocks = nn.ModuleList([_Block("linear", None)])
        for kind in kinds:
            self.blocks.append(_Block(kind, self.blocks[0].linear))

    def forward(
        self, inputs: Tensor, targets: Tensor, counted: Tensor, factor: Tensor, poison: Tensor
    ) -> Any:
        weight = self.blocks[0].linear.weight
        hidden = inputs.to(weight.dtype)
        for block in self.blocks:
            hidden = block(hidden)
        errors = (hidden.sum(dim=1) - targets.to(hidden.dtype)).square()
        injected = _Poison.apply(weight, poison)
        if self.per_token:
            return (errors * counted).sum() * factor + injected, counted.sum()
        return errors.mean() * factor + injected


def new_network(case: Case, kind: type[RandomNetwork] = RandomNetwork) -> RandomNetwork:
    """Return the network of a case, with the same weights at every call."""
    torch.manual_seed(case.seed)
    return kind(case.blocks, per_token=case.per_token)


def new_optimizer(case: Case, network: nn.Module, *, plain: bool = False) -> Optimizer:
    """Return the optimizer of a case.

    Args:
        case: Case with the optimizer's name.
        network: Network whose trainable parameters are optimized.
        plain: Whether to use torch's single-tensor implementation.
    """
    kind, settings = OPTIMIZERS[case.optimizer]
    if plain:
        settings = {k: v for k, v in settings.items() if k not in {"fused", "foreach"}}
        settings |= {"foreach": False}
    first, *others = [p for p in network.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [first, *others], "lr": 0.05}]
    if case.second_rate is not None and others:
        groups = [{"params": [first], "lr": 0.05}, {"params": others, "lr": case.second_rate}]
    return kind(groups, **settings)


def rate_factor(num_applied: int) -> float:
    """Return the factor of the learning rates after this number of applied updates."""
    return 1 / (1 + num_applied / 3)
