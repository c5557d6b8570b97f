"""Callbacks get the step's output, training ends with a flush, and saved states are restored."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler, ExportableState
from transformers.trainer_utils import SaveStrategy

from mfwrap import StepOutput, StepReport
from mfwrap.callbacks import EMACallback, TrainingStateMonitor
from mfwrap.collectives import section_clock
from mfwrap.termination import RankTermination
from mfwrap.trainer import MFTrainer, MonitorCallback
from mfwrap.trainer.events import (
    StepCallbackHandler,
    TerminationCallback,
    add_step_to_events,
    flushed_at_end,
    monitors,
    restore_in_place,
)
from support.trainer_runs import new_trainer


def report() -> StepReport:
    """Return a report with arbitrary values."""
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


class Listener(TrainerCallback):
    """Record the step's keywords of each call, and the value of `answers_late` during the call."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.order: list[str] = []
        self.attached: Any = None
        self.answered_late: list[bool] = []

    def _record(self, keywords: dict[str, Any]) -> None:
        self.got.append({k: v for k, v in keywords.items() if k.startswith("step_")})
        self.order.append("callback")
        self.answered_late.append(self.attached.answers_late)

    def on_step_end(self, *_, **keywords):
        self._record(keywords)

    def on_optimizer_step(self, *_, **keywords):
        self._record(keywords)


def stub_trainer(handler, attached):
    """Return what a handler asks of its trainer."""
    own = SimpleNamespace(attachment=attached)
    return SimpleNamespace(callback_handler=handler, attached=own)


def handler_of(last: StepReport | None) -> tuple[CallbackHandler, Listener, Any]:
    """Return a handler, the handler's only callback, and the attached step with this report."""
    listener = Listener()
    handler = CallbackHandler([listener], None, None, None, None)
    attached = SimpleNamespace(last_report=last, answers_late=False)
    listener.attached = attached
    trainer = stub_trainer(handler, attached)
    add_step_to_events(trainer, listener.order.append, lambda *_: None, RankTermination())
    return trainer.callback_handler, listener, attached


def send(handler: CallbackHandler, event: str) -> TrainerControl:
    """Send an event, and return the control that the callbacks changed."""
    return handler.call_event(event, None, TrainerState(max_steps=9, epoch=0.5), TrainerControl())


def test_the_handler_keeps_its_own_class():
    """A handler of a user's class is still an instance of that class, with its attributes."""

    class Own(CallbackHandler):
        pass

    handler = Own([], None, None, None, None)
    handler.train_dataloader = "loader"
    trainer = stub_trainer(handler, None)
    add_step_to_events(trainer, print, print, RankTermination())
    assert type(handler) is Own
    handler = trainer.callback_handler

    assert isinstance(handler, Own)
    assert isinstance(handler, StepCallbackHandler)
    assert type(handler).__name__ == "StepOwn"
    assert handler.train_dataloader == "loader"


def test_the_end_of_a_step_has_output_and_report():
    """In ``on_step_end``, callbacks get the report and the output of the last update."""
    last = report()
    handler, listener, _ = handler_of(last)

    send(handler, "on_step_end")

    (got,) = listener.got
    assert got["step_report"] is last
    assert got["step_output"] is last.output


def test_no_other_event_has_output_and_report():
    """Output and report are missing in other events, and before the first update."""
    handler, listener, _ = handler_of(report())
    send(handler, "on_optimizer_step")
    before, other, _ = handler_of(None)
    send(before, "on_step_end")

    assert listener.got == other.got == [{}]


@pytest.mark.parametrize("event", ["on_step_end", "on_optimizer_step"])
def test_answers_are_late_only_right_after_the_optimizer(event):
    """`answers_late` is False during callbacks, and True only after ``on_optimizer_step``.

    While `answers_late` is True, ``optimizer_step_was_skipped`` is False and does not synchronize
    with the device. The Trainer reads this property right after ``on_optimizer_step``; callbacks
    read the exact value. `before_event` is called before the callbacks.
    """
    handler, listener, attached = handler_of(report())
    attached.answers_late = True

    send(handler, event)

    assert listener.order == [event, "callback"]
    assert listener.answered_late == [False]
    assert attached.answers_late is (event == "on_optimizer_step")


def test_callbacks_change_the_control():
    """The handler returns the control that a callback changed, like the Trainer's own handler."""

    class Saves(TrainerCallback):
        def on_step_end(self, _args, _state, control, **_):
            control.should_save = True

    handler, _, _ = handler_of(report())
    handler.add_callback(Saves())

    assert send(handler, "on_step_end").should_save
    assert not send(handler, "on_optimizer_step").should_save


@pytest.mark.parametrize(("epoch", "step"), [(1.5, 3), (2.0, 4), (1.5, 9)])
def test_a_checkpoint_at_the_end_of_an_epoch_waits_for_the_evaluation(epoch, step):
    """A checkpoint that is due after the last step is requested after ``on_epoch_end`` instead."""
    handler, _, _ = handler_of(report())
    state = TrainerState(max_steps=9, epoch=epoch, global_step=step)
    events = ("on_step_end", "on_epoch_end", "on_epoch_end")
    asked = [
        handler.call_event(event, None, state, TrainerControl(should_save=saves)).should_save
        for event, saves in zip(events, (True, False, False), strict=True)
    ]

    assert asked == ([True, False, False] if (epoch, step) == (1.5, 3) else [False, True, False])


class Decides(TrainerCallback):
    """Set ``should_save`` at one event, and record what it was before."""

    def __init__(self, event: str, *, value: bool) -> None:
        self.before: list[bool] = []

        def decide(_args, _state, control, **_):
            self.before.append(control.should_save)
            control.should_save = value

        setattr(self, event, decide)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("event", ["on_log", "on_evaluate"])
@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_callbacks_may_cancel_a_postponed_checkpoint(event, value, strategy):
    """Between step and end of an epoch, callbacks see the request for a checkpoint, and change it.

    With the strategy "best", the Trainer decides after an evaluation, as without callbacks.
    """
    handler, _, _ = handler_of(None)
    decides = Decides(event, value=value)
    handler.add_callback(decides)
    state, control = TrainerState(max_steps=9, epoch=2.0), TrainerControl(should_save=True)
    args = SimpleNamespace(save_strategy=SaveStrategy(strategy))
    asked = []
    for each in ("on_step_end", "on_log", "on_evaluate", "on_epoch_end"):
        keywords = {"metrics": {}} if each == "on_evaluate" else {}
        control = handler.call_event(each, args, state, control, **keywords)
        asked.append(control.should_save)

    assert decides.before == [True]
    assert asked == [False, False, False, value and strategy == "steps"]


@pytest.mark.parametrize("event", ["on_log", "on_evaluate"])
def test_a_postponed_checkpoint_is_written_at_the_end_of_the_epoch(event):
    """The epoch's own evaluation and log cannot cancel a step's checkpoint, which stock has saved.

    After the save, they decide for themselves.
    """
    handler, _, _ = handler_of(None)
    state, control = TrainerState(max_steps=9, epoch=2.0), TrainerControl(should_save=True)
    for each in ("on_step_end", "on_epoch_end"):
        control = handler.call_event(each, None, state, control)
    handler.add_callback(Decides(event, value=False))

    assert handler.call_event(event, None, state, control).should_save
    control = handler.on_save(None, state, control)
    assert not control.should_save
    assert not handler.call_event(event, None, state, TrainerControl()).should_save


@pytest.mark.parametrize("event", ["on_log", "on_evaluate"])
def test_other_logs_and_evaluations_leave_the_control_as_it_is(event):
    """Without a postponed checkpoint, a log or an evaluation keeps a request, and makes none."""
    handler, _, _ = handler_of(None)
    for saves in (True, False):
        control = TrainerControl(should_save=saves)
        assert handler.call_event(event, None, TrainerState(), control).should_save is saves


@pytest.mark.parametrize("begin", ["on_train_begin", "on_epoch_begin"])
@pytest.mark.parametrize("num_events", [1, 2])
def test_a_postponed_checkpoint_that_was_not_written(begin, num_events):
    """If an error prevented a postponed save, the next training or epoch does not save instead."""
    handler, _, _ = handler_of(None)
    state = TrainerState(max_steps=9, epoch=2.0)
    for event in ("on_step_end", "on_epoch_end")[:num_events]:
        handler.call_event(event, None, state, TrainerControl(should_save=True))

    for event in (begin, "on_log", "on_step_begin", "on_epoch_end"):
        control = handler.call_event(event, None, TrainerState(), TrainerControl())
        assert not control.should_save


class Order(TrainerCallback):
    """Record the classes of all callbacks during each event, and the control that arrives."""

    def __init__(self) -> None:
        self.handler: Any = None
        self.lists: list[list[str]] = []
        self.controls: list[tuple[bool, bool]] = []

    def _record(self, control: TrainerControl) -> None:
        self.lists.append(self.handler.callback_list.split("\n"))
        self.controls.append((control.should_evaluate, control.should_save))

    def on_step_begin(self, _args, _state, control, **_):
        self._record(control)

    def on_step_end(self, _args, _state, control, **_):
        self._record(control)

    def on_epoch_end(self, _args, _state, control, **_):
        self._record(control)


@pytest.mark.parametrize("first", [[], [TrainerCallback()]], ids=["usual", "flow added later"])
def test_sigterm_is_handled_between_the_flow_and_other_callbacks(first, tmp_path):
    """At SIGTERM, callbacks after the flow callback get its decisions as SIGTERM changed them."""
    order, termination = Order(), RankTermination()
    handler = CallbackHandler([*first, DefaultFlowCallback(), order], None, None, None, None)
    trainer = stub_trainer(handler, SimpleNamespace(last_report=None, answers_late=False))
    add_step_to_events(trainer, print, print, termination)
    order.handler = handler = trainer.callback_handler
    before = list(handler.callbacks)
    args = TrainingArguments(str(tmp_path), eval_strategy="epoch", save_strategy="epoch")
    state = TrainerState(max_steps=9, epoch=1.5, global_step=3)

    with termination:
        os.kill(os.getpid(), signal.SIGTERM)
        for event in ("on_step_begin", "on_step_end", "on_epoch_end"):
            handler.call_event(event, args, state, TrainerControl())
            assert handler.callbacks == before

    usual = [type(callback).__name__ for callback in before]
    with_sigterm = [*usual[:-1], "TerminationCallback", usual[-1]]
    assert order.lists == [usual, with_sigterm, with_sigterm]
    assert order.controls == [(False, False), (False, True), (False, False)]


@pytest.mark.parametrize("removed", [1, 3])
def test_callbacks_may_remove_callbacks(removed):
    """A callback that removes itself, or all callbacks, in an event is removed for good."""

    class Removes(TrainerCallback):
        def on_step_end(self, *_, **__):
            del handler.callbacks[-removed:]

    handler, listener, _ = handler_of(report())
    handler.add_callback(Removes())

    send(handler, "on_step_end")

    assert handler.callbacks == ([listener] if removed == 1 else [])


def test_the_monitors_with_files_or_values_are_monitor_callbacks():
    """`monitors` returns the callbacks that are a `MonitorCallback`, in order."""
    average, state = EMACallback(), TrainingStateMonitor()

    assert monitors([average, TrainerCallback(), state]) == [average, state]


def test_by_default_a_monitor_callback_does_nothing(tmp_path):
    """By default, the methods of a `MonitorCallback` do nothing."""
    monitor = MonitorCallback()

    monitor.on_pre_save(None, TrainerState(), TrainerControl(), model=nn.Linear(1, 1))
    monitor.save_into(tmp_path, None, nn.Linear(1, 1))
    monitor.resume_from(Path("checkpoint-1"))
    monitor.put_weights_back()

    assert monitor.values_to_log() == {}
    assert list(tmp_path.iterdir()) == []


class Attached:
    """Count the flushes of a step; the first `failing` flushes raise an error."""

    def __init__(self, failing: int = 0) -> None:
        self.schedules = ["not deferred"]
        self.step = self
        self.num_flushes = 0
        self._failing = failing

    def explain_out_of_memory(self, *_: Any) -> None:
        pass

    def flush(self) -> None:
        self.num_flushes += 1
        if self.num_flushes <= self._failing:
            msg = "too many skips"
            raise RuntimeError(msg)

    def end_schedules(self) -> list[object]:
        ended, self.schedules = self.schedules, []
        return ended


class PutsBack(MonitorCallback):
    """Count how often the raw weights are put back."""

    def __init__(self) -> None:
        self.count = 0

    def put_weights_back(self) -> None:
        self.count += 1


def test_a_training_ends_with_a_flush():
    """A training ends with one flush and drops the schedules; no weights are put back."""
    attached, callback = Attached(), PutsBack()

    with flushed_at_end(attached, [callback]):
        assert attached.num_flushes == 0

    assert (attached.num_flushes, callback.count, attached.schedules) == (1, 0, [])


def test_after_an_error_the_weights_are_put_back():
    """After an error, weights are put back, and an error of the flush does not hide that error."""
    attached, callback, key = Attached(failing=1), PutsBack(), "the first"

    with (
        pytest.raises(KeyError, match=key),
        flushed_at_end(attached, [TrainerCallback(), callback]),
    ):
        raise KeyError(key)

    assert (attached.num_flushes, callback.count, attached.schedules) == (1, 1, [])


def test_an_error_of_the_last_flush_is_raised():
    """An error of the last flush is raised, and the weights are put back."""
    attached, callback = Attached(failing=1), PutsBack()

    with (
        pytest.raises(RuntimeError, match="too many skips"),
        flushed_at_end(attached, [callback]),
    ):
        pass

    assert (attached.num_flushes, callback.count, attached.schedules) == (2, 1, [])


@pytest.mark.parametrize("is_requested", [False, True])
def test_after_sigterm_a_step_asks_for_a_checkpoint_and_the_end(is_requested):
    """After a SIGTERM, a step requests a save and a stop, and keeps a requested evaluation."""
    control = TrainerControl(should_evaluate=True)

    with RankTermination() as termination:
        if is_requested:
            os.kill(os.getpid(), signal.SIGTERM)
        TerminationCallback(termination).on_step_end(None, TrainerState(), control)

    assert control.should_save == control.should_training_stop == is_requested
    assert control.should_evaluate


@pytest.mark.parametrize(
    ("epoch", "step", "is_requested", "expected"),
    [(1.5, 3, True, False), (2.0, 3, True, True), (1.5, 9, True, True), (1.5, 3, False, True)],
    ids=["in the middle", "at the end", "at the end of the training", "not stopping"],
)
def test_after_sigterm_an_epoch_that_is_not_complete_is_not_evaluated(
    epoch, step, is_requested, expected
):
    """The evaluation and checkpoint of an epoch are cancelled only if the epoch is incomplete."""
    control = TrainerControl(should_evaluate=True, should_save=True)

    with RankTermination() as termination:
        if is_requested:
            os.kill(os.getpid(), signal.SIGTERM)
        termination.stops_after(step)
        state = TrainerState(epoch=epoch, global_step=step, max_steps=9)
        TerminationCallback(termination).on_epoch_end(None, state, control)

    assert control.should_evaluate == control.should_save == expected


class Named(TrainerCallback, ExportableState):
    """Export `value` as state, but not `name`."""

    def __init__(self, name: str = "") -> None:
        self.name, self.value = name, 0

    def state(self):
        return {"args": {"name": "saved"}, "attributes": {"value": self.value}}


def states(*numbers: int) -> list[dict[str, Any]]:
    """Return saved states with these values."""
    return [{"args": {"name": "saved"}, "attributes": {"value": number}} for number in numbers]


@pytest.mark.parametrize(
    ("saved", "is_appended", "expected"),
    [
        ({}, False, [0, 0]),
        ({"Unknown": states(5)[0]}, False, [0, 0]),
        ({"Named": states(5)[0]}, False, [5, 0]),
        ({"Named": states(5, 6)}, False, [5, 6]),
        ({"Named": states(5, 6)}, True, [5, 6]),
        ({"Named": states(5, 6, 7, 8)}, False, [5, 6]),
        # The stock Trainer appends the states of both callbacks at each save. This list is from a
        # third save.
        ({"Named": states(1, 2, 3, 4, 5, 6)}, True, [5, 6]),
        ({"Named": states(5, 6, 7)}, True, [5, 6]),
    ],
    ids=["none", "another class", "one", "two", "two, stock", "four", "three saves", "three"],
)
def test_states_go_to_callbacks_of_their_class_in_order(saved, is_appended, expected):
    """Saved states go to callbacks of their class, in order; other callbacks stay as they are."""
    callbacks = [Named("first"), TrainerCallback(), Named("second")]

    restore_in_place(callbacks, saved, includes_others=True, is_appended=is_appended)

    named = [callbacks[0], callbacks[2]]
    assert [callback.value for callback in named] == expected
    names = [each.name for each in named]
    assert names == [
        "saved" if value else name
        for name, value in zip(("first", "second"), expected, strict=True)
    ]


def test_others_are_restored_only_if_they_are_included():
    """Without `includes_others`, only a `MonitorCallback` gets its state back."""
    stopped, fresh = EarlyStoppingCallback(3), EarlyStoppingCallback(7)
    stopped.early_stopping_patience_counter = 2
    own = NamedMonitor("first")
    saved = {"EarlyStoppingCallback": stopped.state(), "NamedMonitor": states(5)[0]}

    restore_in_place([fresh, own], saved, includes_others=False, is_appended=False)

    assert (fresh.early_stopping_patience, fresh.early_stopping_patience_counter) == (7, 0)
    assert (own.name, own.value) == ("first", 5)


class NamedMonitor(Named, MonitorCallback):
    """A `MonitorCallback` with a state; its constructor is never called again."""


def test_a_monitor_keeps_its_arguments():
    """A `MonitorCallback` gets its attributes back and keeps the arguments of this run."""
    own = NamedMonitor("first")

    restore_in_place([own], {"NamedMonitor": {}}, includes_others=True, is_appended=False)
    assert (own.name, own.value) == ("first", 0)
    restore_in_place([own], {"NamedMonitor": states(5)[0]}, includes_others=True, is_appended=False)
    assert (own.name, own.value) == ("first", 5)


def test_a_constructor_that_does_not_take_the_saved_arguments():
    """The error names the class, the saved arguments and the constructor's reason."""
    saved = {"Named": {"args": {"title": "saved"}}}

    with pytest.raises(
        TypeError,
        match=r"^cannot restore Named with the saved arguments \{'title': 'saved'\} \(.*title.*\); "
        r"return all arguments",
    ):
        restore_in_place([Named()], saved, includes_others=True, is_appended=False)


class SlowEvents(TrainerCallback):
    """Let evaluations, logs and saves take 100 seconds of a clock; keep the sections of steps."""

    def __init__(self) -> None:
        self.seconds = 0
        self.sections: list[Any] = []

    def on_step_end(self, *_: Any, step_report: StepReport, **__: Any) -> None:
        self.sections.append(step_report.sections.seconds())

    def on_log(self, *_: Any, **__: Any) -> None:
        self.seconds += 100

    on_evaluate = on_save = on_log


def test_slow_callbacks_are_not_loading_of_data(tmp_path, monkeypatch):
    """The time of callbacks of an evaluation, a log or a save belongs to no section of a step.

    A log of the loss function keeps the other times of its step.
    """
    slow = SlowEvents()

    class LoggingTrainer(MFTrainer):
        def compute_loss(self, *args: Any, **keywords: Any) -> Any:
            slow.seconds += 10
            self.log({"before": 1.0})
            loss = super().compute_loss(*args, **keywords)
            self.log({"after": 1.0})
            return loss

    monkeypatch.setattr(section_clock, "_now", lambda: slow.seconds * 10**9)
    section_clock.start_for(slow)
    every_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps"}
    trainer = new_trainer(LoggingTrainer, tmp_path, callbacks=[slow], **every_step, eval_steps=1)
    trainer.train()
    section_clock.stop_for(slow)

    assert slow.seconds >= 4 * 300
    assert slow.sections == [[40, 0, 0, 0, 0]] * 4
