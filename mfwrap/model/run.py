"""One training of `Model`: what its callbacks of both kinds are told, and when it stops."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, final

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from mfwrap.arguments import described
from mfwrap.mindspore.managers import LossScaleManager
from mfwrap.model.callback import Callback, CallbackParameters, RunContext
from mfwrap.model.callback_adapter import AdaptedCallback, as_trainer_callback
from mfwrap.model.data import Batches
from mfwrap.model.train_network import TrainNetwork
from mfwrap.outputs import named_output
from mfwrap.step.cell import MFTrainOneStepCell
from mfwrap.step.forward import NetworkCall
from mfwrap.step.mindspore_cells import TrainOneStepWithLossScaleCell
from mfwrap.tensors.deferred import DeferredReads
from mfwrap.tensors.wrappers import unwrapped_optimizer

__all__ = [
    "ModelCallback",
    "ModelRun",
    "Updates",
    "checked_callbacks",
    "refuse_older_hooks",
]


ModelCallback = Callback | TrainerCallback
"""A callback of MindSpore's kind or of transformers'."""


def checked_callbacks(callbacks: object) -> list[ModelCallback]:
    """Return callbacks as a list.

    Args:
        callbacks: One, a list or tuple of them, or ``None``.

    Raises:
        TypeError: If one is of neither kind.
    """
    if callbacks is None:
        return []
    listed: list[Any] = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in listed:
        if not isinstance(callback, (Callback, TrainerCallback)):
            msg = (
                "`callbacks` must be Callbacks of mfwrap.callbacks or transformers.TrainerCallbacks"
                f", got {described(callback)}"
            )
            raise TypeError(msg)
    return listed


def refuse_older_hooks(callbacks: Sequence[ModelCallback]) -> None:
    """Refuse callbacks with only the older names of methods, where training and evaluation mix.

    Source: MindSpore, ``Model.fit``.

    Raises:
        ValueError: If there is one.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            continue
        overridden = [
            name for name in _OLDER if getattr(type(callback), name) is not getattr(Callback, name)
        ]
        if overridden:
            msg = (
                "`callbacks` of `fit` must override on_train_* and on_eval_*, which older names "
                f"cannot tell apart, got {type(callback).__name__} with {overridden}"
            )
            raise ValueError(msg)


_OLDER = ("begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end")


_UNHEARD: Mapping[str, str] = {
    "should_evaluate": "`valid_frequency` of `fit` says when it evaluates",
    "should_save": "give it a ModelCheckpoint, or train with MFTrainer",
}
"""Wishes of transformers' callbacks that nothing comes of, and what to do."""


class _LoopDecides(DefaultFlowCallback):
    """In place of the Trainer's own flow, without which its handler warns."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Decide nothing."""

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Decide nothing."""


@final
class ModelRun:
    """Tells callbacks of a training, in transformers' events.

    Args:
        callbacks: Of both kinds, called in their order.
        trained: Has a cell.
        batches: The training data.
        accelerator: Knows the ranks.
        epoch: Number of the last epoch.
        initial_epoch: Epochs done before.
        facts: What MindSpore's callbacks are told beside.
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
        self._entered = contextlib.ExitStack()
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
            # As MindSpore spells it.
            loss_scale_mananger=trained.manager,
            device_number=accelerator.num_processes,
            parallel_mode="data_parallel" if accelerator.num_processes > 1 else "stand_alone",
            is_world_process_zero=main,
            **facts,
        )
        """What MindSpore's callbacks are told."""
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
        self._said: set[str] = set()
        self._args = _arguments(epoch)
        self._handler = CallbackHandler([_LoopDecides()], trained.network, None, optimizer, None)
        # Not by `add_callback`, which makes objects of classes and warns of two of one class.
        self._handler.callbacks += [
            as_trainer_callback(callback) if isinstance(callback, Callback) else callback
            for callback in callbacks
        ]
        # A callback that asks for its length wants that of an epoch.
        self._handler.train_dataloader = None if batches.sinks else batches.dataset

    def __enter__(self) -> Self:
        for callback in self._callbacks:
            if isinstance(callback, Callback):
                self._entered.enter_context(callback)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            for callback in self._handler.callbacks:
                # Averages that an evaluation has put into the model.
                put_back = getattr(callback, "put_weights_back", None)
                if put_back is not None:
                    put_back()
        self._entered.__exit__(kind, error, traceback)

    @property
    def stops(self) -> bool:
        """Whether a callback has asked the training to stop."""
        if self._control.should_training_stop:
            self.context.request_stop()
        return self.context.get_stop_requested()

    @property
    def epoch_stops(self) -> bool:
        """Whether this epoch is to be broken off, or the training."""
        return self._control.should_epoch_stop or self.stops

    def begin(self) -> None:
        """Tell of the begin of the training."""
        self._tell("on_train_begin")

    def begin_epoch(self, number: int) -> None:
        """Tell of the begin of an epoch, which has a number from 1."""
        self._control.should_epoch_stop = False
        self.parameters.cur_epoch_num = number
        self._tell("on_epoch_begin")

    def begin_step(self) -> None:
        """Tell that a batch is there."""
        self.parameters.cur_step_num += 1
        self._tell("on_step_begin")

    def end_step(self, outputs: Any) -> None:
        """Tell of an update and of what the cell has returned."""
        self.parameters.net_outputs = outputs
        self._state.global_step += 1
        self._state.epoch = self._state.global_step / self._num_batches
        report = getattr(self._cell, "last_report", None)
        self._tell("on_step_end", step_output=_output_with_loss(outputs), step_report=report)

    def end_epoch(self, *, evaluates: bool) -> None:
        """Tell of the end of an epoch, and whether an evaluation follows."""
        self._control.should_evaluate = evaluates
        self._tell("on_epoch_end", evaluates=evaluates)

    def evaluated(self, metrics: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """Tell of an evaluation.

        Args:
            metrics: Those that the model was given.
            results: The same with ``eval_loss``.
        """
        self.parameters.update(metrics=dict(metrics), eval_results=dict(results))
        # As the Trainer names them.
        named = {f"eval_{name.removeprefix('eval_')}": value for name, value in results.items()}
        self._control.should_evaluate = False
        self._tell("on_evaluate", metrics=named)
        self.parameters.pop("metrics")

    def end(self) -> None:
        """Tell of the end of the training."""
        self._tell("on_train_end")

    @property
    def mindspore_callbacks(self) -> list[Callback]:
        """Callbacks of MindSpore's kind."""
        adapted = (c for c in self._handler.callbacks if isinstance(c, AdaptedCallback))
        return [callback.callback for callback in adapted]

    def _tell(self, event: str, *, evaluates: bool = False, **facts: Any) -> None:
        self._control = self._handler.call_event(
            event, self._args, self._state, self._control, run_context=self.context, **facts
        )
        for wish, instead in _UNHEARD.items():
            if not getattr(self._control, wish) or (evaluates and wish == "should_evaluate"):
                continue
            setattr(self._control, wish, False)
            if wish not in self._said:
                self._said.add(wish)
                msg = f"a callback set `{wish}` in {event}, which Model does not heed; {instead}"
                warnings.warn(msg, stacklevel=2)


def _arguments(epoch: int) -> TrainingArguments:
    """Return arguments for callbacks that read them; the loop itself reads none."""
    return TrainingArguments(
        output_dir=".",
        num_train_epochs=epoch,
        eval_strategy="no",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        # Otherwise it would set up devices anew, and accelerate would forget the ranks.
        accelerator_config={"use_configured_state": True},
    )


def _output_with_loss(outputs: Any) -> Any:
    """Return what a monitor can read: a named tuple with a loss, or the loss alone."""
    outputs = named_output(outputs)
    if isinstance(outputs, Tensor) or hasattr(outputs, "loss"):
        return outputs
    return outputs[0] if isinstance(outputs, tuple) and outputs else None


@final
class Updates:
    """Does updates, as long as the context lasts; what is pending then is brought up to date.

    Args:
        trained: Has a cell.
    """

    def __init__(self, trained: TrainNetwork) -> None:
        self._cell = trained.checked_cell()
        self._follower = _ManagerFollower(trained.manager, trained.device)
        self._dividing = _dividing(unwrapped_optimizer(self._cell.optimizer), trained.divisor)

    def __call__(self, call: NetworkCall) -> Any:
        """Do one update; return what the cell returns.

        Raises:
            RuntimeError: If a dynamic manager has heard of too many overflows in a row.
        """
        outputs = self._cell(*call.arguments, **call.keywords)  # type: ignore[operator]
        self._follower.follow(outputs)
        return outputs

    def flush(self) -> None:
        """Wait for the last update: step the schedule, tell the manager.

        Raises:
            RuntimeError: If too many updates in a row were skipped.
        """
        if isinstance(self._cell, (TrainOneStepWithLossScaleCell, MFTrainOneStepCell)):
            self._cell.flush()
        self._follower.flush()

    def __enter__(self) -> Self:
        self._dividing.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._dividing.__exit__(kind, error, traceback)
        # The schedule's last step is due, whatever else went wrong.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(RuntimeError):
            self.flush()


@final
class _ManagerFollower:
    """Keeps a manager on the host in step with the update cell on the device.

    The manager hears of a step when the device does the next one.

    Args:
        manager: Is told of overflows; ``None``, or one that drops no update, is told nothing.
        device: The training device.
    """

    def __init__(self, manager: LossScaleManager | None, device: torch.device) -> None:
        drops = manager is not None and manager.get_drop_overflow_update()
        self._manager = manager if drops else None
        self._reads = DeferredReads(device)

    def follow(self, outputs: Any) -> None:
        """Take a cell's outputs."""
        if self._manager is None:
            return
        self._reads.flush()
        manager, overflow = self._manager, outputs.overflow
        self._reads.submit(
            overflow.float().reshape(1), lambda values: manager.update_loss_scale(bool(values[0]))
        )

    def flush(self) -> None:
        """Wait for what is pending, and tell it."""
        self._reads.flush()


@contextlib.contextmanager
def _dividing(optimizer: Optimizer, divisor: float) -> Iterator[None]:
    """Divide gradients just before the optimizer runs, as long as the context lasts.

    Source: MindSpore, the argument ``loss_scale`` of its optimizers.
    """
    if divisor == 1:
        yield
        return

    def divide(*_: Any) -> None:
        held: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        torch._foreach_mul_([p.grad for p in held if p.grad is not None], 1 / divisor)

    handle = optimizer.register_step_pre_hook(divide)
    try:
        yield
    finally:
        handle.remove()
