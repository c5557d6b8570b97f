"""Attach the training step to an accelerator: `attach` and `AttachedStep`.

`AttachedStep` is what a user holds. What accelerate's calls drive is its `attachment`, see
`mfwrap.accelerate.attachment`. `mfwrap.accelerate.saving.AttachedCheckpoints` saves and loads the
step's state in ``save_state`` and ``load_state``.
"""

import functools
from collections.abc import Mapping
from typing import Any, Self, final

from accelerate import Accelerator
from torch import Tensor

from mfwrap.accelerate.attachment import Attachment
from mfwrap.accelerate.classes import (
    StepScaler,
    attach_optimizer,
    attached_class,
    restore_prepared,
)
from mfwrap.accelerate.saving import AttachedCheckpoints
from mfwrap.accelerate.schedules import attach_scheduler
from mfwrap.accelerate.setup import EMA, attached_handler_class, check_arguments, loop_config
from mfwrap.arguments import check_bool, described
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.compatibility.accelerate import models_of, optimizers_of, schedulers_of
from mfwrap.config import StepConfig
from mfwrap.loss_scale.live import ScaleSense
from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.step.ranks.local_norms import CommunicationHook


@final
class AttachedStep:
    """Run the training step in an accelerate loop; `attach` returns this object.

    Pickle it with its accelerator to keep the step: the accelerator alone pickles as a plain object
    of accelerate, which a process loads without mfwrap. A function that you passed to `attach` must
    then be defined in a module, because pickle cannot find a ``lambda``.

    Source: MindFormers, ``MFTrainOneStepCell``.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: StepConfig,
        ema: EMA | None,
        scale_sense: ScaleSense | None,
        communication_hook: CommunicationHook | None,
        async_save: bool = False,  # noqa: FBT001, FBT002  (only this module calls it)
    ) -> None:
        self.config = config
        """Settings of the step."""
        self.accelerator = accelerator
        """Accelerator that the step is attached to."""
        self._arguments = (config, ema, scale_sense, communication_hook)
        self._kind = type(accelerator)
        self._grad_scaler = accelerator.scaler
        self._ddp_handler = accelerator.ddp_handler
        self._handler_kind = type(self._ddp_handler)
        self._async_save = async_save
        checkpoints = functools.partial(AttachedCheckpoints, async_save=async_save)
        self.attachment = Attachment(accelerator, *self._arguments, checkpoints)
        """What accelerate's calls drive, for the monitors and the Trainer of mfwrap."""
        self._scaler = StepScaler(self.attachment, self._grad_scaler)
        accelerator.scaler = self._scaler
        accelerator.attachment = self.attachment
        accelerator.__class__ = attached_class(self._kind)
        if self._ddp_handler is not None and (config.local_norm or communication_hook is not None):
            self._ddp_handler.__class__ = attached_handler_class(
                self._handler_kind, communication_hook
            )

    @property
    def ema(self) -> ExponentialMovingAverage | None:
        """Average of the weights.

        ``None`` if the step keeps no average, or if a callable makes the average and ``prepare``
        has not called it yet.
        """
        return self.attachment.ema

    @property
    def last_report(self) -> StepReport | None:
        """Report of the last update of any optimizer; ``None`` before the first update."""
        return self.attachment.step.last_report

    @property
    def last_output(self) -> StepOutput | LocalNormStepOutput | None:
        """MindFormers' 5- or 7-tuple of the last update; ``None`` before the first update."""
        return None if self.last_report is None else self.last_report.output

    @property
    def last_reports(self) -> tuple[StepReport | None, ...]:
        """Last report of each optimizer, in the order in which the optimizers were prepared.

        An entry is ``None`` before the first update of its optimizer.
        """
        reports = self.attachment.step.last_reports
        return tuple(reports.get(each) for each in self.attachment.prepared_optimizers())

    @property
    def local_norm_names(self) -> tuple[str, ...]:
        """Names of the groups in the first optimizer's local norms; empty before ``prepare``.

        The first optimizer is the one that was prepared first.
        """
        windows = list(self.attachment.step.windows.values())
        return windows[0].update.parameters.groups().names if windows else ()

    @property
    def loss_scale(self) -> Tensor:
        """The loss scale that the next backward uses, shape ``()``, float32; a copy."""
        return self.attachment.step.loss_scale.value.clone()

    def report_losses(self, losses: Mapping[str, Tensor]) -> None:
        """Report losses of a micro-batch by name, beside the loss that the loop differentiates.

        The report of the update has their means over its micro-batches; see `StepReport`. Call it
        before the micro-batch's ``accelerator.backward``. `MFTrainer` calls it. Does not
        synchronize with the device.

        Args:
            losses: Tensors of one element by name, such as ``lm_loss`` and ``mtp_loss``.

        Raises:
            TypeError: If a loss is no tensor of one element.
        """
        for name, loss in losses.items():
            is_tensor = isinstance(loss, Tensor)
            if not is_tensor or loss.numel() != 1:
                got = f"shape {tuple(loss.shape)}" if is_tensor else f"{described(loss):.80}"
                msg = (
                    f"`losses` must hold tensors of one element, got {got} as {name!r}; give the "
                    "mean of the micro-batch, without `.item()`"
                )
                raise TypeError(msg)
        self.attachment.step.report_losses(losses)

    def flush(self) -> None:
        """Wait for the results of the last update, and advance the schedules if it was applied.

        Synchronizes with the device. Call it before you read ``optimizer.param_groups``, and at the
        end of training. ``accelerator.end_training`` and ``save_state`` call it for you.

        Raises:
            RuntimeError: If ``max_consecutive_skips`` updates in a row were skipped.
        """
        self.attachment.step.flush()

    def wait_for_checkpoint(self) -> None:
        """Wait until the last ``save_state`` is in place; call it on all ranks.

        Only with `async_save` there is something to wait for. The next ``save_state``,
        ``load_state``, ``end_training`` and `detach` call it for you.

        Raises:
            Exception: On all ranks, if the checkpoint could not be written.
        """
        self.attachment.checkpoints.settle()

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
        if vars(accelerator).get("attachment") is not self.attachment:
            return
        scales = self._grad_scaler is not None and self._grad_scaler.is_enabled()
        try:
            self.attachment.release(scaled=scales)
        finally:
            if scales:
                self._scaler.grad_scaler()
                # torch's scaler unscales gradients only after a first call of `scale`, which puts
                # its state on the device.
                self._grad_scaler.scale(self.loss_scale)
            self.attachment.step.end_schedules()
            restore_prepared(accelerator, self._grad_scaler)
            accelerator.scaler = self._grad_scaler
            accelerator.__class__ = self._kind
            if self._ddp_handler is not None:
                self._ddp_handler.__class__ = self._handler_kind
            del accelerator.attachment

    def __copy__(self) -> Self:
        # An accelerator is its own copy, and so is its step.
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (*self._arguments, self._async_save)
        state = self.attachment.step.state_dict()
        return _attached_again, (self.accelerator, arguments, state)


def _attached_again(
    accelerator: Any, arguments: tuple[Any, ...], state: Mapping[str, Any]
) -> AttachedStep:
    """Attach a step to an unpickled accelerator, and to everything that it has prepared.

    Args:
        accelerator: Accelerator without a step.
        arguments: Further arguments of `AttachedStep`.
        state: State of the step, from `LoopStep.state_dict`.
    """
    attached = AttachedStep(accelerator, *arguments)
    attachment = attached.attachment
    for model in models_of(accelerator):
        attachment.see_model(model)
    for optimizer in optimizers_of(accelerator):
        attach_optimizer(optimizer, attachment, accelerator.scaler)
    for scheduler in schedulers_of(accelerator):
        attach_scheduler(scheduler, attachment)
    # The first backward adds optimizers whose parameters are in no prepared model; see `build`.
    attachment.build()
    if len(attachment.step.windows) < len(state["updates"]):
        attachment.build(final=True)
    if state["updates"]:
        attachment.step.load_state_dict(state)
    else:
        attachment.step.loss_scale.load_state_dict(state["loss_scale"])
    return attached


def attach(
    accelerator: Accelerator,
    config: StepConfig | None = None,
    ema: EMA | None = None,
    *,
    scale_sense: ScaleSense | None = None,
    communication_hook: CommunicationHook | None = None,
    async_save: bool = False,
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
        async_save: Whether ``save_state`` copies weights, optimizers and average to host memory,
            and a thread writes them while the loop goes on. The checkpoint is in place after
            `AttachedStep.wait_for_checkpoint`. On one process, an error of the thread is raised by
            the next update; on several, where they wait for the checkpoint.

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
    check_bool("async_save", async_save)
    return AttachedStep(
        accelerator,
        loop_config(accelerator, config),
        ema,
        scale_sense,
        communication_hook,
        async_save,
    )
