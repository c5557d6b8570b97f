"""Read the value that a callback monitors, and decide whether it has improved."""

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.utils import reduce
from torch import Tensor

from mfwrap.arguments import check_choice, check_number, described
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.model import Callback, CallbackParameters, RunContext

_SMALLER_IS_BETTER = {
    *{"hausdorff_distance", "loss", "mae", "mean_surface_distance", "mse", "perplexity"},
    "root_mean_square_distance",
}


def loss_of(outputs: Any) -> Tensor | None:
    """Return the loss, of any shape, in the output of a training cell; ``None`` without a loss.

    Args:
        outputs: The loss, an object with an attribute `loss`, or a tuple that starts with the loss.
    """
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, (tuple, list)) and outputs:
        loss = outputs[0]
    if loss is None and isinstance(outputs, Tensor):
        loss = outputs
    return loss if isinstance(loss, Tensor) else None


def watched_value(parameters: CallbackParameters, monitor: str) -> float | None:
    """Return the monitored value at the end of an epoch; ``None`` if it is unknown.

    The value is the metric `monitor` of this epoch's evaluation, or ``eval_<monitor>``, as a
    Trainer names it. Without such a metric, ``"loss"`` means the loss of the last step, averaged
    over ranks; reading it synchronizes with the device.

    Args:
        parameters: Parameters of the run.
        monitor: Name of the value.

    Raises:
        TypeError: If the metric is not a single number.
    """
    # Test for `metrics`, which exists only if this epoch was evaluated. `eval_results` may come
    # from an earlier epoch.
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


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"`monitor` must name a metric that is a single number, got {name} = {value!r}"
        raise TypeError(msg)
    return float(value)


@dataclass(frozen=True, slots=True)
class Improvement:
    """Decide whether a value is better than another.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If `mode` is unknown, or `min_delta` is negative or non-finite.
    """

    monitor: str
    """Name of the value."""

    mode: str
    """``"min"``, ``"max"``, or ``"auto"``: ``"min"`` for losses and errors, else ``"max"``."""

    min_delta: float
    """An improvement must be larger than this."""

    def __post_init__(self) -> None:
        """Check the settings."""
        if not isinstance(self.monitor, str):
            msg = f"`monitor` must be a str, got {described(self.monitor)}"
            raise TypeError(msg)
        check_choice("mode", self.mode, ("auto", "min", "max"))
        check_number("min_delta", self.min_delta)

    @property
    def is_downward(self) -> bool:
        """Whether a smaller value is better."""
        if self.mode == "auto":
            return self.monitor.removeprefix("eval_") in _SMALLER_IS_BETTER
        return self.mode == "min"

    @property
    def worst(self) -> float:
        """Worst possible value: infinity if a smaller value is better, otherwise minus infinity."""
        return math.inf if self.is_downward else -math.inf

    def improves(self, value: float, best: float) -> bool:
        """Return whether `value` is better than `best` by more than `min_delta`; false for NaN."""
        if self.is_downward:
            return value < best - self.min_delta
        return value > best + self.min_delta


class ImprovementCallback(Callback, abc.ABC):
    """Base of the callbacks that act when a monitored value no longer improves.

    Args:
        monitor: Name of the value.
        mode: See `Improvement`.
        min_delta: See `Improvement`.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting is out of range.
    """

    def __init__(self, monitor: str, mode: str, min_delta: float) -> None:
        self._improvement = Improvement(monitor, mode, min_delta)
        self._restart()

    def _restart(self) -> None:
        self.best = self._improvement.worst
        """The best value so far."""
        self.wait = 0
        """Epochs since the last improvement or change of rates."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """Reset the state that an earlier training left."""
        del run_context
        self._restart()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Compare the epoch's value with the best value; act if patience is used up."""
        if not run_context.original_args().get("evaluates_by_steps"):
            self.on_evaluation(run_context)

    def on_evaluation(self, run_context: RunContext) -> None:
        """Do the same after an evaluation in an epoch."""
        parameters = run_context.original_args()
        monitor = self._improvement.monitor
        value = watched_value(parameters, monitor)
        if value is not None:
            self._compare(value, run_context)
            return
        run_logger(type(self).__module__).warning(
            "%s ignores epoch %d: it has no value for `%s`",
            type(self).__name__,
            parameters.cur_epoch_num,
            monitor,
        )

    @abc.abstractmethod
    def _compare(self, value: float, run_context: RunContext) -> None:
        """Compare a value with the best value; act if patience is used up."""

    def state_dict(self) -> dict[str, Any]:
        """Return the best value (``None`` before the first) and the counters."""
        return {"best": None if math.isinf(self.best) else self.best, "wait": self.wait}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with a best value and counters."""
        best = state_dict["best"]
        self.best = self._improvement.worst if best is None else best
        self.wait = state_dict["wait"]
