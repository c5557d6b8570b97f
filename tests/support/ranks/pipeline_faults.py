"""Programs in which one rank of a pipeline has a fault, which must not stop the other ranks."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim import AdamW

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell, pipeline_stages
from mfwrap.optimizers.after_update import AfterUpdate

__all__ = [
    "act_after_update",
    "change_batches",
    "freeze_first",
    "group_norms",
    "set_bad_rates",
    "train_lone_pipelines",
    "use_gloo_of_old_torch",
]


def _stage(rank: int, group: Any = None) -> Any:
    torch.manual_seed(rank)
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"), group=group)
    return Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.MSELoss())


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, 4), torch.zeros(rows, 4)


def set_bad_rates(rank: int) -> list[dict[str, Any]]:
    """Give one stage a rate that is NaN: a tensor on rank 0, then a number on rank 1.

    Returns:
        For each of the two updates whether it was ``skipped``, whether it has ``changed`` the
        stage, its ``overflow`` and its ``loss_scale``.
    """
    found = []
    for bad_rank, bad_rate in enumerate((torch.tensor(math.nan), math.nan)):
        schedule = _stage(rank)
        stages = pipeline_stages(schedule)
        optimizer = AdamW(stages.parameters(), lr=torch.tensor(0.1), fused=True)
        scale = DynamicLossScaleUpdateCell(1024.0, 2, 2000)
        cell = MFTrainOneStepCell(schedule, optimizer, scale_sense=scale)
        inputs, target = _batch(4)
        cell(inputs, target=target)
        if rank == bad_rank:
            optimizer.param_groups[0]["lr"] = bad_rate
        before = [parameter.clone() for parameter in stages.parameters()]
        output = cell(inputs, target=target)
        found.append(
            {
                "skipped": cell.last_report.skipped.item(),
                "changed": not all(map(torch.equal, before, stages.parameters())),
                "overflow": output.overflow.item(),
                "loss_scale": output.loss_scale.item(),
            }
        )
    return found


class _Nothing(AfterUpdate):
    """Do nothing after an update."""

    def discard(self) -> None:
        """Forget nothing."""

    def act(self, *_: Any) -> None:
        """Act as a hook of the optimizer's step."""


def act_after_update(rank: int) -> str:
    """Act after the updates of each stage, and return the error of the cell."""
    schedule = _stage(rank)
    optimizer = AdamW(pipeline_stages(schedule).parameters(), fused=True)
    optimizer.register_step_post_hook(_Nothing().act)
    cell = MFTrainOneStepCell(schedule, optimizer)
    inputs, target = _batch(4)
    with pytest.raises(ValueError, match="whole network") as caught:
        cell(inputs, target=target)
    return str(caught.value)


def freeze_first(rank: int, frozen: int) -> tuple[float, bool]:
    """Freeze the stage of rank `frozen` before the cell is built.

    Returns:
        Global norm of an update, and whether the update has changed the stage.
    """
    schedule = _stage(rank)
    stages = pipeline_stages(schedule).requires_grad_(rank != frozen)
    cell = MFTrainOneStepCell(schedule, AdamW(stages.parameters()), use_clip_grad=True)
    before = [parameter.clone() for parameter in stages.parameters()]
    inputs, target = _batch(4)
    output = cell(inputs, target=target)
    return output.global_norm.item(), not all(map(torch.equal, before, stages.parameters()))


def group_norms(rank: int) -> list[tuple[str, ...]]:
    """Take norms of groups: the same patterns on both ranks, then the patterns of its own stage.

    Returns:
        Names of the groups in both cases.
    """
    names = []
    for groups in (["stage_0", "stage_1"], [f"stage_{rank}.*weight"]):
        schedule = _stage(rank)
        optimizer = AdamW(pipeline_stages(schedule).parameters())
        cell = MFTrainOneStepCell(schedule, optimizer, local_norm=True, local_norm_groups=groups)
        inputs, target = _batch(4)
        assert cell(inputs, target=target).local_norm.shape == (1,)
        names.append(cell.local_norm_names)
    return names


def change_batches(rank: int) -> list[str]:
    """Call a cell with batches that its schedule cannot take; return the messages of the errors.

    Between the errors and after them, good batches are trained.
    """
    schedule = _stage(rank)
    cell = MFTrainOneStepCell(schedule, AdamW(pipeline_stages(schedule).parameters()))
    inputs, target = _batch(4)
    errors = []
    for rows in (3, 6, 2):
        cell(inputs, target=target)
        with pytest.raises(ValueError, match="must") as caught:
            cell(_batch(rows)[0], target=target)
        errors.append(str(caught.value))
    cell(inputs, target=target)
    # A rank may leave out what it does not use.
    alone = {"target": _batch(2)[1]} if rank == 1 else {}
    with pytest.raises(ValueError, match="must") as caught:
        cell(*([] if rank == 1 else [_batch(2)[0]]), **alone)
    return [*errors, str(caught.value)]


def train_lone_pipelines(rank: int) -> list[str]:
    """Train two pipelines of two ranks that nothing joins; return the warnings."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    schedule = _stage(mesh.get_local_rank("pipeline"), mesh["pipeline"].get_group())
    optimizer = AdamW(pipeline_stages(schedule).parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cell = MFTrainOneStepCell(schedule, optimizer)
        inputs, target = _batch(4)
        cell(inputs, target=target)
    return [str(each.message) for each in caught if "this pipeline" in str(each.message)]


def use_gloo_of_old_torch(rank: int) -> str:
    """Return the error of a pipeline with a version of torch whose stages abort over gloo."""
    schedule = _stage(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mfwrap.step.pipeline.can_use_gloo", lambda: False)
        with pytest.raises(ValueError, match="pipeline") as caught:
            MFTrainOneStepCell(schedule, AdamW(pipeline_stages(schedule).parameters()))
        # A group without a named backend uses gloo on a CPU, too.
        patch.setattr("mfwrap.step.pipeline.distributed.get_backend", lambda _: "undefined")
        with pytest.raises(ValueError, match="pipeline over gloo"):
            MFTrainOneStepCell(schedule, AdamW(pipeline_stages(schedule).parameters()))
    return str(caught.value)
