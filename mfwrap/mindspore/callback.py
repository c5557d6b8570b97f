"""MindSpore's callbacks, the facts of a run that they get, and their adapter to the Trainer."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, final

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, has_length

from mfwrap.arguments import described
from mfwrap.names.counterparts import find
from mfwrap.trainer.events import MonitorCallback


@final
class CallbackParameters(dict[str, Any]):
    """Hold the facts of a run for its callbacks, which read them as items or as attributes.

    Source: MindSpore's ``cb_params``. In MindSpore a missing attribute raises ``KeyError``, so
    ``hasattr`` and ``getattr`` with a default fail. Here it raises ``AttributeError``.

    Example:
        >>> parameters = CallbackParameters(cur_step_num=3)
        >>> parameters.cur_step_num, parameters.get("metrics"), hasattr(parameters, "metrics")
        (3, None, False)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            found = find("cb_params", name)
            advice = f"; they have {sorted(self)}"
            if found is not None and found.verdict != "same":
                advice = found.advice("; ", ", and ")
            msg = f"the parameters of this run have no `{name}`{advice}"
            raise AttributeError(msg) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@final
class RunContext:
    """The argument of each callback method: facts of the run, and a way to stop it.

    Source: MindSpore, ``train.RunContext``.

    Args:
        original_args: Facts of the run; updated in place during the run.
    """

    def __init__(self, original_args: CallbackParameters) -> None:
        self._original_args = original_args
        self._stop_requested = False

    def original_args(self) -> CallbackParameters:
        """Return the facts of the run.

        In a training the facts are ``network``, ``train_network``, ``optimizer``, ``loss_fn``,
        ``epoch_num``, ``batch_num``, ``cur_epoch_num`` and ``cur_step_num`` (both from 1),
        ``net_outputs``, ``train_dataset``, ``list_callback`` and ``mode``; after an evaluation also
        ``metrics`` and ``eval_results``. ``net_outputs`` are tensors on the training device, and
        reading one on the host synchronizes with the device.
        """
        return self._original_args

    def request_stop(self) -> None:
        """Ask the run to stop after this step, or after this epoch if called at the epoch's end."""
        self._stop_requested = True

    def get_stop_requested(self) -> bool:
        """Return whether a callback has asked the run to stop."""
        return self._stop_requested


class Callback:
    """Base class of MindSpore's callbacks; each method does nothing until it is overridden.

    `Model.train` and `Model.fit` call the ``on_train_*`` methods; `Model.eval` and `Model.fit` call
    the ``on_eval_*`` methods. By default these methods call the methods with the older names:
    ``begin``, ``epoch_begin``, ``step_begin``, ``step_end``, ``epoch_end`` and ``end``. The older
    names do not distinguish training from evaluation, so `Model.fit` refuses callbacks that
    override them.

    A callback is a context manager: a run enters it at the start and exits it at the end, also if
    the run raises an error.

    Source: MindSpore, ``train.Callback``.

    Example:
        >>> class StopAtStep(Callback):
        ...     def on_train_step_end(self, run_context):
        ...         if run_context.original_args().cur_step_num == 3:
        ...             run_context.request_stop()
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a training must know to resume, ready for JSON; by default nothing.

        A Trainer saves it in its checkpoints; see `as_trainer_callback`. MindSpore has no such
        method. Must not start a collective.
        """
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned; called after `on_train_begin`."""

    def save_into(self, folder: Path) -> None:
        """Write tensors into a checkpoint of `MFTrainer`, on the rank that saves."""

    def resume_from(self, folder: Path) -> None:
        """Read what `save_into` has written; called on every rank, after `load_state_dict`."""

    def ends_after(self, state_dict: Mapping[str, Any]) -> bool:
        """Return whether the callback had ended the training whose checkpoint has this state.

        ``train(resume_from_checkpoint="auto")`` of an `MFTrainer` then makes no further update.
        """
        del state_dict
        return False

    def begin(self, run_context: RunContext) -> None:
        """Called before a run."""

    def epoch_begin(self, run_context: RunContext) -> None:
        """Called before an epoch."""

    def step_begin(self, run_context: RunContext) -> None:
        """Called before a step."""

    def step_end(self, run_context: RunContext) -> None:
        """Called after a step."""

    def epoch_end(self, run_context: RunContext) -> None:
        """Called after an epoch."""

    def end(self, run_context: RunContext) -> None:
        """Called after a run."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """Called before a training."""
        self.begin(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Called before an epoch of a training."""
        self.epoch_begin(run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Called before an update."""
        self.step_begin(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Called after an update."""
        self.step_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Called after an epoch of a training, and after its evaluation if there is one."""
        self.epoch_end(run_context)

    def on_evaluation(self, run_context: RunContext) -> None:
        """Called after each evaluation of a Trainer with ``eval_strategy="steps"``.

        The facts of the run then include the evaluation's ``metrics``. MindSpore has no such
        method, because its training evaluates at the ends of epochs alone.
        """

    def on_train_end(self, run_context: RunContext) -> None:
        """Called after a training, also if a callback stopped it."""
        self.end(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Called before an evaluation."""
        self.begin(run_context)

    def on_eval_epoch_begin(self, run_context: RunContext) -> None:
        """Called before an evaluation reads its data."""
        self.epoch_begin(run_context)

    def on_eval_step_begin(self, run_context: RunContext) -> None:
        """Called before a batch of an evaluation."""
        self.step_begin(run_context)

    def on_eval_step_end(self, run_context: RunContext) -> None:
        """Called after a batch of an evaluation."""
        self.step_end(run_context)

    def on_eval_epoch_end(self, run_context: RunContext) -> None:
        """Called after the last batch of an evaluation, before its metrics are computed."""
        self.epoch_end(run_context)

    def on_eval_end(self, run_context: RunContext) -> None:
        """Called after an evaluation, with its metrics."""
        self.end(run_context)


_FACTS_WITH_OTHER_ATTRIBUTES: Mapping[str, str] = {
    "network": "network",
    "optimizer": "optimizer",
    "train_dataset": "data set",
    "train_network": "training cell",
}
"""Facts of a run whose objects are PyTorch's or mfwrap's, and their kind in the table of names."""


@contextlib.contextmanager
def explaining_attributes(parameters: CallbackParameters) -> Iterator[None]:
    """Within the block, explain an attribute of MindSpore's objects that PyTorch's objects lack.

    A callback that was written for MindSpore reads ``cb_params.optimizer.global_step``, for
    example. The optimizer is the user's own: nothing is put on it, and no other object takes its
    place. Instead, the AttributeError says what to write. A stand-in with MindSpore's attributes
    would have to return tensors with ``asnumpy`` and schedules that are called with a step.

    Args:
        parameters: Facts of the run.

    Raises:
        AttributeError: In place of one about an object of the run, or about a tensor.
    """
    try:
        yield
    except AttributeError as error:
        kind = _kind_of(error.obj, parameters)
        found = None if kind is None else find(kind, error.name or "")
        if found is None:
            raise
        owner = type(error.obj).__name__
        lacks = f"`{owner}` has no `{error.name}`, which MindSpore's {kind} has"
        msg = lacks + found.advice("; ", ", and ")
        raise AttributeError(msg, name=error.name, obj=error.obj) from error


def _kind_of(value: object, parameters: CallbackParameters) -> str | None:
    """Return the kind of an object of the run in the table of names; None if it has none."""
    if isinstance(value, Tensor):
        return "tensor"
    for fact, kind in _FACTS_WITH_OTHER_ATTRIBUTES.items():
        if value is not None and value is parameters.get(fact):
            return kind
    inside = getattr(parameters.get("train_network"), "network", None)
    return "network" if value is not None and value is inside else None


def as_trainer_callback(callback: Callback) -> TrainerCallback:
    """Adapt a MindSpore callback to the Hugging Face Trainer.

    The callback gets the ``on_train_*`` calls. ``net_outputs`` is the step's output in an
    `MFTrainer`, and ``None`` in a stock Trainer, which does not pass its output to callbacks.

    If an evaluation follows an epoch, ``on_train_epoch_end`` is called after the evaluation. The
    facts of the run then include the evaluation's ``metrics``. With ``eval_strategy="steps"``,
    ``on_evaluation`` is called after each evaluation instead, and ``evaluates_by_steps`` is true
    among the facts. An epoch that another callback or a signal has cut short has no end.

    Checkpoints have the callback's state. `MFTrainer` always restores it; a stock Trainer does so
    with ``restore_callback_states_from_checkpoint=True``, but without the files of `save_into`.

    Args:
        callback: The callback to adapt.

    Raises:
        TypeError: If `callback` is not a `Callback`.

    Example:
        >>> as_trainer_callback(Callback()).on_train_begin  # doctest: +ELLIPSIS
        <bound method AdaptedCallback.on_train_begin of ...>
    """
    if not isinstance(callback, Callback):
        msg = f"`callback` must be a Callback, got {described(callback)}"
        raise TypeError(msg)
    # Each callback gets a new subclass, because a Trainer warns about two callbacks of the same
    # class.
    name = f"Adapted{type(callback).__name__}"
    kind: type[AdaptedCallback] = type(name, (AdaptedCallback,), {"callback": callback})
    return kind()


class AdaptedCallback(MonitorCallback, ExportableState):
    """Call a MindSpore callback in transformers' events; created by `as_trainer_callback`.

    `Model` passes its ``run_context`` and keeps its facts up to date. A Trainer has no
    ``run_context``; the facts of the run then come from the Trainer's state and arguments.
    """

    # Of the class, because a stock Trainer restores a callback by calling its class.
    callback: ClassVar[Callback]
    """The adapted callback."""

    def __init__(self) -> None:
        self._context = RunContext(CallbackParameters())
        self._owns_facts = True
        self._awaits_evaluation = False
        self.callback_state: dict[str, Any] | None = None
        """State of the callback in the checkpoint that a training resumes from."""
        self._checkpoint: Path | None = None
        self._grows = False

    def state(self) -> dict[str, Any]:
        """Return the callback's state, in the form of ``ExportableState``."""
        return {"args": {}, "attributes": {"callback_state": self.callback.state_dict()}}

    def save_into(self, folder: Path, args: Any, model: nn.Module) -> None:
        """Write the callback's tensors into a checkpoint."""
        del model
        if args.should_save:
            self.callback.save_into(folder)

    def resume_from(self, folder: Path) -> None:
        """Keep the checkpoint, which the callback reads when the training has begun."""
        self._checkpoint = folder

    def take_samples(self, samples: Callable[[int], int] | None) -> None:
        """Note that epochs have different numbers of updates if the batch grows."""
        self._grows = samples is not None

    def ends_after(self, attributes: Mapping[str, Any]) -> bool:
        """Return whether the callback had ended the training with these saved attributes."""
        return self.callback.ends_after(attributes.get("callback_state") or {})

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        run_context: RunContext | None = None,
        **facts: Any,
    ) -> None:
        """Begin a run."""
        self._owns_facts = run_context is None
        self._context = run_context or RunContext(self._facts(args, state, facts))
        self._awaits_evaluation = False
        self._send("on_train_begin")
        state_dict, self.callback_state = self.callback_state, None
        checkpoint, self._checkpoint = self._checkpoint, None
        if state_dict:
            self.callback.load_state_dict(state_dict)
        if checkpoint is not None:
            self.callback.resume_from(checkpoint)
        self._apply_stop(control)

    def on_epoch_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Begin an epoch; before that, end the previous epoch if its evaluation was left out."""
        del args
        self._end_epoch(control)
        if self._owns_facts:
            # `state.epoch` counts the finished epochs, so the number of this epoch is 1 higher.
            self._parameters.cur_epoch_num = math.floor(state.epoch or 0) + 1
        self._send("on_train_epoch_begin")
        self._apply_stop(control)

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Begin an update."""
        del args, state
        self._send("on_train_step_begin")
        self._apply_stop(control)

    def on_step_end(
        self, args: Any, state: Any, control: TrainerControl, step_output: Any = None, **_: Any
    ) -> None:
        """End an update."""
        del args
        if self._owns_facts:
            self._parameters.update(cur_step_num=state.global_step, net_outputs=step_output)
        self._send("on_train_step_end")
        self._apply_stop(control)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """End an epoch; if an evaluation is due, let `on_evaluate` end the epoch instead."""
        del args
        if self._owns_facts and self._is_cut_short(state, control):
            return
        self._awaits_evaluation = True
        if not control.should_evaluate or self._parameters.get("evaluates_by_steps"):
            self._end_epoch(control)

    def _is_cut_short(self, state: TrainerState, control: TrainerControl) -> bool:
        """Return whether something else than the callback has stopped a Trainer in an epoch.

        A resumed training continues the epoch, which must not end twice.
        """
        is_stopped = control.should_training_stop and state.global_step < state.max_steps
        is_whole = float(state.epoch or 0).is_integer()
        return is_stopped and not is_whole and not self._context.get_stop_requested()

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add the evaluation's metrics to the facts of the run; end the epoch if it is over."""
        del args, state
        if self._owns_facts:
            results = dict(metrics or {})
            self._parameters.update(metrics=results, eval_results=results)
        if self._parameters.get("evaluates_by_steps"):
            self._send("on_evaluation")
            self._parameters.pop("metrics", None)
            self._apply_stop(control)
        else:
            self._end_epoch(control)

    def on_train_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """End a run."""
        del args, state
        self._end_epoch(control)
        self._send("on_train_end")
        # The user may call `evaluate` after the training.
        self._parameters.pop("evaluates_by_steps", None)

    @property
    def _parameters(self) -> CallbackParameters:
        return self._context.original_args()

    def _send(self, event: str) -> None:
        with explaining_attributes(self._parameters):
            getattr(self.callback, event)(self._context)

    def _end_epoch(self, control: TrainerControl) -> None:
        if self._awaits_evaluation:
            self._awaits_evaluation = False
            self._send("on_train_epoch_end")
            if self._owns_facts:
                # The next epoch may have no evaluation.
                self._parameters.pop("metrics", None)
            self._apply_stop(control)

    def _apply_stop(self, control: TrainerControl) -> None:
        if self._context.get_stop_requested():
            control.should_training_stop = True

    def _facts(
        self, args: TrainingArguments, state: TrainerState, facts: Mapping[str, Any]
    ) -> CallbackParameters:
        """Return the facts of a Trainer's run at its start."""
        dataset = facts.get("train_dataloader")
        network: nn.Module | None = facts.get("model")
        optimizer = facts.get("optimizer")
        epochs = math.ceil(state.num_train_epochs)
        num_batches = math.ceil(state.max_steps / max(epochs, 1))
        if self._grows:
            num_batches = state.max_steps  # the only number that no step of an epoch exceeds
        elif dataset is not None and has_length(dataset):
            num_batches = math.ceil(len(dataset) / args.gradient_accumulation_steps)
        return CallbackParameters(
            mode="train",
            net_outputs=None,
            network=network,
            train_network=network,
            # Pass the optimizer without accelerate's wrapper.
            optimizer=getattr(optimizer, "optimizer", optimizer),
            loss_fn=None,
            train_dataset=dataset,
            epoch_num=epochs,
            batch_num=num_batches,
            cur_epoch_num=math.floor(state.epoch or 0) + 1,
            cur_step_num=state.global_step,
            device_number=args.world_size,
            list_callback=[self.callback],
            evaluates_by_steps=args.eval_strategy == IntervalStrategy.STEPS,
            is_world_process_zero=state.is_world_process_zero,
        )
