"""A network, the ways to shard it over ranks, and the data of each rank."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from mfwrap import AdamWeightDecay, ChainedOptimizer
from mfwrap.optimizers import Muon
from support.small_networks import IGNORED, labelled_batches

__all__ = [
    "NUM_STEPS",
    "Case",
    "TokenModel",
    "micro_batches_of",
    "new_model",
    "optimizer_of",
    "sharded",
]

NUM_STEPS = 4
NUM_ROWS = 8
"""Number of rows of one rank's batch."""


class Case(NamedTuple):
    """The settings of one training."""

    layout: str = "layers"
    accumulation: int = 1
    precision: str = "float32"
    optimizer: str = "fused AdamW"
    per_token: bool = False
    sync_each_batch: bool = False


class TokenModel(nn.Module):
    """A network with a frozen layer, an unused layer, and sizes that ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(requires_grad=False)
        self.last = nn.Linear(7, 5)
        self.unused = nn.Linear(3, 1)

    def forward(self, inputs: Tensor, labels: Tensor, factor: Tensor | float = 1.0) -> Any:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(inputs))))
        total = functional.cross_entropy(
            self.last(hidden), labels, ignore_index=IGNORED, reduction="sum"
        )
        return total * factor, labels.ne(IGNORED).sum()


class MeanModel(nn.Module):
    """A `TokenModel` whose loss is the mean over all rows.

    Ranks with equal numbers of rows then have equal shares of the loss.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        total, _ = self.model(inputs, labels, factor)
        mean: Tensor = total / len(labels)
        return mean


def new_model(*, per_token: bool) -> nn.Module:
    """Return a network with fixed initial weights, which all ranks and the reference share."""
    torch.manual_seed(0)
    model = TokenModel()
    return model if per_token else MeanModel(model)


def sharded(network: nn.Module, case: Case) -> nn.Module:
    """Shard a network in the case's layout; every rank must call this function."""
    world = distributed.get_world_size()
    policy = MixedPrecisionPolicy()
    if case.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = network if case.per_token else network.model
    mesh = init_device_mesh("cpu", (world,))
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    match case.layout:
        case "layers":
            _shard_layers(model, settings)
            fully_shard(network, **settings)
        case "root":
            fully_shard(network, **settings)
        case "children":
            _shard_layers(model, settings)
            fully_shard(model.unused, **settings)
        case "replicas":
            _shard_layers(model, settings | {"mesh": replicated_mesh(world)})
            fully_shard(network, **settings | {"mesh": replicated_mesh(world)})
        case "two meshes":
            fully_shard(model.first, **settings | {"mesh": replicated_mesh(world)})
            fully_shard(network, **settings)
        case "partly replicated":
            model.first = DistributedDataParallel(model.first)
            for layer in (model.frozen, model.last, model.unused):
                fully_shard(layer, **settings)
    return network


def replicated_mesh(world: int) -> DeviceMesh:
    """Return a mesh whose first dimension replicates and whose second dimension shards.

    The first dimension has size 2 if the number of ranks is even, otherwise 1.
    """
    shape = (2, world // 2) if world % 2 == 0 else (1, world)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _shard_layers(model: nn.Module, settings: dict[str, Any]) -> None:
    for layer in (model.first, model.frozen, model.last):
        fully_shard(layer, **settings)


def optimizer_of(name: str, network: nn.Module, *, plain: bool = False) -> Optimizer:
    """Return an optimizer by name; `plain` selects torch's single-tensor implementation."""
    kind = "" if plain else name.split(maxsplit=1)[0]
    way: dict[str, Any] = {"foreach": kind == "foreach"} if kind != "fused" else {"fused": True}
    if name == "AdamWeightDecay":
        return AdamWeightDecay(network.parameters(), lr=1e-3, fp32_state=True, fused=not plain)
    if name == "Muon with AdamW":
        matrices = [p for p in network.parameters() if p.ndim == 2]
        others = [p for p in network.parameters() if p.ndim != 2]
        # Muon computes in bfloat16. Its steps have an error of 2 %, and shards change the order of
        # its sums. At this rate, 2 % of the steps are less than the tests' tolerance of 2e-6, but
        # the steps of matrices that are not whole would differ by more.
        muon = torch.optim.Muon if plain else Muon
        return ChainedOptimizer(muon(matrices, lr=2e-5), AdamW(others, lr=1e-2, fused=not plain))
    if name.endswith("AdamW"):
        return AdamW(network.parameters(), lr=1e-2, **way)
    dampening = 0.5 if "dampened" in name else 0.0
    return SGD(network.parameters(), lr=0.1, momentum=0.9, dampening=dampening, **way)


def micro_batches_of(case: Case, step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's micro-batches of one update.

    With a per-token loss, the ranks have unequal numbers of targets. Rank 1 has no targets in step
    1, and no rank has targets in step 2.
    """
    [(inputs, labels)] = labelled_batches(1, size=NUM_ROWS, seed=10 * step + rank, num_classes=5)
    if case.per_token:
        labels[: 1 + 2 * (rank % 3)] = IGNORED
        if step == 2 or (step, rank) == (1, 1):
            labels[:] = IGNORED
    parts = zip(inputs.chunk(case.accumulation), labels.chunk(case.accumulation), strict=True)
    return list(parts)
