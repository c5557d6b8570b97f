"""What a callback of MindFormers' PyNative trainer reads: arguments, state, schedule and groups."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, TrainerState, TrainingArguments

from mfwrap.callbacks.shared.progress import (
    RunSettings,
    data_parallel_size,
    global_batch_size,
    ranks_layout,
    run_length,
)
from mfwrap.names import hint
from mfwrap.names.counterparts import Counterpart, find
from mfwrap.schedules.formula import FormulaLR
from mfwrap.tensors.wrappers import unwrapped_network

_SETTINGS, _STATE = "PyNative settings", "PyNative state"
"""Kinds of objects in the table of names, which says what to write for what a Trainer lacks."""

_ELSEWHERE = Counterpart("write", "`args.training_arguments` or accelerate's `AcceleratorState`")
_IN_GROUPS = Counterpart("write", "`weight_decay` of the optimizer's `param_groups`")
_ABSENT_IN_TRAINING = {
    "rampup_batch_size": Counterpart("write", "`state.global_batch_size`, the rows of this update")
}
_ABSENT_IN_OPTIMIZER = {
    "learning_rate": Counterpart("write", "`args.lr_scheduler.learning_rate`"),
    "weight_decay_exclude": _IN_GROUPS,
    "weight_decay_include": _IN_GROUPS,
}


def _refusal(place: str, name: str, instead: Counterpart) -> str:
    return f"`{place}.{name}` is unknown in a Trainer{instead.advice('; ', ', and ')}"


@final
class PyNativeSection(Mapping[str, Any]):
    """A section of the arguments, which callbacks read as attributes, by ``get`` and as items.

    A setting that PyNative has and a Trainer has not raises an error that says what to do instead,
    also with ``get``. For any other name, ``get`` returns its default.

    Args:
        path: Path of the section, such as ``args.training``, for messages.
        values: Settings and sections by name.
        absent: Returns what to write for a setting that PyNative has and a Trainer has not;
            ``None`` if PyNative has no setting of this name.
    """

    def __init__(
        self,
        path: str,
        values: Mapping[str, Any],
        absent: Callable[[str], Counterpart | None] = lambda _: None,
    ) -> None:
        self._path, self._absent = path, absent
        # A dict, because PyNative's callbacks copy sections with `deepcopy`.
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `copy` and `pickle` ask before there are any values
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        raise AttributeError(self._sentence(name))

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        raise KeyError(self._sentence(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{self._path}: {self._values}"

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting; `default` if PyNative has no setting of this name.

        Raises:
            AttributeError: If PyNative has the setting and a Trainer has not.
        """
        if name not in self._values and self._absent(name) is not None:
            raise AttributeError(self._sentence(name))
        return self._values.get(name, default)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings that a Trainer has, as nested dicts."""
        return {
            name: value.to_dict() if hasattr(value, "to_dict") else value
            for name, value in self._values.items()
        }

    def _sentence(self, name: str) -> str:
        instead = self._absent(name)
        if instead is None:
            return f"`{self._path}` has no `{name}`{hint(name, self._values)}"
        return _refusal(self._path, name, instead)


def pynative_arguments(
    args: TrainingArguments, state: TrainerState, facts: Mapping[str, Any], *, grows: bool = False
) -> PyNativeSection:
    """Return a Trainer's settings as PyNative's arguments.

    Args:
        args: The Trainer's arguments.
        state: State of the Trainer at the start of a training.
        facts: Keywords that the Trainer passes to callbacks.
        grows: Whether the batch grows.
    """
    total = global_batch_size(RunSettings(), state, args)
    layout = ranks_layout()
    training = {
        "steps": state.max_steps,
        # With `split_batches` the Trainer's own size is that of all ranks.
        "local_batch_size": total // (args.gradient_accumulation_steps * data_parallel_size()),
        "global_batch_size": total,
        "max_norm": args.max_grad_norm,
        "seed": args.seed,
        "deterministic": args.full_determinism,
        **({} if grows else {"rampup_batch_size": None}),
    }
    parallelism = {
        "data_parallel": data_parallel_size(),
        "tensor_parallel": 1 if layout is None else layout.tp_size,
        "context_parallel": 1 if layout is None else layout.cp_size,
        "pipeline_parallel": 1,
    }
    sections = {
        "training": PyNativeSection("args.training", training, _ABSENT_IN_TRAINING.get),
        "parallelism": PyNativeSection("args.parallelism", parallelism, lambda _: _ELSEWHERE),
        "optimizer": PyNativeSection(
            "args.optimizer",
            _optimizer_settings(facts.get("optimizer")),
            _ABSENT_IN_OPTIMIZER.get,
        ),
        "lr_scheduler": PyNativeSection(
            "args.lr_scheduler",
            _schedule_settings(facts.get("lr_scheduler"), facts.get("optimizer"), args, state),
        ),
        "model": PyNativeSection("args.model", _model_settings(facts.get("model"))),
        "training_arguments": args,
    }
    return PyNativeSection("args", sections, functools.partial(find, _SETTINGS))


def _optimizer_settings(optimizer: Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {}
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in optimizer.defaults.items()
        if name != "lr"
    }
    # Groups without decay are those that PyNative's rules exempt, so the others have the setting.
    decays = [group["weight_decay"] for group in optimizer.param_groups if "weight_decay" in group]
    return {
        "type": type(optimizer).__name__,
        **settings,
        **({"weight_decay": max(decays)} if decays else {}),
    }


def _schedule_settings(
    schedule: Any, optimizer: Optimizer | None, args: TrainingArguments, state: TrainerState
) -> dict[str, Any]:
    if schedule is None or optimizer is None:
        return {}
    kind, settings = type(schedule).__name__, {}
    if isinstance(schedule, FormulaLR):  # a schedule of MindFormers, with its settings
        settings = {
            name: value
            for name, value in vars(schedule).items()
            if isinstance(value, (int, float)) and not name.startswith("_") and name != "last_epoch"
        }
    elif isinstance(schedule, LambdaLR):
        function = schedule.lr_lambdas[0]
        module = getattr(function, "func", function).__module__
        if module == "transformers.optimization":  # made by the Trainer from its arguments
            kind = SchedulerType(args.lr_scheduler_type).value
            settings = {"warmup_steps": args.get_warmup_steps(state.max_steps)}
    # A schedule that follows a metric does not note the initial rates of the groups.
    learning_rate = optimizer.param_groups[0].get("initial_lr", optimizer.defaults["lr"])
    return settings | {
        "type": kind,
        "learning_rate": float(learning_rate),
        "total_steps": state.max_steps,
    }


def _model_settings(model: nn.Module | None) -> dict[str, Any]:
    if model is None:
        return {}
    network = unwrapped_network(model)
    config: Any = getattr(network, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    return {**settings, "architectures": type(network).__name__}


@dataclass(kw_only=True)
class PyNativeState:
    """State of a training, as PyNative's callbacks read it; updated before each event.

    A callback may set attributes. It keeps them until the end of the training, and other callbacks
    do not see them.
    """

    epoch: float
    """Number of whole epochs before this one. As in PyNative, it changes after `on_epoch_begin`."""

    global_step: int
    """Number of updates done: in `on_step_end` with the present one, so from 1."""

    max_steps: int
    epoch_step: int
    """Number of updates in an epoch."""

    global_batch_size: int
    num_accumulation_steps: int
    """Number of micro-batches of an update."""

    eval_steps: int = 0
    """Always 0, as in PyNative."""

    consumed_samples: int = 0
    """`global_step` times `global_batch_size`, as in PyNative: also if a batch was smaller. If the
    batch grows, the samples that were used."""

    loss_scale: Tensor | None = None
    """Shape ``()``, float32, on the training device: loss scale that the next update uses. ``None``
    before the end of the first step. Always 1.0 in PyNative."""

    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    is_train_begin: bool = True
    is_train_end: bool = False

    def __getattr__(self, name: str) -> NoReturn:
        instead = find(_STATE, name)
        if instead is None:
            msg = f"`state` has no `{name}`{hint(name, self.__dataclass_fields__)}"
        else:
            msg = _refusal("state", name, instead)
        raise AttributeError(msg)

    def update(self, state: TrainerState) -> None:
        """Take the present values of a Trainer's state, except the epoch."""
        self.global_step, self.max_steps = state.global_step, state.max_steps
        self.consumed_samples = state.global_step * self.global_batch_size
        self.best_metric = state.best_metric
        self.best_model_checkpoint = state.best_model_checkpoint

    def grow(self, samples: Callable[[int], int], num_rows: int, *, is_done: bool) -> None:
        """Take the sizes of an update if the batch grows.

        Args:
            samples: Returns the samples of the first updates, by their number.
            num_rows: Rows of a micro-batch on all ranks together.
            is_done: Whether the update is the last that was done, and not the next one.
        """
        first = self.global_step - is_done
        self.consumed_samples = samples(self.global_step)
        self.global_batch_size = samples(first + 1) - samples(first)
        self.num_accumulation_steps = math.ceil(self.global_batch_size / num_rows)


def pynative_state(
    args: TrainingArguments, state: TrainerState, facts: Mapping[str, Any]
) -> PyNativeState:
    """Return the state of a training of a Trainer; the arguments are `pynative_arguments`'s."""
    length = run_length(RunSettings(), state, args, facts.get("train_dataloader"))
    return PyNativeState(
        epoch=float(state.global_step // length.steps_per_epoch),
        global_step=state.global_step,
        max_steps=state.max_steps,
        epoch_step=length.steps_per_epoch,
        global_batch_size=global_batch_size(RunSettings(), state, args),
        num_accumulation_steps=args.gradient_accumulation_steps,
    )


@final
class PyNativeSchedule:
    """A torch schedule that also returns the rate of a step, as PyNative's schedules do.

    Attributes are those of the torch schedule.

    Args:
        schedule: The torch schedule.
    """

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def __call__(self, step: Any) -> Tensor:
        """Return the learning rate of the first parameter group, shape ``()``, float32.

        It is computed from the step alone. So after a skipped update, which does not advance the
        schedule itself, it differs from the rate that the optimizer uses. Does not synchronize with
        the device.

        Args:
            step: Index of the update, from 0: in `on_step_end`, ``state.global_step`` is the index
                of the next update.

        Raises:
            TypeError: If the schedule has no formula for a step.
        """
        schedule, index = self._schedule, int(step)
        if isinstance(schedule, FormulaLR):
            rate = schedule.rate(schedule.base_lrs[0], index)
        elif isinstance(schedule, LambdaLR):
            rate = schedule.base_lrs[0] * schedule.lr_lambdas[0](index)
        else:
            msg = (
                f"`lr_scheduler` cannot be called: {type(schedule).__name__} has no formula for a "
                "step; read `lr_scheduler.get_last_lr()[0]`, the rate of the next update"
            )
            raise TypeError(msg)
        if isinstance(rate, Tensor):
            return rate.detach().float()
        # Filling makes no copy from the host, which would synchronize with a device.
        return torch.full((), rate, dtype=torch.float32)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_schedule":
            raise AttributeError(name)
        return getattr(self._schedule, name)


@final
class AbsentValue:
    """Stand in for a keyword that PyNative passes and a Trainer does not have.

    Any use raises ``RuntimeError``, except ``is None``.

    Args:
        name: Name of the keyword.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<`{self._name}`, which a Trainer does not have>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        found = find("PyNative argument", self._name)
        advice = "" if found is None else found.advice("; ", ", and ")
        msg = f"`{self._name}` is unknown in a Trainer{advice}"
        raise RuntimeError(msg)

    __hash__ = None  # type: ignore[assignment]  # (a class without equality has no hash)
    __bool__ = __call__ = __iter__ = __len__ = __getitem__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __int__ = __index__ = __float__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
