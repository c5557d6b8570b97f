"""Train with monitors that write records, in a process that kills itself at a file operation."""

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from mfwrap import MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import LocalNormMonitor, MetricsRecorder, ReplicaCheck, TrainingStateMonitor
from mfwrap.callbacks.metrics_recorder import ThroughputRecorder
from mfwrap.checkpoints.verification import newest_whole_checkpoint
from mfwrap.records import resume_records, save_records
from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator
from support.programs import FORKING
from support.small_networks import Classifier, labelled_batches

__all__ = ["LOOPS", "records_in", "run"]

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
