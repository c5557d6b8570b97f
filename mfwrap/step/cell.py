"""MindFormers' training step for PyTorch."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from mfwrap.arguments import check_bool, described
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.collectives import Section, section_clock
from mfwrap.config import SpikePolicyName, StepConfig
from mfwrap.loss_scale.live import LossScale, ScaleSense
from mfwrap.memory import Training, explain_out_of_memory, is_out_of_memory, shapes_of
from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.step.accelerator import (
    DEFAULT_SCALE,
    check_accelerator,
    effective_scale,
    join_saves,
    remove_grad_scaler,
)
from mfwrap.step.calls import NetworkCall, calls_of, split_calls
from mfwrap.step.captured import CapturedStep
from mfwrap.step.parameters import TrainedParameters, checked_optimizer
from mfwrap.step.parts.cell_parts import LossScaleHooks, has_own_step
from mfwrap.step.pipeline import accumulation_of
from mfwrap.step.ranks.fsdp import local_squares_of
from mfwrap.step.ranks.local_norms import CommunicationHook, checked_communication_hook
from mfwrap.step.rate_table import RateTable
from mfwrap.step.schedules import Schedule, checked_schedule
from mfwrap.step.spikes import STATE_NAMES
from mfwrap.step.state import StepState, state_of
from mfwrap.step.update import StepUpdate
from mfwrap.tensors.norm_groups import LocalNormGroups
from mfwrap.tensors.saved_state import check_keys

if TYPE_CHECKING:
    from accelerate import Accelerator

    from mfwrap.step.pipeline import PipelineSchedule


class MFTrainOneStepCell(LossScaleHooks):
    """Run MindFormers' training step: each call does one whole update of a network.

    A call runs forward and backward of each micro-batch with a scaled loss, and reads the gradients
    once to compute norms and detect overflow. It then unscales and clips the gradients, and updates
    the weights, the average of the weights and the schedule. If a gradient is non-finite, all three
    are left unchanged, in any precision: float16, bfloat16 or float32. The loss scale is adjusted
    after applied and skipped updates alike.

    With torch's fused optimizers there is no host-device synchronization in the step. With any
    other optimizer the step synchronizes once, to read whether to skip.

    The cell does not move the network or the data to a device, and does not switch between train
    and eval mode.

    Source: MindFormers, ``wrapper.MFTrainOneStepCell``; the keyword-only arguments are ours.

    Args:
        network: Network that returns a loss of one element, an output with a ``loss`` (Hugging Face
            models), a tuple that begins with the loss, or a dict of losses such as ``lm_loss``,
            which are added up and reported (`StepReport.losses`). With `calculate_per_token_loss`:
            a Hugging Face model, or a network that returns ``(numerator, denominator)``, where the
            numerator may be a dict of losses. Or: a schedule of ``torch.distributed.pipelining``,
            see `pipeline_stages`.
        optimizer: Any torch optimizer; accelerate's wrapper is unwrapped.
        use_clip_grad: See `StepConfig`, which describes all settings that are not described here.
        max_grad_norm: See `StepConfig`.
        scale_sense: Loss scale: a number, a tensor of shape ``()`` or ``(1,)``, or a loss-scale
            update cell. Updates with non-finite gradients are skipped with any loss scale.
        local_norm: See `StepConfig`.
        accelerator: Accelerator whose autocast, ``no_sync`` and gradient state are used. The
            accelerator's gradient scaler is removed; the cell uses the scaler's loss scale if
            `scale_sense` is not given.
        gradient_accumulation_steps: See `StepConfig`.
        not_split: See `StepConfig`.
        lr_scheduler: Schedule that is stepped once for each applied update, just before the next
            update. `flush` steps it for the last update.
        ema: Average that follows the weights after each applied update.
        calculate_per_token_loss: See `StepConfig`. For a Hugging Face model whose forward takes
            ``num_items_in_batch``, the cell counts the targets itself.
        use_skip_data_by_global_norm: See `StepConfig`.
        global_norm_spike_threshold: See `StepConfig`.
        spike_policy: See `StepConfig`.
        spike_z: See `StepConfig`.
        local_norm_groups: See `StepConfig`.
        max_consecutive_skips: See `StepConfig`.
        communication_hook: ``(state, hook)``, which the cell registers with the network's
            DistributedDataParallel. The hook reduces the gradients after their local norms are
            taken. ``None`` keeps torch's all-reduce.
        sync_each_batch: See `StepConfig`.
        accumulate_allreduce_grads_in_fp32: See `StepConfig`.
        capture: Capture one whole update in a graph of the device (a CUDA graph), and replay it
            with one call of the host for each update; see `mfwrap.step.captured`. All batches must
            have the shapes of the first one. The schedule, and the error about too many skips, come
            one update later. A learning rate that you set yourself holds from the next update on.
            If you freeze a parameter, load a state into the optimizer or change a setting of it,
            the step is captured again. On a CPU the same steps run without a graph.

    Raises:
        RuntimeError: If the network has a communication hook already, and another one is needed for
            `local_norm`, `accumulate_allreduce_grads_in_fp32` or `communication_hook`.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, if two arguments contradict each other, or if a
            launcher started several processes but this one has no process group.

    Example:
        >>> import torch
        >>> from mfwrap import DynamicLossScaleUpdateCell, WithLossCell
        >>> network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
        >>> optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
        >>> cell = MFTrainOneStepCell(
        ...     network,
        ...     optimizer,
        ...     use_clip_grad=True,
        ...     scale_sense=DynamicLossScaleUpdateCell(65536.0, 2, 2000),
        ...     local_norm=True,
        ... )
        >>> output = cell(torch.ones(4, 2), torch.ones(4, 1))
        >>> output.loss_scale, output.overflow, output.size
        (tensor(65536.), tensor(False), tensor([2, 1]))
        >>> cell.local_norm_names
        ('backbone.weight', 'backbone.bias')
    """

    def __init__(
        self,
        network: "nn.Module | PipelineSchedule",
        optimizer: Optimizer,
        use_clip_grad: bool = False,  # noqa: FBT001, FBT002  (MindFormers' signature)
        max_grad_norm: float = 1.0,
        scale_sense: ScaleSense = DEFAULT_SCALE,
        local_norm: bool = False,  # noqa: FBT001, FBT002  (MindFormers' signature)
        *,
        accelerator: "Accelerator | None" = None,
        gradient_accumulation_steps: int = 1,
        not_split: Sequence[str | int] = (),
        lr_scheduler: Schedule | None = None,
        ema: ExponentialMovingAverage | None = None,
        calculate_per_token_loss: bool = False,
        use_skip_data_by_global_norm: bool = False,
        global_norm_spike_threshold: float = 1.0,
        spike_policy: SpikePolicyName = "record",
        spike_z: float | None = None,
        local_norm_groups: LocalNormGroups | None = None,
        max_consecutive_skips: int | None = 100,
        communication_hook: CommunicationHook | None = None,
        sync_each_batch: bool = False,
        accumulate_allreduce_grads_in_fp32: bool = False,
        capture: bool = False,
    ) -> None:
        config = StepConfig(
            use_clip_grad=use_clip_grad,
            max_grad_norm=max_grad_norm,
            local_norm=local_norm,
            gradient_accumulation_steps=gradient_accumulation_steps,
            not_split=not_split,
            calculate_per_token_loss=calculate_per_token_loss,
            use_skip_data_by_global_norm=use_skip_data_by_global_norm,
            global_norm_spike_threshold=global_norm_spike_threshold,
            spike_policy=spike_policy,
            spike_z=spike_z,
            local_norm_groups=local_norm_groups,
            max_consecutive_skips=max_consecutive_skips,
            sync_each_batch=sync_each_batch,
            accumulate_allreduce_grads_in_fp32=accumulate_allreduce_grads_in_fp32,
        )
        self.config = self.__config = config
        """Settings of the step."""
        self.__accumulate = accumulate = accumulation_of(network, config, accelerator)
        self.__check_communication_hook(communication_hook)
        self.__check_capture(capture)
        if accelerator is not None:
            check_accelerator(accelerator, config)
        optimizer = checked_optimizer(optimizer)
        schedule = checked_schedule(lr_scheduler, optimizer)
        parameters = TrainedParameters.of_network(
            accumulate.network, optimizer, local_norm_groups, are_stages=accumulate.are_stages
        )
        if config.calculate_per_token_loss:
            accumulate.sharded_parts.check_per_token(parameters.reduction)
        self.ema = self.__ema = _checked_average(ema, parameters)
        """Average of the weights; ``None`` without one."""
        loss_scale = LossScale(effective_scale(scale_sense, accelerator), parameters.device)
        self.__loss_scale = loss_scale
        rates = RateTable(optimizer, schedule, parameters.device) if capture else None
        self.__update = StepUpdate(
            parameters,
            optimizer,
            config,
            loss_scale,
            lr_scheduler=rates if rates and schedule else schedule,
            ema=ema,
            agreement=accumulate.agreement(parameters.tensors),
        )
        self.__captured = (
            None
            if rates is None
            else CapturedStep(accumulate, self.__update, optimizer, loss_scale, ema, rates)
        )
        self.last_report: StepReport | None = None
        """Report of the last update; ``None`` before the first."""
        # Last, because it changes what belongs to the caller: it registers hooks of the network,
        # some of which cannot be removed, and removes the accelerator's gradient scaler.
        super().__init__(
            accumulate.network, optimizer, parameters, loss_scale, lr_scheduler=schedule, ema=ema
        )
        self.__update.read_own_gradients(
            local_squares_of(
                accumulate.distributed_parts,
                accumulate.sharded_parts,
                parameters.tensors,
                communication_hook,
                are_asked_for=config.local_norm,
            )
        )
        if config.accumulate_allreduce_grads_in_fp32:
            accumulate.accumulate_in_float32()
        if accelerator is not None:
            remove_grad_scaler(accelerator)
            join_saves(accelerator, self.flush)
        self.__guard = accumulate.guard(optimizer, config)

    def __check_communication_hook(self, hook: CommunicationHook | None) -> None:
        if checked_communication_hook(hook) is not None and not self.__accumulate.distributed_parts:
            msg = (
                "`communication_hook` must be None for a network without DistributedDataParallel, "
                f"got {described(hook)}"
            )
            raise ValueError(msg)
        self.__config.check_communication_hook(hook)

    def __check_capture(self, capture: bool) -> None:  # noqa: FBT001  (the cell's argument)
        if check_bool("capture", capture) and has_own_step(type(self)):
            msg = (
                "`capture` must be False for a subclass with its own `__call__`, which is not "
                f"captured, got {type(self).__name__}"
            )
            raise ValueError(msg)

    @property
    def before_update(self) -> list[Callable[[], None]]:
        """Functions to call in each update before the weights change; captured: before forward."""
        return (self.__captured or self.__update).before_update

    @property
    def local_norm_names(self) -> tuple[str, ...]:
        """Names of the groups of local norms, in the order of the output's ``local_norm``."""
        return self.__update.parameters.groups().names

    def __call__(self, *inputs: Any, **batch: Any) -> StepOutput | LocalNormStepOutput:
        """Do one update from one batch.

        With ``gradient_accumulation_steps=k``, tensors with at least one dimension are split along
        the first dimension, which must be that of the rows, into ``k`` micro-batches. Everything
        else goes to each micro-batch, and so does what `not_split` names.

        Args:
            inputs: Positional arguments of the network.
            batch: Keyword arguments of the network.

        Returns:
            MindFormers' 5-tuple (7-tuple with `local_norm`) as a named tuple of tensors on the
            device. Returning it does not synchronize with the device.

        Raises:
            RuntimeError: If too many updates in a row were skipped, no parameter has a gradient,
                the optimizer's parameters have changed, or a parameter of the network has been
                replaced.
            TypeError: If the network returns no loss, or a gradient is sparse.
            ValueError: If the tensors to split differ in their first dimensions or cannot be split
                evenly, a micro-batch is empty and the loss is a mean, the loss does not have
                exactly one element, or a learning rate is a non-finite number.
        """
        config = self.__config
        return self.__step(
            split_calls(inputs, batch, config.gradient_accumulation_steps, config.not_split)
        )

    def step(self, micro_batches: Sequence[Any]) -> StepOutput | LocalNormStepOutput:
        """Do one update from micro-batches as a data loader yields them.

        Args:
            micro_batches: At least one micro-batch, of any size. The network gets a mapping as
                keyword arguments, a tuple as positional arguments, and anything else as a single
                argument. A list is a single argument, too. torch's default collation turns tuples
                into lists: pass ``tuple(batch)`` to get positional arguments again.

        Returns:
            The same as a call of the cell.

        Raises:
            RuntimeError: In the same cases as a call of the cell.
            TypeError: If `micro_batches` is not a sequence, or in the same cases as a call.
            ValueError: If `micro_batches` is empty, if it has several micro-batches although
                `local_norm` and `sync_each_batch` are set, or in the same cases as a call.
        """
        calls = calls_of(micro_batches)
        self.__config.check_micro_batches(len(calls))
        return self.__step(calls)

    def __step(self, calls: Sequence[NetworkCall]) -> StepOutput | LocalNormStepOutput:
        run = self.__update_once if self.__captured is None else self.__captured
        try:
            self.last_report = run(calls)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self.__explain(error, calls)
            raise
        return self.last_report.output

    def __explain(self, error: RuntimeError, calls: Sequence[NetworkCall]) -> None:
        """Say in which micro-batch memory ran out, and what needs less."""
        accumulate, index, number = self.__accumulate, self.__accumulate.running, len(calls)
        explain_out_of_memory(
            error,
            self.__update.parameters.device,
            Section.UPDATE if index is None else Section.FORWARD_BACKWARD,
            Training(
                networks=[accumulate.network],
                is_sharded=bool(accumulate.sharded_parts.units),
                accumulates=number > 1,
                reduces_each=self.__config.sync_each_batch,
                average=self.__ema,
            ),
            step=self.__update.counts.num_updates + 1,
            micro_batch="" if index is None or number == 1 else f"{index + 1} of {number}",
            shapes=None if index is None else shapes_of(*calls[index]),
        )

    def __update_once(self, calls: Sequence[NetworkCall]) -> StepReport:
        self.__update.release_gradients()
        guard = self.__guard
        try:
            with contextlib.nullcontext() if guard is None else guard.updating(ends=True):
                accumulated = self.__accumulate(calls, self.__loss_scale.value)
                return self.__update(accumulated)
        except BaseException:
            # The update releases the gradients. If forward or backward has raised, the next step
            # must not add its gradients to those of an incomplete step.
            self.__update.release_gradients()
            section_clock.switch(Section.DATA)
            raise
        finally:
            self.__accumulate.end_update()

    def flush(self) -> None:
        """Step the schedule if the last update was applied, and check for too many skips in a row.

        Synchronizes with the device. Call it at the end of training, and before you save or read a
        schedule.

        Raises:
            RuntimeError: If too many updates in a row were skipped.
        """
        self.__update.flush()

    def state_dict(self) -> dict[str, Any]:
        """Call `flush`, and return the cell's own state: loss scale, counters, norms, average.

        Returns:
            A nested dict of tensors and numbers that ``torch.save`` can write and
            ``torch.load(weights_only=True)`` can read. The states of the network, the optimizer and
            the schedule are not included.
        """
        # Call this method before the others, because it flushes, and a flush may raise. Then
        # nothing has been copied in vain.
        own = state_of(self.__update.state_owners())
        self.__update.parameters.warn_of_replaced()
        return StepState(self.__loss_scale, self.__ema).state_dict(own)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned, or change nothing if an entry does not fit.

        Results of the last update that are still pending are dropped: the schedule is not stepped
        for that update. A state that was saved without a `spike_policy` starts it with no norms.

        Raises:
            KeyError: If a key is missing or unknown.
            TypeError: If a value has the wrong type.
            ValueError: If a value has the wrong shape or range.
        """
        state = StepState(self.__loss_scale, self.__ema)
        keys = state.keys(*self.__update.counts.tensors())
        check_keys(state_dict, keys, "cell", optional=STATE_NAMES)
        owners = self.__update.state_owners()
        state.load_state_dict(state_dict, [(owner, state_dict) for owner in owners])
        if self.__captured is not None:
            self.__captured.forget_counts()


def _checked_average(
    ema: ExponentialMovingAverage | None, parameters: TrainedParameters
) -> ExponentialMovingAverage | None:
    if ema is None:
        return None
    if not isinstance(ema, ExponentialMovingAverage):
        msg = f"`ema` must be an ExponentialMovingAverage or None, got {described(ema)}"
        raise TypeError(msg)
    ema.check_placement()
    if not ema.follows(parameters.tensors):
        msg = (
            "`ema` must average parameters that the cell trains, got an average of other parameters"
        )
        raise ValueError(msg)
    return ema
