"""MindFormers' training state monitor, and the search for the cause when a step goes wrong."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from mfwrap import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.average.swap import training_weights
from mfwrap.callbacks.culprit.anomaly_log import KINDS
from mfwrap.callbacks.culprit.good_checkpoints import to_return_to
from mfwrap.callbacks.shared.progress import global_batch_size
from mfwrap.callbacks.shared.run_log import WarnOnce, run_logger
from mfwrap.callbacks.shared.settings import saved_settings, takes_settings
from mfwrap.callbacks.shared.training_weights import monitors_training
from mfwrap.callbacks.training_state.run import TrainingStateRun
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.collectives import num_ranks
from mfwrap.records.evaluations import NO_RESULT, TIMINGS, prefix_of
from mfwrap.records.skipped_rows import RowPlaces
from mfwrap.tensors.wrappers import trainable
from mfwrap.trainer import BadSteps, MonitorCallback

_OF_OTHERS = frozenset({"recompute_differs", "replicas_differ"})
"""Kinds of anomalies that other monitors find."""


@final
@monitors_training
class TrainingStateMonitor(MonitorCallback, ExportableState):
    """Show the state of a training, and find the layer and rank at fault when a step goes wrong.

    The arguments are the fields of `TrainingStateSettings`, by keyword.

    ``on_step_end`` takes the output of the step as keyword ``step_output`` and its report as
    ``step_report``. A good step does not synchronize with the device: its values are copied in the
    background. The monitor uses them just before the next update, at ``on_pre_optimizer_step``. If
    the loop does not send this event, the monitor uses them at the end of the next step. It uses
    them earlier if the loop logs, evaluates, saves or ends.

    **Metrics.** Each metric is written in the formats that its setting names:

    - ``"log"``: the log ``mfwrap.callbacks``, at level INFO, on the main process;
    - ``"tensorboard"``: curves in ``tensorboard_dir``;
    - ``"jsonl"``: ``training_state.jsonl`` in the run folder. Each record also has loss, norm,
      learning rate and loss scale of the step;
    - ``"trackers"``: in `MFTrainer`, the trackers of ``report_to``, whenever it logs; in a loop of
      your own, the function ``log_to``.

    Curves and records are written on every rank. Ranks other than 0 have their own files.

    **Anomalies.** With ``find_culprit``, the first of the steps that overflow, spike or have a
    non-finite loss gets a record in ``anomalies.jsonl`` in the run folder, and a line in the log.
    The record names layer, rank and norms (`Anomaly` lists the fields). A dynamic loss scale
    overflows on purpose while it searches for its value: such steps are only counted, in
    `num_scale_overflows`. To name a layer, the monitor needs local norms
    (``StepConfig(local_norm=True)``). A fault in the forward pass makes all gradients non-finite;
    then only ``replay`` can tell where the fault began.

    **In a loop that passes no output**, such as a stock Trainer, the monitor reports optimizer
    state, weights and throughput, and checks the loss and the norm that the loop logs. A warning,
    logged once, names the values that are missing.

    With a Trainer, the usual norms and the counts are part of the checkpoint.

    **Differences from MindFormers.** Local norms and losses are computed on every device, and are
    unscaled. ``check_for_nan_in_loss_and_grad`` ignores ordinary overflows. A NaN norm counts as a
    spike, ``check_for_global_norm`` writes all spikes of a step, and settings that exclude each
    other raise an error at construction. After a resume, curves go on at the step of the
    checkpoint. ``dump_path`` and ``monitor_on`` are not supported.

    Source: MindFormers, ``TrainingStateMonitor`` and ``monitor_config``.

    Raises:
        ImportError: At ``on_train_begin``, if ``tensorboard_dir`` is given and TensorBoard is not
            installed.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range or contradicts another one; at
            ``on_train_begin`` if the length of the run or, for ``"jsonl"``, its folder is unknown.
    """

    bad_kinds = tuple(kind for kind in KINDS if kind not in _OF_OTHERS)

    @takes_settings(TrainingStateSettings)
    def __init__(self, settings: TrainingStateSettings) -> None:
        self._settings = settings
        self._run: TrainingStateRun | None = None
        self._scale_before: Tensor | None = None
        # Model and optimizer of `on_train_begin`, for loops that do not pass them again.
        self._known: dict[str, Any] = {}
        self._warn_once = WarnOnce(__package__)
        self._num_scale_overflows = 0
        self._bad_steps: list[BadSteps] = []
        self._row_places: RowPlaces | None = None
        self._trainer: object | None = None
        self._run_batch: Callable[[Mapping[str, Any]], Tensor] | None = None
        self._grown: Callable[[int], int] | None = None
        self.names_rows = settings.find_culprit and settings.replay
        self.saved_run: dict[str, Any] | None = None
        """State that an earlier run saved; ignored by a run that begins at another step."""

    @property
    def num_scale_overflows(self) -> int:
        """Number of steps read so far that overflowed only because the loss scale was too high."""
        finder = None if self._run is None else self._run.finder
        return self._num_scale_overflows if finder is None else finder.num_scale_overflows

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **known: Any
    ) -> None:
        """Begin a run: determine its length, and record the norms of the weights."""
        self._close()
        self._known = _not_none(known)
        self._run = self._begin(args, state, state.global_step, known)

    def on_step_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **known: Any
    ) -> None:
        """Start the clock, and keep the loss scale that the step uses."""
        known |= self._known | _not_none(known)
        if self._run is None:
            self._run = self._begin(args, state, state.global_step, known)
        attachment = getattr(known.get("optimizer"), "attachment", None)
        self._scale_before = attachment and attachment.step.loss_scale.value.clone()
        self._run.begin_step(state.global_step + 1, known.get("optimizer"))
        self._run.clock.restart()

    def on_pre_optimizer_step(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **known: Any
    ) -> None:
        """Write and judge the previous step, before this step's update changes the weights."""
        known |= self._known | _not_none(known)
        del args
        if self._run is not None:
            self._run.before_update(state.global_step + 1, known.get("model"))

    def write(self, *, waits: bool) -> None:
        """Write the metrics of the previous step early; it is judged where it always is.

        Starts no collective. `LoopMonitor` calls this before the loop logs the next step.

        Args:
            waits: Whether to wait for values that have not arrived.
        """
        if self._run is not None:
            self._run.write(waits=waits)

    def on_step_end(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        control: TrainerControl,
        step_output: StepOutput | LocalNormStepOutput | Tensor | None = None,
        step_report: StepReport | None = None,
        **known: Any,
    ) -> None:
        """Write and judge the previous step if it is pending; start copying this step's values.

        Raises:
            TypeError: If `step_output` is not the output of a step.
        """
        known |= self._known | _not_none(known)
        if self._run is None:
            self._run = self._begin(args, state, state.global_step - 1, known)
        if step_output is None and step_report is not None:
            step_output = step_report.output
        scale_before, self._scale_before = self._scale_before, None
        self._run.end_step(
            state.global_step,
            step_output,
            step_report,
            scale_before=scale_before,
            model=known.get("model"),
            optimizer=known.get("optimizer"),
        )
        for text in _missing_values(self._settings, step_output, step_report, known):
            self._warn_once(f"TrainingStateMonitor cannot show {text}")
        if self._settings.print_struct:
            _log_structure(known.get("model"))
            control.should_training_stop = True
        if control.should_save or control.should_evaluate:
            # A stock Trainer does not call `on_pre_save`. These flags are the same on all ranks.
            self._flush()

    def on_log(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        logs: Mapping[str, Any] | None = None,
        **__: Any,
    ) -> None:
        """Write and judge the last step; in a loop without outputs, judge the logged values."""
        del args
        self._flush()
        if self._run is not None:
            if logs and not self._run.has_outputs:
                self._run.log(state.global_step, logs)
            tracked = self._run.writers.tracked
            if logs and "loss" in logs and not tracked.keys() <= logs.keys():
                self._warn_once(
                    "TrainingStateMonitor cannot show metrics in trackers: use MFTrainer or give "
                    "`log_to`"
                )
            self._run.clock.restart()

    def bad_steps(self) -> Sequence[BadSteps]:
        """Return the steps whose anomalies have been recorded since the last call."""
        found, self._bad_steps = self._bad_steps, []
        if self._run is not None:
            found += self._run.bad_steps
            self._run.bad_steps.clear()
        return found

    def checkpoints_to_keep(self, saved: Sequence[Path]) -> Sequence[Path]:
        """Return the newest checkpoint from before the loss has left its course, if it has.

        All of them, if that cannot be read.
        """
        try:
            return to_return_to(saved[-1].parent, saved) if saved else ()
        except (OSError, ValueError):  # a damaged record must not end a save
            return saved

    def take_row_places(self, places: RowPlaces | None) -> None:
        """Receive the function that tells where the rows of a step are in the training data."""
        self._row_places = places

    def take_trainer(
        self,
        trainer: object | None,
        run_batch: Callable[[Mapping[str, Any]], Tensor] | None = None,
    ) -> None:
        """Receive the Trainer, and what computes the loss of a batch again."""
        self._trainer, self._run_batch = trainer, run_batch

    def record_call(
        self, network: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Record a call of a network that began before the monitor, for a replay."""
        if self._run is not None:
            self._run.record_call(network, positional, keywords)

    def take_batch(self, batch: Mapping[str, Any] | Sequence[Any]) -> None:
        """Receive a micro-batch, whose columns a loss outside of the network may use."""
        if self._run is not None:
            self._run.note_batch(batch)

    def take_loss(self, loss: Tensor) -> None:
        """Receive the loss of a micro-batch, to tell which one is not finite."""
        if self._run is not None:
            self._run.note_loss(loss)

    def take_samples(self, samples: Callable[[int], int] | None) -> None:
        """Receive the function that counts samples if the batch grows."""
        self._grown = samples

    @training_weights()
    def values_to_log(self) -> dict[str, float]:
        """Return the newest reported step's metrics for trackers, keyed by tag.

        `MFTrainer` adds them to its log. Synchronizes with the device, as logging does anyway.
        """
        self._flush()
        return {} if self._run is None else dict(self._run.writers.tracked)

    def on_evaluate(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        metrics: Mapping[str, Any] | None = None,
        **__: Any,
    ) -> None:
        """Write and judge the last step, record the weights' norms, and write the metrics."""
        del args
        if self._run is None:
            return
        self._run.pause()
        if state.is_world_process_zero:
            prefix = prefix_of(state)
            results = {
                prefix + name: float(value)
                for name, value in (metrics or {}).items()
                if isinstance(value, (int, float))
                and name != NO_RESULT
                and not name.endswith((*TIMINGS, "epoch"))
            }
            self._run.writers.write_evaluation(state.global_step, results)

    def on_pre_save(self, *_: Any, **__: Any) -> None:
        """Write and judge the last step, and gather the state of all ranks.

        The records of the step and the state of each rank then belong to the checkpoint.
        """
        if self._run is not None:
            self._run.before_save()

    def on_save(self, *_: Any, **__: Any) -> None:
        """Write and judge the last step, and record the norms of the weights."""
        if self._run is not None:
            self._run.pause()

    on_epoch_end = on_save

    def write_after_error(self) -> None:
        """Write the end of an episode that the error of the training has ended."""
        if self._run is not None:
            self._run.end_episode()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write and judge the last step, close all files, and warn if the training has diverged."""
        self._flush()
        run = self._run
        self._close()
        if run is not None:
            run.warn_of_divergence()
        self._known = {}

    @training_weights()
    def state(self) -> dict[str, Any]:
        """Return the state that a Trainer writes into its checkpoint.

        Starts no collective, because a Trainer calls this on the saving rank only. With several
        ranks, call `on_pre_save` on every rank first, as `MFTrainer` does: it writes and judges the
        last step, and gathers the usual local norms of all ranks. The state of one rank can then
        be restored on every rank.

        Returns:
            Settings under ``args``, usual norms and counts under ``attributes``, ready for JSON.
        """
        if num_ranks() == 1:
            self._flush()
        saved = self.saved_run if self._run is None else self._run.state_dict()
        return {"args": saved_settings(self._settings), "attributes": {"saved_run": saved}}

    def _begin(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        global_step: int,
        known: Mapping[str, Any],
    ) -> TrainingStateRun:
        settings = self._settings
        if settings.throughput_baseline and not global_batch_size(settings, state, args):
            self._warn_once(
                "TrainingStateMonitor cannot show throughput_linearity: the batch size is unknown; "
                "give `global_batch_size`"
            )
        run = TrainingStateRun(
            settings,
            args=args,
            state=state,
            global_step=global_step,
            model=known.get("model"),
            train_dataloader=known.get("train_dataloader"),
            tokenizer=known.get("processing_class"),
            row_places=self._row_places,
            grown=self._grown,
        )
        run.note_holder(self._trainer, self._run_batch)
        if self.saved_run is not None:
            run.load_state_dict(self.saved_run)
        run.clock.restart()
        return run

    def _flush(self) -> None:
        if self._run is not None:
            self._run.flush()

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._bad_steps += run.bad_steps
            self.saved_run = run.state_dict()
            if run.finder is not None:
                self._num_scale_overflows = run.finder.num_scale_overflows
            run.close()


def _not_none(known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: known[name] for name in ("model", "optimizer") if known.get(name) is not None}


def _missing_values(
    settings: TrainingStateSettings,
    output: Any,
    report: StepReport | None,
    known: Mapping[str, Any],
) -> list[str]:
    """Return a text for each kind of value that the loop does not provide, with the reason.

    Args:
        settings: Settings of the monitor.
        output: Output of a step; ``None`` if the loop passes none.
        report: Report of a step; ``None`` if the loop passes none.
        known: Other keywords of ``on_step_end``: ``model``, ``optimizer``.
    """
    missing = []
    if output is None:
        missing.append(
            "local norms, losses and the layer of an anomaly: the loop passes no `step_output`"
        )
    elif not hasattr(output, "local_norm") and not settings.replay:  # which finds the layer, too
        missing.append(
            "the layer of an anomaly: it needs mfwrap's step with "
            "StepConfig(local_norm=True), in a recipe runner_wrapper.local_norm"
        )
    has_norms = report is not None and report.reduction_norms is not None
    if settings.noise_scale_format and not has_norms:
        missing.append(
            "the noise scale: it needs two ranks whose gradients are averaged, "
            "StepConfig(local_norm=True), and a loop that passes a `step_report`"
        )
    if known.get("model") is None:
        if settings.weight_state_format or settings.optimizer_state_format or settings.replay:
            missing.append("weights, optimizer state and a replay: the loop passes no `model`")
    elif known.get("optimizer") is None and settings.optimizer_state_format:
        missing.append("optimizer state: the loop passes no `optimizer`")
    return missing


def _log_structure(model: nn.Module | None) -> None:
    """Log names and shapes of all trainable parameters."""
    for name, parameter in {} if model is None else trainable(model).items():
        run_logger(__package__).info("%s %s", name, tuple(parameter.shape))
