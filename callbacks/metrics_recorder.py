"""The numbers of each step and each evaluation of a run, in its file ``metrics.jsonl``."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState, TrainingArguments

from mfwrap.callbacks import EvalCallback
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.outputs import StepReport
from mfwrap.records.json_lines import JsonLines, read_json_lines

__all__ = [
    "METRICS_FILE",
    "RECIPE_FILE",
    "MetricsRecorder",
    "ThroughputRecorder",
    "limit_of",
    "results_of",
]

METRICS_FILE = "metrics.jsonl"
RECIPE_FILE = "recipe.yaml"
_LIMIT = "max_grad_norm"


@final
class MetricsRecorder(TrainerCallback):
    """Write a record of each step, with the names of `StepOutput`, and of each evaluation.

    The numbers stay on the device until the Trainer logs, evaluates or saves, where it waits
    anyway. Written by the main process alone. A run that is resumed goes on behind its checkpoint.
    The first record has the limit of the global norm, where there is one.

    Args:
        folder: Of the run.
        evaluates_average: Whether evaluations within the training see averaged weights.
        says_evaluations: Whether to log them, too.
    """

    def __init__(
        self, folder: Path, *, evaluates_average: bool, says_evaluations: bool = False
    ) -> None:
        self._says_evaluations = says_evaluations
        self._path = folder / METRICS_FILE
        self._prefix = "ema_" if evaluates_average else ""
        self._lines = JsonLines(self._path)
        self._reports: list[tuple[int, StepReport]] = []
        self._is_training = False

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Keep the records up to the step that the run goes on from."""
        self._reports.clear()
        self._is_training = True
        if not state.is_world_process_zero:
            return
        records = read_json_lines(self._path) if self._path.exists() else []
        self._path.unlink(missing_ok=True)
        self._lines = JsonLines(self._path)
        if args is not None and args.max_grad_norm:
            self._lines.append({_LIMIT: args.max_grad_norm})
        for record in records:
            if 0 < record.get("step", 0) <= state.global_step:
                self._lines.append(record)

    def on_step_end(
        self,
        args: TrainingArguments | None,  # noqa: ARG002  (its name is the Trainer's)
        state: TrainerState,
        *_: Any,
        step_report: StepReport | None = None,
        **__: Any,
    ) -> None:
        """Keep the report of the step."""
        if state.is_world_process_zero and step_report is not None:
            self._reports.append((state.global_step, step_report))

    def on_log(self, *_: Any, **__: Any) -> None:
        """Write the steps since the last time."""
        self.write_steps()

    def on_save(self, *_: Any, **__: Any) -> None:
        """Write the steps since the last time."""
        self.write_steps()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write the last steps."""
        self._is_training = False
        self.write_steps()

    def on_evaluate(
        self,
        args: TrainingArguments | None,  # noqa: ARG002  (its name is the Trainer's)
        state: TrainerState,
        *_: Any,
        metrics: dict[str, float] | None = None,
        **__: Any,
    ) -> None:
        """Write an evaluation within the training."""
        if state.is_world_process_zero and self._is_training and metrics is not None:
            self.write_steps()
            results = {self._prefix + name: value for name, value in results_of(metrics).items()}
            self._lines.append({"step": state.global_step, **results})
            if self._says_evaluations:
                said = ", ".join(f"{name}: {value:.6g}" for name, value in results.items())
                run_logger(EvalCallback.__module__).info(
                    "Eval result: step %d, %s", state.global_step, said
                )

    def write(self, record: dict[str, Any]) -> None:
        """Write a record of its own."""
        self._lines.append(record)

    def write_steps(self) -> None:
        """Write the steps since the last time, with one copy from the device for each field."""
        if not self._reports:
            return
        steps = [step for step, _ in self._reports]
        reports = [report for _, report in self._reports]
        self._reports.clear()
        outputs = [report.output for report in reports]
        names = reports[0].local_norm_names
        columns = {
            name: _column([getattr(output, name) for output in outputs])
            for name in outputs[0]._fields
            if name != "size"
        } | {"skipped": _column([report.skipped for report in reports])}
        for index, step in enumerate(steps):
            record = {name: None if c is None else c[index] for name, c in columns.items()}
            norms = record.get("local_norm")
            if norms is not None:
                record["local_norm"] = dict(zip(names, norms, strict=True))
            self._lines.append({"step": step, **record})


@final
class ThroughputRecorder(TrainerCallback):
    """Write samples a second, of all processes, each time that the Trainer logs.

    They are in ``throughput.jsonl``, apart from numbers that are the same in every run. Evaluations
    and checkpoints do not count.

    Args:
        folder: Of the run.
        clock: Returns seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lines = JsonLines(folder / "throughput.jsonl")
        self._clock = clock
        self._start = (0, 0.0)

    def on_train_begin(
        self,
        args: TrainingArguments | None,  # noqa: ARG002  (its name is the Trainer's)
        state: TrainerState,
        *_: Any,
        **__: Any,
    ) -> None:
        """Start to count."""
        self._start = state.global_step, self._clock()

    def on_log(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        logs: Mapping[str, Any] | None = None,
        **__: Any,
    ) -> None:
        """Write the samples of the steps since the last time."""
        if logs is None or "loss" not in logs:  # an evaluation's, or the summary
            return
        start, seconds = self._start
        self._start = state.global_step, self._clock()
        if args is None or not state.is_world_process_zero or state.global_step == start:
            return
        size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        samples = (state.global_step - start) * size
        record = {"throughput": samples / (self._start[1] - seconds)}
        self._lines.append({"step": state.global_step, **record})

    # What was not training is left out, with the steps before it since the last log.
    on_evaluate = on_train_begin
    on_save = on_train_begin


def _column(values: list[Tensor | None]) -> list[Any] | None:
    tensors = [value for value in values if value is not None]
    return torch.stack(tensors).tolist() if len(tensors) == len(values) else None


def limit_of(metrics: Path) -> float | None:
    """Return the limit of the global norm that the file of a run's numbers has; ``None`` if none.

    Raises:
        ValueError: If it holds what is no record.
    """
    limits = [record[_LIMIT] for record in read_json_lines(metrics) if _LIMIT in record]
    return float(limits[-1]) if limits else None


def results_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what a Trainer's evaluation has found, without its timings."""
    timings = ("_runtime", "_per_second", "_time")
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("eval_") and not name.endswith(timings)
    }
