"""Record steps and evaluations in ``metrics.jsonl``, and throughput in ``throughput.jsonl``."""

import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor
from transformers import TrainerState, TrainingArguments

from mfwrap.callbacks.eval_callback import EvalCallback
from mfwrap.callbacks.shared.progress import RunSettings, Samples
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.outputs import StepReport
from mfwrap.records.evaluations import prefix_of, results_of
from mfwrap.records.forms import to_number
from mfwrap.records.json_lines import JsonLines, last_record, last_value, to_plain
from mfwrap.records.rewards import (
    ALIKE,
    FEW,
    REWARD,
    constant_rewards,
    since_when_untaught,
    why_untaught,
)
from mfwrap.records.row_losses import BY_SOURCE
from mfwrap.records.run_files import open_records
from mfwrap.trainer import MonitorCallback

_OF_TRAINING = (*BY_SOURCE, REWARD, ALIKE, "completions/mean_length")
"""Beginnings of names in the Trainer's training log that are recorded: of sources and of TRL's
rewards. The records of the steps have the others, or trackers."""

_OTHERS = re.compile("epoch|step|eval_.*")
"""Names in other logs that are of the Trainer."""


@final
class MetricsRecorder(MonitorCallback):
    """Write a record per step, with `StepOutput`'s field names, and a record per evaluation.

    If an `EMACallback` evaluates averaged weights, their metrics get the prefix ``ema_``.

    If the network reports losses beside their sum, the record has them by name in ``losses``.

    A record for each log of the Trainer has what the steps lack: ``loss/<source>`` and
    ``tokens/<source>`` of all steps since the log before and of all ranks, and ``reward``,
    ``rewards/<name>/mean``, ``frac_reward_zero_std`` and ``completions/mean_length`` of TRL. A log
    that a subclass writes itself is recorded whole; several in a step are recorded as their mean.
    If rewards have taught nothing in the first five logs, or in all of a shorter training, the main
    process logs a warning, and another one if they teach nothing any more and have fallen.

    The numbers stay on the device until the Trainer logs, evaluates or saves, because the Trainer
    then synchronizes anyway. Only the main process writes. If gradients are clipped, the first
    record has ``max_grad_norm``. If all parameter groups have a name, ``learning_rates`` has the
    rate of each. With a ``spike_policy``, ``spike_score`` says how far the global norm was above
    the expected one, see `StepReport`.

    A training from the start renames an earlier run's file to ``metrics.jsonl.1``. A resumed
    training removes the records that were written after its checkpoint, and continues the file.

    Args:
        folder: Run folder, which gets ``metrics.jsonl``.
        says_evaluations: Whether to log the results of evaluations, and rewards, too.
    """

    def __init__(self, folder: str | Path, *, says_evaluations: bool = False) -> None:
        self.evaluation_lines = says_evaluations
        self._path = Path(folder) / "metrics.jsonl"
        self._lines: JsonLines | None = None
        self._reports: list[tuple[int, StepReport]] = []
        self._args: TrainingArguments | None = None
        self._limit: float | None = None
        self._is_training = False
        self._own: dict[str, list[float]] = {}
        self._own_step = 0
        self._has_warned = False

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Open the file.

        Raises:
            OSError: If files cannot be written to the run folder.
        """
        self._reports.clear()
        self._own.clear()
        self._is_training, self._lines, self._args = True, None, args
        self._has_warned = False
        if not state.is_world_process_zero:
            return
        self._lines = open_records(self._path, state.global_step)
        self._limit = last_value(self._path, "max_grad_norm")

    def on_step_end(
        self,
        args: TrainingArguments | None,  # noqa: ARG002  (the Trainer passes it by position)
        state: TrainerState,
        *_: Any,
        step_report: StepReport | None = None,
        **__: Any,
    ) -> None:
        """Keep the report of the step, whose numbers stay on the device."""
        if self._lines is not None and step_report is not None:
            self._reports.append((state.global_step, step_report))

    def on_log(
        self,
        args: TrainingArguments | None,  # noqa: ARG002  (the Trainer passes it by position)
        state: TrainerState,
        *_: Any,
        logs: Mapping[str, Any] | None = None,
        **__: Any,
    ) -> None:
        """Write the steps since the last call, and the numbers of the log that they lack."""
        self.write_steps()
        kept = _recorded(logs or {})
        if kept:
            self._write_own(state.global_step, kept)
        if self.evaluation_lines and self._lines is not None and kept.get(REWARD) is not None:
            said = "step %d, reward: %.6g"
            run_logger(EvalCallback.__module__).info(said, state.global_step, kept[REWARD])
        if ALIKE in kept:
            self._warn_of_rewards(state, FEW)
            self._warn_of_collapse(state)

    def _write_own(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write numbers of a log, or their means over those of the step so far.

        A ``compute_loss`` that logs does so for each micro-batch.
        """
        if step != self._own_step:
            self._own, self._own_step = {}, step
        for name, number in numbers.items():
            self._own.setdefault(name, []).append(number)
        self.write({"step": step, **{name: fmean(self._own[name]) for name in numbers}})

    def _warn_of_rewards(self, state: TrainerState, *numbers: int) -> None:
        """Warn if the Trainer has logged rewards so many times, and they have taught nothing."""
        logs = (entry for entry in state.log_history if ALIKE in entry)
        found = [*itertools.islice(logs, FEW + 1)]
        if self._lines is None or len(found) not in numbers:
            return
        why = why_untaught((one[ALIKE], one.get(REWARD)) for one in found)
        if why is None and (same := constant_rewards(found)):
            run_logger(__name__).warning(
                "step %d: all answers so far got the same reward from %s, which teaches nothing",
                state.global_step,
                " and ".join(same),
            )
        if why is not None:
            run_logger(__name__).warning(
                "step %d: the rewards have taught nothing so far, because %s; change the reward, "
                "the prompts or the temperature, so that answers to a prompt get different ones",
                state.global_step,
                why,
            )

    def _warn_of_collapse(self, state: TrainerState) -> None:
        """Warn once if rewards teach nothing any more, and the model has become worse."""
        if self._lines is None or self._has_warned:
            return
        logs = (
            (int(entry["step"]), entry[ALIKE], entry.get(REWARD))
            for entry in state.log_history
            if ALIKE in entry
        )
        if since := since_when_untaught(logs):
            self._has_warned = True
            run_logger(__name__).warning(
                "step %d: the rewards teach nothing any more: %s; begin anew, or at a checkpoint "
                "from before the first step that a monitor has found, with a lower learning rate "
                "or a larger `beta`, which keeps the model near the one that it began as",
                state.global_step,
                since,
            )

    def on_pre_save(self, *_: Any, **__: Any) -> None:
        """Write the steps since the last call, so that the checkpoint has them."""
        self.write_steps()

    def write_after_error(self) -> None:
        """Write the steps before the error, whose numbers are still on the device."""
        self.write_steps()

    def on_train_end(
        self,
        args: TrainingArguments | None = None,  # noqa: ARG002  (the Trainer passes it by position)
        state: TrainerState | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Write the last steps."""
        self._is_training = False
        self.write_steps()
        if state is not None:
            self._warn_of_rewards(state, *range(1, FEW))

    def on_evaluate(
        self,
        args: TrainingArguments | None,  # noqa: ARG002  (the Trainer passes it by position)
        state: TrainerState,
        *_: Any,
        metrics: dict[str, float] | None = None,
        **__: Any,
    ) -> None:
        """Write an evaluation during training."""
        if self._lines is not None and self._is_training and metrics is not None:
            self.write_steps()
            results = results_of(metrics, prefix_of(state))
            self.write_evaluation(state.global_step, results)
            if self.evaluation_lines:
                said = ", ".join(f"{name}: {value:.6g}" for name, value in results.items())
                run_logger(EvalCallback.__module__).info(
                    "Eval result: step %d, %s", state.global_step, said
                )

    def write_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Write those results of an evaluation that the file does not have for this step."""
        if self._lines is None:
            return
        new = {
            name: value
            for name, value in results.items()
            if (last_record(self._path, name, step=step) or {}).get(name) != to_plain(value)
        }
        if new:
            self.write({"step": step, **new})

    def write(self, record: Mapping[str, Any]) -> None:
        """Write an additional record, on the main process only."""
        if self._lines is None:
            return
        limit = None if self._args is None else self._args.max_grad_norm
        if limit and limit != self._limit:
            self._lines.append({"max_grad_norm": limit})
            self._limit = limit
        self._lines.append(record)

    def write_steps(self) -> None:
        """Write the steps since the last call, with one copy from the device per field."""
        if self._lines is None or not self._reports:
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
        if reports[0].spike_score is not None:
            columns["spike_score"] = _column([report.spike_score for report in reports])
        losses = _losses(reports)
        rate_names = reports[0].learning_rate_names
        if rate_names:
            columns["learning_rates"] = _column([report.learning_rates for report in reports])
        for index, step in enumerate(steps):
            record = {name: None if c is None else c[index] for name, c in columns.items()}
            norms = record.get("local_norm")
            if norms is not None:
                record["local_norm"] = dict(zip(names, norms, strict=True))
            if losses[index]:
                record["losses"] = losses[index]
            rates = record.get("learning_rates")
            if rates is not None:
                record["learning_rates"] = dict(zip(rate_names, rates, strict=True))
            self.write({"step": step, **record})


@final
class ThroughputRecorder(MonitorCallback):
    """Write samples per second, summed over processes, each time that the Trainer logs.

    The throughput is not in ``metrics.jsonl``, so that a repeated run writes an identical
    ``metrics.jsonl``. The time of evaluations and checkpoints is left out.

    Args:
        folder: Run folder, which gets ``throughput.jsonl``.
        clock: Returns seconds from an arbitrary start.
    """

    def __init__(self, folder: str | Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._path = Path(folder) / "throughput.jsonl"
        self._lines: JsonLines | None = None
        self._clock = clock
        self._start = (0, 0.0)
        self._grown: Callable[[int], int] | None = None

    def take_samples(self, samples: Callable[[int], int] | None) -> None:
        """Receive the function that counts samples if the batch grows."""
        self._grown = samples

    def on_train_begin(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        **__: Any,
    ) -> None:
        """Open the file on the main process, and start the clock.

        Raises:
            OSError: If files cannot be written to the run folder.
        """
        is_main = state.is_world_process_zero
        self._lines = open_records(self._path, state.global_step) if is_main else None
        self.on_save(args, state)

    def on_log(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        logs: Mapping[str, Any] | None = None,
        train_dataloader: Any = None,
        **__: Any,
    ) -> None:
        """Write the throughput of the steps since the clock was started."""
        if logs is None or "loss" not in logs:  # the log of an evaluation, or the final summary
            return
        start, seconds = self._start
        self._start = state.global_step, self._clock()
        if args is None or self._lines is None or state.global_step == start:
            return
        seen = Samples(RunSettings(), state, args, self._grown, train_dataloader)
        samples = seen.until(state.global_step) - seen.until(start)
        record = {"throughput": samples / (self._start[1] - seconds)}
        self._lines.append({"step": state.global_step, **record})

    def on_save(
        self,
        args: TrainingArguments | None,  # noqa: ARG002  (the Trainer passes it by position)
        state: TrainerState,
        *_: Any,
        **__: Any,
    ) -> None:
        """Restart the clock, to leave the time of saving out.

        The steps between the last log and this event are then not measured.
        """
        self._start = state.global_step, self._clock()

    on_evaluate = on_save


def _column(values: list[Tensor | None]) -> list[Any] | None:
    tensors = [value for value in values if value is not None]
    return torch.stack(tensors).tolist() if len(tensors) == len(values) else None


def _losses(reports: Sequence[StepReport]) -> list[dict[str, float]]:
    """Return the named losses of each step, with one copy from the device."""
    values = [loss for report in reports for loss in report.losses.values()]
    read = iter(torch.stack(values).tolist() if values else ())
    return [{name: next(read) for name in report.losses} for report in reports]


def _recorded(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a log that are recorded; none of an evaluation or the end."""
    if any(name.endswith("_runtime") for name in logs):
        return {}
    # The Trainer's training log has both; a subclass may log a loss of its own.
    is_of_training = {"loss", "learning_rate"} <= logs.keys()
    return {
        name: number
        for name, value in logs.items()
        if (name.startswith(_OF_TRAINING) if is_of_training else not _OTHERS.fullmatch(name))
        and (number := to_number(value)) is not None
    }
