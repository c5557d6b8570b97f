"""The value that a callback watches, and whether it has become better."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from accelerate.utils import reduce
from torch import Tensor

from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.model import CallbackParameters

__all__ = ["Improvement", "loss_of", "value_of_epoch", "watched_value"]

_SMALLER_IS_BETTER = {
    *{"hausdorff_distance", "loss", "mae", "mean_surface_distance", "mse", "perplexity"},
    "root_mean_square_distance",
}


def loss_of(outputs: Any) -> Tensor | None:
    """Return the loss in what a training cell returns, of any shape; ``None`` without one.

    Args:
        outputs: The loss, or a tuple that has it by name or first.
    """
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, (tuple, list)) and outputs:
        loss = outputs[0]
    if loss is None and isinstance(outputs, Tensor):
        loss = outputs
    return loss if isinstance(loss, Tensor) else None


def watched_value(parameters: CallbackParameters, monitor: str) -> float | None:
    """Return a value at the end of an epoch; ``None`` if it is not known.

    That is a metric of this epoch's evaluation, by its name or with ``eval_`` before it, which is
    how a Trainer names it; or else, for ``"loss"``, the loss of the last step, as a mean over
    ranks, which waits for the device.

    Args:
        parameters: Of the run.
        monitor: Name of the value.

    Raises:
        TypeError: If the metric is not one number.
    """
    # `eval_results` stays for later epochs; `metrics` is there only after an evaluation.
    if "metrics" in parameters:
        metrics = {**parameters.get("eval_results", {}), **parameters.metrics}
        for name in (monitor, f"eval_{monitor}"):
            if name in metrics:
                return _number(name, metrics[name])
    if monitor != "loss":
        return None
    loss = loss_of(parameters.get("net_outputs"))
    if loss is None:
        return None
    mean: Tensor = reduce(loss.detach().float().mean(), "mean")
    return float(mean)


def value_of_epoch(callback: object, parameters: CallbackParameters, monitor: str) -> float | None:
    """Return `watched_value`, or warn in the name of a callback that there is none."""
    value = watched_value(parameters, monitor)
    if value is None:
        run_logger(type(callback).__module__).warning(
            "%s finds no `%s` in epoch %d, which does not count",
            type(callback).__name__,
            monitor,
            parameters.cur_epoch_num,
        )
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"`monitor` must name a metric that is one number, got {name} = {value!r}"
        raise TypeError(msg)
    return float(value)


@dataclass(frozen=True, slots=True)
class Improvement:
    """When a value is better than another.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If `mode` is unknown, or `min_delta` negative.
    """

    monitor: str
    """Name of the value."""

    mode: str
    """``"min"``, ``"max"``, or ``"auto"``: ``"min"`` for losses and errors, else ``"max"``."""

    min_delta: float
    """By how much a value has to be better."""

    def __post_init__(self) -> None:
        """Refuse what does not fit."""
        if not isinstance(self.monitor, str):
            msg = f"`monitor` must be a str, got {type(self.monitor).__name__}"
            raise TypeError(msg)
        check_one_of("mode", self.mode, ("auto", "min", "max"))
        if isinstance(self.min_delta, bool) or not isinstance(self.min_delta, (int, float)):
            msg = f"`min_delta` must be a number, got {type(self.min_delta).__name__}"
            raise TypeError(msg)
        if not 0 <= self.min_delta < math.inf:
            msg = f"`min_delta` must be >= 0 and finite, got {self.min_delta}"
            raise ValueError(msg)

    @property
    def is_downward(self) -> bool:
        """Whether smaller is better."""
        if self.mode == "auto":
            return self.monitor.removeprefix("eval_") in _SMALLER_IS_BETTER
        return self.mode == "min"

    @property
    def worst(self) -> float:
        """What any number is better than."""
        return math.inf if self.is_downward else -math.inf

    def improves(self, value: float, best: float) -> bool:
        """Return whether `value` is better than `best`; nan never is."""
        if self.is_downward:
            return value < best - self.min_delta
        return value > best + self.min_delta


def check_one_of(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ``ValueError`` if `value` is none of `choices`."""
    if value not in choices:
        msg = f"`{name}` must be one of {list(choices)}, got {value!r}"
        raise ValueError(msg)
