"""What norms are usual in a run: of the whole gradient on the host, by group on the device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["GlobalNormHistory", "RunningNorms"]

_DECAY = 0.98
_MOST_RISE = 4.0
"""A norm counts as at most this many times the usual one, so that one spike does not become it."""

_FEWEST_STEPS = 20
_DEVIATIONS = 6.0


@final
class GlobalNormHistory:
    """Tell a spike of the global norm from its ordinary course.

    A spike is a norm above `factor` times the usual one that is also six standard deviations away
    from it, both by logarithm, for norms fall and scatter by factors. Nothing is one in the first
    twenty steps.

    Args:
        factor: > 1.
    """

    def __init__(self, factor: float) -> None:
        self._log_factor = math.log(factor)
        self._num_steps = 0
        self._mean = 0.0
        self._variance = 0.0

    @property
    def usual(self) -> float | None:
        """The usual norm, a geometric mean; ``None`` before the first."""
        return math.exp(self._mean) if self._num_steps else None

    def is_spike(self, norm: float) -> bool:
        """Tell whether a finite norm is a spike."""
        if self._num_steps < _FEWEST_STEPS or norm <= 0:
            return False
        rise = math.log(norm) - self._mean
        return rise > max(self._log_factor, _DEVIATIONS * math.sqrt(self._variance))

    def add(self, norm: float) -> None:
        """Learn the norm of an update; zero and what is not finite teach nothing."""
        if not math.isfinite(norm) or norm <= 0:
            return
        value = math.log(norm)
        if self._num_steps:
            deviation = math.sqrt(self._variance)
            value = min(value, self._mean + max(math.log(_MOST_RISE), 3 * deviation))
        self._num_steps += 1
        weight = max(1 - _DECAY, 1 / self._num_steps)
        difference = value - self._mean
        self._mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference**2)

    def state_dict(self) -> dict[str, float]:
        """Return what is known, as JSON can hold it."""
        return {
            "num_steps": self._num_steps,
            "mean_log": self._mean,
            "variance_log": self._variance,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._num_steps = int(state["num_steps"])
        self._mean = float(state["mean_log"])
        self._variance = float(state["variance_log"])


@final
class RunningNorms:
    """Exponential means of local norms, on the device, over applied updates.

    A handful of operations on ``(G,)`` tensors a step; nothing is read on the host.

    Args:
        names: Of the ``G`` groups.
        device: Where the norms are.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        # Replaced at every step, so that those of a step stay what they were.
        self._mean = torch.zeros(len(self.names), device=device)
        self._weight = torch.zeros(len(self.names), device=device)

    @property
    def usual(self) -> Tensor:
        """Shape ``(G,)``, float32: the usual norm of each group; nan where none is known."""
        return self._mean / self._weight

    @torch.no_grad()
    def add(self, norms: Tensor, applied: Tensor) -> None:
        """Learn the norms of a step.

        Args:
            norms: Shape ``(G,)``, float32.
            applied: Shape ``()``, bool: whether the update was.
        """
        counts = norms.isfinite() & applied
        known = self._weight > 0
        highest = torch.where(known, _MOST_RISE * self.usual, float("inf"))
        # Zero is no measure of what a group may rise to: a layer that begins at zero, or an expert
        # that had no token.
        counts = counts & (norms > 0)
        highest = torch.where(highest > 0, highest, float("inf"))
        limited = torch.minimum(norms, highest)
        self._mean = torch.where(counts, _DECAY * self._mean + (1 - _DECAY) * limited, self._mean)
        self._weight = torch.where(counts, _DECAY * self._weight + (1 - _DECAY), self._weight)

    def state_dict(self) -> dict[str, Any]:
        """Return names, means and weights, as JSON can hold them; waits for the device."""
        return {
            "names": list(self.names),
            "means": self._mean.tolist(),
            "weights": self._weight.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, in the groups that both have."""
        saved = dict(
            zip(state["names"], zip(state["means"], state["weights"], strict=True), strict=True)
        )
        device = self._mean.device
        pairs = [saved.get(name, (0.0, 0.0)) for name in self.names]
        self._mean = torch.tensor([mean for mean, _ in pairs]).to(device)
        self._weight = torch.tensor([weight for _, weight in pairs]).to(device)
