"""A network whose two halves are the stages of a pipeline."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from mfwrap import MFTrainOneStepCell, pipeline_stages
from support.layouts.layout import Layout
from support.layouts.networks import WIDTH, Block

__all__ = ["Pipeline"]

_NUM_MICRO_BATCHES = 2
"""As many as one process accumulates. Other sums of the same gradients round differently, which
moves biases that start at zero by more than 1e-6 of their size."""


class _Stages(nn.ModuleDict):
    """The whole network, with the names that its parameters have in the stages."""

    def __init__(self) -> None:
        super().__init__(
            {
                "stage_0": nn.Sequential(nn.Linear(WIDTH, 12), Block()),
                "stage_1": nn.Sequential(Block(), nn.LayerNorm(12), nn.Linear(12, WIDTH)),
            }
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(self["stage_1"](self["stage_0"](inputs)), targets)


class Pipeline(Layout):
    """A pipeline of two stages, each on one rank or replicated over several ranks.

    Args:
        name: First cell of the row.
        ranks: Number of ranks that train.
        data: How stages are replicated: ``"ddp"`` or ``"fsdp"``. Empty for a pipeline without
            replicas, which four ranks resume as two in DistributedDataParallel.
        resumes_on: Numbers of ranks that resume the checkpoint of `ranks`, one after the other.
    """

    local_norms = "of the rank's stages and loss"

    def __init__(
        self, name: str, ranks: int, data: str = "", *, resumes_on: tuple[int, ...] = ()
    ) -> None:
        super().__init__(name, ranks, self._build, resumes_on=resumes_on)
        self._data = data

    def whole_network(self) -> nn.Module:
        """Return both stages."""
        torch.manual_seed(0)
        return _Stages()

    def _build(self, whole: nn.Module) -> Any:
        shape = (2, distributed.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "data"))
        place = mesh.get_local_rank("pipeline")
        stage = whole.get_submodule(f"stage_{place}")
        if self._data == "fsdp":
            fully_shard(stage, mesh=mesh["data"])
        elif shape[1] > 1:
            stage = DistributedDataParallel(stage, process_group=mesh["data"].get_group())
        group = mesh["pipeline"].get_group()
        return Schedule1F1B(
            PipelineStage(stage, place, 2, torch.device("cpu"), group=group),
            _NUM_MICRO_BATCHES,
            loss_fn=nn.MSELoss(),
        )

    def module(self, network: Any) -> nn.Module:
        """Return the stage of this rank."""
        return pipeline_stages(network)

    def batch(self, number: int, rank: int) -> dict[str, Any]:
        """Return the part of the batch that belongs to this rank's pipeline."""
        replicas = distributed.get_world_size() // 2
        return {
            name: tensor.chunk(replicas)[rank % replicas]
            for name, tensor in self.whole_batch(number).items()
        }

    def update(self, cell: MFTrainOneStepCell, batches: list[dict[str, Any]]) -> Any:
        """Do one update of the pipeline, whose schedule makes its own micro-batches."""
        inputs, targets = (
            torch.cat([batch[name] for batch in batches]) for name in ("inputs", "targets")
        )
        return cell(inputs, target=targets)

    @contextlib.contextmanager
    def bad_loss(self, cell: MFTrainOneStepCell) -> Iterator[None]:
        """Make the output of this rank's stage NaN within the block."""
        [stage] = cell.network.values()
        with stage.register_forward_hook(lambda _stage, _inputs, output: output * math.nan):
            yield
