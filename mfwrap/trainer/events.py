"""The Trainer's events with the step in them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn
from transformers.trainer_callback import (
    CallbackHandler,
    ExportableState,
    TrainerCallback,
    TrainerControl,
)

from mfwrap.outputs import StepReport
from mfwrap.termination import RankTermination

__all__ = [
    "KeepsFiles",
    "StepCallbackHandler",
    "TerminationCallback",
    "TrainerSteps",
    "announce_checkpoint",
    "handler_class",
    "restore_in_place",
    "save_callbacks",
    "values_to_log",
]


class TrainerSteps(Protocol):
    """What the events ask of a Trainer, and tell it."""

    def report_of_step(self) -> StepReport | None:
        """Return the report of the last update."""

    def answer_late(self, *, late: bool) -> None:
        """Let ``optimizer_step_was_skipped`` say False instead of waiting, or no longer."""

    def before_event(self, event: str) -> None:
        """Hear of an event before the callbacks do."""


class StepCallbackHandler:
    """Mixed in before the Trainer's own handler by `handler_class`."""

    steps: TrainerSteps

    def call_event(
        self, event: str, args: Any, state: Any, control: TrainerControl, **keywords: Any
    ) -> TrainerControl:
        """Call all callbacks; at the end of a step they get its output and its report."""
        # The Trainer asks whether the update was skipped right after this event, and steps the
        # schedule if not. That the schedule knows by itself, a step later.
        self.steps.answer_late(late=False)
        self.steps.before_event(event)
        report = self.steps.report_of_step()
        if event == "on_step_end" and report is not None:
            keywords |= {"step_output": report.output, "step_report": report}
        control = super().call_event(event, args, state, control, **keywords)  # type: ignore[misc]
        self.steps.answer_late(late=event == "on_optimizer_step")
        return control


class TerminationCallback(TrainerCallback):
    """Save and stop after a step, if the process of any rank has been told to end.

    An evaluation that is due is done before: it draws random numbers, and without it a resumed run
    would not be the one that was not stopped.

    Args:
        termination: Knows which step is the last one.
    """

    def __init__(self, termination: RankTermination) -> None:
        self._termination = termination

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Ask for the checkpoint and for the end."""
        del args
        if self._termination.stops_after(state.global_step):
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Let an epoch that was broken off ask for nothing; its step has been saved.

        One that has ended is saved once more after its evaluation.
        """
        del args
        if self._termination.is_stopping:
            if not float(state.epoch).is_integer():
                control.should_evaluate = False
            control.should_save = control.should_evaluate


def handler_class(kind: type[CallbackHandler]) -> type[CallbackHandler]:
    """Return the subclass of a callback handler's class that has the step in its events."""
    return type(f"Step{kind.__name__}", (StepCallbackHandler, kind), {})


def values_to_log(callbacks: list[Any]) -> dict[str, float]:
    """Return what callbacks have for the Trainer's trackers: their own ``values_to_log``."""
    values: dict[str, float] = {}
    for callback in callbacks:
        ask = getattr(callback, "values_to_log", None)
        values |= {} if ask is None else ask()
    return values


def restore_in_place(callbacks: list[Any], saved: Any) -> None:
    """Give callbacks the states that a checkpoint holds, without replacing them.

    Args:
        callbacks: Those that export a state are restored.
        saved: States by the name of the class, several of one class in a list: a mapping.
    """
    stateful = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    for name, data in saved.items():
        same_class = [callback for callback in stateful if type(callback).__name__ == name]
        states = data if isinstance(data, list) else [data]
        # A stock Trainer appends to such a list at each save.
        for callback, state in zip(same_class, states[-len(same_class) :], strict=False):
            _set_attributes(callback, state)


def _set_attributes(target: object, state: Mapping[str, Any]) -> None:
    for attribute, value in state.get("attributes", {}).items():
        setattr(target, attribute, value)


@runtime_checkable
class KeepsFiles(Protocol):
    """A callback with files of its own in each checkpoint of an `MFTrainer`.

    A Trainer's event ``on_save`` comes when the checkpoint is in place and its files are listed;
    what is written then is lost if the process ends before, and nobody notices.
    """

    def save_into(self, folder: Path, args: Any, model: nn.Module) -> None:
        """Write them, while the checkpoint is not yet in place.

        Called on every rank; ``args.should_save`` says which one writes.
        """

    def resume_from(self, folder: Path) -> None:
        """Hear which checkpoint a training is resumed from, just before ``on_train_begin``."""


def save_callbacks(callbacks: Iterable[object], folder: Path, args: Any, model: nn.Module) -> None:
    """Let callbacks write their files into a checkpoint."""
    for callback in callbacks:
        if isinstance(callback, KeepsFiles):
            callback.save_into(folder, args, model)


def announce_checkpoint(callbacks: Iterable[object], folder: Path) -> None:
    """Tell callbacks with files which checkpoint is resumed."""
    for callback in callbacks:
        if isinstance(callback, KeepsFiles):
            callback.resume_from(folder)
