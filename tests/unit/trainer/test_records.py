"""The records of a run belong to its checkpoints: after an error, after a kill, on resuming."""

import functools
import random

import pytest
from transformers import TrainerCallback

from mfwrap.callbacks import CheckpointMonitor, MetricsRecorder
from mfwrap.records import read_json_lines
from mfwrap.trainer import MFTrainer
from support import resumed_training
from support.recorded_training import LOOPS, records_in, run
from support.resumed_training import end_of
from support.trainer_runs import new_trainer, train
from support.training_state import assert_same_state


def test_a_second_training_in_the_same_folder(tmp_path):
    """A training from the start keeps the records of the first one under another name."""
    monitors = [MetricsRecorder(tmp_path), CheckpointMonitor(2)]
    for number in range(2):
        trainer = new_trainer(MFTrainer, tmp_path, callbacks=monitors)
        if number:
            with pytest.warns(UserWarning, match="has records of an earlier run"):
                train(trainer)
        else:
            train(trainer)

    for name in ("metrics.jsonl", "checkpoint_health.jsonl"):
        first, second = (read_json_lines(tmp_path / each) for each in (f"{name}.1", name))
        assert [each.get("step") for each in first] == [each.get("step") for each in second]


class Interrupted(TrainerCallback):
    """Raise `InterruptedError` at an event of a step.

    Args:
        event: Name of the event.
        step: Number of updates before the error.
    """

    def __init__(self, event: str, step: int) -> None:
        self._step = step
        setattr(self, event, self._stop)

    def _stop(self, _args, state, _control, **_):
        if state.global_step == self._step:
            raise InterruptedError


ENDS_OF_EPOCHS = {
    "save_steps": {"save_steps": 3},
    "CheckpointMonitor": {"save_strategy": "no"},
    "log of the epoch": {"save_steps": 3, "logging_strategy": "epoch"},
    "end in the middle of an epoch": {"save_steps": 3, "max_steps": 9},
}


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize(
    ("settings", "event", "step"),
    [
        ("save_steps", "on_save", 6),
        ("save_steps", "on_prediction_step", 6),
        ("save_steps", "on_save", 12),
        ("CheckpointMonitor", "on_save", 6),
        ("log of the epoch", "on_save", 6),
        ("end in the middle of an epoch", "on_save", 9),
        ("end in the middle of an epoch", "on_evaluate", 9),
    ],
)
def test_interrupted_at_the_end_of_an_epoch(settings, event, step, tmp_path):
    """A run interrupted around the evaluation of an epoch records this evaluation exactly once."""
    arguments = {"eval_strategy": "epoch", **ENDS_OF_EPOCHS[settings]}

    def trainer(name, *callbacks):
        monitors = [MetricsRecorder(tmp_path / name), *callbacks]
        if settings == "CheckpointMonitor":
            monitors.insert(0, CheckpointMonitor(save_checkpoint_steps=3))
        folder = tmp_path / name
        return resumed_training.new_trainer(folder, callbacks=monitors, **arguments)

    alone = trainer("alone")
    alone.train()
    with pytest.raises(InterruptedError):
        trainer("run", Interrupted(event, step)).train()
    again = trainer("run")
    again.train(resume_from_checkpoint=True)

    expected, found = (records_in(tmp_path / name)["metrics.jsonl"] for name in ("alone", "run"))
    assert found == expected
    ends = [
        {name: value for name, value in end_of(each).items() if "generator" not in name}
        for each in (alone, again)
    ]
    assert_same_state(*ends)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return a function that trains without a kill, and returns operations and records."""

    @functools.cache
    def train_unbroken(loop):
        folder = tmp_path_factory.mktemp("unbroken") / "run"
        return run(loop, folder), records_in(folder)

    return train_unbroken


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loop", LOOPS)
def test_kills_before_file_operations(loop, seed, unbroken, tmp_path):
    """A run that is killed before file operations and resumed has the records of an unbroken run.

    The run is killed twice: once on its way from the start, and once more after the resume.
    """
    num_operations, expected = unbroken(loop)
    draw = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    run(loop, tmp_path / "run", kill_at=draw.randint(1, num_operations))
    run(loop, tmp_path / "run", kill_at=draw.randint(1, num_operations))
    run(loop, tmp_path / "run")

    assert records_in(tmp_path / "run") == expected
