"""The step behind an unchanged accelerate loop."""

from accelerate import Accelerator

from mfwrap.accelerate.attached_step import AttachedStep
from mfwrap.accelerate.setup import EMA, check_arguments
from mfwrap.config import StepConfig
from mfwrap.loss_scale.live import ScaleSense
from mfwrap.step.local_norms import CommunicationHook

__all__ = ["AttachedStep", "attach"]


def attach(
    accelerator: Accelerator,
    config: StepConfig | None = None,
    ema: EMA | None = None,
    *,
    scale_sense: ScaleSense | None = None,
    communication_hook: CommunicationHook | None = None,
) -> AttachedStep:
    """Put MindFormers' training step behind an accelerate loop.

    Called before ``accelerator.prepare``. The loop stays as it is: ``accumulate``, ``backward``,
    ``clip_grad_norm_``, ``clip_grad_value_``, ``unscale_gradients``, ``optimizer.step``,
    ``zero_grad``, ``scheduler.step``, ``optimizer_step_was_skipped``, ``save_state`` and
    ``load_state`` keep their meaning. In every precision, an update whose gradients are not finite
    is skipped. ``clip_grad_norm_`` returns the norm of the unscaled gradients before clipping,
    from the same read that tells overflow and local norms, and the optimizer's own pass clips.
    Prepared schedules count applied updates only; they advance just before the next update, so
    ``get_last_lr`` answers with the rate that was last used.

    With torch's fused optimizers nothing of it waits for the device. ``optimizer_step_was_skipped``
    and a schedule's ``state_dict`` do.

    With several optimizers, the loss scale changes when none of them has unused gradients. An
    average whose weights several optimizers hold follows when each has done its update.

    Args:
        accelerator: One that has prepared nothing yet; alone or under DistributedDataParallel.
        config: Settings of the step. `use_clip_grad` clips where the loop itself does not, and
            reports the norm; accumulation and the normalisation of losses are the loop's own.
        ema: Follows the weights after each applied update: an average of the prepared model, or a
            callable that makes one of it and is called at the end of ``prepare``.
        scale_sense: The loss scale: a number, a tensor or an update cell. By default the scale of
            the accelerator's gradient scaler (float16 on CUDA), and 1 if it has none.
        communication_hook: ``(state, hook)``, which is registered with what ``prepare`` puts in
            DistributedDataParallel and reduces the gradients once their local norms are taken;
            ``None`` for the one of the accelerator's ``DistributedDataParallelKwargs``, or else the
            usual all-reduce.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a setting has no meaning in a loop, or the accelerator is of a kind that is
            not supported.
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
    return AttachedStep(accelerator, config, ema, scale_sense, communication_hook)
