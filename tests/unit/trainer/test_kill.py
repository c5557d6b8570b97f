"""A training that was ended by SIGTERM or Ctrl-C resumes like an uninterrupted one."""

import dataclasses
import functools
import os
import signal

import numpy as np
import pytest
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from mfwrap.checkpoints.manifest import MANIFEST
from mfwrap.records import read_json_lines
from support.killed_training import PLACES, Moment, new_recorder, start_process, write_task
from support.programs import Program
from support.resumed_training import (
    NUM_STEPS,
    STEPS_AN_EPOCH,
    RunSettings,
    end_of,
    new_trainer,
    trained,
)
from support.signals import told_until_it_ends
from support.training_state import assert_same_state

SETTINGS = RunSettings(save_steps=2, logging_steps=5)
RANDOM_LINES = np.random.default_rng(0).integers(1, 3 * NUM_STEPS - 3, 4).tolist()
TRAINS = """
import sys
from pathlib import Path
from support.killed_training import train_in
train_in(Path(sys.argv[1]))
"""
AGAIN = 'continue with: trainer.train(resume_from_checkpoint="auto")'


def random_moments(seed):
    """Return a moment at each place, in random updates."""
    draw = np.random.default_rng(seed)
    moments = []
    for place, visits in PLACES.items():
        # A save follows each second update, but a run that has ended cannot stop in its last one.
        update = int(draw.choice(range(2, NUM_STEPS, 2) if place == "save" else NUM_STEPS))
        is_short = (update + 1) % STEPS_AN_EPOCH == 0
        moments.append(Moment(place, update, 0 if is_short else int(draw.integers(visits))))
    return moments


def lasting(end):
    """Return a final state without random states, which a finished run does not load."""
    return {name: value for name, value in end.items() if "generator" not in name}


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    """Return the final state of an uninterrupted run."""
    return lasting(end_of(trained(tmp_path_factory.mktemp("alone"), SETTINGS)))


def signalled(folder, line, number, settings=SETTINGS, send=os.kill):
    """Train in another process, and send it a signal after it has printed `line` lines.

    Returns:
        Exit status of the process, and all lines that it printed.
    """
    with start_process(folder, settings) as process:
        told = [process.stdout.readline() for _ in range(line)]
        send(process.pid, number)
        told += process.stdout.readlines()
        return process.wait(), [each.strip() for each in told if each]


def end_from_last_checkpoint(folder):
    """Resume from the last checkpoint, if any, in this process; return the final state."""
    last = get_last_checkpoint(str(folder))
    trainer = new_trainer(folder, SETTINGS, seed=0 if last is None else 1)
    trainer.train(resume_from_checkpoint=last)
    return lasting(end_of(trainer))


def test_told_to_end(left_alone, tmp_path):
    """At SIGTERM the step is finished and saved, and the process exits with status 75."""
    write_task(tmp_path, SETTINGS)
    with Program(TRAINS, tmp_path) as program:
        told = [program.stdout.readline() for _ in range(2)]
        os.kill(program.pid, signal.SIGTERM)
        told = [line.strip() for line in told + program.stdout.readlines()]
        status = program.wait()

    assert status == 75
    assert told[-1].startswith("saved ")
    step = int(told[-1].split()[1])
    assert 0 < step < NUM_STEPS
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / f"checkpoint-{step}")
    assert not (tmp_path / "end.pt").exists()
    assert_same_state(left_alone, end_from_last_checkpoint(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_with_data_workers(tmp_path, number):
    """The step is finished and saved even if the data workers get the signal, too."""
    settings = dataclasses.replace(SETTINGS, workers=1)
    status, told = signalled(tmp_path, 2, number, settings, os.killpg)

    assert status == (75 if number == signal.SIGTERM else -signal.SIGINT)
    assert told[-1].startswith("saved ")


@pytest.mark.slow
@pytest.mark.parametrize("line", RANDOM_LINES)
def test_interrupted_at_a_random_moment(left_alone, tmp_path, line):
    """Ctrl-C at any moment finishes the step and saves it; the resumed weights are bitwise same."""
    status, told = signalled(tmp_path, line, signal.SIGINT)

    assert status == -signal.SIGINT  # as Python ends after a KeyboardInterrupt
    assert told[-1].startswith("saved ")
    last = get_last_checkpoint(str(tmp_path))
    assert last == str(tmp_path / f"checkpoint-{told[-1].split()[1]}")
    assert_same_state(left_alone, end_from_last_checkpoint(tmp_path))


@pytest.fixture(scope="module")
def recorded_alone(tmp_path_factory):
    """Return the final state and the records of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("recorded")
    end = lasting(end_of(trained(folder, SETTINGS, callbacks=[new_recorder(folder)])))
    return end, (folder / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, moment) for moment in random_moments(1)]
    + [(signal.SIGTERM, moment) for moment in random_moments(2)],
    ids=str,
)
def test_told_to_end_at_a_random_moment_of_a_step(recorded_alone, tmp_path, number, moment):
    """At any moment, the step is saved, one line says how to go on, and going on is bitwise."""
    errors = tmp_path / "errors"
    with (
        errors.open("w") as stderr,
        start_process(tmp_path / "run", SETTINGS, moment=moment, stderr=stderr) as process,
    ):
        while process.stdout.readline() != "moment\n":
            assert process.poll() is None
        process.send_signal(number)
        process.communicate("\n")

    # A shell reports a process that ends like Python after a KeyboardInterrupt as 130.
    assert process.returncode == (75 if number == signal.SIGTERM else -signal.SIGINT)
    # A save belongs to the update that has just been finished.
    step = moment.num_updates + (moment.place != "save")
    newest = tmp_path / "run" / f"checkpoint-{step}"
    assert get_last_checkpoint(str(tmp_path / "run")) == str(newest)
    who = "Ctrl-C" if number == signal.SIGINT else "a signal"
    says = f"mfwrap: stopped by {who} after step {step}, checkpoint {newest}; {AGAIN}"
    said = errors.read_text().splitlines()
    assert [line for line in said if "mfwrap: " in line] == [says]
    assert said[-1] == says  # no traceback after it

    recorder = new_recorder(tmp_path / "run")
    trainer = new_trainer(tmp_path / "run", SETTINGS, seed=1, callbacks=[recorder])
    trainer.train(resume_from_checkpoint=True)
    end, records = recorded_alone
    assert_same_state(end, lasting(end_of(trainer)))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == records
    steps = [one["step"] for one in read_json_lines(tmp_path / "run" / "metrics.jsonl")[1:]]
    assert steps == list(range(1, NUM_STEPS + 1))


@pytest.mark.slow
def test_interrupted_twice(tmp_path):
    """The second Ctrl-C interrupts in the middle of the step."""
    with start_process(tmp_path, SETTINGS, waits=True) as process:
        assert process.stdout.readline() == "micro-batch 0\n"
        process.send_signal(signal.SIGINT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "micro-batch 0\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == -signal.SIGINT

    assert get_last_checkpoint(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("number", "kind", "who"),
    [(signal.SIGTERM, SystemExit, "a signal"), (signal.SIGINT, KeyboardInterrupt, "Ctrl-C")],
)
def test_one_line_says_how_to_continue(tmp_path, capsys, number, kind, who):
    """A stopped training says which checkpoint it has, and the call that continues it."""
    before = signal.getsignal(number)
    with pytest.raises(kind):
        trained(tmp_path, SETTINGS, callbacks=[ToldToEnd("on_substep_end", 3, number)])

    assert signal.getsignal(number) is before
    lines = [line for line in capsys.readouterr().err.splitlines() if "mfwrap: " in line]
    checkpoint = tmp_path / "checkpoint-4"
    assert lines == [f"mfwrap: stopped by {who} after step 4, checkpoint {checkpoint}; {AGAIN}"]


@pytest.mark.slow
def test_told_to_end_twice(tmp_path):
    """A SIGTERM that is repeated after 5 seconds ends the process in the middle of the step."""
    with start_process(tmp_path, SETTINGS, waits=True) as process:
        first = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        # Until now the process has waited within its step for a line on stdin. Send the line, so
        # that the step continues.
        process.stdin.write("\n")
        process.stdin.flush()
        second = process.stdout.readline()
        status = told_until_it_ends(process)

    assert (first, second) == ("micro-batch 0\n", "micro-batch 0\n")
    assert status == -signal.SIGTERM
    assert get_last_checkpoint(str(tmp_path)) is None


class ToldToEnd(TrainerCallback):
    """Send this process a signal once, at an event.

    Args:
        event: Name of the event.
        step: Number of updates before the signal.
        number: The signal.
    """

    def __init__(self, event, step, number=signal.SIGTERM) -> None:
        self.step, self.number = step, number
        setattr(self, event, self._send)

    def _send(self, _args, state, control, **_):
        if state.global_step == self.step:
            self.step = None
            os.kill(os.getpid(), self.number)
        return control


class Happened(TrainerCallback):
    """Record evaluations and checkpoints."""

    def __init__(self) -> None:
        self.events = []

    def on_evaluate(self, _args, state, _control, **_) -> None:
        """Record an evaluation."""
        self.events.append(f"evaluated {state.global_step}")

    def on_save(self, _args, state, _control, **_) -> None:
        """Record a checkpoint."""
        self.events.append(f"saved {state.global_step}")


EVALUATIONS = {
    "never": {"save_strategy": "no"},
    "every third step": {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 6},
    "each epoch": {"eval_strategy": "epoch", "save_strategy": "epoch"},
}
# Evaluation strategy, event and step of the signal, and the step after which the run stops.
MOMENTS = [
    ("never", "on_substep_end", 0, 1),
    ("never", "on_pre_optimizer_step", 3, 4),
    ("never", "on_substep_end", 5, 6),
    ("never", "on_epoch_begin", 6, 7),
    ("every third step", "on_substep_end", 3, 4),
    ("every third step", "on_prediction_step", 3, 4),
    ("each epoch", "on_substep_end", 3, 4),
]
# The same, where the stop is after an evaluation of that step.
EVALUATION_IS_DUE = [
    ("every third step", "on_save", 6, 6),
    ("each epoch", "on_prediction_step", 6, 6),
    ("every third step", "on_substep_end", 2, 3),
    ("each epoch", "on_substep_end", 5, 6),
]


@pytest.fixture(scope="module")
def evaluated_alone(tmp_path_factory):
    """Return a function that takes an evaluation strategy and returns the final state of a run."""

    @functools.cache
    def run(when):
        return end_of(trained(tmp_path_factory.mktemp("alone"), SETTINGS, **EVALUATIONS[when]))

    return run


def tell_to_end(folder, when, event, step):
    """Train until the SIGTERM takes effect; return the evaluations and saved checkpoints."""
    happened, handler = Happened(), signal.getsignal(signal.SIGTERM)
    callbacks = [ToldToEnd(event, step), happened]
    with pytest.raises(SystemExit) as caught:
        trained(folder, SETTINGS, callbacks=callbacks, **EVALUATIONS[when])
    assert caught.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is handler
    return happened.events


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize(("when", "event", "step", "stopped"), MOMENTS + EVALUATION_IS_DUE)
def test_how_it_ends(tmp_path, when, event, step, stopped):
    """After a SIGTERM, a run finishes its step and saves once, without an extra evaluation."""
    events = tell_to_end(tmp_path, when, event, step)

    assert events[-1] == f"saved {stopped}"
    assert events.count(f"saved {stopped}") == 1
    is_due = (when, event, step, stopped) in EVALUATION_IS_DUE
    assert events.count(f"evaluated {stopped}") == is_due


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize(("when", "event", "step", "stopped"), MOMENTS + EVALUATION_IS_DUE)
def test_how_it_goes_on(evaluated_alone, tmp_path, when, event, step, stopped):
    """A run resumed after a SIGTERM at any moment ends like an uninterrupted run."""
    tell_to_end(tmp_path, when, event, step)

    again = new_trainer(tmp_path, SETTINGS, seed=1, **EVALUATIONS[when])
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stopped}"))

    assert_same_state(evaluated_alone(when), end_of(again))


@pytest.mark.slow
def test_told_to_end_with_the_best_checkpoint_kept(tmp_path):
    """The checkpoint after a SIGTERM is kept in addition to the best one, despite a limit of 1."""
    best_is_first = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    alone = end_of(trained(tmp_path / "alone", SETTINGS, **best_is_first))
    told = ToldToEnd("on_substep_end", 4)
    with pytest.raises(SystemExit):
        trained(tmp_path / "told", SETTINGS, callbacks=[told], **best_is_first)
    names = sorted(path.name for path in (tmp_path / "told").iterdir())

    again = new_trainer(tmp_path / "told", SETTINGS, seed=1, **best_is_first)
    again.train(resume_from_checkpoint=True)

    assert names == ["checkpoint-2", "checkpoint-5"]
    assert_same_state(alone, end_of(again))
    assert [path.name for path in (tmp_path / "told").iterdir()] == ["checkpoint-2"]


def test_told_to_end_when_it_has(left_alone, tmp_path):
    """A SIGTERM after the last step lets the run end as usual, with exit status 75."""
    told = ToldToEnd("on_train_end", NUM_STEPS)

    with pytest.raises(SystemExit) as caught:
        trained(tmp_path, SETTINGS, callbacks=[told])

    assert caught.value.code == 75
    assert_same_state(left_alone, end_from_last_checkpoint(tmp_path))


def test_told_to_end_when_it_has_the_best_weights(tmp_path):
    """A SIGTERM after the best weights are loaded does not save them as those of the last step."""
    first_is_best = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "best",
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "load_best_model_at_end": True,
    }
    told = ToldToEnd("on_train_end", NUM_STEPS)

    with pytest.raises(SystemExit) as caught:
        trained(tmp_path, SETTINGS, callbacks=[told], **first_is_best)

    assert caught.value.code == 75
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_not_told_to_end(tmp_path):
    """The signal of one training does not end a later training of the same process."""
    with pytest.raises(SystemExit):
        trained(tmp_path / "first", SETTINGS, callbacks=[ToldToEnd("on_substep_end", 0)])
    trainer = trained(tmp_path / "second", SETTINGS)

    assert trainer.state.global_step == NUM_STEPS


def test_one_call_that_comes_back(left_alone, tmp_path):
    """With ``"auto"`` one call starts a training, resumes it, and leaves a finished one alone."""
    trainer = new_trainer(tmp_path, SETTINGS, callbacks=[ToldToEnd("on_substep_end", 3)])
    with pytest.raises(SystemExit):
        trainer.train(resume_from_checkpoint="auto")
    (tmp_path / "checkpoint-8").mkdir()
    for name in ("model.safetensors", MANIFEST):
        (tmp_path / "checkpoint-8" / name).touch()
    trainer = new_trainer(tmp_path, SETTINGS, seed=1)
    with pytest.warns(UserWarning, match=r"checkpoint-8: .*; resuming from .*checkpoint-4$"):
        trainer.train(resume_from_checkpoint="auto")
    again = new_trainer(tmp_path, SETTINGS, seed=1)
    again.train(resume_from_checkpoint="auto")

    assert_same_state(left_alone, lasting(end_of(trainer)))
    assert_same_state(left_alone, lasting(end_of(again)))
