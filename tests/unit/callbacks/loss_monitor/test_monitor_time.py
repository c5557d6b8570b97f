"""Which steps the loss monitor prints, and which times it shows."""

import logging

import pytest

from support.monitored_loop import Loop, output, shown


@pytest.mark.parametrize("start", [0, 99])
def test_steps_between_records(start, caplog):
    """With `per_print_times=3`, a record has its step's loss and the mean time of three steps."""
    loop = Loop(per_print_times=3, max_steps=200, epochs=1)
    loop.state.global_step = start
    loop.send("on_train_begin")
    for number in range(1, 8):
        loop.step(output(float(number)), seconds=number / 4)
    loop.send("on_train_end")

    assert shown(caplog, r"step:\[ *(\d+)") == [str(start + 3), str(start + 6)]
    assert shown(caplog, r"loss:\[(.*?)\]") == ["3.000/2.000", "6.000/3.500"]
    assert shown(caplog, r"per_step_time: (\d+)ms") == ["500", "1250"]


def test_a_run_that_resumes_between_two_records(caplog):
    """It goes on with the steps of an uninterrupted run; the first time is that of two steps."""
    loop = Loop(per_print_times=3, max_steps=200, epochs=1)
    loop.state.global_step = 100
    loop.send("on_train_begin")
    for number in range(1, 6):
        loop.step(output(float(number)), seconds=number / 4)
    loop.send("on_train_end")

    assert shown(caplog, r"step:\[ *(\d+)") == ["102", "105"]
    assert shown(caplog, r"per_step_time: (\d+)ms") == ["375", "1000"]


def test_a_count_that_goes_back(caplog):
    """If a loop sets its step count back to 0, its next step is printed."""
    loop = Loop(per_print_times=3)
    loop.send("on_train_begin")
    for _ in range(3):
        loop.step(output())
    loop.state.global_step = 0
    loop.step(output())
    loop.send("on_train_end")

    assert shown(caplog, r"step:\[ *(\d+)") == ["3", "1"]


@pytest.mark.parametrize("event", ["on_evaluate", "on_save", "on_log", "on_step_begin"])
def test_time_between_steps_does_not_count(event, caplog):
    """Evaluation, checkpoints, logging and data loading do not add to the step time."""
    loop = Loop()
    loop.send("on_train_begin")
    loop.clock.now += 500
    loop.step(output(), seconds=0.25)
    loop.clock.now += 500
    loop.send(event)
    # No further `on_step_begin` is sent, so the step's time starts at `event`.
    loop.clock.now += 0.5
    loop.state.global_step += 1
    loop.send("on_step_end", step_output=output())
    loop.send("on_train_end")

    assert shown(caplog, r"per_step_time: (\d+)ms") == ["250", "500"]


def test_time_left(caplog):
    """The time left is extrapolated from the steps of this run except the first."""
    loop = Loop(max_steps=1000, epochs=1)
    loop.state.global_step = 900
    loop.send("on_train_begin")
    loop.step(output(), seconds=600.0)
    for _ in range(9):
        loop.step(output(), seconds=2.0)
        loop.clock.now += 3600
        loop.send("on_save")
    loop.send("on_train_end")
    left = [
        line.getMessage().split("samples/s/p  ")[1]
        for line in caplog.records
        if "samples" in line.getMessage()
    ]

    assert left[1:] == [f"0:03:{2 * steps - 180:02d} }}" for steps in range(98, 89, -1)]


def test_first_step_without_any_event_before(caplog):
    """A loop may send only `on_step_end`: its steps are printed, the first with time 0."""
    loop = Loop()
    for _ in range(2):
        loop.clock.now += 0.25
        loop.state.global_step += 1
        loop.send("on_step_end", step_output=output())
    loop.send("on_train_end")

    assert shown(caplog, r"step:\[ *(\d+)") == ["1", "2"]
    assert [int(t) for t in shown(caplog, r"per_step_time: (\d+)ms")] == [0, 250]


def test_the_wait_for_the_step_before_is_time_of_a_step(caplog):
    """The step time includes the wait for the values of the previous step."""
    loop = Loop()

    class SlowDevice(logging.Handler):
        """Let half a second pass for each record."""

        def emit(self, record):
            loop.clock.now += 0.5 if "Epoch" in record.getMessage() else 0.0

    handler = SlowDevice()
    logger = logging.getLogger("mfwrap.callbacks")
    logger.addHandler(handler)
    try:
        loop.send("on_train_begin")
        for _ in range(3):
            loop.step(output(), seconds=0.25)
        loop.send("on_train_end")
    finally:
        logger.removeHandler(handler)

    assert shown(caplog, r"per_step_time: (\d+)ms") == ["250", "750", "750"]
