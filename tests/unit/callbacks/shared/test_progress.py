"""Length of a run, positions of steps, and step times."""

import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from transformers import TrainerState, TrainingArguments

from mfwrap.callbacks.loop.arguments import loop_arguments
from mfwrap.callbacks.shared.progress import (
    RunLength,
    RunSettings,
    Samples,
    StepClock,
    global_batch_size,
    run_length,
)
from support.attached_runs import new_accelerator


def state(max_steps=0, epochs=0, **settings) -> TrainerState:
    """Return the state of a loop."""
    return TrainerState(max_steps=max_steps, num_train_epochs=epochs, **settings)


def arguments(**settings) -> TrainingArguments:
    """Return arguments of a Trainer."""
    return TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], **settings)


def size(length: RunLength) -> tuple[int, int, int]:
    """Return epochs, steps per epoch, and steps of the run."""
    return length.num_epochs, length.steps_per_epoch, length.num_steps


@pytest.mark.parametrize(
    ("loop", "batches", "accumulation", "expected"),
    [
        (state(6, 2), 3, 1, (2, 3, 6)),
        (state(6, 2), 5, 2, (2, 3, 6)),
        (state(5, 2), 3, 1, (2, 3, 5)),
        (state(4, 2), 3, 1, (2, 3, 4)),
        (state(7, sys.maxsize), None, 4, (1, 7, 7)),
        (state(1, 1), 30, 4, (1, 8, 1)),
    ],
    ids=["whole", "short last group", "1.5 epochs", "max_steps", "no length", "one step"],
)
def test_trainer(loop, batches, accumulation, expected):
    """In a Trainer, an epoch has one update for each group of accumulated batches."""
    loader = iter(()) if batches is None else range(batches)
    args = arguments(gradient_accumulation_steps=accumulation)

    assert size(run_length(RunSettings(), loop, args, loader)) == expected


@pytest.mark.parametrize(
    ("loop", "loader", "expected"),
    [
        (state(6, 2), None, (2, 3, 6)),
        (state(6), None, (1, 6, 6)),
        (state(6, 2), range(6), (2, 3, 6)),
        (state(10), range(4), (3, 4, 10)),
        (state(0, 2), range(4), (2, 4, 8)),
    ],
    ids=["state alone", "steps alone", "two batches an update", "no epochs", "no steps"],
)
def test_own_loop(loop, loader, expected):
    """Without a Trainer, the state sets the length; a loader that contradicts it is ignored."""
    assert size(run_length(RunSettings(), loop, None, loader)) == expected


@pytest.mark.parametrize(
    ("given", "loop", "expected"),
    [
        ({"origin_epochs": 2, "dataset_size": 3}, state(), (2, 3, 6)),
        ({"origin_epochs": 3, "dataset_size": 10}, state(25, 1), (3, 10, 25)),
        ({"dataset_size": 3}, state(6, 1), (2, 3, 6)),
        ({"origin_epochs": 2}, state(6), (2, 3, 6)),
    ],
    ids=["both", "an end before", "updates of an epoch", "epochs"],
)
def test_what_is_given_comes_first(given, loop, expected):
    """The monitor's settings override the lengths of the loop."""
    assert size(run_length(RunSettings(**given), loop, None, None)) == expected


def test_arguments_stand_in_for_a_bare_state():
    """Values that the state leaves at 0 are taken from the Trainer's arguments."""
    args = arguments(max_steps=12)

    assert size(run_length(RunSettings(), state(), args, None)) == (1, 12, 12)


@pytest.mark.parametrize(
    ("loop", "given"),
    [(state(), {}), (state(0, 2), {}), (state(), {"dataset_size": 3})],
    ids=["nothing", "epochs", "updates of an epoch"],
)
def test_a_length_that_is_not_known(loop, given):
    """If the length is unknown, the error says what to set."""
    with pytest.raises(ValueError, match=r"`state.max_steps` must be set .* got 0"):
        run_length(RunSettings(**given), loop, None, None)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_positions_count_through_the_epochs(epochs, steps, data):
    """Positions count through all epochs; finished and remaining steps add up to all steps."""
    length = RunLength(num_epochs=epochs, steps_per_epoch=steps, num_steps=epochs * steps)
    places = [(e, s) for e in range(1, epochs + 1) for s in range(1, steps + 1)]
    number = data.draw(st.integers(1, len(places)))
    position = length.position(number)

    assert (position.epoch, position.step_of_epoch) == places[number - 1]
    assert position.percent == pytest.approx(100 * number / len(places))
    assert position.step + position.steps_left == len(places)


def test_steps_before_this_run():
    """With initial epochs and steps, positions continue after them."""
    settings = {"dataset_size": 4, "origin_epochs": 3, "initial_epoch": 1}
    length = run_length(RunSettings(**settings), state(4, 1), None, None)
    later = run_length(RunSettings(**settings, initial_step=2), state(), None, None)
    places = [(p.epoch, p.step_of_epoch, p.step) for p in map(length.position, (1, 4))]

    assert places == [(2, 1, 5), (2, 4, 8)]
    assert length.position(1).steps_left == 7
    assert later.position(1).step == 7


def test_a_loop_that_runs_too_long():
    """After the end of the run, 0 steps are left."""
    length = RunLength(num_epochs=1, steps_per_epoch=2, num_steps=2)

    assert length.position(5).steps_left == 0


def test_global_batch_size():
    """The batch size counts all batches of an update; it is 0 if the state has no batch size."""
    assert global_batch_size(RunSettings(), state(train_batch_size=8), None) == 8
    args = arguments(gradient_accumulation_steps=4)
    assert global_batch_size(RunSettings(), state(train_batch_size=8), args) == 32
    assert global_batch_size(RunSettings(), state(), args) == 0


def test_the_batch_size_of_an_own_loop(tmp_path):
    """It is that of the loop's arguments, unless the monitor has one of its own."""
    own = loop_arguments(tmp_path, 3, None, global_batch_size=24)
    assert global_batch_size(RunSettings(), state(), own) == 24
    assert global_batch_size(RunSettings(global_batch_size=6), state(), own) == 6


def test_several_processes(monkeypatch):
    """The batch size counts the samples of all processes, those that several share only once."""
    new_accelerator()
    # torch's fake process group: four ranks, of which only this one exists.
    store = FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=4)
    try:
        assert global_batch_size(RunSettings(), state(train_batch_size=8), None) == 32
        args = arguments(accelerator_config={"split_batches": True})
        assert global_batch_size(RunSettings(), state(train_batch_size=8), args) == 8
        monkeypatch.setattr(Accelerator().state, "parallelism_config", ParallelismConfig(tp_size=2))
        assert global_batch_size(RunSettings(), state(train_batch_size=8), None) == 16
    finally:
        torch.distributed.destroy_process_group()


def clock_of(*times: float) -> StepClock:
    """Return a step clock that reads these times, one after the other."""
    return StepClock(iter(times).__next__)


def run_steps(*seconds: float) -> StepClock:
    """Return a step clock after steps of these lengths, in seconds."""
    times = [0.0]
    for step in seconds:
        times.append(times[-1] + step)
    clock = clock_of(*times)
    clock.restart()
    for _ in seconds:
        clock.end_step()
    return clock


def test_a_lap_is_the_mean_of_its_steps():
    """`end_lap` returns the mean time since the last call, and 0 without steps."""
    clock = clock_of(0.0, 1.0, 3.0, 7.0)
    clock.restart()
    clock.end_step()
    clock.end_step()
    assert clock.end_lap() == 1.5

    clock.end_step()
    assert clock.end_lap() == 4.0
    assert clock.end_lap() == 0.0


def test_time_between_steps_is_left_out():
    """The time between the end of a step and the next restart does not count."""
    clock = clock_of(0.0, 1.0, 100.0, 102.0)
    clock.restart()
    clock.end_step()
    clock.restart()
    clock.end_step()

    assert clock.end_lap() == 1.5


def test_a_step_that_began_unseen_has_no_time():
    """Without a restart the first step has no time, but the second step has a time."""
    clock = clock_of(50.0, 52.0)
    clock.end_step()
    assert (clock.end_lap(), clock.typical_seconds) == (0.0, 0.0)

    clock.end_step()
    assert clock.end_lap() == 2.0


def test_a_clock_that_is_set_back():
    """If the clock goes backwards, the step time is 0."""
    clock = clock_of(10.0, 4.0)
    clock.restart()
    clock.end_step()

    assert clock.end_lap() == 0.0


def test_the_first_step_is_left_out():
    """The first step is left out of the typical time as soon as there is another step."""
    assert run_steps(600.0).typical_seconds == 600.0
    assert run_steps(600.0, 2.0).typical_seconds == pytest.approx(2.0)
    assert run_steps(600.0, *[2.0] * 30).typical_seconds == pytest.approx(2.0)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=30))
def test_typical_time_is_an_exponential_mean(seconds):
    """The typical time is an exponential mean with decay 0.9."""
    weights = [0.9**age for age in range(len(seconds))][::-1]
    mean = sum(w * s for w, s in zip(weights, seconds, strict=True)) / sum(weights)

    assert run_steps(5.0, *seconds).typical_seconds == pytest.approx(mean, rel=1e-9)


def test_samples_of_a_batch_of_one_size():
    """Each update has as many samples as any other."""
    samples = Samples(RunSettings(), state(train_batch_size=8), None)

    assert (samples.per_update, samples.until(3), samples.mean(3), samples.mean(7, 5)) == (
        *(8, 24, 8, 8),
    )


@pytest.mark.parametrize(
    ("num_rows", "drop_last", "counts"),
    [(17, False, [0, 16, 17, 33, 34]), (17, True, [0, 16, 32]), (16, False, [0, 16, 32])],
)
def test_samples_of_a_last_batch_that_is_small(num_rows, drop_last, counts):
    """It counts the rows that it has, in each pass over the data."""
    args = arguments(gradient_accumulation_steps=2)
    loader = DataLoader(range(num_rows), batch_size=8, drop_last=drop_last)
    samples = Samples(RunSettings(), state(train_batch_size=8), args, None, loader)

    assert [samples.until(step) for step in range(len(counts))] == counts
    assert samples.mean(2, 2) == counts[2] / 2


def test_samples_of_a_batch_that_grows():
    """The function of the trainer counts; the mean is over the last updates."""
    seen = [0, 2, 4, 8, 16]
    samples = Samples(RunSettings(), state(train_batch_size=8), None, seen.__getitem__)

    assert [samples.until(step) for step in range(5)] == seen
    assert [samples.mean(step) for step in range(1, 5)] == [2, 2, 4, 8]
    assert samples.mean(4, 3) == 14 / 3
    assert samples.mean(1, 3) == 2 / 3
    assert samples.per_update == 8


def test_the_run_of_a_batch_that_grows_is_one_epoch():
    """Epochs have different numbers of updates; settings of the monitor still count."""
    loop, loader = state(10, 3), range(4)

    assert size(run_length(RunSettings(), loop, None, loader, grows=True)) == (1, 10, 10)
    explicit = RunSettings(origin_epochs=2, dataset_size=5)
    assert size(run_length(explicit, loop, None, loader, grows=True)) == (2, 5, 10)


def test_the_last_step_of_a_part_of_an_epoch_is_all():
    """No rounding leaves the last block of a bar open."""
    for num_steps in range(1, 200):
        for steps_per_epoch in (1, 7, 54, 150):
            epochs = -(-num_steps // steps_per_epoch)
            length = RunLength(
                num_epochs=epochs, steps_per_epoch=steps_per_epoch, num_steps=num_steps
            )
            if epochs * steps_per_epoch != num_steps:
                assert length.position(num_steps).percent == 100.0
