"""Programs that each rank runs to train with monitors."""

import json
import logging
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from mfwrap import MFTrainOneStepCell, StepConfig, StepOutput
from mfwrap.callbacks import (
    LocalNormMonitor,
    MetricsRecorder,
    MFLossMonitor,
    TrainingStateMonitor,
)
from mfwrap.callbacks.culprit.judges.judges import Judges
from mfwrap.records import read_json_lines
from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator
from support.small_networks import Classifier, LinearProbe, labelled_batches

__all__ = [
    "estimate_noise",
    "gather_norms",
    "judged_norms",
    "losses_shown",
    "named_losses_shown",
    "refuse_a_folder",
    "save_an_overflow",
    "save_usual_norms",
    "train_monitored",
]

NAN = float("nan")


class _Records(logging.Handler):
    """Keep the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class _AllReduceSizes:
    """Collect the number of elements of each ``all_reduce`` within a ``with`` block."""

    def __enter__(self) -> list[int]:
        self.sizes: list[int] = []
        self._all_reduce = distributed.all_reduce

        def counted(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            self.sizes.append(tensor.numel())
            return self._all_reduce(tensor, *arguments, **keywords)

        distributed.all_reduce = counted
        return self.sizes

    def __exit__(self, *_: object) -> None:
        distributed.all_reduce = self._all_reduce


def _output(loss: float, *, overflow: bool) -> StepOutput:
    return StepOutput(
        loss=torch.tensor(loss),
        overflow=torch.tensor(overflow),
        loss_scale=torch.tensor(1.0),
        learning_rate=torch.tensor(0.1),
        global_norm=torch.tensor(1.0),
    )


def losses_shown(
    rank: int,
    losses: list[list[float]],
    overflows: list[int],
    logs: list[int],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Pass losses to a loss monitor; return its log lines and the sizes of its ``all_reduce``.

    Args:
        rank: Rank of this process.
        losses: Losses of each rank, one per step.
        overflows: Steps that overflow, counted from 1.
        logs: Steps at which the loop logs, counted from 1.
        settings: Keyword arguments of the monitor.
    """
    records = _Records()
    logger = logging.getLogger("mfwrap.callbacks.loss_monitor")
    logger.addHandler(records)
    monitor = MFLossMonitor(**settings)
    state = TrainerState(max_steps=len(losses[rank]), num_train_epochs=2, train_batch_size=1)
    state.is_world_process_zero = rank == 0
    control = TrainerControl()
    by_step = []
    try:
        monitor.on_train_begin(None, state, control)
        for state.global_step, loss in enumerate(losses[rank], start=1):
            monitor.on_step_begin(None, state, control)
            control.should_log = state.global_step in logs
            output = _output(loss, overflow=state.global_step in overflows)
            with _AllReduceSizes() as sent:
                monitor.on_step_end(None, state, control, step_output=output)
            by_step.append(sent)
        monitor.on_train_end(None, state, control)
    finally:
        logger.removeHandler(records)
    return {
        "records": [each for each in records.messages if each.startswith("{ Epoch")],
        "sent": by_step,
        "not finite": monitor.num_losses_not_finite,
        "mean": monitor.saved_mean,
    }


class _LossInMapping(Classifier):
    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(inputs, labels)}


def train_monitored(rank: int, folder: str, kind: str, callbacks: dict[str, Any]) -> list[str]:
    """Train six steps with a Trainer; return the log lines of the loss monitor."""
    new_accelerator()
    records = _Records()
    logger = logging.getLogger("mfwrap.callbacks.loss_monitor")
    logger.addHandler(records)
    inputs, labels = map(torch.cat, zip(*labelled_batches(6, size=4), strict=True))
    rows = [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]
    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        report_to="none",
        save_steps=3,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
    )
    monitors = [MFLossMonitor(**callbacks)]
    known = {"train_dataset": rows, "callbacks": monitors}
    trainer: Trainer
    if kind == "Trainer":
        trainer = Trainer(_LossInMapping(), arguments, **known)
    else:
        trainer = MFTrainer(_LossInMapping(), arguments, **known, step=StepConfig(local_norm=True))
    try:
        trainer.train()
    finally:
        logger.removeHandler(records)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    Path(folder, f"logged_{rank}.txt").write_text(" ".join(map(str, logged)), encoding="utf-8")
    return [each for each in records.messages if each.startswith("{ Epoch")]


def estimate_noise(
    rank: int, folder: str, mean: float, deviation: float, data: str, num_steps: int
) -> dict[str, Any]:
    """Train a linear model on noise, and return what the monitor records of the noise scale.

    Each row of a batch is the gradient of one sample. It has 1024 elements with the same mean and
    deviation.

    Args:
        rank: Rank of this process.
        folder: Run folder.
        mean: Mean of each element.
        deviation: Deviation of each element.
        data: ``"same"`` if both ranks train on the same rows, else ``"own"``.
        num_steps: Number of steps, in two intervals of the noise scale.

    Returns:
        Noise scales by step, and the sizes of all ``all_reduce`` of the monitor.
    """
    network = DistributedDataParallel(LinearProbe(1024))
    optimizer = SGD(network.parameters(), lr=1.0, fused=True)
    cell = MFTrainOneStepCell(network, optimizer, local_norm=True, scale_sense=1024.0)
    monitor = TrainingStateMonitor(
        noise_scale_format="jsonl",
        noise_scale_steps=num_steps // 2,
        folder=folder,
        global_batch_size=16,
        dataset_size=num_steps,
    )
    state, control = TrainerState(max_steps=num_steps, num_train_epochs=1), TrainerControl()
    state.is_world_process_zero = rank == 0
    generator = torch.Generator().manual_seed(0 if data == "same" else rank)
    sent: list[int] = []
    monitor.on_train_begin(None, state, control)
    for state.global_step in range(1, num_steps + 1):
        rows = mean + deviation * torch.randn(8, 1024, generator=generator)
        cell(rows * NAN if state.global_step == 7 else rows)
        with _AllReduceSizes() as sizes:
            monitor.on_step_end(None, state, control, cell.last_report.output, cell.last_report)
        sent += sizes
    monitor.on_train_end(None, state, control)
    name = "training_state.jsonl" if rank == 0 else "training_state_rank1.jsonl"
    records = read_json_lines(Path(folder, name))
    scales = {each["step"]: float(each["noise_scale"]) for each in records if "noise_scale" in each}
    return {"scales": scales, "sent": sent}


class _RecordsAtSave(TrainerCallback):
    """Read the steps in each file of records as soon as a checkpoint has its final name."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}

    def on_save(self, args: Any, state: TrainerState, _control: Any, **_: Any) -> None:
        """Read the files before the callbacks that are listed later write anything."""
        if state.global_step == 4:
            self.steps = _steps_in(args.output_dir)


def _steps_in(folder: str) -> dict[str, list[int]]:
    return {
        path.name: [record["step"] for record in read_json_lines(path) if "step" in record]
        for path in sorted(Path(folder).glob("*.jsonl"))
    }


def save_an_overflow(rank: int, folder: str) -> dict[str, Any]:
    """Train with a NaN on rank 1 in step 4, which is saved and not logged; resume after step 4.

    Returns:
        Records of the anomalies, steps in each file of records as soon as the checkpoint has its
        name and at the end of the resumed training, the number of losses in the epoch mean that
        the checkpoint holds, and the states of the monitors at the end of both trainings.
    """
    inputs, labels = map(torch.cat, zip(*labelled_batches(6, size=2), strict=True))
    inputs[7] = NAN  # two rows per step, the second of them on rank 1
    rows = [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]
    at_save = _RecordsAtSave()
    states = []
    for checkpoint in (None, str(Path(folder, "checkpoint-4"))):
        new_accelerator()
        torch.manual_seed(0)
        trainer = MFTrainer(
            _LossInMapping(),
            TrainingArguments(
                folder,
                max_steps=6,
                per_device_train_batch_size=1,
                train_sampling_strategy="sequential",
                logging_steps=3,
                save_steps=4,
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=rows,
            callbacks=[
                at_save,
                MetricsRecorder(Path(folder)),
                TrainingStateMonitor(local_norm_format="jsonl"),
                LocalNormMonitor(),
                MFLossMonitor(per_print_times=5),
            ],
            step=StepConfig(local_norm=True),
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        exporting = [each for each in trainer.callback_handler.callbacks if _exports(each)]
        states.append([each.state() for each in exporting])
    state = json.loads(Path(folder, "checkpoint-4", "trainer_state.json").read_text("utf-8"))
    monitor = state["stateful_callbacks"]["MFLossMonitor"]["attributes"]["saved_mean"]
    distributed.barrier()
    return {
        "anomalies": [
            {name: record[name] for name in ("step", "kind", "ranks")}
            for record in read_json_lines(Path(folder, "anomalies.jsonl"))
        ],
        "num_losses": monitor["num_losses"] + monitor["num_not_finite"],
        "steps": at_save.steps,
        "resumed": _steps_in(folder),
        "states": states,
    }


def _exports(callback: TrainerCallback) -> bool:
    return isinstance(callback, (MFLossMonitor, TrainingStateMonitor))


def save_usual_norms(rank: int, before: dict[str, Any]) -> dict[str, Any]:
    """Return the usual norms that a state restores, the own ones, and the state of all ranks.

    Args:
        rank: Rank of this process.
        before: State of another number of ranks.
    """
    restored, saving, again = (Judges(None, 10) for _ in range(3))
    restored.load_state_dict(before)
    own = judged_norms(saving, 1.0 + rank, 10.0 + rank)
    alone = saving.state_dict()
    saving.gather()
    together = saving.state_dict()
    again.load_state_dict(together)
    kept = again.state_dict()
    return {
        "kept": kept,
        "restored": judged_norms(restored, 1.0, 1.0),
        "own": own,
        "again": judged_norms(again, 1.0, 1.0),
        "alone": alone,
        "together": together,
    }


def judged_norms(judges: Judges, *norms: float) -> list[float]:
    """Judge a step with these local norms, and return the norms that were usual before it."""
    values = torch.tensor(norms)
    output = types.SimpleNamespace(
        loss=torch.ones(()), global_norm=values.norm(), local_norm=values
    )
    names = tuple("abcdefgh"[: len(norms)])
    report = types.SimpleNamespace(
        local_norm_names=names, learning_rates=torch.zeros(0), learning_rate_factor=1.0
    )
    return judges.end_step(1, output, report, None).usual_norm.tolist()


def refuse_a_folder(rank: int, folder: str) -> str:
    """Start a training on two machines, the second of which cannot write; return the error."""
    new_accelerator()
    trainer = MFTrainer(
        _LossInMapping(),
        TrainingArguments(str(Path(folder, "0")), report_to="none", use_cpu=True),
        train_dataset=[{"inputs": torch.zeros(3), "labels": torch.tensor(0)}],
    )
    if rank == 1:
        Path(folder, "file").touch()
        trainer.args.output_dir = str(Path(folder, "file", "1"))
    try:
        trainer.train()
    except OSError as error:
        return str(error)
    return ""


def gather_norms(rank: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train four steps with the cell; return their local norms and the number of gathers."""
    network: torch.nn.Module = Classifier()
    if distributed.is_initialized():
        network = DistributedDataParallel(network)
    cell = MFTrainOneStepCell(
        network, SGD(network.parameters(), lr=0.1), local_norm=settings.pop("local_norm", True)
    )
    monitor = LocalNormMonitor(folder=folder, **settings)
    state, control = TrainerState(), TrainerControl()
    gathers = 0
    norms = []
    gather = distributed.gather

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return gather(*arguments, **keywords)

    distributed.gather = counted
    try:
        for state.global_step, batch in enumerate(labelled_batches(4, seed=rank), start=1):
            output = cell(*batch)
            norms.append(getattr(output, "local_norm", torch.zeros(0)))
            monitor.on_step_end(
                None, state, control, step_output=output, step_report=cell.last_report
            )
        monitor.on_train_end(None, state, control)
    finally:
        distributed.gather = gather
    return {"norms": torch.stack(norms), "names": cell.local_norm_names, "gathers": gathers}


class _NamedLosses(nn.Module):
    """A network whose named losses are its inputs; a loss of 0 is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, lm_loss: Tensor, mtp_loss: Tensor) -> dict[str, Tensor]:
        losses = {"lm_loss": lm_loss + self.weight}
        return losses | ({"mtp_loss": mtp_loss} if mtp_loss else {})


def named_losses_shown(rank: int, losses: list[list[tuple[float, float]]]) -> list[str]:
    """Train on the losses of this rank, one pair for each step; return the lines of the log."""
    records = _Records()
    logger = logging.getLogger("mfwrap.callbacks.loss_monitor")
    logger.addHandler(records)
    network = _NamedLosses()
    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.0))
    monitor = MFLossMonitor()
    state = TrainerState(max_steps=len(losses[rank]), num_train_epochs=1, train_batch_size=1)
    state.is_world_process_zero = rank == 0
    control = TrainerControl()
    try:
        monitor.on_train_begin(None, state, control)
        for state.global_step, pair in enumerate(losses[rank], start=1):
            monitor.on_step_begin(None, state, control)
            cell(*map(torch.tensor, pair))
            monitor.on_step_end(None, state, control, step_report=cell.last_report)
        monitor.on_train_end(None, state, control)
    finally:
        logger.removeHandler(records)
    return [each for each in records.messages if each.startswith("{ Epoch")]
