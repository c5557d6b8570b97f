"""Follow a run for the training state monitor: write the metrics of its steps and judge them."""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments

from mfwrap import DeferredReads, StepReport
from mfwrap.callbacks.culprit.anomaly_log import Anomaly
from mfwrap.callbacks.culprit.episode_log import EpisodeLog
from mfwrap.callbacks.culprit.episodes import Episodes
from mfwrap.callbacks.culprit.good_checkpoints import divergence_in
from mfwrap.callbacks.culprit.judges.step import JudgedStep, StepScores
from mfwrap.callbacks.shared.progress import RunPosition, Samples, StepClock, run_length
from mfwrap.callbacks.shared.run_folder import run_folder
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.step_values import (
    PackedValues,
    StepNumbers,
    StepValues,
    numbers_of,
    pack,
    skip_flag,
    values_of_logs,
)
from mfwrap.callbacks.training_state.checks import SpikeCount, SpikeGuard, check_finite
from mfwrap.callbacks.training_state.culprit_finder import is_compiled, new_finder
from mfwrap.callbacks.training_state.fingerprints import FingerprintRecorder
from mfwrap.callbacks.training_state.forward_watches import ForwardNumbers, forward_watches
from mfwrap.callbacks.training_state.metrics import PackedMetrics, StateMetric, StateMetrics
from mfwrap.callbacks.training_state.noise_scale import new_noise_scale
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.callbacks.training_state.writers import MetricWriters
from mfwrap.collectives import num_ranks, this_rank
from mfwrap.records.skipped_rows import RowPlaces
from mfwrap.tensors.shards import meeting_device, on_device
from mfwrap.tensors.wrappers import unwrapped_network
from mfwrap.trainer import BadSteps

_MOST_BAD_STEPS = 1000


class _Step(NamedTuple):
    """Numbers that the host knows when a step ends, and references to values on the device."""

    number: int
    position: RunPosition
    packed: PackedValues | None
    """Values of the output, on the device; ``None`` if the loop passes no output."""

    metrics: tuple[StateMetric, ...]
    """Metrics whose values are on the device."""

    linearity: float | None
    judgement: JudgedStep | None
    """What the judges found; ``None`` if steps are not judged, or without an output."""


@final
class TrainingStateRun:
    """Write the metrics of each step of a run, and judge whether the step is good.

    Values are copied to the host without synchronizing with the device. They are used at the next
    `flush`, at the latest at the end of the next step.

    Args:
        settings: Settings of the monitor.
        args: Arguments of the Trainer; ``None`` in a loop without a Trainer.
        state: State of the loop.
        global_step: Steps finished before the first step of this run.
        model: Network, with its wrappers; ``None`` if unknown.
        train_dataloader: Data loader, for the length of an epoch; ``None`` if unknown.
        tokenizer: Decodes the texts of samples; ``None`` if unknown.
        row_places: Tells where rows are in the training data; ``None`` if that is unknown.
        grown: See `mfwrap.callbacks.shared.progress.Samples`.

    Raises:
        ImportError: If ``tensorboard_dir`` is given and TensorBoard is not installed.
        OSError: If files cannot be written to the run folder.
        ValueError: If the length of the run, or a folder that is needed, is unknown.
    """

    def __init__(
        self,
        settings: TrainingStateSettings,
        *,
        args: TrainingArguments | None,
        state: TrainerState,
        global_step: int,
        model: nn.Module | None = None,
        train_dataloader: Any = None,
        tokenizer: Any = None,
        row_places: RowPlaces | None = None,
        grown: Callable[[int], int] | None = None,
    ) -> None:
        folder = _folder(settings, args)
        is_main = state.is_world_process_zero
        threshold = settings.global_norm_spike_threshold
        self.clock = StepClock(settings.clock)
        self.finder = (
            new_finder(
                settings, args, model, global_step, tokenizer=tokenizer, row_places=row_places
            )
            if settings.find_culprit
            else None
        )
        self.last_step = global_step
        self.bad_steps: deque[BadSteps] = deque(maxlen=_MOST_BAD_STEPS)
        """Last steps with an anomaly, for a rollback; the monitor empties it."""
        self.has_outputs = False
        """Whether any step of this run has had an output."""
        self._settings, self._folder = settings, folder if is_main else None
        self._length = run_length(settings, state, args, train_dataloader, grows=grown is not None)
        first_step = self._length.position(global_step).step
        self.writers = MetricWriters(settings, args, folder, is_main=is_main, first_step=first_step)
        self._samples = Samples(settings, state, args, grown, train_dataloader)
        self._last_lap = global_step
        self._metrics = StateMetrics(settings) if settings.formats else None
        self._noise_scale = new_noise_scale(settings, self._samples.per_update)
        compiled = is_compiled(model, args)
        self._watches = forward_watches(
            settings,
            None if model is None else unwrapped_network(model),
            is_compiled=compiled,
            judge=None if self.finder is None else self.finder.judges.forward,
        )
        self._is_watched = False
        self._recorder = None if self.finder is None else self.finder.recorder
        self._fingerprints: FingerprintRecorder | None = None
        if settings.fingerprints and folder is not None:
            self._fingerprints = FingerprintRecorder(
                args,
                folder,
                model,
                global_step=global_step,
                first_step=first_step,
                interval=settings.step_interval,
                is_compiled=compiled,
            )
        self._log = EpisodeLog(
            Episodes(settings.state_interval) if self.finder is None else self.finder.episodes,
            None if self.finder is None else folder,
            this_rank(),
            first_step=global_step,
            is_main=is_main,
        )
        self._spike_guard = (
            SpikeGuard(threshold, folder, writes=is_main)
            if settings.check_for_global_norm
            else None
        )
        self._spike_count = (
            SpikeCount(threshold, settings.global_norm_spike_count_threshold)
            if settings.use_skip_data_by_global_norm
            else None
        )
        # Parts that have a state of their own, by its name in the state of the run.
        self._stateful: dict[str, Any] = {
            "finder": self.finder,
            "spike_count": self._spike_count,
            "noise_scale": self._noise_scale,
        }
        self._reads = DeferredReads()
        # Steps that are written, and not judged yet.
        self._unjudged: deque[tuple[StepNumbers, JudgedStep | None, Sequence[float]]] = deque()
        self._last_scale: float | None = None

    def begin_step(self, global_step: int, optimizer: Any = None) -> None:
        """Watch the forward passes of a step, if its metrics are reported.

        Args:
            global_step: Number of this step: the finished steps plus one.
            optimizer: Optimizer, with or without wrappers; ``None`` if unknown.
        """
        self._is_watched = self._watches is not None and self._is_due(global_step)
        if self._watches is not None and self._is_watched:
            self._watches.begin()
        if self.finder is not None:
            self.finder.judges.begin_step(global_step, optimizer)
        if self._fingerprints is not None:
            self._fingerprints.begin_step(global_step, optimizer)

    def before_update(self, global_step: int, model: nn.Module | None) -> None:
        """Write and judge the previous step, before this step's update changes the weights.

        Args:
            global_step: Number of this step: the finished steps plus one.
            model: Network, with or without wrappers; ``None`` if unknown.
        """
        if self._fingerprints is not None:
            self._fingerprints.end_forward()
        self.flush()
        if self._fingerprints is not None:
            self._fingerprints.before_update(global_step, model)

    def end_step(
        self,
        global_step: int,
        output: Any,
        report: StepReport | None,
        *,
        scale_before: Tensor | None,
        model: nn.Module | None,
        optimizer: Any,
    ) -> None:
        """Write and judge the previous step, and start copying the values of this step.

        Args:
            global_step: Finished steps, this one included.
            output: Output of the step; ``None`` if the loop passes none.
            report: Report of the step; ``None`` if the loop passes none.
            scale_before: Loss scale that the step used, shape ``()``; ``None`` if unknown.
            model: Network whose weights are measured; ``None`` if unknown.
            optimizer: Optimizer whose state is measured, with or without wrappers; ``None`` if
                unknown.
        """
        if self._fingerprints is not None:
            self._fingerprints.end_forward()
        # Pending values belong to the previous step. This step's update has changed the weights
        # since, so the previous step cannot be replayed exactly.
        self.flush(weights_have_moved=True)
        if self._recorder is not None:
            self._recorder.end_step()
        self.clock.end_step()
        self.last_step = global_step
        forward = self._forward_numbers()
        skipped = skip_flag(output, report)
        judgement = None
        packed = None
        if output is not None:
            self.has_outputs = True
            packed = pack(
                output,
                skipped=skipped,
                consecutive_skips=None if report is None else report.consecutive_skips,
                scale_before=scale_before,
                report=report,
            )
            if self.finder is not None:
                applied = None if skipped is None else ~skipped
                judgement = self.finder.judges.end_step(
                    global_step, output, report, applied, optimizer
                )
        shown = PackedMetrics((), None)
        if self._metrics is not None:
            noise_scale = None
            if self._noise_scale is not None and report is not None:
                noise_scale = self._noise_scale.end_step(
                    global_step, report, self._samples.mean(global_step)
                )
            shown = self._metrics.of_step(
                global_step,
                output,
                () if report is None else report.local_norm_names,
                model,
                optimizer,
                forward,
                noise_scale=noise_scale,
                judged=judgement,
            )
        step = _Step(
            number=global_step,
            position=self._length.position(global_step),
            packed=packed,
            metrics=shown.metrics,
            linearity=self._linearity(global_step) if self._is_due(global_step) else None,
            judgement=judgement,
        )
        self._submit(step, shown.values)
        if self._fingerprints is not None:
            self._fingerprints.end_step(global_step, model, output, report)

    def flush(self, *, weights_have_moved: bool = False) -> None:
        """Wait for the pending values of the last step, write them, and judge the step.

        Args:
            weights_have_moved: Whether a later update has changed the weights already.

        Raises:
            RuntimeError: If `SpikeGuard.check` raises it.
            ValueError: If `check_finite` or `SpikeCount.check` raises it.
        """
        if self._fingerprints is not None:
            self._fingerprints.flush()  # first, because judging a step may raise
        self.write(waits=True)
        while self._unjudged:
            self._judge(*self._unjudged.popleft(), weights_have_moved=weights_have_moved)

    def write(self, *, waits: bool) -> None:
        """Write the metrics of the last step, and judge it later, in `flush`.

        Judging may run the network or a collective, and may raise; writing does none of this, so
        one rank may call it alone, at any place of a loop.

        Args:
            waits: Whether to wait for values that have not arrived.
        """
        self._reads.flush(waits=waits)

    def pause(self) -> None:
        """Write and judge the last step, and restart the clock.

        Call this where training pauses: for an evaluation, a checkpoint, the end of an epoch.
        """
        self.flush()
        self.clock.restart()

    def before_save(self) -> None:
        """Write and judge the last step, and gather the state of all ranks.

        Call it on every rank. `state_dict` then returns the state of all ranks.
        """
        self.flush()
        if self.finder is not None:
            self.finder.judges.gather()

    def log(self, global_step: int, logs: Mapping[str, Any]) -> None:
        """Judge a step by its logged loss and norm, in a loop that passes no step output.

        Raises:
            RuntimeError: If `SpikeGuard.check` raises it.
            ValueError: If `check_finite` or `SpikeCount.check` raises it.
        """
        values = values_of_logs(logs)
        if values is None:
            return
        norm = values.global_norm
        overflow = norm is not None and not math.isfinite(norm)
        values = dataclasses.replace(values, overflow=overflow)
        judgement = None
        if self.finder is not None:
            logged = SimpleNamespace(
                loss=torch.tensor(values.loss),
                global_norm=_tensor(norm),
                learning_rate=_tensor(values.learning_rate),
            )
            judgement = self.finder.judges.end_step(
                global_step, logged, None, torch.tensor(not overflow), measures_updates=False
            )
        # The loop logs after the update, and does not say whether the update was skipped.
        host_values = [] if judgement is None else judgement.summary.tolist()
        numbers = numbers_of(global_step, values)
        self._judge(numbers, judgement, host_values, weights_have_moved=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, ready for JSON. Call `before_save` first."""
        parts = self._stateful.items()
        return {
            "global_step": self.last_step,
            "last_scale": self._last_scale,
            **{name: None if part is None else part.state_dict() for name, part in parts},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; ignore it if this run begins at another step.

        Args:
            state: State that `state_dict` returned.
        """
        if state["global_step"] != self.last_step:
            return
        self._last_scale = state["last_scale"]
        for name, part in self._stateful.items():
            if part is not None and state[name] is not None:
                part.load_state_dict(state[name])

    def end_episode(self) -> None:
        """Write the end of an episode that goes on, because the training has failed."""
        self._log.close()

    def close(self) -> None:
        """Close all files, and remove all hooks from network and optimizer."""
        if self.finder is not None:
            self.finder.close()
        self._log.close()
        self.writers.close()
        if self._fingerprints is not None:
            self._fingerprints.close()
        if self._watches is not None:
            self._watches.close()
        if self._recorder is not None:
            self._recorder.close()

    def warn_of_divergence(self) -> None:
        """Warn if the loss has left its course for good: the line that said so may be far above.

        Call this when the training has ended, after `close`.
        """
        if self.finder is None or self._folder is None:
            return
        if said := divergence_in(self._folder):
            run_logger(__package__).warning("%s; see `mfwrap report %s`", said, self._folder)

    def _is_due(self, global_step: int) -> bool:
        return global_step % self._settings.step_interval == 0

    def record_call(
        self, network: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Record a call of the network that has begun; see `StepRecorder`."""
        if self._recorder is not None and self._recorder.network is network:
            self._recorder.record(network, positional, keywords)

    def note_batch(self, batch: Mapping[str, Any] | Sequence[Any]) -> None:
        """Note a micro-batch of the step; see `StepRecorder.note_batch`."""
        if self._recorder is not None:
            self._recorder.note_batch(batch)

    def note_holder(
        self, holder: object | None, run_batch: Callable[[Mapping[str, Any]], Tensor] | None
    ) -> None:
        """Note what calls the network, such as its Trainer, and how it computes a loss.

        See `StepRecorder.holder` and `StepRecorder.run_batch`.
        """
        if self._recorder is not None:
            self._recorder.holder, self._recorder.run_batch = holder, run_batch

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of a micro-batch; see `StepRecorder.note_loss`."""
        if self._recorder is not None:
            self._recorder.note_loss(loss)

    def _forward_numbers(self) -> ForwardNumbers | None:
        watched, self._is_watched = self._is_watched, False
        return self._watches.end() if watched and self._watches is not None else None

    def _linearity(self, global_step: int) -> float | None:
        baseline = self._settings.throughput_baseline
        if baseline is None:
            return None
        seconds, num_steps = self.clock.end_lap(), max(global_step - self._last_lap, 1)
        self._last_lap = global_step
        samples = self._samples.mean(global_step, num_steps)
        if not seconds or not samples:
            return None
        return samples / num_ranks() / seconds / baseline

    def _submit(self, step: _Step, shown: Tensor | None) -> None:
        """Start copying the values of a step to the host, all in one tensor."""
        summary = None if step.judgement is None else step.judgement.summary
        packed = None if step.packed is None else step.packed.tensor
        values = [value for value in (packed, shown, summary) if value is not None]
        if not values:
            self._write(step, [], None)
            return
        device = meeting_device(values)
        together = torch.cat([on_device(value, device) for value in values])
        self._reads.submit(together, functools.partial(self._receive, step))

    def _receive(self, step: _Step, host_values: Sequence[float]) -> None:
        if step.packed is None:
            self._write(step, host_values, None)
            return
        num_values, num_metrics = len(step.packed.tensor), len(step.metrics)
        values = step.packed.unpack(host_values[:num_values])
        rest = host_values[num_values:]
        self._write(step, rest[:num_metrics], values)
        numbers = numbers_of(step.number, values, last_scale=self._last_scale)
        self._last_scale = values.loss_scale
        self._unjudged.append((numbers, step.judgement, rest[num_metrics:]))

    def _write(self, step: _Step, host_values: Sequence[float], values: StepValues | None) -> None:
        metrics, shown = list(step.metrics), list(host_values)
        if step.linearity is not None:
            metrics.append(StateMetric("throughput_linearity", self._settings.throughput_formats))
            shown.append(step.linearity)
        if metrics:
            numbers = {} if values is None else values.to_record()
            self.writers.write(step.position, metrics, shown, numbers)

    def _judge(
        self,
        numbers: StepNumbers,
        judgement: JudgedStep | None,
        host_values: Sequence[float],
        *,
        weights_have_moved: bool,
    ) -> None:
        anomaly = None
        if self.finder is not None and judgement is not None:
            scores = StepScores(*host_values)
            anomaly = self.finder.judge(
                numbers, judgement, scores, weights_have_moved=weights_have_moved
            )
            is_shared = self.finder.is_shared
            episodes = self.finder.episodes
            goes_on = episodes.last is not None and not episodes.last.is_over
            is_followed = episodes.astray is not None or episodes.early is not None
            if anomaly is not None or goes_on or is_followed:
                self._log.add(anomaly, numbers, is_shared=is_shared)
            if episodes.last is not None:
                self.finder.forget(numbers.step)
            notes = self.finder.notes.of_step(numbers, judgement, scores)
            if notes:
                said = None if anomaly is None else anomaly.cause
                self._log.note(one for one in notes if one.cause.name != said)
            if anomaly is not None:
                self.bad_steps.append(_bad_steps(anomaly, is_shared=is_shared))
        is_ordinary = numbers.overflow and self.finder is not None and anomaly is None
        if self._settings.check_for_nan_in_loss_and_grad and not is_ordinary:
            check_finite(numbers)
        if numbers.global_norm is not None and not numbers.overflow:
            for check in (self._spike_guard, self._spike_count):
                if check is not None:
                    check.check(numbers.step, numbers.global_norm)


def _bad_steps(anomaly: Anomaly, *, is_shared: bool) -> BadSteps:
    knows_rows = all(one.position is not None for one in anomaly.samples)
    return BadSteps(
        anomaly.kind,
        anomaly.since or anomaly.step,
        anomaly.step,
        is_shared=is_shared,
        rows=tuple((one.rank, one.micro_batch, one.row) for one in anomaly.samples if knows_rows),
        description=str(anomaly),
    )


def _folder(settings: TrainingStateSettings, args: TrainingArguments | None) -> Path | None:
    """Return the run folder; ``None`` if it is unknown and nothing needs it."""
    folder = run_folder(settings.folder, args)
    if folder is None and ("jsonl" in settings.formats or settings.fingerprints):
        what = "`fingerprints`" if settings.fingerprints else "the format 'jsonl'"
        msg = f"`folder` must be given for {what} in a loop of your own, got None"
        raise ValueError(msg)
    return folder


def _tensor(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value)
