"""The Trainer's events with the step in them, and callbacks that are restored in place."""

import os
import signal
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState

from mfwrap import StepOutput, StepReport
from mfwrap.termination import RankTermination
from mfwrap.trainer.events import (
    StepCallbackHandler,
    TerminationCallback,
    handler_class,
    restore_in_place,
)


def report() -> StepReport:
    """Return the report of some update."""
    zero = torch.zeros(())
    count = torch.zeros((), dtype=torch.int64)
    return StepReport(
        output=StepOutput(zero, zero.bool(), zero + 1, zero, None),
        skipped=zero.bool(),
        applied_updates=count,
        skipped_updates=count,
        consecutive_skips=count,
        learning_rates=zero[None],
        local_norm_names=(),
    )


class Steps:
    """A trainer as its events see it; notes what it is told."""

    def __init__(self, last: StepReport | None) -> None:
        self.last = last
        self.heard: list[Any] = []

    def report_of_step(self) -> StepReport | None:
        return self.last

    def answer_late(self, *, late: bool) -> None:
        self.heard.append(late)

    def before_event(self, event: str) -> None:
        self.heard.append(event)


class Listener(TrainerCallback):
    """Notes the step's keywords, and what the trainer had been told by then."""

    def __init__(self, steps: Steps) -> None:
        self.got: list[dict[str, Any]] = []
        self._steps = steps

    def _note(self, keywords: dict[str, Any]) -> None:
        self.got.append({k: v for k, v in keywords.items() if k.startswith("step_")})
        self._steps.heard.append("callback")

    def on_step_end(self, *_, **keywords):
        self._note(keywords)

    def on_optimizer_step(self, *_, **keywords):
        self._note(keywords)


def handler_of(steps: Steps) -> tuple[CallbackHandler, Listener]:
    """Return a handler with the step in its events, and its one callback."""
    listener = Listener(steps)
    handler = CallbackHandler([listener], None, None, None, None)
    handler.__class__ = handler_class(type(handler))
    handler.steps = steps
    return handler, listener


def send(handler: CallbackHandler, event: str) -> TrainerControl:
    """Call an event, and return what the callbacks want."""
    return handler.call_event(event, None, TrainerState(), TrainerControl())


def test_the_class_of_a_handler_stays_what_it_was_too():
    """Whoever asks sees a handler of the same kind, and of ours."""

    class Own(CallbackHandler):
        pass

    kind = handler_class(Own)

    assert issubclass(kind, Own)
    assert issubclass(kind, StepCallbackHandler)
    assert kind.__name__ == "StepOwn"


def test_the_end_of_a_step_has_output_and_report():
    """The report of the last update, and its output."""
    steps = Steps(report())
    handler, listener = handler_of(steps)

    send(handler, "on_step_end")

    (got,) = listener.got
    assert got["step_report"] is steps.last
    assert got["step_output"] is steps.last.output


def test_no_other_event_has_them():
    """Nor the end of a step before the first update."""
    handler, listener = handler_of(Steps(report()))
    send(handler, "on_optimizer_step")
    before, other = handler_of(Steps(None))
    send(before, "on_step_end")

    assert listener.got == other.got == [{}]


@pytest.mark.parametrize("event", ["on_step_end", "on_optimizer_step"])
def test_answers_are_late_only_right_after_the_optimizer(event):
    """Callbacks that ask get the truth; only the Trainer, right after this event, does not."""
    steps = Steps(report())
    handler, _ = handler_of(steps)

    send(handler, event)

    assert steps.heard == [False, event, "callback", event == "on_optimizer_step"]


def test_what_callbacks_want_comes_back():
    """As from the Trainer's own handler."""

    class Saves(TrainerCallback):
        def on_step_end(self, _args, _state, control, **_):
            control.should_save = True

    handler, _ = handler_of(Steps(report()))
    handler.add_callback(Saves())

    assert send(handler, "on_step_end").should_save
    assert not send(handler, "on_optimizer_step").should_save


@pytest.mark.parametrize("is_requested", [False, True])
def test_at_the_end_of_the_process_a_step_asks_for_a_checkpoint(is_requested):
    """And for the end of training, with the evaluation that is due; otherwise for nothing."""
    control = TrainerControl(should_evaluate=True)

    with RankTermination() as termination:
        if is_requested:
            os.kill(os.getpid(), signal.SIGTERM)
        TerminationCallback(termination).on_step_end(None, TrainerState(), control)

    assert control.should_save == control.should_training_stop == is_requested
    assert control.should_evaluate


class Named(TrainerCallback, ExportableState):
    """Has a state, and something that is none."""

    def __init__(self, name: str = "") -> None:
        self.name, self.value = name, 0

    def state(self):
        return {"args": {"name": "saved"}, "attributes": {"value": self.value}}


def attributes(*numbers: int) -> list[dict[str, Any]]:
    """Return saved states."""
    return [{"args": {"name": "saved"}, "attributes": {"value": number}} for number in numbers]


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({}, [0, 0]),
        ({"Unknown": attributes(5)[0]}, [0, 0]),
        ({"Named": attributes(5)[0]}, [5, 0]),
        ({"Named": attributes(5, 6)}, [5, 6]),
        # As the Trainer leaves it after two checkpoints.
        ({"Named": attributes(1, 2, 3, 4, 5, 6)}, [5, 6]),
        ({"Named": {}}, [0, 0]),
    ],
    ids=["nothing", "another class", "one", "two", "last of several", "no attributes"],
)
def test_states_go_to_callbacks_of_their_class_in_order(saved, expected):
    """Callbacks themselves stay, with what is no part of their state."""
    callbacks = [Named("first"), TrainerCallback(), Named("second")]

    restore_in_place(list(callbacks), saved)

    named = [callback for callback in callbacks if isinstance(callback, Named)]
    assert [callback.value for callback in named] == expected
    assert [callback.name for callback in named] == ["first", "second"]


def test_the_state_of_a_class_of_transformers_is_restored():
    """As it exports it itself."""
    stopped, fresh = EarlyStoppingCallback(3), EarlyStoppingCallback(7)
    stopped.early_stopping_patience_counter = 2

    restore_in_place([fresh], {"EarlyStoppingCallback": stopped.state()})

    assert fresh.early_stopping_patience_counter == 2
    assert fresh.early_stopping_patience == 7
