"""The Trainer's events: what callbacks get from the step, and what loops ask of callbacks."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl

from mfwrap.accelerate.attached_step import AttachedStep
from mfwrap.schedules.deferred import DeferredSchedule, undefer_schedule
from mfwrap.termination import RankTermination

if TYPE_CHECKING:
    from mfwrap.trainer.mixin import MFTrainerMixin


class MonitorCallback(TrainerCallback):
    """A transformers callback with what `MFTrainer` asks of it beside transformers' events.

    Override what a callback needs; by default each method does nothing. `Model` calls
    `put_weights_back` only, and a stock Trainer none of these methods.
    """

    def values_to_log(self) -> dict[str, float]:
        """Return values by name that `MFTrainer` adds to each training log."""
        return {}

    def save_into(self, folder: Path, args: Any, model: nn.Module) -> None:
        """Write files of the callback into a checkpoint that is not yet in place.

        Called on every rank; ``args.should_save`` says which rank writes. At transformers'
        ``on_save`` the checkpoint is in place and its files are listed: if the process ends before
        a file is written there, nobody notices that the file is missing.

        Args:
            folder: Folder of the checkpoint.
            args: The trainer's arguments.
            model: The trainer's model.
        """

    def resume_from(self, folder: Path) -> None:
        """Take note of the checkpoint that a training resumes from, before ``on_train_begin``."""

    def put_weights_back(self) -> None:
        """Put the raw weights back into the model if it holds others; called after an error."""


def monitors(callbacks: Iterable[object]) -> list[MonitorCallback]:
    """Return those callbacks that are a `MonitorCallback`."""
    return [callback for callback in callbacks if isinstance(callback, MonitorCallback)]


class StepCallbackHandler(CallbackHandler):
    """A Trainer's callback handler whose events carry the step; see `add_step_to_events`."""

    trainer: "MFTrainerMixin"
    before_event: Callable[[str], None]

    def call_event(
        self, event: str, args: Any, state: Any, control: TrainerControl, **keywords: Any
    ) -> TrainerControl:
        """Call all callbacks; at the end of a step they get its output and its report."""
        attached = self.trainer.attached
        # The Trainer asks whether the update was skipped right after `on_optimizer_step`, and steps
        # the schedule if it was not. The answer would synchronize with the device. A late answer,
        # False, costs nothing, and the schedule itself finds out about the skip one step later.
        attached.answers_late = False
        self.before_event(event)
        report = attached.last_report
        if event == "on_step_end" and report is not None:
            keywords |= {"step_output": report.output, "step_report": report}
        changed: TrainerControl = super().call_event(  # type: ignore[no-untyped-call]  # (transformers)
            event, args, state, control, **keywords
        )
        attached.answers_late = event == "on_optimizer_step"
        return changed


def add_step_to_events(trainer: "MFTrainerMixin", before_event: Callable[[str], None]) -> None:
    """Turn a trainer's callback handler into a `StepCallbackHandler` that is also of its own class.

    Args:
        trainer: A trainer that has its callback handler.
        before_event: Called with the name of each event, before the callbacks.
    """
    handler: Any = trainer.callback_handler
    kind = type(handler)
    handler.__class__ = type(f"Step{kind.__name__}", (StepCallbackHandler, kind), {})
    handler.trainer, handler.before_event = trainer, before_event


@contextlib.contextmanager
def flushed_at_end(attached: AttachedStep, callbacks: list[Any]) -> Iterator[None]:
    """Train within the block; afterwards flush the step, and hand schedules and weights back.

    Args:
        attached: Step of the training.
        callbacks: Callbacks, which put the raw weights back into the model if the block raises.
    """
    try:
        yield
        attached.flush()
    except BaseException:
        # The schedule's last step is due after an error, too. A second error would hide the first.
        with contextlib.suppress(RuntimeError):
            attached.flush()
        for callback in monitors(callbacks):
            callback.put_weights_back()
        raise
    finally:
        # Outside of a training, whoever steps a schedule expects it to advance at once.
        for schedule in attached.step.schedules:
            if isinstance(schedule, DeferredSchedule):
                undefer_schedule(schedule)
        attached.step.schedules.clear()


class TerminationCallback(TrainerCallback):
    """Save and stop after the current step if the process of any rank has received SIGTERM.

    An evaluation that is due is done first. It draws random numbers, so without it a resumed
    training would not be the same as one that was never stopped.

    Args:
        termination: Tells which step is the last one.
    """

    def __init__(self, termination: RankTermination) -> None:
        self._termination = termination

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Ask for a checkpoint and for the end of the training."""
        del args
        if self._termination.stops_after(state.global_step):
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Cancel what is due at the end of an epoch if the epoch was interrupted.

        The step of the interruption has been saved already. An epoch that is complete is saved once
        more, after its evaluation.
        """
        del args
        if self._termination.is_stopping:
            if not float(state.epoch).is_integer():
                control.should_evaluate = False
            control.should_save = control.should_evaluate


def restore_in_place(callbacks: list[Any], saved: Mapping[str, Any]) -> None:
    """Restore the states of callbacks from a checkpoint without replacing the callbacks.

    Args:
        callbacks: Callbacks; those that export a state are restored.
        saved: States by the name of the callback's class: a dict, or a list of dicts if there are
            several callbacks of the class.
    """
    stateful = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    for name, data in saved.items():
        same_class = [callback for callback in stateful if type(callback).__name__ == name]
        states = data if isinstance(data, list) else [data]
        # A stock Trainer appends to such a list at each save, so the newest states come last.
        for callback, state in zip(same_class, states[-len(same_class) :], strict=False):
            for attribute, value in state.get("attributes", {}).items():
                setattr(callback, attribute, value)
