"""Programs that each rank runs to train the stages of a pipeline, and their one-process equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    get_schedule_class,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    pipeline_stages,
)
from mfwrap.sharded_checkpoint import load_sharded, save_sharded
from support.host_reads import HostReads
from support.small_networks import IGNORED
from support.training_state import training_state

__all__ = [
    "BAD_STEP",
    "Case",
    "costs_of",
    "disagree",
    "disagree_about_replicas",
    "freeze",
    "save_and_load",
    "train_pipeline",
    "train_whole",
]

NUM_STEPS = 5
BAD_STEP = 2
"""Index of the step in which the gradient of one stage is NaN."""
_NUM_LAYERS = 4
_WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline of two ranks, and perhaps replicas of it."""

    schedule: str = "1F1B"
    """Name of the schedule, as ``get_schedule_class`` knows it."""

    stages_per_rank: int = 1
    """Number of stages of each rank."""

    is_v_shaped: bool = False
    """Whether the rank of the first stage also has the last stage."""

    num_micro_batches: int = 2
    """Number of micro-batches of each pipeline."""

    data: str = ""
    """How the stages are replicated: ``ddp``, ``fsdp``, or empty for a single pipeline."""

    per_token: bool = False
    """Whether the loss is a sum over tokens, divided by the number of targets."""

    scale_grads: bool = True
    """Whether the schedule divides gradients by the number of micro-batches."""

    def with_data(self, data: str) -> "Case":
        """Return this case with two replicas of every stage."""
        return replace(self, data=data)


def layers() -> list[nn.Module]:
    """Return the layers of the whole network, the same in every process."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(_NUM_LAYERS)]


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Return inputs of shape (8, 8) and labels of shape (8,), some of them without a target."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    inputs = torch.randn(8, _WIDTH, generator=generator)
    labels = torch.randint(0, _WIDTH, (8,), generator=generator)
    labels[: step + replica] = IGNORED
    return inputs, labels


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all rows, so that micro-batches of equal size have equal weights."""
    return functional.cross_entropy(output, labels.clamp(min=0))


def token_loss(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over the rows with a target, and the number of these rows."""
    total = functional.cross_entropy(output, labels, ignore_index=IGNORED, reduction="sum")
    return total, labels.ne(IGNORED).sum()


def own_stages(case: Case, place: int) -> list[int]:
    """Return the numbers of the stages of the pipeline's rank `place`."""
    if case.is_v_shaped:
        return [place, 3 - place]
    return [place + 2 * turn for turn in range(case.stages_per_rank)]


def new_schedule(case: Case, rank: int) -> Any:
    """Build the stages and the schedule of one rank."""
    pipeline = data = None
    place = rank
    if case.data:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
        pipeline, data = mesh["pipeline"].get_group(), mesh["data"]
        place = mesh.get_local_rank("pipeline")
    num_stages = 2 * case.stages_per_rank
    per_stage = _NUM_LAYERS // num_stages
    whole = layers()
    stages = []
    for number in own_stages(case, place):
        part: nn.Module = nn.Sequential(*whole[number * per_stage : (number + 1) * per_stage])
        if case.data == "ddp":
            part = DistributedDataParallel(part, process_group=data.get_group())
        if case.data == "fsdp":
            fully_shard(part, mesh=data)
        stages.append(PipelineStage(part, number, num_stages, torch.device("cpu"), group=pipeline))
    kind: Callable[..., Any] = get_schedule_class(case.schedule)
    return kind(
        stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
        n_microbatches=case.num_micro_batches,
        loss_fn=token_loss if case.per_token else mean_loss,
        scale_grads=case.scale_grads,
    )


def _spoil(stage: nn.Module, spoilt: list[bool]) -> None:
    """Make the gradients of a stage's first layer NaN whenever ``spoilt[0]`` is true."""

    def factor(gradient: Tensor) -> Tensor:
        return gradient * float("nan") if spoilt[0] else gradient

    def watch(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(factor)

    first = next(each for each in stage.modules() if isinstance(each, nn.Linear))
    first.register_forward_hook(watch)


def _cell(network: Any, module: nn.Module, case: Case) -> Any:
    optimizer = AdamW(module.parameters(), lr=1e-2, fused=True)
    schedule = StepLR(optimizer, 2, gamma=0.5)
    ema = ExponentialMovingAverage(module, decay=0.9)
    return MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        max_grad_norm=0.05,
        scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 2),
        lr_scheduler=schedule,
        ema=ema,
        calculate_per_token_loss=case.per_token,
        local_norm=True,
    )


def _records(cell: Any, module: nn.Module, update: Callable[[int], Any], spoilt: Any) -> Any:
    names = [name.removeprefix("stages.") for name in cell.local_norm_names]
    outputs, states = [], []
    for step in range(NUM_STEPS):
        spoilt[0] = step == BAD_STEP
        outputs.append(update(step))
        cell.flush()
        states.append(training_state(module, cell.optimizer, cell.ema, cell.lr_scheduler))
    report = cell.last_report
    return {
        "losses": [output.loss.item() for output in outputs],
        "norms": [output.global_norm.item() for output in outputs],
        "overflows": [output.overflow.item() for output in outputs],
        "scales": [output.loss_scale.item() for output in outputs],
        "local_norms": [
            dict(zip(names, output.local_norm.tolist(), strict=True)) for output in outputs
        ],
        "counts": [report.applied_updates.item(), report.skipped_updates.item()],
        "states": states,
    }


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train_pipeline(rank: int, values: dict[str, Any]) -> dict[str, Any]:
    """Train the stages of one rank of ``Case(**values)``; return the record of each step."""
    case = Case(**values)
    schedule = new_schedule(case, rank)
    module = pipeline_stages(schedule)
    replica = rank % 2 if case.data else 0
    spoilt = [False]
    if "stage_0" in module and replica == 0:
        _spoil(module["stage_0"], spoilt)
    cell = _cell(schedule, module, case)

    def update(step: int) -> Any:
        inputs, labels = batch(step, replica)
        return cell(inputs, target=labels)

    record = _records(cell, module, update, spoilt)
    record["states"] = [
        {
            name.replace(".module.", "."): _whole(value)
            for name, value in each.items()
            if isinstance(value, Tensor)
        }
        for each in record["states"]
    ]
    return record


class _Whole(nn.Module):
    """The whole network with its loss; the names of its parameters are those of the stages."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        per_stage = _NUM_LAYERS // (2 * case.stages_per_rank)
        whole = layers()
        self.stages = nn.ModuleDict(
            {
                f"stage_{number}": nn.Sequential(
                    *whole[number * per_stage : (number + 1) * per_stage]
                )
                for number in range(2 * case.stages_per_rank)
            }
        )
        self._loss = token_loss if case.per_token else mean_loss
        self._factor = 1 if case.scale_grads else case.num_micro_batches

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        for stage in self.stages.values():
            inputs = stage(inputs)
        loss = self._loss(inputs, labels)
        return loss if isinstance(loss, tuple) else loss * self._factor


def train_whole(case: Case, replicas: Sequence[int] = (0,)) -> dict[str, Any]:
    """Train the whole network in this process, on the batches of some replicas."""
    network = _Whole(case)
    spoilt = [False]
    _spoil(network.stages["stage_0"], spoilt)
    cell = _cell(network, network.stages, case)

    def update(step: int) -> Any:
        batches = [batch(step, replica) for replica in replicas]
        return cell.step(
            [
                pair
                for inputs, labels in batches
                for pair in zip(
                    inputs.chunk(case.num_micro_batches),
                    labels.chunk(case.num_micro_batches),
                    strict=True,
                )
            ]
        )

    return _records(cell, network.stages, update, spoilt)


def costs_of(rank: int) -> dict[str, Any]:
    """Return what a step adds to its schedule, after the first step.

    Returns:
        ``messages``: sizes of the collectives in elements; ``reads``: names of the host's reads.
    """
    case = Case(per_token=True)
    schedule = new_schedule(case, rank)
    cell = _cell(schedule, pipeline_stages(schedule), case)
    for step in range(2):
        inputs, labels = batch(step, 0)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            cell(inputs, target=labels)
    messages = [
        sum(torch.Size(shape).numel() for shape in event.input_shapes)
        for event in profiled.events()
        if event.name == "gloo:all_reduce"
    ]
    with HostReads() as counted:
        cell(inputs, target=labels)
    return {"messages": messages, "reads": counted.names}


def freeze(rank: int) -> dict[str, Any]:
    """Freeze the stage of rank 0 after the first of two updates.

    Returns:
        ``norms`` of both updates, the ``local_norms`` of the second one, and whether the second
        update has ``changed`` the stage.
    """
    schedule = new_schedule(Case(), rank)
    stages = pipeline_stages(schedule)
    cell = _cell(schedule, stages, Case())
    inputs, labels = batch(0, 0)
    norms = [cell(inputs, target=labels).global_norm.item()]
    stages.requires_grad_(rank == 1)
    before = [parameter.clone() for parameter in stages.parameters()]
    output = cell(inputs, target=labels)
    return {
        "norms": [*norms, output.global_norm.item()],
        "local_norms": output.local_norm,
        "changed": not all(map(torch.equal, before, stages.parameters())),
    }


def disagree(rank: int) -> list[str]:
    """Train pipelines whose ranks differ; return the errors of the first updates."""
    errors = []
    for settings in ({"max_consecutive_skips": 10 + rank}, {}):
        case = Case(scale_grads=bool(settings) or rank == 0)
        schedule = new_schedule(case, rank)
        optimizer = AdamW(pipeline_stages(schedule).parameters())
        cell = MFTrainOneStepCell(schedule, optimizer, **settings)
        with pytest.raises(RuntimeError) as caught:
            cell(batch(0, 0)[0], target=batch(0, 0)[1])
        errors.append(str(caught.value))
    return errors


def disagree_about_replicas(rank: int) -> str:
    """Wrap only the first of two stages in DistributedDataParallel; return the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    place = mesh.get_local_rank("pipeline")
    stage: nn.Module = nn.Linear(_WIDTH, _WIDTH)
    if place == 0:
        stage = DistributedDataParallel(stage, process_group=mesh["data"].get_group())
    group = mesh["pipeline"].get_group()
    schedule = Schedule1F1B(
        PipelineStage(stage, place, 2, torch.device("cpu"), group=group), 2, loss_fn=mean_loss
    )
    cell = MFTrainOneStepCell(schedule, AdamW(stage.parameters()))
    with pytest.raises(RuntimeError) as caught:
        cell(batch(0, 0)[0], target=batch(0, 0)[1])
    return str(caught.value)


def save_and_load(rank: int, folder: str) -> dict[str, Any]:
    """Save a pipeline after two updates, do a third one, and do it again from the checkpoint.

    Returns:
        The ``states`` after both third updates, and the messages of ``errors``: of loading into
        other stages and into a plain network, and of saving an average of unnamed stages.
    """
    case = Case(schedule="Interleaved1F1B", stages_per_rank=2)
    states = []
    for part in range(2):
        schedule = new_schedule(case, rank)
        module = pipeline_stages(schedule)
        cell = _cell(schedule, module, case)
        if part == 0:
            for step in range(2):
                cell(batch(step, 0)[0], target=batch(step, 0)[1])
            save_sharded(f"{folder}/checkpoint", cell, cell.lr_scheduler)
        else:
            load_sharded(f"{folder}/checkpoint", cell, cell.lr_scheduler)
        cell(batch(2, 0)[0], target=batch(2, 0)[1])
        cell.flush()
        states.append(training_state(module, cell.optimizer, cell.ema, cell.lr_scheduler))
    errors = []
    other = new_schedule(Case(), rank)
    for network in (other, nn.Linear(2, 1)):
        module = pipeline_stages(other) if network is other else network
        cell = MFTrainOneStepCell(network, AdamW(module.parameters()))
        with pytest.raises(KeyError) as missing:
            load_sharded(f"{folder}/checkpoint", cell)
        errors.append(str(missing.value))
    stage = next(iter(pipeline_stages(other).values()))
    cell = MFTrainOneStepCell(other, AdamW(stage.parameters()), ema=ExponentialMovingAverage(stage))
    with pytest.raises(ValueError, match="averages of a pipeline") as clash:
        save_sharded(f"{folder}/clash", cell)
    return {"states": states, "errors": [*errors, str(clash.value)]}
