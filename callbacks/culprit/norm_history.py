"""Track the usual norms of gradients and weights in a run, and find norms that have risen."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from mfwrap.callbacks.culprit.anomaly_log import WeightNorm
from mfwrap.collectives import gather_on_all, this_rank
from mfwrap.tensors.sharded_norms import tensor_norms
from mfwrap.tensors.shards import is_distributed
from mfwrap.tensors.wrappers import trainable

_DECAY = 0.98
_MOST_RISE = 4.0
"""Limit for the rise of a norm, as a factor. In a mean, a norm counts as at most this multiple of
the usual norm, so that one spike does not change the mean much. A weight is reported if its norm
has risen by more."""

_FEWEST_STEPS = 20
_DEVIATIONS = 6.0


@final
class GlobalNormHistory:
    """Track the usual global norm and detect spikes.

    A norm is a spike if it is above `factor` times the usual norm and also more than six standard
    deviations above the usual norm. The usual norm and the deviation are computed from logarithms,
    because norms vary by factors. Spikes are detected only after the first twenty norms.

    Args:
        factor: Smallest ratio of a spike to the usual norm, > 1.
    """

    def __init__(self, factor: float) -> None:
        self._log_factor = math.log(factor)
        self._num_steps = 0
        self._mean = 0.0
        self._variance = 0.0

    @property
    def usual(self) -> float | None:
        """The usual norm: a running geometric mean, ``None`` before the first norm."""
        return math.exp(self._mean) if self._num_steps else None

    def is_spike(self, norm: float) -> bool:
        """Tell whether a finite norm is a spike."""
        if self._num_steps < _FEWEST_STEPS or norm <= 0:
            return False
        rise = math.log(norm) - self._mean
        return rise > max(self._log_factor, _DEVIATIONS * math.sqrt(self._variance))

    def add(self, norm: float) -> None:
        """Include the norm of an update in the usual norm; ignore a zero or non-finite norm."""
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
        """Return the state, ready for JSON."""
        return {
            "num_steps": self._num_steps,
            "mean_log": self._mean,
            "variance_log": self._variance,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._num_steps = int(state["num_steps"])
        self._mean = float(state["mean_log"])
        self._variance = float(state["variance_log"])


@final
class RunningNorms:
    """Keep exponential means of the local norms of applied updates, on the device.

    A step costs a handful of operations on ``(G,)`` tensors and no host-device synchronization.

    Args:
        names: Names of the ``G`` groups.
        device: Device of the norms.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._mean = torch.zeros(len(self.names), device=device)
        self._weight = torch.zeros(len(self.names), device=device)
        self._of_ranks: Tensor | None = None

    @property
    def usual(self) -> Tensor:
        """Usual norm of each group, shape ``(G,)``, float32; NaN for a group without a norm."""
        return self._mean / self._weight

    @torch.no_grad()
    def add(self, norms: Tensor, applied: Tensor) -> None:
        """Include the norms of a step in the means; ignore zero and non-finite norms.

        Args:
            norms: Local norms, shape ``(G,)``, float32.
            applied: Whether the update was applied, shape ``()``, bool.
        """
        counts = norms.isfinite() & applied
        known = self._weight > 0
        highest = torch.where(known, _MOST_RISE * self.usual, float("inf"))
        # Ignore norms of zero, because they would limit all later norms to zero. They do occur: a
        # layer may begin at zero, and an expert may have received no token.
        counts = counts & (norms > 0)
        highest = torch.where(highest > 0, highest, float("inf"))
        limited = torch.minimum(norms, highest)
        self._mean = torch.where(counts, _DECAY * self._mean + (1 - _DECAY) * limited, self._mean)
        self._weight = torch.where(counts, _DECAY * self._weight + (1 - _DECAY), self._weight)
        self._of_ranks = None

    def gather(self) -> None:
        """Gather the means of all ranks, so that `state_dict` has them. Call it on every rank.

        Each rank has its own norms, but a Trainer saves only the state of one rank.
        """
        self._of_ranks = gather_on_all(torch.stack((self._mean, self._weight)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON; synchronizes with the device.

        Returns:
            The names of the groups, and a row of means and of weights for each rank. If `gather`
            was not called since the last step, there is only the row of this rank.
        """
        of_ranks = self._of_ranks
        if of_ranks is None:
            of_ranks = torch.stack((self._mean, self._weight)).unsqueeze(0)
        means, weights = of_ranks.unbind(1)
        return {"names": list(self.names), "means": means.tolist(), "weights": weights.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a group whose name is not in the state starts empty.

        Each rank loads the row that it saved. If the state has only ``n`` rows and the run has more
        ranks, rank ``r`` loads row ``r % n``: another rank's norms are the best estimate.
        """
        # States of older versions have the numbers of one rank only, without a dimension of ranks.
        means, weights = (
            torch.tensor(state[key]).reshape(-1, len(state["names"]))
            for key in ("means", "weights")
        )
        row = this_rank() % len(means)
        saved = dict(zip(state["names"], torch.stack((means[row], weights[row])).T, strict=True))
        rows = [saved.get(name, torch.zeros(2)) for name in self.names]
        self._mean, self._weight = torch.stack(rows, dim=1).to(self._mean.device)
        self._of_ranks = None


@final
class WeightWatch:
    """Record the norms of a network's trainable weights, and find weights whose norm has risen.

    Args:
        network: Network to watch; the first norms are recorded immediately. A network with sharded
            weights is not watched.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._before: dict[str, tuple[Tensor, int]] = {}
        self.look()

    def look(self) -> None:
        """Record the norms of all weights, without host-device synchronization."""
        weights = trainable(self._network)
        self._before = {}
        # Skip sharded weights: their norms need a collective, but perhaps not every rank calls
        # this method.
        if weights and not any(map(is_distributed, weights.values())):
            norms = tensor_norms(list(weights.values())).unbind()
            sizes = [weight.numel() for weight in weights.values()]
            self._before = dict(zip(weights, zip(norms, sizes, strict=True), strict=True))

    def changed(self) -> list[WeightNorm]:
        """Return weights whose norm is non-finite or has risen more than fourfold, worst first.

        The norm of a small weight, such as a bias that began at zero, is compared with the root
        mean square of all weights instead of the weight's earlier norm. The list is empty if more
        than half of the weights have risen, as after a non-finite update. Reads the weights and
        synchronizes with the device.
        """
        weights = trainable(self._network)
        known = {name: self._before[name] for name in weights if name in self._before}
        if not known:
            return []
        now = tensor_norms([weights[name] for name in known]).tolist()
        sizes = [size for _, size in known.values()]
        before = [norm.item() for norm, _ in known.values()]
        typical = math.sqrt(sum(norm**2 for norm in before) / sum(sizes))
        if not math.isfinite(typical):
            typical = 0.0
        risen = []
        for name, size, norm, norm_before in zip(known, sizes, now, before, strict=True):
            rise = norm / max(norm_before, typical * math.sqrt(size), 1e-30)
            # Written so that NaN counts as risen.
            if not rise <= _MOST_RISE:
                rank = rise if math.isfinite(rise) else math.inf
                risen.append((rank, WeightNorm(name=name, norm=norm, norm_before=norm_before)))
        if len(risen) > max(1, len(known) // 2):
            # A change of most weights is a consequence of the fault, not its cause.
            return []
        return [weight for _, weight in sorted(risen, key=lambda pair: -pair[0])]
