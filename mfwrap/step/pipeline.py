"""The first half of a training step in a pipeline: a schedule runs all micro-batches.

In a pipeline each rank holds some of the network's layers, its *stages*. A schedule of
``torch.distributed.pipelining`` splits the batch into micro-batches, sends activations and their
gradients between the ranks, and leaves the gradients of each rank's own stages in
``parameter.grad``. The step needs three more things:

- **The loss must be scaled.** The schedule calls the loss function itself, on the rank of the last
  stage. During a step, `PipelineAccumulation` replaces it by a function that scales the loss.
- **The gradients must be divided by the number of micro-batches**, if the schedule has
  ``scale_grads``. torch divides each gradient in a pass of its own. The step divides the loss
  instead, and turns ``scale_grads`` off for the duration of the step.
- **All ranks must reach the same decision.** No rank holds all gradients, and only one has the
  loss. `StageTotals` adds up the squared norms, and passes the loss along in the same message.

Only this file and pipeline_batches.py use private names of torch's schedules: ``_stage``,
``_stages``, ``_loss_fn``, ``_n_microbatches``, ``_args_chunk_spec``, ``_kwargs_chunk_spec`` and
``_internal_losses``.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from mfwrap.arguments import callers_stacklevel
from mfwrap.collectives import Section, gather_objects, num_ranks, ranks_of, section_clock
from mfwrap.collectives.places import named_ranks
from mfwrap.compatibility.pipelining import (
    GLOO_RELEASE,
    can_use_gloo,
    forget_losses,
    loss_function,
    num_micro_batches,
    run,
    set_loss_function,
    stages_of,
)
from mfwrap.config import StepConfig
from mfwrap.preflight import check_ranks_agree, setting_facts, step_facts, version_facts
from mfwrap.step.accumulation import (
    GradientAccumulation,
    GradientsAsWeights,
    detached,
    normalizer_of,
)
from mfwrap.step.calls import NetworkCall
from mfwrap.step.losses import Accumulated, LossParts, Normalizer, loss_of, pair_of
from mfwrap.step.parameters import checked_network, network_parameters
from mfwrap.step.pipeline_batches import PipelineBatches
from mfwrap.step.ranks.agreement import Agreement, StageTotals, reduced_by
from mfwrap.step.ranks.float32_gradients import Float32Gradients
from mfwrap.step.ranks.fsdp import ShardedParts
from mfwrap.step.ranks.guard import RankGuard
from mfwrap.tensors.shards import is_distributed, mesh_groups, on_device
from mfwrap.tensors.wrappers import PipelineStages, distributed_parts, is_instance_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    PipelineSchedule = PipelineScheduleMulti | PipelineScheduleSingle


def pipeline_stages(schedule: "PipelineSchedule") -> PipelineStages:
    """Return the stages that a pipeline schedule runs on this rank, as one module.

    Build the optimizer and the average of the weights from this module: the names of its parameters
    are the same on every rank that runs the stage, and differ between stages. Calling the module is
    not possible; the schedule calls the stages.

    Args:
        schedule: Schedule of ``torch.distributed.pipelining``.

    Returns:
        The stages by name, ``stage_0``, ``stage_1``, ...; the number is the ``stage_index``.

    Raises:
        TypeError: If `schedule` is not such a schedule.
        ValueError: If no stage of this rank has a parameter. torch builds no optimizer without any.
    """
    if not _is_schedule(schedule):
        msg = (
            "`schedule` must be a schedule of torch.distributed.pipelining, got "
            f"{type(schedule).__name__}"
        )
        raise TypeError(msg)
    stages = PipelineStages(
        {f"stage_{stage.stage_index}": stage.submod for stage in stages_of(schedule)}
    )
    if next(stages.parameters(), None) is None:
        names = " and ".join(name for name, _ in stages.named_children())
        msg = (
            f"{names} of this rank must have a parameter for the optimizer, got none; move a layer "
            "with parameters, frozen or not, into a stage of each rank"
        )
        raise ValueError(msg)
    return stages


def _is_schedule(value: object) -> bool:
    module, names = "torch.distributed.pipelining.schedules", ("Single", "Multi")
    return any(is_instance_of(value, module, f"PipelineSchedule{name}") for name in names)


def accumulation_of(
    network: "nn.Module | PipelineSchedule",
    config: StepConfig,
    accelerator: "Accelerator | None" = None,
) -> "GradientAccumulation | PipelineAccumulation":
    """Return the first half of the step that trains a network or a pipeline.

    Args:
        network: Network, or schedule of a pipeline.
        config: Settings of the step.
        accelerator: As in `GradientAccumulation`.

    Raises:
        TypeError: If `network` is neither a module nor a schedule, or cannot be trained.
        ValueError: If a schedule cannot be trained with these settings.
    """
    if _is_schedule(network):
        if accelerator is not None:
            msg = (
                "`accelerator` must be None with a pipeline schedule, which accelerate does not "
                "know; use autocast inside the stages"
            )
            raise ValueError(msg)
        return PipelineAccumulation(network, config)
    return GradientAccumulation(
        checked_network(network),
        per_token=config.calculate_per_token_loss,
        reduces_each=config.sync_each_batch,
        accelerator=accelerator,
    )


@final
class PipelineAccumulation:
    """Run forward and backward of every micro-batch through a schedule of a pipeline.

    Args:
        schedule: Schedule of ``torch.distributed.pipelining`` with a loss function, one on each
            rank of the pipeline.
        config: Settings of the step.

    Raises:
        ValueError: If the schedule has no loss function or mixes process groups, or the step should
            accumulate gradients itself, or DistributedDataParallel would not reduce all gradients.
    """

    def __init__(self, schedule: Any, config: StepConfig) -> None:
        self.running: int | None = None
        """As of `GradientAccumulation`."""
        self._schedule = schedule
        self._stages = stages_of(schedule)
        _check_schedule(schedule, self._stages, config)
        self._per_token = config.calculate_per_token_loss
        self.network = pipeline_stages(schedule)
        """Stages of this rank."""
        self.distributed_parts = distributed_parts(self.network)
        """DistributedDataParallel modules of the stages."""
        self.sharded_parts = ShardedParts(self.network)
        """Modules of the stages that ``fully_shard`` has sharded."""
        self._group: distributed.ProcessGroup | None = self._stages[0].group
        self.are_stages = self._stages[0].group_size > 1
        """Whether other ranks train other stages of the network."""
        self._float32: Float32Gradients | GradientsAsWeights = GradientsAsWeights()
        self._has_first = any(stage.is_first for stage in self._stages)
        self._has_last = any(stage.is_last for stage in self._stages)
        self._batches = PipelineBatches(schedule, has_buffers=self.are_stages)

    def __call__(self, calls: Sequence[NetworkCall], loss_scale: Tensor) -> Accumulated:
        """Run the schedule once; it adds scaled gradients to the ``grad`` of this rank's stages.

        Args:
            calls: One call with the arguments of the schedule's ``step``. Positional arguments are
                used on the rank of the first stage, ``target`` on the rank of the last stage, and
                all other keywords on every rank.
            loss_scale: Loss scale, shape ``()``, float32.

        Returns:
            Loss and divisors of the whole batch on the rank of the last stage, zeros on all other
            ranks.

        Raises:
            TypeError: If the loss function returns no loss, or `calls` has a keyword that the step
                sets itself.
            ValueError: If there is not exactly one call, ``target`` is missing, or the batch cannot
                be split evenly into micro-batches or has other shapes than the first one.
        """
        self.sharded_parts.check_usable()
        arguments, keywords = self._arguments(calls)
        num_parts = num_micro_batches(self._schedule)
        divides = self._schedule.scale_grads and not self._per_token
        divisor = num_parts if divides else 1
        parts: list[LossParts] = []
        section_clock.switch(Section.FORWARD_BACKWARD)
        self.running = 0
        self._float32.accumulate(on=num_parts > 1)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._scaled_loss(loss_scale / divisor, parts))
                # torch turns the reduction on for the last backward itself. But it runs one forward
                # more in the first step, to find out about shapes, which would prepare a reduction
                # in the first backward, and an error in the second step.
                for part in self.distributed_parts:
                    stack.enter_context(part.no_sync())
                run(self._schedule, arguments, keywords)
            self._batches.keep_shapes()
            self.running = None
        except BaseException:
            self.sharded_parts.discard_half_a_step()
            forget_losses(self._schedule)
            raise
        if self._has_last:
            # torch calls the loss function once more in the first step, to find out about shapes.
            accumulated = self._accumulated(parts[-num_parts:], divisor)
        else:
            accumulated = self._of_other_ranks(loss_scale)
        # The divisor of gradients whose sum the schedule does not divide does not contain a number.
        is_divided_later = self._float32.is_active and self._per_token
        return accumulated._replace(num_summed=num_parts if is_divided_later else 1)

    def accumulate_in_float32(self) -> None:
        """Accumulate the gradients in float32 from now on; as of `GradientAccumulation`."""
        self._float32 = Float32Gradients([self.network], self.distributed_parts)

    def end_update(self) -> None:
        """Let gradients have the dtypes of their weights again; call it after each update."""
        self._float32.restore()

    def agreement(self, _parameters: Sequence[nn.Parameter]) -> Agreement | None:
        """Return how the ranks of the pipeline come to the same norms; see `StepUpdate`."""
        return StageTotals(self._group) if self.are_stages else None

    def _arguments(self, calls: Sequence[NetworkCall]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(calls) != 1:
            msg = (
                "one update of a pipeline takes one whole batch, which its schedule splits into "
                f"micro-batches, got {len(calls)} micro-batches; call the cell with the batch"
            )
            raise ValueError(msg)
        arguments, keywords = calls[0]
        own = sorted({"losses", "return_outputs"} & keywords.keys())
        if own:
            msg = (
                f"the cell of a pipeline takes no {' and no '.join(map(repr, own))}: it runs the "
                "schedule only to train, and returns the loss in its output"
            )
            raise TypeError(msg)
        others = {name: value for name, value in keywords.items() if name != "target"}
        target = keywords.get("target")
        if self._has_last and target is None:
            msg = (
                "the cell of a pipeline needs `target` on the rank of the last stage, for the "
                "schedule's loss function; got none"
            )
            raise ValueError(msg)
        # Check also what this rank does not use: the same call is bad on all ranks, and a rank that
        # begins the step would wait for the others.
        self._batches.check(
            arguments, {k: v for k, v in others.items() if k != "loss_kwargs"}, target
        )
        if self._has_last:
            others["target"] = target
        return (arguments if self._has_first else ()), others

    @contextlib.contextmanager
    def _scaled_loss(self, scale: Tensor, parts: list[LossParts]) -> Iterator[None]:
        """Make the schedule multiply its losses by `scale`, and append each loss to `parts`."""
        schedule = self._schedule
        loss_fn, scale_grads = loss_function(schedule), schedule.scale_grads
        read = pair_of if self._per_token else _mean_of

        def scaled(*arguments: Any, **keywords: Any) -> Tensor:
            part = read(loss_fn(*arguments, **keywords), "loss_fn")
            parts.append(detached(part, scale.device))
            # Multiply in float32: a float16 loss times the scale would overflow.
            with torch.autocast(part.numerator.device.type, enabled=False):
                return part.numerator.float() * on_device(scale, part.numerator.device)

        set_loss_function(schedule, scaled)
        schedule.scale_grads = False
        try:
            yield
        finally:
            set_loss_function(schedule, loss_fn)
            schedule.scale_grads = scale_grads

    def _of_other_ranks(self, loss_scale: Tensor) -> Accumulated:
        zero = torch.zeros((), dtype=torch.float32, device=loss_scale.device)
        if not self._per_token:
            return Accumulated(zero, None)
        return Accumulated(zero, Normalizer(zero, zero, bool(self.sharded_parts.units)))

    def _accumulated(self, parts: Sequence[LossParts], divisor: int) -> Accumulated:
        total = torch.stack([part.numerator for part in parts]).sum()
        denominators = [part.denominator for part in parts if part.denominator is not None]
        if not denominators:
            return Accumulated(total / divisor, None)
        local = torch.stack(denominators).sum()
        normalizer = normalizer_of(local, self.distributed_parts, self.sharded_parts)
        return Accumulated(total / local, normalizer)

    def guard(self, optimizer: Optimizer, config: StepConfig) -> RankGuard | None:
        """Return the guard of the ranks of this pipeline; ``None`` if there is only one rank.

        Args:
            optimizer: Optimizer of this rank's stages.
            config: Settings of the step.
        """
        if num_ranks() == 1:
            return None
        self._warn_if_alone()
        schedule = self._schedule

        def facts() -> dict[str, dict[str, str]]:
            return {
                # Groups of norms are names of this rank's own stages.
                "settings of the step": setting_facts(config, ["local_norm_groups"]),
                "versions": version_facts(),
                "optimizer": {"class": type(optimizer).__name__},
                "pipeline": {
                    "schedule": type(schedule).__name__,
                    "number of micro-batches": str(num_micro_batches(schedule)),
                    "scale_grads": str(schedule.scale_grads),
                    "number of stages": str(self._stages[0].num_stages),
                },
            }

        def problems() -> list[str]:
            # The ranks that hold the same stage are compared by name and shape. Their problems are
            # sent to the ranks of the other stages, which would otherwise wait for them forever.
            own = step_facts([self.network], [optimizer], config)
            found = [_disagreement(own, group) for group in self._data_groups()]
            found.append(self._unequal_replicas())
            return [problem for problem in found if problem is not None]

        return RankGuard(self._group, facts, problems=problems)

    def _data_groups(self) -> "list[distributed.ProcessGroup]":
        """Return the groups of ranks that hold the same stages as this rank."""
        if self.distributed_parts:
            return [self.distributed_parts[0].process_group]
        meshes = (p.device_mesh for p in self.network.parameters() if is_distributed(p))
        mesh = next(meshes, None)
        return [] if mesh is None else list(mesh_groups(mesh))

    def _unequal_replicas(self) -> str | None:
        """Return a sentence if stages are averaged over different numbers of ranks.

        All ranks of the pipeline must call this. Frozen stages are averaged by nobody.
        """
        ranks = ranks_of(self._group)
        of_ranks = gather_objects(self._replicas(), self._group)
        numbers: dict[str, list[int]] = {}
        for rank, number in zip(ranks, of_ranks, strict=True):
            if number:
                numbers.setdefault(number, []).append(rank)
        if len(numbers) < 2:
            return None
        parts = [f"{number} on {named_ranks(those)}" for number, those in numbers.items()]
        return (
            "pipeline: number of ranks that average a stage's gradients is "
            f"{' but '.join(parts)}; wrap all stages or none"
        )

    def _replicas(self) -> str:
        """Return over how many ranks the gradients of this rank's stages are averaged.

        Empty if all stages of this rank are frozen.
        """
        numbers: dict[int, float] = {}
        for part in self.distributed_parts:
            numbers |= {id(p): part.process_group.size() for p in reduced_by(part)}
        for unit in self.sharded_parts.units:
            numbers |= {id(p): unit.divisor for p in unit.parameters}
        trained = [p for p in network_parameters(self.network).values() if p.requires_grad]
        return " and ".join(f"{n:g}" for n in sorted({numbers.get(id(p), 1) for p in trained}))

    def _warn_if_alone(self) -> None:
        """Warn if this pipeline has some of the ranks, and nothing averages its gradients."""
        if self._replicas() == "1" and len(ranks_of(self._group)) < num_ranks():
            warnings.warn(
                "no wrapper averages the gradients of this pipeline with those of other ranks, so "
                f"its ranks {ranks_of(self._group)} train, clip and skip alone; wrap its stages in "
                "DistributedDataParallel or fully_shard, unless the trainings are independent",
                stacklevel=callers_stacklevel(),
            )


def _mean_of(output: Any, source: str) -> LossParts:
    return LossParts(loss_of(output, source), None)


def _disagreement(facts: Any, group: Any) -> str | None:
    try:
        check_ranks_agree(facts, group=group)
    except RuntimeError as error:
        return str(error).removeprefix("cannot start training: ")
    return None


def _check_schedule(schedule: Any, stages: Sequence[Any], config: StepConfig) -> None:
    first = stages[0]
    over_gloo = first.device.type == "cpu" or distributed.get_backend(first.group) == "gloo"
    if first.group_size > 1 and over_gloo and not can_use_gloo():
        msg = (
            f"a pipeline over gloo needs torch {GLOO_RELEASE} or newer, got {torch.__version__}, "
            "in which its stages abort; use NCCL, or a newer torch"
        )
        raise ValueError(msg)
    if loss_function(schedule) is None:
        msg = (
            f"`network` must be a schedule that trains, got {type(schedule).__name__} without "
            "`loss_fn`; pass `loss_fn` to the schedule on every rank"
        )
        raise ValueError(msg)
    if config.gradient_accumulation_steps != 1:
        msg = (
            "`gradient_accumulation_steps` must be 1 with a pipeline schedule, which accumulates "
            f"its {num_micro_batches(schedule)} micro-batches, got "
            f"{config.gradient_accumulation_steps}; pass `n_microbatches` to the schedule"
        )
        raise ValueError(msg)
    if config.not_split:
        msg = (
            "`not_split` must be left out with a pipeline schedule, which splits the batch itself, "
            f"got {list(config.not_split)}; pass `args_chunk_spec` and `kwargs_chunk_spec` to the "
            "schedule"
        )
        raise ValueError(msg)
    if config.sync_each_batch:
        msg = (
            "`sync_each_batch` must be False with a pipeline schedule, which reduces gradients "
            "after its last micro-batch, got True"
        )
        raise ValueError(msg)
    if any(stage.group is not stages[0].group for stage in stages):
        msg = "`network` must be a schedule whose stages have the same process group, got several"
        raise ValueError(msg)
    for stage in stages:
        _check_replicas(schedule, stage)
        if config.accumulate_allreduce_grads_in_fp32 and distributed_parts(stage.submod):
            msg = (
                "`accumulate_allreduce_grads_in_fp32` must be False with a pipeline whose stages "
                "are wrapped in DistributedDataParallel, which begins its reduction inside the "
                "schedule; use `fully_shard` on the stages"
            )
            raise ValueError(msg)


def _check_replicas(schedule: Any, stage: Any) -> None:
    """Refuse DistributedDataParallel where a schedule does not make it reduce."""
    parts = distributed_parts(stage.submod)
    if any(part is not stage.submod for part in parts):
        msg = (
            "DistributedDataParallel must wrap whole stages of a pipeline, because a schedule "
            f"reduces only these, got modules inside stage {stage.stage_index}; wrap the stage"
        )
        raise ValueError(msg)
    if parts and _splits_backward(schedule):
        msg = (
            f"the stages of {type(schedule).__name__} must not be wrapped in "
            "DistributedDataParallel, which does not reduce the gradients of weights that a "
            "schedule computes after those of activations; use `fully_shard` on the stages, or a "
            "schedule such as ScheduleInterleaved1F1B"
        )
        raise ValueError(msg)


def _splits_backward(schedule: Any) -> bool:
    """Return whether a schedule computes gradients of activations and weights separately."""
    order = schedule.pipeline_order or {}
    actions = [each for actions in order.values() for each in actions if each is not None]
    actions += [sub for each in actions for sub in each.sub_actions or ()]
    return any(each.computation_type.name == "BACKWARD_WEIGHT" for each in actions)
