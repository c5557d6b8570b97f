"""MindSpore's callbacks in a loop that has transformers' events."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from mfwrap.arguments import described
from mfwrap.model.callback import Callback, CallbackParameters, RunContext

__all__ = ["AdaptedCallback", "as_trainer_callback"]


def as_trainer_callback(callback: Callback) -> TrainerCallback:
    """Return a MindSpore callback as one that a Trainer takes.

    It gets the ``on_train_*`` calls. ``net_outputs`` is the step's output in an `MFTrainer` and
    ``None`` in a stock Trainer, which shows none. Where an evaluation follows the end of an epoch,
    ``on_train_epoch_end`` comes after it, with its ``metrics``.

    Args:
        callback: What is called.

    Raises:
        TypeError: If `callback` is no `Callback`.

    Example:
        >>> as_trainer_callback(Callback()).on_train_begin  # doctest: +ELLIPSIS
        <bound method AdaptedCallback.on_train_begin of ...>
    """
    if not isinstance(callback, Callback):
        msg = f"`callback` must be a Callback, got {described(callback)}"
        raise TypeError(msg)
    # One class for each: a Trainer warns of two callbacks of one class.
    kind: type[AdaptedCallback] = type(f"Adapted{type(callback).__name__}", (AdaptedCallback,), {})
    return kind(callback)


class AdaptedCallback(TrainerCallback):
    """Calls a MindSpore callback at transformers' events; `as_trainer_callback` makes it.

    `Model` hands its own ``run_context`` to every event; without one, as in a Trainer, the facts
    come from the state and the arguments.

    Args:
        callback: What is called.
    """

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        """What is called."""
        self._context = RunContext(CallbackParameters())
        self._awaits_evaluation = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        run_context: RunContext | None = None,
        **facts: Any,
    ) -> None:
        """Begin a run."""
        own = RunContext(CallbackParameters(mode="train", net_outputs=None))
        self._context = own if run_context is None else run_context
        self._awaits_evaluation = False
        if run_context is None:
            self._tell_run(args, state, facts)
        self.callback.on_train_begin(self._context)
        self._pass_on_stop(control)

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        run_context: RunContext | None = None,
        **_: Any,
    ) -> None:
        """Begin an epoch; end the one before, if its evaluation did not come."""
        del args
        self._end_epoch(control)
        if run_context is None:
            # The epoch that begins: the Trainer's is the part of it that is done.
            self._parameters.cur_epoch_num = math.floor(state.epoch or 0) + 1
        self.callback.on_train_epoch_begin(self._context)
        self._pass_on_stop(control)

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Begin an update."""
        del args, state
        self.callback.on_train_step_begin(self._context)
        self._pass_on_stop(control)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        run_context: RunContext | None = None,
        step_output: Any = None,
        **_: Any,
    ) -> None:
        """End an update."""
        del args
        if run_context is None:
            self._parameters.update(cur_step_num=state.global_step, net_outputs=step_output)
        self.callback.on_train_step_end(self._context)
        self._pass_on_stop(control)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """End an epoch, or wait for the evaluation that is due."""
        del args, state
        self._awaits_evaluation = True
        if not control.should_evaluate:
            self._end_epoch(control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        run_context: RunContext | None = None,
        metrics: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Take the metrics; end the epoch that waits for them."""
        del args, state
        if run_context is None:
            results = dict(metrics or {})
            self._parameters.update(metrics=results, eval_results=results)
        self._end_epoch(control)
        if run_context is None:
            # They are of this epoch alone.
            self._parameters.pop("metrics")

    def on_train_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """End a run."""
        del args, state
        self._end_epoch(control)
        self.callback.on_train_end(self._context)

    @property
    def _parameters(self) -> CallbackParameters:
        return self._context.original_args()

    def _end_epoch(self, control: TrainerControl) -> None:
        if self._awaits_evaluation:
            self._awaits_evaluation = False
            self.callback.on_train_epoch_end(self._context)
            self._pass_on_stop(control)

    def _pass_on_stop(self, control: TrainerControl) -> None:
        if self._context.get_stop_requested():
            control.should_training_stop = True

    def _tell_run(
        self, args: TrainingArguments, state: TrainerState, facts: Mapping[str, Any]
    ) -> None:
        """Tell what does not change in the course of a Trainer's run."""
        dataset = facts.get("train_dataloader")
        network: nn.Module | None = facts.get("model")
        optimizer = facts.get("optimizer")
        epochs = math.ceil(state.num_train_epochs)
        num_batches = math.ceil(state.max_steps / max(epochs, 1))
        if dataset is not None and has_length(dataset):
            num_batches = math.ceil(len(dataset) / args.gradient_accumulation_steps)
        self._parameters.update(
            network=network,
            train_network=network,
            optimizer=getattr(optimizer, "optimizer", optimizer),
            loss_fn=None,
            train_dataset=dataset,
            epoch_num=epochs,
            batch_num=num_batches,
            cur_epoch_num=math.floor(state.epoch or 0) + 1,
            cur_step_num=state.global_step,
            device_number=args.world_size,
            list_callback=[self.callback],
            is_world_process_zero=state.is_world_process_zero,
        )
