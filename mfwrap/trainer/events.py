"""Pass a step's results to callbacks of `MFTrainer`, call their extra methods, handle SIGTERM."""

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from torch import Tensor, nn
from transformers import DefaultFlowCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl
from transformers.trainer_utils import SaveStrategy

from mfwrap.accelerate.attachment import Attachment
from mfwrap.arguments import described, takes
from mfwrap.collectives import Section, section_clock
from mfwrap.outputs import StepReport
from mfwrap.records.checkpoint_requests import CheckpointRequests
from mfwrap.records.skipped_rows import RowPlaces
from mfwrap.schedules.deferred import DeferredSchedule, undefer_schedule
from mfwrap.termination import RankTermination
from mfwrap.trainer.view import TrainerView

StepLines = Literal["never", "without a bar", "always"]

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

_ENDING_EVENTS = frozenset({"on_step_end", "on_epoch_end"})
"""Names of the events in which `TerminationCallback` may act."""


class BadSteps(NamedTuple):
    """Steps of a training that went wrong, for `Rollback`."""

    kind: str
    """What went wrong, one of `MonitorCallback.bad_kinds`."""

    first_step: int
    last_step: int
    is_shared: bool
    """Whether all ranks report the same at the same step. If not, other ranks may know nothing."""

    rows: tuple[tuple[int, int, int], ...] = ()
    """Rows that are at fault in a single step: rank, micro-batch of the rank, and row in the
    micro-batch, each from 0. Empty if they are unknown."""

    description: str = ""
    """What went wrong, in one line."""


class MonitorCallback(TrainerCallback):
    """A transformers callback with additional methods that `MFTrainer` calls.

    Override the methods that you need; by default each does nothing. `Model` calls only
    `put_weights_back`. A stock Trainer calls none of these methods.

    If the callback is an ``ExportableState``, `MFTrainer` always restores its saved attributes.
    """

    saves_checkpoints: bool = False
    """Whether the callback requests checkpoints. `MFTrainer` then checks before the first step that
    the disk has room for one."""

    saves_in_background: bool = False
    """Whether the callback wants `MFTrainer` to write checkpoints in the background, as its
    argument ``async_save`` does."""

    step_lines: StepLines = "never"
    """Whether the callback prints each step: ``"without a bar"`` if `MFTrainer` shows no progress
    bar in a terminal, ``"always"`` instead of such a bar, or ``"never"``."""

    evaluation_lines: bool = False
    """Whether the callback prints the results of evaluations. Without a progress bar, `MFTrainer`
    then does not print them."""

    names_rows: bool = False
    """Whether the callback names rows of batches, and `take_row_places` is called."""

    bad_kinds: tuple[str, ...] = ()
    """Kinds of steps that `bad_steps` can report."""

    def bad_steps(self) -> Sequence[BadSteps]:
        """Return the steps found to be bad since the last call, also after ``on_train_end``.

        `MFTrainer` calls it after each step if it may go back to a checkpoint. It must not
        synchronize with the device, nor start a collective.
        """
        return ()

    def checkpoints_to_keep(self, saved: Sequence[Path]) -> Sequence[Path]:
        """Return the checkpoints that ``save_total_limit`` is not to remove.

        Called on the process that removes checkpoints, in any thread, after each save.

        Args:
            saved: The run's checkpoints, in the order of their steps.
        """
        del saved
        return ()

    def take_row_places(self, places: RowPlaces | None) -> None:
        """Receive the function that tells where the rows of a step are in the training data.

        Called before ``on_train_begin``, and at the end of the training with ``None``. The function
        must not be called later than at the end of the next step.
        """

    def take_trainer(
        self,
        trainer: TrainerView | None,
        run_batch: Callable[[Mapping[str, Any]], Tensor] | None = None,
    ) -> None:
        """Receive the Trainer, whose attributes may hold other models, such as a teacher.

        Called before ``on_train_begin`` if the callback names rows, and at the end of the training
        with ``None``.

        Args:
            trainer: The Trainer.
            run_batch: Computes the loss of a batch again; see
                `mfwrap.trainer.loss_again.loss_of_batch`.
        """

    def take_batch(self, batch: Mapping[str, Any]) -> None:
        """Receive a micro-batch after its forward and backward, as the Trainer's step got it.

        Called if the callback names rows. It must not synchronize with the device.
        """

    def take_loss(self, loss: Tensor) -> None:
        """Receive the loss of the micro-batch that `take_batch` has got, shape ``()``.

        It must not synchronize with the device.
        """

    def take_samples(self, samples: Callable[[int], int] | None) -> None:
        """Receive the function that counts samples if the batch grows.

        Called before ``on_train_begin``, and at the end of the training with ``None``.

        Args:
            samples: Returns the number of samples of the first updates on all processes together,
                by their number; ``None`` if each update has as many samples as any other.
        """

    def take_evaluation_loader(self, make_loader: Callable[[], Any] | None) -> None:
        """Receive the function that returns the data loader of the evaluations.

        Called before ``on_train_begin``.

        Args:
            make_loader: Returns the data loader of the first data set; ``None`` without held-out
                rows.
        """

    def values_to_log(self) -> dict[str, float]:
        """Return values, by name, that `MFTrainer` adds to each training log."""
        return {}

    def on_pre_save(
        self, args: Any, state: TrainerState, control: TrainerControl, **known: Any
    ) -> None:
        """Finish what is pending, because a checkpoint is about to be written.

        Called on every rank at the same moment, so a callback may start collectives here.
        ``ExportableState.state`` must not start any: a Trainer calls it on the saving rank only.
        Records that are written here belong to the checkpoint. Records that are written later, for
        example in ``on_save``, are removed when a training resumes from the checkpoint.

        In a loop of your own, call it on every rank before you save.

        Args:
            args: The trainer's arguments; ``None`` in a loop without a Trainer.
            state: State of the loop.
            control: Flags of the loop.
            known: Further keywords: ``model`` and ``optimizer``.
        """

    def save_into(self, folder: Path, args: Any, model: nn.Module) -> None:
        """Write the callback's files into a checkpoint before it is moved into place.

        Called on every rank; ``args.should_save`` says which rank writes. Do not use transformers'
        ``on_save`` for this: by then the checkpoint is in place and its files are listed. If the
        process ended before the callback wrote its file, no check would detect the missing file.

        Args:
            folder: Folder of the checkpoint.
            args: The trainer's arguments.
            model: The trainer's model.
        """

    def resume_from(self, folder: Path) -> None:
        """Receive the checkpoint that a training resumes from; called before ``on_train_begin``."""

    def ends_after(self, attributes: Mapping[str, Any]) -> bool:
        """Return whether the callback had ended the training whose checkpoint it is.

        ``train(resume_from_checkpoint="auto")`` then makes no further update.

        Args:
            attributes: Attributes of the callback in the checkpoint, see ``ExportableState``.
        """
        del attributes
        return False

    def expect_background_saves(self) -> None:
        """Learn that `saves_in_background` has an effect; called before ``on_train_begin``."""

    def expect_evaluations(self) -> None:
        """Learn that the Trainer will enter `evaluation`; called before ``on_train_begin``."""

    def evaluation(
        self, state: TrainerState, model: nn.Module
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context of an evaluation of the training, of all data sets.

        `MFTrainer` enters it after the events that request the evaluation, and leaves it after
        ``on_evaluate``. It does not enter it if ``trainer.evaluate()`` is called by hand.

        Args:
            state: State of the training.
            model: The trainer's model.
        """
        del state, model
        return _NOTHING

    def put_weights_back(self) -> None:
        """Restore the raw weights if the model holds averaged weights; called after an error."""

    def write_after_error(self) -> None:
        """Write the numbers of the steps before an error of the training; by default, nothing."""


def monitors(callbacks: Iterable[object]) -> list[MonitorCallback]:
    """Return the callbacks that are instances of `MonitorCallback`."""
    return [callback for callback in callbacks if isinstance(callback, MonitorCallback)]


def finish_pending(trainer: TrainerView) -> None:
    """Write what is pending before a save: that of the callbacks, and rows; on every rank."""
    known = {"model": trainer.model, "optimizer": trainer.optimizer}
    for callback in monitors(trainer.callback_handler.callbacks):
        callback.on_pre_save(trainer.args, trainer.state, trainer.control, **known)
    trainer.loss_by_row.write()


@contextlib.contextmanager
def evaluating(
    callbacks: Iterable[object], state: TrainerState, model: nn.Module
) -> Iterator[None]:
    """Run an evaluation of a training within the block; see `MonitorCallback.evaluation`."""
    with contextlib.ExitStack() as stack:
        for callback in monitors(callbacks):
            stack.enter_context(callback.evaluation(state, model))
        yield


@final
class PostponedSave:
    """Postpone a checkpoint that is due after the last step of an epoch.

    It is written when the epoch's evaluation and log are done. A stock Trainer saves first. A run
    that resumes from such a checkpoint begins with the next epoch, so it would lack this evaluation
    and log. In `on_log` and `on_evaluate` of the last step, callbacks see that a checkpoint is due,
    and can cancel it.
    """

    def __init__(self) -> None:
        self.is_due = False
        """Whether a checkpoint is due at the end of this epoch."""
        self.must_save = False
        """Whether this is the end of the epoch, and the postponed checkpoint is not written yet."""

    def on_step_end(self, _args: Any, state: TrainerState, control: TrainerControl) -> None:
        """Postpone the checkpoint of the last step of an epoch."""
        self.is_due = control.should_save and _ends_epoch(state)
        control.should_save = control.should_save and not self.is_due

    def on_log(self, _args: Any, _state: TrainerState, control: TrainerControl) -> None:
        """Take the decision of callbacks about a checkpoint that is due."""
        if self.is_due:
            self.is_due, control.should_save = control.should_save, False

    def on_evaluate(self, args: Any, _state: TrainerState, control: TrainerControl) -> None:
        """Take the decision of callbacks, unless the Trainer decides after each evaluation."""
        if self.is_due:
            self.is_due = control.should_save and args.save_strategy != SaveStrategy.BEST
            control.should_save = False

    def on_epoch_end(self, *_: Any) -> None:
        """Have the postponed checkpoint written next."""
        self.is_due, self.must_save = False, self.is_due

    def on_save(self, *_: Any) -> None:
        """Forget a postponed checkpoint: it is written."""
        self.is_due = self.must_save = False

    # An error, or an evaluation with the strategy "best", may have prevented a postponed save.
    on_train_begin = on_epoch_begin = on_save


@final
class RequestedSave:
    """Save a checkpoint that another program has asked for; see `CheckpointRequests`.

    Args:
        requests: Requests of the training.
    """

    def __init__(self, requests: CheckpointRequests) -> None:
        self._requests = requests

    def on_step_end(self, _args: Any, state: TrainerState, control: TrainerControl) -> None:
        """Request the checkpoint."""
        control.should_save = self._requests.is_due(state.global_step) or control.should_save

    def on_save(self, _args: Any, state: TrainerState, _control: TrainerControl) -> None:
        """Answer the request."""
        self._requests.saved(Path(f"checkpoint-{state.global_step}"))


class StepCallbackHandler(CallbackHandler):
    """Callback handler that passes the step's results to callbacks; see `add_step_to_events`."""

    def follow(
        self,
        trainer: TrainerView,
        before_event: Callable[[str], bool | None],
        after_event: Callable[[str, TrainerControl], None],
        termination: RankTermination,
        listeners: Sequence[object],
    ) -> None:
        """Begin to pass results and events of a trainer; see `add_step_to_events`."""
        self._trainer = trainer
        self._before_event, self._after_event = before_event, after_event
        self._termination = TerminationCallback(termination)
        self._postponed = PostponedSave()
        self._listeners = (*listeners, self._postponed)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # This object's class was made by `add_step_to_events`, so no module has it.
        return new_step_handler, (type(self).__mro__[2],), self.__getstate__()

    def add_callback(self, callback: Any) -> None:
        """Add a callback; raise ``TypeError`` if it is not a transformers callback."""
        check_callback(callback)
        super().add_callback(callback)  # type: ignore[no-untyped-call]  # (transformers)

    def call_event(
        self, event: str, args: Any, state: Any, control: TrainerControl, **keywords: Any
    ) -> TrainerControl:
        """Call all callbacks, and the parts of the trainer before and after them.

        For ``on_step_end``, callbacks get the step's output and report as keywords.
        """
        attached = self._trainer.attached.attachment
        # Right after `on_optimizer_step`, the Trainer reads whether the update was skipped. If not,
        # it steps the schedule. If only the device knows the true value, the Trainer gets False
        # there, so that the host does not wait. This is safe: if the update was skipped, the
        # deferred schedule drops the step just before the next update.
        attached.answers_late = False
        if self._before_event(event) is False:
            if event == "on_save":  # the callbacks hear of it later, see `tell_saved`
                self._postponed.on_save()
                self._after_event(event, control)
            return control
        control.should_save |= self._postponed.is_due and event in {"on_log", "on_evaluate"}
        call: Callable[..., TrainerControl] = super().call_event
        if event == "on_step_end" and attached.last_report is not None:
            call = functools.partial(self._call_with_step, attached.last_report)
        # What callbacks do for these events does not belong to a step.
        is_pause = event in {"on_evaluate", "on_log", "on_save"}
        with (
            section_clock.left_out() if is_pause else _NOTHING,
            self._calling_termination() if event in _ENDING_EVENTS else _NOTHING,
        ):
            changed = call(event, args, state, control, **keywords)
            for listener in self._listeners:
                listen = getattr(listener, event, None)
                if listen is not None:
                    listen(args, state, changed)
        if event == "on_step_begin":
            section_clock.begin_step()
        attached.answers_late = event == "on_optimizer_step"
        changed.should_save |= self._postponed.must_save
        self._after_event(event, changed)
        return changed

    def tell_saved(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call ``on_save`` for a checkpoint that was written in the background.

        Args:
            args: The trainer's arguments.
            state: State of the training at the step of the checkpoint.
            control: The trainer's control. What is due in the present step stays due.
        """
        with section_clock.left_out():
            changed: TrainerControl = super().call_event(  # type: ignore[no-untyped-call]  # (transformers)
                "on_save", args, state, control
            )
            for listener in self._listeners:
                if listener is not self._postponed and hasattr(listener, "on_save"):
                    listener.on_save(args, state, changed)
        return changed

    def _call_with_step(
        self, report: StepReport, event: str, args: Any, state: Any, control: Any, **keywords: Any
    ) -> TrainerControl:
        """Call all callbacks with the step's results, as far as they take these keywords."""
        changed: TrainerControl = control
        results = {"step_output": report.output, "step_report": report}
        if all(_taken(callback, event) == set(results) for callback in self.callbacks):
            return super().call_event(  # type: ignore[no-any-return,no-untyped-call]  # (transformers)
                event, args, state, control, **keywords, **results
            )
        # transformers gives all callbacks the same keywords, so call each alone. A callback may
        # change the list meanwhile.
        alone = copy.copy(self)
        for callback in self.callbacks:
            alone.callbacks = [callback]
            taken = {name: results[name] for name in _taken(callback, event)}
            changed = super(StepCallbackHandler, alone).call_event(  # type: ignore[no-untyped-call]  # (transformers)
                event, args, state, changed, **keywords, **taken
            )
        return changed

    @contextlib.contextmanager
    def _calling_termination(self) -> Iterator[None]:
        """Within the block, have the callback for SIGTERM in the list.

        At any other time the list is that of a stock Trainer, which users read and change.
        """
        callbacks = self.callbacks
        # Call it after the callback that decides when to evaluate and save, whose decision it may
        # cancel, and before the user's callbacks, which may prepare for an evaluation.
        flows = [isinstance(callback, DefaultFlowCallback) for callback in callbacks]
        place = max((number for number, is_flow in enumerate(flows, 1) if is_flow), default=0)
        callbacks.insert(place, self._termination)
        try:
            yield
        finally:
            # A callback may have emptied or replaced the list.
            with contextlib.suppress(ValueError):
                self.callbacks.remove(self._termination)


_taken_by_function: MutableMapping[Any, frozenset[str]] = weakref.WeakKeyDictionary()


def _taken(callback: object, event: str) -> frozenset[str]:
    """Return which results of a step the callback's method takes as keywords."""
    method = getattr(callback, event)
    function = getattr(method, "__func__", method)
    try:
        taken = _taken_by_function.get(function)
    except TypeError:  # an object that is called as a function, and cannot be a key
        return _taken_keywords(method)
    if taken is None:
        taken = _taken_by_function[function] = _taken_keywords(method)
    return taken


def _taken_keywords(method: Callable[..., Any]) -> frozenset[str]:
    return frozenset(name for name in ("step_output", "step_report") if takes(method, name))


def _ends_epoch(state: TrainerState) -> bool:
    """Return whether the step is the last one of its epoch or of the training."""
    is_complete = state.epoch is not None and float(state.epoch).is_integer()
    return is_complete or state.global_step >= state.max_steps


def check_callback(callback: object) -> None:
    """Raise ``TypeError`` unless `callback` is a transformers callback, or a class of callbacks.

    A Trainer does not check this: a callback of `Model` would raise at the first event.
    """
    kind = callback if isinstance(callback, type) else type(callback)
    if not issubclass(kind, TrainerCallback):
        msg = (
            f"`callbacks` must hold transformers.TrainerCallback, got {described(callback)}; "
            "convert a callback of `Model` with mfwrap.callbacks.as_trainer_callback, and one of "
            "MindFormers' PyNative trainer with mfwrap.callbacks.adapt_pynative"
        )
        raise TypeError(msg)


def check_given_callbacks(
    init: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Check the argument `callbacks` of a call of a Trainer's ``__init__``; see `check_callback`.

    Args:
        init: ``__init__`` of the Trainer.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    given = dict(zip(inspect.signature(init).parameters, args, strict=False)) | dict(kwargs)
    for callback in given.get("callbacks") or ():
        check_callback(callback)


def add_step_to_events(
    trainer: TrainerView,
    before_event: Callable[[str], bool | None],
    after_event: Callable[[str, TrainerControl], None],
    termination: RankTermination,
    *listeners: object,
) -> None:
    """Give a trainer a callback handler that passes the step's results to callbacks.

    The trainer's handler stays as it is. The new one has its attributes, such as the list of
    callbacks. Its class is a subclass of `StepCallbackHandler` and of the class of the old one.

    Args:
        trainer: A trainer that already has its callback handler.
        before_event: Function that is called with the name of each event, before the callbacks. If
            it returns False, nobody hears of the event.
        after_event: Function that is called with the name of each event and the trainer's control,
            which it may change, after the callbacks and the listeners.
        termination: Decides after which step SIGTERM ends the training.
        listeners: Objects with a method for each event that concerns them, named like the event. It
            is called after the callbacks with the trainer's arguments, state and control, which it
            may change.
    """
    before = trainer.callback_handler
    handler = new_step_handler(type(before))
    vars(handler).update(vars(before))
    handler.follow(trainer, before_event, after_event, termination, listeners)
    trainer.callback_handler = handler


@functools.cache
def _step_handler_class(kind: Any) -> type[StepCallbackHandler]:
    return type(f"Step{kind.__name__}", (StepCallbackHandler, kind), {})


def new_step_handler(kind: Any) -> StepCallbackHandler:
    """Return an empty step handler of an earlier class `kind`; unpickling a handler calls this."""
    return object.__new__(_step_handler_class(kind))


@contextlib.contextmanager
def flushed_at_end(attached: Attachment, callbacks: list[Any]) -> Iterator[None]:
    """Train within the block; then flush the step, and stop deferring the steps of schedules.

    After an error, the callbacks also put the raw weights back into the model, and write what they
    hold. An error for lack of memory outside of the updates is explained here.

    Args:
        attached: Step of the training.
        callbacks: Callbacks, whose `MonitorCallback.put_weights_back` and `write_after_error` are
            called after an error.
    """
    try:
        yield
        attached.flush()
    except BaseException as error:
        attached.explain_out_of_memory(error, Section.DATA)
        # Flush after an error, too: the schedule's last step is still to be done. A second error
        # is suppressed, because it would hide the first.
        with contextlib.suppress(RuntimeError):
            attached.flush()
        for callback in monitors(callbacks):
            callback.put_weights_back()
            # Numbers cannot be read from a device that has failed.
            with contextlib.suppress(RuntimeError, OSError):
                callback.write_after_error()
        raise
    finally:
        # After the training, a schedule must advance as soon as its `step` is called.
        for schedule in attached.step.end_schedules():
            if isinstance(schedule, DeferredSchedule):
                undefer_schedule(schedule)


class TerminationCallback(TrainerCallback):
    """Save and stop after the current step if the process of any rank has received SIGTERM.

    An evaluation that is due after this step is done before the stop. An evaluation draws random
    numbers, so skipping it would make a resumed training differ from an uninterrupted training.

    Args:
        termination: Decides which step is the last one.
    """

    def __init__(self, termination: RankTermination) -> None:
        self._termination = termination

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Request a checkpoint and the end of the training if this is the last step."""
        del args
        if self._termination.stops_after(state.global_step):
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """If training stops in the middle of an epoch, cancel the evaluation and checkpoint here.

        The last step has been saved already. If it completed the epoch, its checkpoint is saved
        after the evaluation.
        """
        del args
        if self._termination.is_stopping and not _ends_epoch(state):
            control.should_evaluate = control.should_save = False


def restore_in_place(
    exporting: Sequence[object],
    saved: Mapping[str, Any],
    *,
    includes_others: bool,
    is_appended: bool,
) -> None:
    """Restore exported states from a checkpoint without replacing the objects that exported them.

    Saved attributes are set. If an object is not a `MonitorCallback`, its constructor is called
    first, on the object itself, with the saved arguments.

    Args:
        exporting: Callbacks and the trainer's control. Only objects that export a state are
            restored.
        saved: States by the name of the object's class. Each is a dict, or a list of dicts if there
            are several objects of the class; states go to objects in order.
        includes_others: Whether to restore objects that are not a `MonitorCallback`, too.
        is_appended: Whether a list may hold states of several saves, the newest ones last, as a
            stock Trainer writes it.

    Raises:
        TypeError: If a constructor does not take the saved arguments.
    """
    stateful = [
        each
        for each in exporting
        if isinstance(each, ExportableState)
        and (includes_others or isinstance(each, MonitorCallback))
    ]
    for name, data in saved.items():
        same_class = [each for each in stateful if type(each).__name__ == name]
        states = data if isinstance(data, list) else [data]
        if is_appended and same_class and len(states) % len(same_class) == 0:
            states = states[-len(same_class) :]
        for each, state in zip(same_class, states, strict=False):
            if not isinstance(each, MonitorCallback):
                _construct_again(each, state.get("args", {}))
            for attribute, value in state.get("attributes", {}).items():
                setattr(each, attribute, value)


def _construct_again(exporting: Any, arguments: Mapping[str, Any]) -> None:
    try:
        exporting.__init__(**arguments)
    except TypeError as error:
        msg = (
            f"cannot restore {type(exporting).__name__} with the saved arguments {arguments} "
            f"({error}); return all arguments of the constructor in `state`, or set "
            "`restore_callback_states_from_checkpoint` to False"
        )
        raise TypeError(msg) from error
