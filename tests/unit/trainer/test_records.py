"""The records of a run belong to its checkpoints: after an error, after a kill, on resuming."""

import functools
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from mfwrap import MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import (
    CheckpointMonitor,
    LocalNormMonitor,
    MetricsRecorder,
    ReplicaCheck,
    TrainingStateMonitor,
)
from mfwrap.callbacks.metrics_recorder import ThroughputRecorder
from mfwrap.checkpoints.verification import newest_whole_checkpoint
from mfwrap.records import read_json_lines, resume_records, save_records
from mfwrap.trainer import MFTrainer
from support import resumed_training
from support.attached_runs import new_accelerator
from support.programs import FORKING
from support.resumed_training import end_of
from support.small_networks import Classifier, labelled_batches
from support.trainer_runs import new_trainer, train
from support.training_state import assert_same_state

NUM_STEPS, SAVED, LOGGED = 9, 4, 3
"""Steps of a training, steps between checkpoints, and steps between logs."""

OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}
"""Audit events of Python that a kill can precede."""


def run(loop: str, folder: Path, *, kill_at: int | None = None) -> int:
    """Train in another process; resume from the newest checkpoint of the folder, if there is one.

    Args:
        loop: Name in `LOOPS`.
        folder: Run folder.
        kill_at: Number of the file operation in `folder` before which the process is killed.

    Returns:
        Number of file operations; -1 if the process was killed.
    """
    ours, theirs = FORKING.Pipe()
    process = FORKING.Process(target=_train, args=(theirs, loop, str(folder), kill_at))
    process.start()
    theirs.close()
    try:
        answer: int = ours.recv()
    except EOFError:
        answer = -1
    process.join()
    assert process.exitcode == (0 if answer >= 0 else -signal.SIGKILL)
    return answer


_TIMES = {"throughput", "seconds"}


def records_in(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of each file, without numbers that depend on time."""
    return {
        path.name: [
            {name: value for name, value in json.loads(line).items() if name not in _TIMES}
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        for path in sorted(folder.glob("*.jsonl"))
    }


def _train(connection: Any, loop: str, folder: str, kill_at: int | None) -> None:
    torch.set_num_threads(1)
    operations = itertools.count(1)
    number = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal number
        if event not in OPERATIONS or not str(arguments[0]).startswith(folder):
            return
        if event == "open" and str(arguments[1]).startswith("r"):
            return
        number = next(operations)
        if number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    Path(folder).mkdir(exist_ok=True)
    sys.addaudithook(audit)
    LOOPS[loop](Path(folder))
    connection.send(number)


def _monitors(folder: Path) -> list[Any]:
    return [
        TrainingStateMonitor(
            local_norm_format="jsonl",
            weight_state_format="jsonl",
            folder=folder,
            origin_epochs=1,
            dataset_size=NUM_STEPS,
        ),
        MetricsRecorder(folder),
        LocalNormMonitor(2, folder=folder),
        ReplicaCheck(folder=folder),
    ]


class _LossInMapping(Classifier):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(inputs, labels)}


def _batches(*, spoilt: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Return a batch per step; if `spoilt`, step 4, which is saved, and step 6 have a NaN."""
    batches = labelled_batches(NUM_STEPS, size=2)
    for step in (4, 6) if spoilt else ():
        batches[step - 1][0][0] = float("nan")
    return batches


def _trainer(kind: type[Trainer], folder: Path) -> None:
    new_accelerator()
    batches = _batches(spoilt=issubclass(kind, MFTrainer))
    inputs, labels = map(torch.cat, zip(*batches, strict=True))
    rows = [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]
    torch.manual_seed(0)
    keywords = {"step": StepConfig(local_norm=True)} if issubclass(kind, MFTrainer) else {}
    trainer: Any = kind(
        _LossInMapping(),
        TrainingArguments(
            str(folder),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=2,
            train_sampling_strategy="sequential",
            logging_steps=LOGGED,
            save_steps=SAVED,
            eval_strategy="steps",
            eval_steps=SAVED,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            log_level="error",
        ),
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=[*_monitors(folder), ThroughputRecorder(folder)],
        **keywords,
    )
    trainer.remove_callback(PrinterCallback)
    newest = newest_whole_checkpoint(folder)
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))


def _own_loop(
    folder: Path,
    step_of: Callable[[Any], Any],
    save: Callable[[Path], None],
    load: Callable[[Path], None],
) -> None:
    """Train in a hand-written loop that saves a checkpoint under a temporary name."""
    state, control = TrainerState(max_steps=NUM_STEPS), TrainerControl()
    monitors = _monitors(folder)
    (judge,) = (each for each in monitors if isinstance(each, TrainingStateMonitor))
    saved = [int(path.name.removeprefix("step_")) for path in folder.glob("step_?")]
    if saved:
        state.global_step = max(saved)
        checkpoint = folder / f"step_{state.global_step}"
        load(checkpoint)
        judge.saved_run = json.loads((checkpoint / "monitor.json").read_text(encoding="utf-8"))

    def notify(event: str, **values: Any) -> None:
        for monitor in monitors:
            getattr(monitor, event)(None, state, control, **values)

    notify("on_train_begin")
    for step, batch in enumerate(_batches(), start=1):
        if step <= state.global_step:
            continue
        report = step_of(batch)
        state.global_step = step
        notify("on_step_end", step_output=report.output, step_report=report)
        if step % SAVED == 0:
            notify("on_pre_save")
            partial = folder / f"step_{step}.partial"
            save(partial)
            saved_run = judge.state()["attributes"]["saved_run"]
            (partial / "monitor.json").write_text(json.dumps(saved_run), encoding="utf-8")
            partial.rename(folder / f"step_{step}")
            notify("on_save")
    notify("on_train_end")


def _attached(folder: Path) -> None:
    torch.manual_seed(0)
    accelerator = new_accelerator()
    attached = attach(accelerator, StepConfig(local_norm=True))
    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
    network, optimizer = accelerator.prepare(network, optimizer)

    def step_of(batch: Any) -> Any:
        accelerator.backward(network(*batch))
        optimizer.step()
        optimizer.zero_grad()
        return attached.last_report

    _own_loop(
        folder,
        step_of,
        lambda path: accelerator.save_state(str(path)),
        lambda path: accelerator.load_state(str(path)),
    )


def _cell(folder: Path) -> None:
    torch.manual_seed(0)
    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
    cell = MFTrainOneStepCell(network, optimizer, local_norm=True)
    parts = {"network": network, "optimizer": optimizer, "cell": cell}

    def step_of(batch: Any) -> Any:
        cell(*batch)
        return cell.last_report

    def save(path: Path) -> None:
        path.mkdir(exist_ok=True)
        torch.save({name: part.state_dict() for name, part in parts.items()}, path / "state.pt")
        save_records(path)

    def load(path: Path) -> None:
        for name, state in torch.load(path / "state.pt", weights_only=True).items():
            parts[name].load_state_dict(state)
        resume_records(path)

    _own_loop(folder, step_of, save, load)


LOOPS = {
    "MFTrainer": lambda folder: _trainer(MFTrainer, folder),
    "Trainer": lambda folder: _trainer(Trainer, folder),
    "attached": _attached,
    "cell": _cell,
}
"""Kinds of training loops by name."""


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
