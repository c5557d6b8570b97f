"""The two lines of a record, compared with MindFormers' format strings byte for byte."""

import dataclasses
import re
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.callbacks.loss_monitor.record import StepRecord, record_lines
from mfwrap.callbacks.shared.progress import UNKNOWN_LENGTH, RunLength
from mfwrap.callbacks.shared.step_values import StepValues

FLOAT32 = st.floats(width=32)
POSITIVE = st.floats(min_value=2.0**-30, max_value=2.0**30, width=32)


def record(*, step=1, epochs=1, steps_per_epoch=1, num_steps=None, **settings) -> StepRecord:
    """Return a record with these values and a loss of 1; all other values are unknown."""
    length = RunLength(
        num_epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps or epochs * steps_per_epoch,
    )
    names = ("loss", "overflow", "loss_scale", "learning_rate", "global_norm")
    values = {"loss": 1.0} | {name: settings.pop(name) for name in names if name in settings}
    defaults = {
        "mean_loss": 1.0,
        "seconds": 1.0,
        "seconds_left": 0.0,
        "global_batch_size": 0,
        "num_samples": 0,
        "num_processes": 1,
        "tflops": None,
        "peak_tflops": None,
    }
    return StepRecord(
        position=length.position(step), values=StepValues(**values), **(defaults | settings)
    )


def mindformers_lines(
    *, epoch, epochs, step, steps, loss, mean, seconds, lr, overflow, scale, norm, rate, left, batch
) -> tuple[str, str]:
    """Format the numbers with MindFormers' own format strings."""
    origin_steps = (epoch - 1) * steps + step
    percent = origin_steps / epochs / steps * 100
    throughput = batch / 1 / seconds
    lr_part = "" if lr is None else "lr: %s, " % np.float32(lr)  # noqa: UP031  (MindFormers' format)
    rate_part = "" if rate is None else ", train_throughput_per_npu: %.3fT" % rate  # noqa: UP031  (MindFormers' format)
    first = (
        "{ Epoch:[%3d/%3d], step:[%5d/%5d], loss:[%5.3f/%5.3f], per_step_time: %dms, %s"  # noqa: UP031  (MindFormers' format)
        "overflow cond: %s, loss_scale: %s, global_norm: %s%s"
        % (
            *(epoch, epochs, step, steps, loss, mean, seconds * 1000, lr_part, overflow),
            *(np.float32(scale), None if norm is None else np.array([norm], np.float32)),
            rate_part,
        )
    )
    second = "  %4.1f%% |%-50s| %.5f samples/s/p  %s }" % (  # noqa: UP031  (MindFormers' format)
        percent,
        "█" * int(50 * percent / 100),
        throughput,
        timedelta(seconds=int(left)),
    )
    return first, second


def test_a_run_that_goes_on_longer():
    """The bar ends at 100 %."""
    length = RunLength(num_epochs=1, steps_per_epoch=9, num_steps=9)
    assert [length.position(step).percent for step in (9, 10)] == [100.0, 100.0]


NUMBERS = st.fixed_dictionaries(
    {
        "epochs": st.integers(1, 2000),
        "steps": st.integers(1, 200_000),
        "loss": FLOAT32,
        "mean": FLOAT32,
        "seconds": POSITIVE,
        "lr": st.none() | FLOAT32,
        "overflow": st.booleans(),
        "scale": FLOAT32,
        "norm": st.none() | FLOAT32,
        "rate": st.none() | POSITIVE,
        "left": st.floats(0, 1e9),
        "batch": st.integers(1, 10_000),
    }
)


@given(NUMBERS, st.data())
def test_lines_are_those_of_mindformers_format_strings(numbers, data):
    """For any numbers, both lines equal those of MindFormers' format strings."""
    epoch = data.draw(st.integers(1, numbers["epochs"]))
    step = data.draw(st.integers(1, numbers["steps"]))
    ours = record_lines(
        record(
            step=(epoch - 1) * numbers["steps"] + step,
            epochs=numbers["epochs"],
            steps_per_epoch=numbers["steps"],
            loss=numbers["loss"],
            mean_loss=numbers["mean"],
            seconds=numbers["seconds"],
            learning_rate=numbers["lr"],
            overflow=numbers["overflow"],
            loss_scale=numbers["scale"],
            global_norm=numbers["norm"],
            tflops=numbers["rate"],
            seconds_left=numbers["left"],
            global_batch_size=numbers["batch"],
        )
    )

    assert ours == mindformers_lines(epoch=epoch, step=step, **numbers)


@given(step=st.integers(1, 900), loss=POSITIVE, norm=st.floats(0.0625, 1024, width=32))
def test_parsers_read_the_line(step, loss, norm):
    """Regular expressions of existing scripts find epoch, step, loss and norm."""
    line, _ = record_lines(
        record(step=step, epochs=3, steps_per_epoch=300, loss=loss, global_norm=norm)
    )
    found = [
        float(re.search(pattern, line).group(1))
        for pattern in (
            r"Epoch:\[\s*(\d+)",
            r"step:\[\s*(\d+)",
            r"loss:\[\s*([\d.]+)/",
            r"global_norm: \[?([\d.]+)",
        )
    ]

    assert found[:2] == [(step - 1) // 300 + 1, (step - 1) % 300 + 1]
    assert found[2] == pytest.approx(loss, abs=6e-4)
    assert found[3] == pytest.approx(norm, rel=1e-6, abs=1e-7)


def test_named_losses():
    """Losses beside the loss have MindFormers' place and six decimals."""
    given = record(loss=2.5)
    values = dataclasses.replace(given.values, losses={"lm_loss": 2.25, "mtp_loss": 0.25})
    first, _ = record_lines(dataclasses.replace(given, values=values))

    assert "loss:[2.500/1.000], lm_loss: 2.250000, mtp_loss: 0.250000, per_step_time" in first


def test_unknown_values():
    """An unknown learning rate is left out; other values are shown as unavailable or None."""
    first, second = record_lines(record())

    assert first.endswith(
        "per_step_time: 1000ms, overflow cond: unavailable, loss_scale: unavailable, "
        "global_norm: None"
    )
    assert " 0.00000 samples/s/p " in second


@pytest.mark.parametrize(
    ("epochs", "steps_per_epoch", "place"),
    [
        (1, UNKNOWN_LENGTH, "Epoch:[  1/  ?], step:[    9/    ?]"),
        (10**9, 4, "Epoch:[  3/  ?], step:[    1/    4]"),
    ],
)
def test_a_run_of_unknown_length(epochs, steps_per_epoch, place):
    """If the number of steps is unknown, there is neither a share of the run nor a time left."""
    first, second = record_lines(
        record(
            step=9,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            num_steps=UNKNOWN_LENGTH,
            global_batch_size=8,
        )
    )

    assert place in first
    assert second == "  8.00000 samples/s/p }"


def test_a_time_that_is_not_known():
    """Without a step time the throughput is 0."""
    first, second = record_lines(record(seconds=0.0, global_batch_size=4))

    assert "per_step_time: 0ms" in first
    assert " 0.00000 samples/s/p " in second


def test_utilisation():
    """If the peak rate is known, the line shows the mfu after the throughput."""
    first, _ = record_lines(record(tflops=156.0, peak_tflops=312.0))

    assert first.endswith("global_norm: None, train_throughput_per_npu: 156.000T, mfu: 50.0%")


def test_a_run_that_ends_within_an_epoch():
    """A run that ends within an epoch still ends at 100 %."""
    half, _ = (record(step=s, epochs=2, steps_per_epoch=4, num_steps=6) for s in (3, 6))
    last = record(step=6, epochs=2, steps_per_epoch=4, num_steps=6)

    assert record_lines(half)[1].startswith("  50.0% |" + "█" * 25 + " " * 25 + "|")
    assert record_lines(last)[1].startswith("  100.0% |" + "█" * 50 + "|")


def test_throughput_is_that_of_one_process():
    """Samples per second are divided by the number of processes."""
    _, second = record_lines(record(seconds=0.5, global_batch_size=32, num_processes=4))

    assert " 16.00000 samples/s/p " in second


def test_a_time_left_too_long_to_print():
    """A time left beyond the largest timedelta is shown as the largest one."""
    _, second = record_lines(record(seconds_left=1e300))

    assert second.endswith("samples/s/p  999999999 days, 23:59:59 }")


def test_a_norm_beyond_float32():
    """A logged norm too large for float32 is shown as inf, without a warning."""
    first, _ = record_lines(record(global_norm=1e300))

    assert first.endswith("global_norm: [inf]")


@given(norm=FLOAT32 | st.floats(1e-5, 1e7) | st.sampled_from([1e-4, 1e6, 999999.94, 9.9999997e-05]))
def test_a_norm_is_printed_as_an_array_of_numpy(norm):
    """The norm is what NumPy prints for an array of one element, as in MindFormers."""
    first, _ = record_lines(record(global_norm=norm))

    assert first.endswith(f"global_norm: {np.array([norm], dtype=np.float32)}")


def test_the_memory_of_a_device_ends_the_first_line():
    """A CPU has none, so its lines are MindFormers'."""
    first, *_ = record_lines(record(max_memory=3 * 2**29))

    assert first.endswith(", max_memory: 1.50 GiB")
    assert "max_memory" not in record_lines(record())[0]
