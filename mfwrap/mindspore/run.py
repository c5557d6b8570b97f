"""Run a training of `Model`: call its callbacks, do its updates, and decide when it stops."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from mfwrap.arguments import described
from mfwrap.checkpoints.ownership import OwnedFolders
from mfwrap.compatibility.torch import foreach_mul_
from mfwrap.mindspore.callback import (
    Callback,
    CallbackParameters,
    RunContext,
    as_trainer_callback,
)
from mfwrap.mindspore.cells import TrainOneStepWithLossScaleCell
from mfwrap.mindspore.data import Batches
from mfwrap.mindspore.train_network import TrainNetwork
from mfwrap.outputs import named_output
from mfwrap.records.run_files import owning_record_folders
from mfwrap.step.calls import NetworkCall
from mfwrap.step.cell import MFTrainOneStepCell
from mfwrap.step.parts.cell_parts import LossScaleHooks
from mfwrap.tensors.deferred import DeferredReads
from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.trainer.events import monitors

ModelCallback = Callback | TrainerCallback
"""A callback of MindSpore or of transformers."""

_IGNORED: Mapping[str, str] = {
    "should_evaluate": "set `valid_frequency` of `fit` instead",
    "should_save": "use the callback ModelCheckpoint instead, or train with MFTrainer",
}
"""Switches of transformers' control that `Model` ignores, and what to use instead."""


@final
class ModelRun:
    """Send the events of a training to its callbacks, as a Trainer of transformers does.

    MindSpore's callbacks are adapted by `as_trainer_callback` and get the ``on_train_*`` calls.

    Args:
        callbacks: MindSpore's and transformers' callbacks, called in this order.
        trained: Network with a training cell.
        batches: The training data.
        accelerator: Accelerator, for the rank and the number of ranks.
        epoch: Number of the last epoch.
        initial_epoch: Number of epochs that were done before this run.
        facts: Further facts for MindSpore's callbacks.
    """

    def __init__(
        self,
        callbacks: Sequence[ModelCallback],
        trained: TrainNetwork,
        batches: Batches,
        accelerator: Accelerator,
        *,
        epoch: int,
        initial_epoch: int,
        facts: Mapping[str, Any],
    ) -> None:
        self._cell = trained.checked_cell()
        optimizer = unwrapped_optimizer(self._cell.optimizer)
        self._num_batches = batches.num_batches
        self._callbacks = callbacks
        main = accelerator.is_main_process
        self.parameters = CallbackParameters(
            mode="train",
            network=trained.network,
            train_network=self._cell,
            optimizer=optimizer,
            train_dataset=batches.dataset,
            epoch_num=epoch - initial_epoch,
            batch_num=batches.num_batches,
            cur_epoch_num=initial_epoch + 1,
            cur_step_num=0,
            net_outputs=None,
            list_callback=list(callbacks),
            initial_step=0,
            last_save_ckpt_step=None,
            latest_ckpt_file=None,
            # The misspelling is MindSpore's; callbacks written for MindSpore read this name.
            loss_scale_mananger=trained.manager,
            device_number=accelerator.num_processes,
            parallel_mode="data_parallel" if accelerator.num_processes > 1 else "stand_alone",
            is_world_process_zero=main,
            **facts,
        )
        """Facts of the run for MindSpore's callbacks."""
        self.context = RunContext(self.parameters)
        self._state = TrainerState(
            epoch=float(initial_epoch),
            global_step=initial_epoch * batches.num_batches,
            max_steps=epoch * batches.num_batches,
            num_train_epochs=epoch,
            train_batch_size=batches.batch_size,
            is_local_process_zero=accelerator.is_local_main_process,
            is_world_process_zero=main,
        )
        self._control = TrainerControl()
        self._warned: set[str] = set()
        self._args = _arguments(epoch)
        # The handler warns if it is made without this callback, which decides in a Trainer when to
        # log, save and evaluate. `add_callback` warns about two callbacks of the same class.
        flow = DefaultFlowCallback()
        self._handler = CallbackHandler([flow], trained.network, None, optimizer, None)
        self._handler.callbacks = [
            as_trainer_callback(callback) if isinstance(callback, Callback) else callback
            for callback in callbacks
        ]
        # Callbacks use the loader's length as the length of an epoch. With a `sink_size` the epochs
        # have another length, so do not pass the loader to callbacks.
        self._handler.train_dataloader = None if batches.sinks else batches.dataset

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Enter MindSpore's callbacks; the monitors own the folders that they open in the block."""
        with contextlib.ExitStack() as entered:
            owned = entered.enter_context(contextlib.closing(OwnedFolders()))
            entered.enter_context(owning_record_folders(owned))
            for callback in self.mindspore_callbacks:
                entered.enter_context(callback)
            try:
                yield
            except BaseException:
                # If an evaluation of averaged weights failed, the model still holds the averages.
                # Restore the raw weights.
                for monitor in monitors(self._handler.callbacks):
                    monitor.put_weights_back()
                raise

    @property
    def stops(self) -> bool:
        """Whether a callback has asked the training to stop."""
        if self._control.should_training_stop:
            self.context.request_stop()
        return self.context.get_stop_requested()

    @property
    def epoch_stops(self) -> bool:
        """Whether a callback has asked this epoch, or the training, to stop."""
        return self._control.should_epoch_stop or self.stops

    def begin_epoch(self, number: int) -> None:
        """Call ``on_epoch_begin``; epochs count from 1."""
        self._control.should_epoch_stop = False
        self.parameters.cur_epoch_num = number
        self.send("on_epoch_begin")

    def begin_step(self) -> None:
        """Call ``on_step_begin``."""
        self.parameters.cur_step_num += 1
        self.send("on_step_begin")

    def end_step(self, outputs: Any) -> None:
        """Call ``on_step_end`` with the outputs of the cell."""
        self.parameters.net_outputs = outputs
        self._state.global_step += 1
        self._state.epoch = self._state.global_step / self._num_batches
        report = getattr(self._cell, "last_report", None)
        self.send("on_step_end", step_output=_output_with_loss(outputs), step_report=report)

    def end_epoch(self, *, evaluates: bool) -> None:
        """Call ``on_epoch_end``; with `evaluates`, an evaluation follows."""
        self._control.should_evaluate = evaluates
        self.send("on_epoch_end", evaluates=evaluates)

    def evaluated(self, metrics: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """Call ``on_evaluate`` after an evaluation.

        Args:
            metrics: Value of each metric of the model, by its name.
            results: `metrics` and, if known, ``eval_loss``.
        """
        self.parameters.update(metrics=dict(metrics), eval_results=dict(results))
        # transformers' callbacks expect the Trainer's names, which begin with ``eval_``.
        named = {f"eval_{name.removeprefix('eval_')}": value for name, value in results.items()}
        self._control.should_evaluate = False
        self.send("on_evaluate", metrics=named)
        self.parameters.pop("metrics")

    @property
    def mindspore_callbacks(self) -> list[Callback]:
        """MindSpore's callbacks, in the order in which they are called."""
        return [callback for callback in self._callbacks if isinstance(callback, Callback)]

    def send(self, event: str, *, evaluates: bool = False, **facts: Any) -> None:
        """Call a method of all callbacks, such as ``on_train_begin``.

        Args:
            event: Name of the method.
            evaluates: Whether an evaluation follows, so that `Model` itself asks for one.
            facts: Further keywords for transformers' callbacks.
        """
        self._control = self._handler.call_event(
            event, self._args, self._state, self._control, run_context=self.context, **facts
        )
        for switch, instead in _IGNORED.items():
            if not getattr(self._control, switch) or (evaluates and switch == "should_evaluate"):
                continue
            setattr(self._control, switch, False)
            if switch not in self._warned:
                self._warned.add(switch)
                msg = f"Model ignores `{switch}`, which a callback set in {event}; {instead}"
                warnings.warn(msg, stacklevel=2)


def _arguments(epoch: int) -> TrainingArguments:
    """Return arguments for callbacks that read them; `Model` itself uses none of them."""
    return TrainingArguments(
        output_dir=".",
        num_train_epochs=epoch,
        eval_strategy="no",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        # By default TrainingArguments resets accelerate's state, which would lose the ranks.
        accelerator_config={"use_configured_state": True},
    )


def _output_with_loss(outputs: Any) -> Any:
    """Return the outputs as monitors read them: an object with ``loss``, or the loss itself."""
    outputs = named_output(outputs)
    if isinstance(outputs, Tensor) or hasattr(outputs, "loss"):
        return outputs
    return outputs[0] if isinstance(outputs, tuple) and outputs else None


@final
class Updates:
    """Do the updates of a training within `running`, whose end reads the pending values.

    If the cell skips overflowing updates, they are passed on to the loss-scale manager on the host.
    A flag is read after the next step has been launched, so the device is busy during the read.

    Args:
        trained: Network with a training cell.
    """

    def __init__(self, trained: TrainNetwork) -> None:
        self._cell = trained.checked_cell()
        self._overflows = DeferredReads(trained.device)
        # Without an update cell of the manager, the cell is a plain one, which reports no overflow.
        manager = trained.manager if isinstance(self._cell, LossScaleHooks) else None
        drops = manager is not None and manager.get_drop_overflow_update()
        self._manager = manager if drops else None
        self._divisor = trained.divisor

    def __call__(self, call: NetworkCall) -> Any:
        """Do one update; return the cell's outputs.

        Raises:
            RuntimeError: If the cell raises ``RuntimeError``, or if more updates in a row
                overflowed than a dynamic manager allows.
        """
        cell: Any = self._cell
        outputs = cell(*call.arguments, **call.keywords)
        if (manager := self._manager) is not None:
            self._overflows.flush()
            self._overflows.submit(
                outputs.overflow.float().reshape(1),
                lambda values: manager.update_loss_scale(bool(values[0])),
            )
        return outputs

    def flush(self) -> None:
        """Read the pending values of the last update; step the schedule, and update the manager.

        Raises:
            RuntimeError: If too many updates in a row were skipped or overflowed.
        """
        if isinstance(self._cell, (TrainOneStepWithLossScaleCell, MFTrainOneStepCell)):
            self._cell.flush()
        self._overflows.flush()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Prepare the optimizer for the updates in the block, and call `flush` at its end."""
        try:
            with _dividing(unwrapped_optimizer(self._cell.optimizer), self._divisor):
                yield
        except BaseException:
            # The schedule has not yet stepped for the last update. Suppress an error of this flush,
            # because it would hide the first error.
            with contextlib.suppress(RuntimeError):
                self.flush()
            raise
        self.flush()


@contextlib.contextmanager
def _dividing(optimizer: Optimizer, divisor: float) -> Iterator[None]:
    """Within the block, divide gradients just before the optimizer runs.

    Source: MindSpore, the argument ``loss_scale`` of its optimizers.
    """
    if divisor == 1:
        yield
        return

    def divide(*_: Any) -> None:
        parameters: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        foreach_mul_([p.grad for p in parameters if p.grad is not None], 1 / divisor)

    handle = optimizer.register_step_pre_hook(divide)
    try:
        yield
    finally:
        handle.remove()


_OLDER = ("begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end")


def checked_callbacks(callbacks: object) -> list[ModelCallback]:
    """Return callbacks as a list.

    Args:
        callbacks: A callback, a list or tuple of callbacks, or ``None``.

    Raises:
        TypeError: If a callback is neither a `Callback` nor a ``transformers.TrainerCallback``.
    """
    if callbacks is None:
        return []
    listed: list[Any] = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in listed:
        if not isinstance(callback, (Callback, TrainerCallback)):
            msg = (
                "`callbacks` must be instances of mfwrap.callbacks.Callback or "
                f"transformers.TrainerCallback, got {described(callback)}"
            )
            raise TypeError(msg)
    return listed


def refuse_older_hooks(callbacks: Sequence[ModelCallback]) -> None:
    """Refuse callbacks that override methods with the older names.

    `Model.fit` both trains and evaluates, and the older names do not distinguish the two.

    Source: MindSpore, ``Model.fit``.

    Raises:
        ValueError: If a callback overrides one of these methods.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            continue
        overridden = [
            name for name in _OLDER if getattr(type(callback), name) is not getattr(Callback, name)
        ]
        if overridden:
            msg = (
                "`callbacks` of `fit` must override on_train_* or on_eval_* methods, because the "
                "older names do not distinguish training from evaluation, got "
                f"{type(callback).__name__} with {overridden}"
            )
            raise ValueError(msg)
