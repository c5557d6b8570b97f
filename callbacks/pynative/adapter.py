"""Adapt the callbacks of MindFormers' PyNative trainer to the Trainer."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mfwrap.arguments import described
from mfwrap.callbacks.pynative.facts import (
    AbsentValue,
    PyNativeSchedule,
    PyNativeSection,
    PyNativeState,
    pynative_arguments,
    pynative_state,
)
from mfwrap.callbacks.shared.run_log import WarnOnce
from mfwrap.collectives import add_over_ranks, num_ranks
from mfwrap.model import Callback
from mfwrap.tensors.wrappers import unwrapped_network, unwrapped_optimizer
from mfwrap.trainer import MonitorCallback

_EVENTS = (
    "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin",
    "on_step_end",
)  # fmt: skip

_KEYWORDS = ("model", "optimizer", "lr_scheduler", "train_dataset", "eval_dataset")
_STEP_END_KEYWORDS = (
    "loss", "grad_norm", "monitor", "metric_reduce_group", "metric_reduce_group_size",
    "pp_metric_reduce_group", "pp_metric_reduce_group_size", "has_last",
)  # fmt: skip


class PyNativeCallback:
    """Base class of PyNative's callbacks; each method does nothing until it is overridden.

    In a script of MindFormers, write ``from mfwrap.callbacks import PyNativeCallback as
    TrainerCallback`` instead of ``from mindformers.pynative.callback import TrainerCallback``, and
    give the callback to a Trainer with `adapt_pynative`, which says what the methods get. What they
    return is ignored. An error that they raise ends the training.

    Source: MindFormers, ``mindformers.pynative.callback.TrainerCallback``.

    Example:
        >>> class PrintLoss(PyNativeCallback):
        ...     def on_step_end(self, args, state, **kwargs):
        ...         print(f"{state.global_step}/{args.training.steps} {kwargs['loss'].item()}")
    """

    def on_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Never called, as in PyNative."""

    def on_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Never called, as in PyNative."""

    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Called before a training, also before one that resumes."""

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Called after a training."""

    def on_epoch_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Called before each epoch, except the first."""

    def on_epoch_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Called after the last step of each epoch."""

    def on_step_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Called before an update."""

    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Called after an update."""


def is_pynative_callback(callback: object) -> bool:
    """Return whether PyNative could call an object, or objects of a class, as a callback.

    An object need not have all methods of `PyNativeCallback`. At least one is needed, and each must
    take what PyNative passes: ``(args, state, **kwargs)``. Callbacks of transformers and of
    MindSpore are no callbacks of PyNative.
    """
    kind = callback if isinstance(callback, type) else type(callback)
    if issubclass(kind, (TrainerCallback, Callback)):
        return False
    methods = {event: getattr(kind, event) for event in _EVENTS if hasattr(kind, event)}
    return bool(methods) and all(_fits(event, method) for event, method in methods.items())


def _fits(event: str, method: Callable[..., Any]) -> bool:
    names = (*_KEYWORDS, *(_STEP_END_KEYWORDS if event == "on_step_end" else ()))
    try:
        inspect.signature(method).bind(None, None, None, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def adapt_pynative(callback: Any) -> TrainerCallback:
    """Adapt a callback of MindFormers' PyNative trainer to the Hugging Face Trainer.

    The callback gets PyNative's events, in PyNative's order:

    - ``args`` has the sections ``training``, ``optimizer``, ``lr_scheduler``, ``model`` (the
      network's ``config``) and ``parallelism``. ``args.training_arguments`` is the Trainer's own
      object.
    - ``state`` is a `PyNativeState`.
    - ``kwargs`` has ``model`` (a list of one network), ``optimizer``, ``lr_scheduler`` (also called
      with a step), and the data loaders as ``train_dataset`` and ``eval_dataset`` (``None`` before
      the first evaluation).
    - ``kwargs`` of ``on_step_end`` also has ``loss`` and ``grad_norm``, shape ``()``, float32, on
      the training device: the mean loss of this update over its micro-batches and all ranks, and
      the global norm before clipping. Making them does not synchronize with the device. With
      several ranks, the loss costs one all-reduce of one number per step.

    What PyNative has and a Trainer has not, such as ``monitor``, raises an error when it is used.
    A stock Trainer does not pass a step's results to callbacks, so both values are ``None`` there.
    All ranks must have the callback.

    Args:
        callback: Object with methods of `PyNativeCallback`, or a class without arguments.

    Raises:
        TypeError: If PyNative could not call `callback`, see `is_pynative_callback`.

    Example:
        >>> adapt_pynative(PyNativeCallback()).on_step_end  # doctest: +ELLIPSIS
        <bound method AdaptedPyNativeCallback.on_step_end of ...>
    """
    if not is_pynative_callback(callback):
        msg = (
            "`callback` must have methods of PyNative's callbacks, such as "
            f"`on_step_end(self, args, state, **kwargs)`, got {described(callback)}"
        )
        raise TypeError(msg)
    made = callback() if isinstance(callback, type) else callback
    # Each callback gets a new subclass, because a Trainer warns about two callbacks of the same
    # class. Its name is in the list of mfwrap's callbacks, which `MFTrainer` compares over ranks.
    kind: type[AdaptedPyNativeCallback] = type(
        f"Adapted{type(made).__name__}", (AdaptedPyNativeCallback,), {"callback": made}
    )
    return kind()


class AdaptedPyNativeCallback(MonitorCallback):
    """Call a callback of PyNative in transformers' events; created by `adapt_pynative`."""

    callback: ClassVar[Any]
    """The adapted callback."""

    def __init__(self) -> None:
        self._args: PyNativeSection | None = None
        self._state: PyNativeState | None = None
        self._samples: Callable[[int], int] | None = None
        self._warn = WarnOnce(__package__)

    def take_samples(self, samples: Callable[[int], int] | None) -> None:
        """Receive the function that counts samples if the batch grows."""
        self._samples = samples

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **facts: Any,
    ) -> None:
        """Begin a training.

        Raises:
            TypeError: If the loop is not a Trainer.
        """
        del control
        # `Model` passes arguments that it does not use itself.
        if not isinstance(args, TrainingArguments) or "run_context" in facts:
            msg = (
                f"{type(self.callback).__name__} must run in a Trainer, whose arguments PyNative's "
                "callbacks read; in another loop, use a monitor of mfwrap or a `Callback`"
            )
            raise TypeError(msg)
        self._args = self._state = None
        self._send("on_train_begin", args, state, facts)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: Any
    ) -> None:
        """Begin an epoch; PyNative does not announce the first one, nor the rest of an epoch."""
        del control
        if state.global_step and _is_whole(state):
            pynative = self._send("on_epoch_begin", args, state, facts)
            pynative.epoch = float(state.epoch or 0)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: Any
    ) -> None:
        """Begin an update."""
        del control
        self._send("on_step_begin", args, state, facts)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        step_output: Any = None,
        **facts: Any,
    ) -> None:
        """End an update."""
        del control
        if step_output is None:
            self._warn(
                f"{type(self.callback).__name__} gets no `loss`, `grad_norm` and "
                "`state.loss_scale` (they are None): this Trainer does not pass the results of a "
                "step to callbacks; use MFTrainer"
            )
        loss = None if step_output is None else _mean_over_ranks(step_output.loss)
        norm = getattr(step_output, "global_norm", None)
        results = {
            "loss": loss,
            # A copy, because PyNative's callbacks divide values in place.
            "grad_norm": None if norm is None else norm.clone(),
            "monitor": AbsentValue("monitor"),
            **_groups(),
        }
        scale = getattr(step_output, "loss_scale", None)
        self._send("on_step_end", args, state, facts, results, loss_scale=scale)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: Any
    ) -> None:
        """End an epoch; PyNative does not announce the end of an epoch that was cut short."""
        del control
        if state.global_step and _is_whole(state):
            self._send("on_epoch_end", args, state, facts)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: Any
    ) -> None:
        """End a training."""
        del control
        self._send("on_train_end", args, state, facts, is_train_begin=False, is_train_end=True)

    def _send(
        self,
        event: str,
        args: TrainingArguments,
        state: TrainerState,
        facts: dict[str, Any],
        results: dict[str, Any] | None = None,
        **changes: Any,
    ) -> PyNativeState:
        """Call a method of the callback, if it has it; return the state that the method has got.

        Args:
            event: Name of the method.
            args: The Trainer's arguments.
            state: The Trainer's state.
            facts: Keywords that the Trainer passes to callbacks.
            results: Further keywords of the method.
            changes: Attributes of PyNative's state that change.
        """
        loader, schedule = facts.get("train_dataloader"), facts.get("lr_scheduler")
        schedule = getattr(schedule, "scheduler", schedule)  # without accelerate's wrapper
        optimizer, model = unwrapped_optimizer(facts.get("optimizer")), facts.get("model")
        if self._args is None or self._state is None:
            known = {
                "model": model,
                "optimizer": optimizer,
                "lr_scheduler": schedule,
                "train_dataloader": loader,
            }
            self._args = pynative_arguments(args, state, known, grows=self._samples is not None)
            self._state = pynative_state(args, state, known)
        self._state.update(state)
        if self._samples is not None:
            rows = self._args.training.local_batch_size * self._args.parallelism.data_parallel
            self._state.grow(self._samples, rows, is_done=event == "on_step_end")
        for name, value in changes.items():
            setattr(self._state, name, value)
        method = getattr(self.callback, event, None)
        if method is not None:
            method(
                self._args,
                self._state,
                model=[] if model is None else [unwrapped_network(model)],
                optimizer=optimizer,
                lr_scheduler=None if schedule is None else PyNativeSchedule(schedule),
                train_dataset=loader,
                eval_dataset=facts.get("eval_dataloader"),
                **(results or {}),
            )
        return self._state


def _is_whole(state: TrainerState) -> bool:
    """Return whether a Trainer is between two epochs."""
    return float(state.epoch or 0).is_integer()


def _mean_over_ranks(loss: Tensor) -> Tensor:
    """Return the mean of a loss over all ranks, as a new tensor; reached by all ranks."""
    mean = loss.detach().clone()
    add_over_ranks(mean)
    return mean.div_(num_ranks())


def _groups() -> dict[str, Any]:
    """Return PyNative's groups of ranks: without pipeline, and without groups for one rank."""
    groups: dict[str, Any] = {
        "metric_reduce_group": None,
        "metric_reduce_group_size": None,
        "pp_metric_reduce_group": None,
        "pp_metric_reduce_group_size": None,
        "has_last": True,
    }
    if num_ranks() > 1:
        groups |= {
            name: AbsentValue(name) for name in ("metric_reduce_group", "metric_reduce_group_size")
        }
    return groups
