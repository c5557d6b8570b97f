"""Evaluations by steps and by epochs are called and logged as in MindFormers."""

import re

import pytest
import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from mfwrap.callbacks import EvalCallback
from mfwrap.collectives import section_clock
from support.monitored_loop import Clock


def evaluated(callback, calls, *, num_epochs=3, steps_per_epoch=4, epoch=0.0, main=True):
    """Run a loop; return the events and steps at which the callback evaluates."""
    state = TrainerState(epoch=epoch, is_world_process_zero=main)
    handler = CallbackHandler([callback], None, None, None, None)
    control = TrainerControl()
    found = []

    def send(event):
        before = len(calls)
        handler.call_event(event, None, state, control)
        found.extend([(event, state.global_step)] * (len(calls) - before))

    send("on_train_begin")
    for _ in range(num_epochs):
        for _ in range(steps_per_epoch):
            state.global_step += 1
            send("on_step_end")
        send("on_epoch_end")
    return found


@pytest.mark.parametrize(
    ("intervals", "epoch", "expected"),
    [
        ({"step_interval": 3}, 0, [("step", 3), ("step", 6), ("step", 9), ("step", 12)]),
        ({"step_interval": 0, "epoch_interval": 2}, 0, [("epoch", 8)]),
        ({"step_interval": 0, "epoch_interval": 2}, 1.0, [("epoch", 4), ("epoch", 12)]),
        ({"step_interval": 8, "epoch_interval": 1}, 0, [("epoch", 4), ("step", 8), ("epoch", 12)]),
        ({}, 0, []),
        ({"step_interval": -1, "epoch_interval": -1}, 0, []),
    ],
    ids=str,
)
def test_when(intervals, epoch, expected):
    """Intervals count from the start of training, and no step is evaluated twice."""
    calls = []
    callback = EvalCallback(lambda: calls.append(1), **intervals)
    found = evaluated(callback, calls, epoch=epoch)

    assert found == [(f"on_{what}_end", step) for what, step in expected]


def test_the_line(caplog):
    """Only the main process logs the result and the time."""
    clock, calls = Clock(), []

    def evaluate():
        clock.now += 1.25
        calls.append(1)
        return {"accuracy": 0.5}

    for main in (True, False):
        callback = EvalCallback(evaluate, 3, clock=clock)
        evaluated(callback, calls, num_epochs=1, main=main)

    assert len(calls) == 2
    assert [r.getMessage() for r in caplog.records if r.name.endswith("eval_callback")] == [
        "Eval result: {'accuracy': 0.5}, eval time is 1.250000 s."
    ]


def test_an_evaluation_is_not_loading_of_data(monkeypatch):
    """The time of an evaluation is left out of the sections of the next step."""
    clock, calls = Clock(), []
    monkeypatch.setattr(section_clock, "_now", lambda: int(1e9 * clock.now))
    section_clock.start_for(clock)

    def evaluate():
        clock.now += 5
        calls.append(1)

    evaluated(EvalCallback(evaluate, 4), calls, num_epochs=1)
    clock.now += 1
    sections = section_clock.end_step(torch.device("cpu"))
    section_clock.stop_for(clock)

    assert calls == [1]
    assert sections.seconds() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "`eval_func` must be callable, got 3 of type int"),
        ((print, 1.5), "`step_interval` must be an int, got 1.5"),
        ((print, 1, True), "`epoch_interval` must be an int, got True"),
    ],
)
def test_bad_arguments(arguments, message):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(TypeError, match=re.escape(message)):
        EvalCallback(*arguments)
