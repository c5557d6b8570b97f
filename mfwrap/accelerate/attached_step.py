"""Attach the training step to an accelerator: `attach` and `AttachedStep`.

`AttachedStep` deals with accelerate. It adds the optimizers that the accelerator prepares to a
`mfwrap.accelerate.loop_step.LoopStep`, which does the updates and does not depend on accelerate.
`mfwrap.accelerate.saving.AttachedCheckpoints` saves and loads the step's state in ``save_state``
and ``load_state``.

`attach` runs before ``prepare``, when there are no optimizers yet. `AttachedStep.build` adds them
later. A loop may prepare its optimizer before its model, or call ``prepare`` several times, so
`build` runs more than once. After each ``prepare`` it adds the optimizers whose parameters are all
in prepared models. At the first backward at the latest, it adds all other prepared optimizers.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mfwrap.accelerate.classes import LoopRanks, StepScaler, attached_class
from mfwrap.accelerate.loop_step import LoopStep
from mfwrap.accelerate.prepared import attached_again, restore_prepared
from mfwrap.accelerate.saving import AttachedCheckpoints, LoopObserver
from mfwrap.accelerate.setup import (
    EMA,
    attached_handler_class,
    check_arguments,
    loop_config,
    made_average,
    named_parameters_of,
    parameters_of_models,
    trained_models,
)
from mfwrap.accelerate.state import is_writer, load_step, save_step
from mfwrap.accelerate.timing import LoopSections
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.collectives import rank_watch
from mfwrap.compatibility.accelerate import models_of, optimizers_of
from mfwrap.config import StepConfig
from mfwrap.loss_scale.live import LossScale, ScaleSense
from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.step.accelerator import scale_of
from mfwrap.step.backward_reductions import reduce_before_accumulation
from mfwrap.step.float32_gradients import Float32Gradients
from mfwrap.step.fsdp import ShardedParts, sharded_local_squares_of
from mfwrap.step.local_norms import CommunicationHook, local_squares_of
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.ranks import agreement_of
from mfwrap.tensors.wrappers import distributed_parts


@final
class AttachedStep:
    """Run the training step in an accelerate loop; `attach` returns this object.

    Pickle it with its accelerator to keep the step: the accelerator alone pickles without it.

    Source: MindFormers, ``MFTrainOneStepCell``.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: StepConfig,
        ema: EMA | None,
        scale_sense: ScaleSense | None,
        communication_hook: CommunicationHook | None,
    ) -> None:
        self.config = config
        """Settings of the step."""
        self.ema = ema if isinstance(ema, ExponentialMovingAverage) else None
        """Average of the weights. ``None`` if the step keeps no average, or if a callable makes the
        average and ``prepare`` has not called it yet."""
        self._make_ema = None if isinstance(ema, ExponentialMovingAverage) else ema
        self._arguments = (config, ema, scale_sense, communication_hook)
        self.accelerator = accelerator
        """Accelerator that the step is attached to."""
        self._kind = type(accelerator)
        self._grad_scaler = accelerator.scaler
        self._communication_hook = communication_hook
        self._distributed_parts: list[DistributedDataParallel] = []
        self._ddp_handler = accelerator.ddp_handler
        self._handler_kind = type(self._ddp_handler)
        if scale_sense is None:
            scale_sense = scale_of(accelerator)
        self.step = LoopStep(config, LossScale(scale_sense, accelerator.device))
        """Step that the accelerator's calls run. A loop does not have to call it."""
        self._scaler = StepScaler(self, accelerator)
        self.has_grad_scaler = self._grad_scaler is not None
        """Whether the accelerator has a gradient scaler of its own."""
        self.numbers_micro_batches = False
        """Whether the loop uses ``accelerator.accumulate``. If so, ``accelerator.step`` numbers the
        micro-batches of an update: 1, 2, ..., and 0 for the data loader's last micro-batch."""
        self.answers_late = False
        """Whether ``optimizer_step_was_skipped`` returns False if the true answer would synchronize
        with the device. The Trainer reads it after every step."""
        self.ranks = LoopRanks(accelerator, self._distributed_parts, config)
        """Check of the ranks that update the models together."""
        self.sections = LoopSections()
        """Times of the sections of the loop's steps."""
        self._float32: Float32Gradients | None = None
        self.is_weightless = False
        """Whether ``accelerator.backward`` multiplies losses by 0, so that gradients are 0."""
        self.is_loading = False
        """Whether optimizer states are being loaded. If so, ``optimizer.step()`` calls torch's
        optimizer directly instead of doing an update."""
        self.checkpoints = AttachedCheckpoints(self, accelerator)
        """Saving and loading in ``save_state`` and ``load_state``."""
        self.observers: list[LoopObserver] = []
        """Objects that follow the loop, such as `mfwrap.callbacks.LoopMonitor`."""
        accelerator.scaler = self._scaler
        accelerator.attachment = self
        accelerator.__class__ = attached_class(self._kind)
        if self._ddp_handler is not None and (config.local_norm or communication_hook is not None):
            self._ddp_handler.__class__ = attached_handler_class(
                self._handler_kind, communication_hook
            )

    @property
    def last_report(self) -> StepReport | None:
        """Report of the last update of any optimizer; ``None`` before the first update."""
        return self.step.last_report

    @property
    def last_output(self) -> StepOutput | LocalNormStepOutput | None:
        """MindFormers' 5- or 7-tuple of the last update; ``None`` before the first update."""
        return None if self.last_report is None else self.last_report.output

    @property
    def last_reports(self) -> tuple[StepReport | None, ...]:
        """Last report of each optimizer, in the order in which the optimizers were prepared.

        An entry is ``None`` before the first update of its optimizer.
        """
        windows = [self.step.windows.get(each) for each in self._prepared_optimizers()]
        return tuple(None if window is None else window.last_report for window in windows)

    @property
    def local_norm_names(self) -> tuple[str, ...]:
        """Names of the groups in the first optimizer's local norms; empty before ``prepare``.

        The first optimizer is the one that was prepared first.
        """
        windows = list(self.step.windows.values())
        return windows[0].update.parameters.groups().names if windows else ()

    @property
    def loss_scale(self) -> Tensor:
        """The loss scale that the next backward uses, shape ``()``, float32; a copy."""
        return self.step.loss_scale.value.clone()

    def report_losses(self, losses: Mapping[str, Tensor]) -> None:
        """Report losses of a micro-batch by name, beside the loss that the loop differentiates.

        The report of the update has their means over its micro-batches; see `StepReport`. Call it
        before the micro-batch's ``accelerator.backward``. `MFTrainer` calls it. Does not
        synchronize with the device.

        Args:
            losses: Tensors of one element by name, such as ``lm_loss`` and ``mtp_loss``.
        """
        self.step.report_losses(losses)

    def flush(self) -> None:
        """Wait for the results of the last update, and advance the schedules if it was applied.

        Synchronizes with the device. Call it before you read ``optimizer.param_groups``, and at the
        end of training. ``accelerator.end_training`` and ``save_state`` call it for you.

        Raises:
            RuntimeError: If ``max_consecutive_skips`` updates in a row were skipped.
        """
        self.step.flush()

    def detach(self) -> None:
        """Restore the accelerator and its prepared objects to accelerate's own classes.

        This method flushes the step first, so that the schedules are current. Gradients that no
        update has used yet are prepared for accelerate: a pending clip is applied in place. If the
        accelerator has an enabled gradient scaler of its own, these gradients are handed over
        scaled, and the gradient scaler takes over the step's loss scale and growth counter.
        Otherwise the gradients are divided by the loss scale. torch cannot remove a communication
        hook, so the hook that `attach` registered stays in the model, but it takes no more norms.
        """
        accelerator = self.accelerator
        if accelerator.__dict__.get("attachment") is not self:
            return
        scales = self._grad_scaler is not None and self._grad_scaler.is_enabled()
        try:
            self.flush()
        finally:
            self.checkpoints.detach()
            self.sections.detach()
            for window in self.step.windows.values():
                window.hand_back(scaled=scales)
                window.update.local_squares = None
            self._leave_float32()
            if scales:
                self._scaler.grad_scaler()
                # torch's scaler unscales gradients only after a first call of `scale`, which puts
                # its state on the device.
                self._grad_scaler.scale(self.loss_scale)
            self.step.schedules.clear()
            restore_prepared(accelerator, self._grad_scaler)
            accelerator.scaler = self._grad_scaler
            accelerator.__class__ = self._kind
            if self._ddp_handler is not None:
                self._ddp_handler.__class__ = self._handler_kind
            del accelerator.attachment

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (type(self), self.accelerator, self._arguments, self.step.state_dict())
        return attached_again, arguments

    def see_model(self, prepared: nn.Module) -> None:
        """Record a prepared model, and its DistributedDataParallel modules."""
        reduce_before_accumulation(prepared)
        self._leave_float32()
        known = self._distributed_parts
        known += [part for part in distributed_parts(prepared) if part not in known]
        self.sections.see_model(prepared)
        # Start the watch of the ranks, so that it answers even if this rank never gets a batch.
        rank_watch()

    def build(self, *, final: bool = False, in_step: bool = False) -> None:
        """Add the prepared optimizers to the step; create the average if `attach` got a callable.

        Every method that needs the updates calls this method first. If there is nothing to add, the
        call is cheap.

        Args:
            final: Whether all models are prepared by now. If so, an optimizer is added even if some
                of its parameters are in no prepared model.
            in_step: Whether a backward of this step has made this call already. If so, a change of
                an optimizer's parameters is noticed only if their number has changed.

        Raises:
            ValueError: If `attach` got a callable for the average and there is not exactly one
                trained model, or if no optimizer holds any of the averaged parameters.
        """
        models = models_of(self.accelerator)
        if self._make_ema is not None and self.ema is None:
            trained = trained_models(models, optimizers_of(self.accelerator))
            if trained or final:
                self.ema = made_average(self._make_ema, trained)
        if self.ema is not None and not self.step.windows:
            self.ema.check_placement()
            self.step.follow(self.ema)
        for wrapper in optimizers_of(self.accelerator):
            optimizer = wrapper.optimizer
            window = self.step.windows.get(optimizer)
            if window is not None:
                known = window.update.parameters
                if known.are_current(quickly=in_step):
                    continue
            named, are_complete = named_parameters_of(optimizer, models)
            if final or are_complete:
                parameters = TrainedParameters(
                    named,
                    optimizer,
                    self.config.local_norm_groups,
                    present=functools.partial(parameters_of_models, tuple(models)),
                )
                self._add(optimizer, parameters)
                # An optimizer may be added before another one that was prepared earlier.
                self.step.arrange(self._prepared_optimizers())
        if final:
            self.step.check_average()
        if (
            self.config.accumulate_allreduce_grads_in_fp32
            and self._float32 is None
            and self.step.windows
        ):
            self._float32 = Float32Gradients(models, self._distributed_parts)

    def begin_backward(self) -> None:
        """Prepare the backward of the loss that was scaled last."""
        if self._float32 is None:
            return
        # Most loops say whether more micro-batches follow. In others, the second backward before an
        # update shows that they accumulate.
        is_first = all(window.num_backward == 1 for window in self.step.windows.values())
        self._float32.accumulate(on=not (self.accelerator.sync_gradients and is_first))
        self._float32.begin_backward()

    def end_backward(self) -> None:
        """Complete the gradients of the last backward."""
        if self._float32 is not None:
            self._float32.end_backward()

    def _leave_float32(self) -> None:
        if self._float32 is not None:
            self._float32.accumulate(on=False)
            self._float32 = None

    def _prepared_optimizers(self) -> list[Optimizer]:
        return [wrapper.optimizer for wrapper in optimizers_of(self.accelerator)]

    def _add(self, optimizer: Optimizer, parameters: TrainedParameters) -> None:
        parts = self._distributed_parts
        self.step.add(
            optimizer,
            parameters,
            local_squares=sharded_local_squares_of(
                ShardedParts(*models_of(self.accelerator)),
                parameters.tensors,
                local_squares_of(
                    parts,
                    parameters.tensors,
                    self._communication_hook,
                    are_asked_for=self.config.local_norm,
                ),
                are_asked_for=self.config.local_norm,
            ),
            agreement=agreement_of(parts, parameters.tensors),
        )

    def clear(self) -> None:
        """Flush the step, then drop everything that was prepared."""
        try:
            self.flush()
        finally:
            self.step.clear()
            self._leave_float32()
            self._distributed_parts.clear()
            # The models that are prepared next are compared across ranks again.
            self.ranks = LoopRanks(self.accelerator, self._distributed_parts, self.config)
            if self._make_ema is not None:
                self.ema = None

    def save_files(self, folder: Path, *, each_node: bool = False) -> None:
        """Flush the step, then write loss scale, counts and average into a checkpoint.

        Call it on every process. The main process writes the files; with sharded weights each rank
        writes its own shards.

        Args:
            folder: Existing folder of the checkpoint.
            each_node: Whether the main process of every node writes the files. If False, only the
                main process of the whole run writes them.
        """
        save_step(folder, self.step, is_writer=is_writer(self.accelerator, each_node=each_node))

    def load_files(self, folder: Path) -> None:
        """Restore the state that `save_files` wrote; change nothing if a part does not fit.

        Load the weights before the call: if the checkpoint has no average, the average starts from
        the weights. A checkpoint without any of the step's files gives a warning, not an error.

        Raises:
            FileNotFoundError: If only some of the step's files exist.
            KeyError: If a name is missing or unknown.
            TypeError: If a value has the wrong type.
            ValueError: If a file is damaged, or a value has the wrong shape or range.
        """
        self.build(final=True)
        load_step(folder, self.step, self.ema)


def attach(
    accelerator: Accelerator,
    config: StepConfig | None = None,
    ema: EMA | None = None,
    *,
    scale_sense: ScaleSense | None = None,
    communication_hook: CommunicationHook | None = None,
) -> AttachedStep:
    """Make an accelerate loop run MindFormers' training step.

    Call it before ``accelerator.prepare``. The loop stays as it is: ``accumulate``, ``backward``,
    ``clip_grad_norm_``, ``clip_grad_value_``, ``unscale_gradients``, ``optimizer.step``,
    ``zero_grad``, ``scheduler.step``, ``optimizer_step_was_skipped``, ``save_state`` and
    ``load_state`` keep their meaning. What changes:

    - An update whose gradients are not finite is skipped, in any precision: float16, bfloat16 or
      float32.
    - ``clip_grad_norm_`` returns the norm of the unscaled gradients before clipping. It reads the
      gradients once for this norm, the local norms and the overflow flag. The optimizer applies
      the clip in its own pass over the gradients.
    - Prepared schedules advance only for applied updates. Where only the device knows whether an
      update was applied (fused optimizers on a GPU), they advance just before the next update.

    With torch's fused optimizers there is no host-device synchronization in the step. Reading
    ``optimizer_step_was_skipped``, or calling ``get_last_lr`` or ``state_dict`` of a schedule,
    synchronizes once if only the device knows the answer.

    With several optimizers, the loss scale changes once all of them have used their gradients. If
    several optimizers hold weights of the average, the average is updated once all of them have
    done their update.

    Args:
        accelerator: Accelerator that has prepared nothing yet. It may train in one process, under
            DistributedDataParallel or under FSDP2.
        config: Settings of the step; ``None`` for the defaults. With `use_clip_grad` the step clips
            the gradients if the loop has not clipped them, and reports the norm. The loop itself
            accumulates gradients and normalizes its losses, and accelerate decides when they are
            reduced (``GradientAccumulationPlugin.sync_each_batch``).
        ema: Average that follows the weights after each applied update: an average of the model
            that will be prepared, or a callable that takes the prepared model and returns an
            average. ``prepare`` calls the callable as its last action. ``None`` for no average.
        scale_sense: Loss scale: a number, a tensor or an update cell. ``None`` takes the scale of
            the accelerator's gradient scaler (float16 on CUDA), or 1 if it has none.
        communication_hook: Pair ``(state, hook)``, which ``prepare`` registers with
            DistributedDataParallel. The local norms of the gradients are taken before the hook
            reduces them. ``None`` takes the hook of the accelerator's
            ``DistributedDataParallelKwargs``, or torch's all-reduce if there is none.

    Returns:
        The attached step. It holds the reports of the updates.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a setting does not apply to a loop, if the accelerator uses DeepSpeed,
            Megatron-LM, XLA or version 1 of FSDP, or if a launcher started several processes but
            the accelerator has not connected them.
        RuntimeError: If the accelerator is attached already, or has prepared something.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from mfwrap import StepConfig
        >>> from mfwrap.accelerate import attach
        >>> accelerator = Accelerator(cpu=True)
        >>> attached = attach(accelerator, StepConfig(local_norm=True))  # the one line
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(4, 2)).square().mean())
        >>> norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> attached.last_output.overflow, attached.last_output.size
        (tensor(False), tensor([2, 1]))
    """
    config = StepConfig() if config is None else config
    check_arguments(accelerator, config, ema, communication_hook)
    return AttachedStep(
        accelerator, loop_config(accelerator, config), ema, scale_sense, communication_hook
    )
