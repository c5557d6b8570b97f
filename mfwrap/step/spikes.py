"""Skip or clip an update whose global norm is far above the norms before it.

The absolute threshold of ``use_skip_data_by_global_norm`` needs a number that fits the network, its
batch and its stage of training. `SpikePolicy` compares the logarithm of the global norm with a
window of earlier ones instead. It judges the norm after the reduction, which is the same number on
all ranks, so all ranks skip or clip an update or none does, without a message. Nothing here
synchronizes with the device.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from mfwrap.config import StepConfig
from mfwrap.tensors.robust_window import RobustWindow
from mfwrap.tensors.saved_state import check_tensor

PRIOR_DEVIATION = 0.5
"""Deviation of the logarithm of the norm that is assumed before there are norms. 15 % of it are
always left: a norm is never a spike of 6 deviations below 1.6 times the expected one, however quiet
the run is. At the second update a spike is more than ``exp(6 * 0.5)``, 20 times, the first norm."""

PATIENCE = 10
"""Number of spikes in a row from which on a spike enters the window as it is. After two more the
median of the last five norms is the new level, so at most 12 updates in a row are skipped."""

_IN_A_ROW = "spikes_in_a_row"

STATE_NAMES = frozenset({"spike_values", "spike_distances", _IN_A_ROW})
"""Names of the tensors in `SpikePolicy.state_dict`."""


class SpikeVerdict(NamedTuple):
    """Judgement of one update; tensors on the training device."""

    score: Tensor
    """Distance of the logarithm of the global norm above the expected one, in deviations, shape
    ``()``, float32; NaN if the norm is 0 or non-finite, or nothing is expected yet."""

    is_spike: Tensor
    """Whether `score` is above the limit, shape ``()``, bool."""

    skips: Tensor
    """Whether to skip the update, shape ``()``, bool; false if the policy does not skip."""

    coefficient: Tensor | None
    """Largest factor of the unscaled gradients, shape ``()``, float32, 1 without a spike; ``None``
    if the policy does not clip."""

    level: Tensor
    """Logarithm of the global norm, shape ``()``, float32."""

    policy: "SpikePolicy"
    """Policy that has judged, and remembers the norm."""

    def skips_besides(self, skips: Tensor) -> Tensor:
        """Return whether to skip the update for this reason or another one, shape ``()``, bool."""
        return skips | self.skips

    def clipped(self, coefficient: Tensor | None, clipped_by: Tensor | None) -> Tensor | None:
        """Return the smaller one of another factor that clips the gradients, and this one.

        Args:
            coefficient: Factor, shape ``()``, float32; ``None`` for 1.
            clipped_by: Factor by which the gradients were clipped after the norm was measured,
                shape ``()``; ``None`` for 1.
        """
        own = self.coefficient
        if own is not None and clipped_by is not None:
            own = (own / clipped_by).clamp(max=1.0)
        if coefficient is None or own is None:
            return coefficient if own is None else own
        return torch.minimum(coefficient, own)

    def remember(self, applied: Tensor) -> None:
        """Let the policy remember the norm; `applied` is whether the update was, ``()``, bool."""
        self.policy.count(self, applied)


@final
class SpikePolicy:
    """Judge each global norm, and remember it.

    A norm is a spike if its logarithm is more than `limit` deviations above the expected one; see
    `RobustWindow`. A skipped update does not enter the window, neither does one with a norm that is
    0 or non-finite. A clipped update enters with the norm that it was clipped to. From the tenth
    spike in a row on, a spike enters with its own norm, so that a new level is learned.

    ``clip`` is ZClip's rule: a norm of ``z`` deviations is clipped to ``limit**2 / z`` deviations
    above the expected norm, so the higher the spike, the closer to the expected norm. ZClip takes
    moving averages of the norm and of its square, after 25 updates that it does not judge; here it
    is medians of the logarithm, from the second update on.

    Source: Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM Pre-Training",
    arXiv:2504.02507, with the code at github.com/bluorion-com/ZClip (``adaptive_scaling``).

    Args:
        policy: ``"skip"`` or ``"clip"``.
        limit: Score above which a norm is a spike, > 0.
        device: Training device.
    """

    def __init__(self, policy: str, limit: float, device: torch.device) -> None:
        self._clips = policy == "clip"
        self._limit = limit
        self._window = RobustWindow(1, prior=PRIOR_DEVIATION, device=device)
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, global_norm: Tensor) -> SpikeVerdict:
        """Judge the norm of an update that is not decided yet.

        Args:
            global_norm: L2 norm of all unscaled, reduced gradients before clipping, shape ``()``,
                float32.
        """
        level = global_norm.log()
        score = self._window.scores(level.reshape(1)).squeeze(0)
        is_spike = score > self._limit  # False for NaN
        if not self._clips:
            return SpikeVerdict(score, is_spike, is_spike, None, level, self)
        too_high = score - self._limit**2 / score
        factor = torch.exp(-too_high * self._window.deviation.squeeze(0))
        coefficient = torch.where(is_spike, factor, 1.0)
        return SpikeVerdict(score, is_spike, torch.zeros_like(is_spike), coefficient, level, self)

    def count(self, verdict: SpikeVerdict, applied: Tensor) -> None:
        """Remember the norm of an update.

        Args:
            verdict: Judgement of the update.
            applied: Whether the update was applied, shape ``()``, bool.
        """
        # A norm that cannot be judged, such as that of an overflow, neither continues nor ends a
        # row of spikes.
        in_a_row = (self._in_a_row + 1) * verdict.is_spike
        self._in_a_row = torch.where(verdict.score.isnan(), self._in_a_row, in_a_row)
        is_new_level = verdict.is_spike & (self._in_a_row >= PATIENCE)
        level = verdict.level
        if verdict.coefficient is not None:
            level = torch.where(is_new_level, level, level + verdict.coefficient.log())
        self._window.add(level.reshape(1), applied | is_new_level)

    def replaced(self) -> list[tuple[object, str]]:
        return [(self, "_in_a_row"), *self._window.replaced()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the window and of the number of spikes in a row."""
        window = {f"spike_{name}": t.clone() for name, t in self._window.state_dict().items()}
        return {**window, _IN_A_ROW: self._in_a_row.clone()}

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the errors that `load_state_dict` would raise, without changing anything."""
        if STATE_NAMES.isdisjoint(state_dict):
            return
        for name, own in self.state_dict().items():
            check_tensor(name, state_dict[name], own)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state, or start with an empty window if `state_dict` has none of its names.

        So a run that was saved without a policy can be continued with one.

        Args:
            state_dict: State that `state_dict` returned; other names are ignored.

        Raises:
            KeyError: If only some of the names are missing.
            TypeError: If a value is not a tensor.
            ValueError: If a tensor has another shape or dtype.
        """
        self.check(state_dict)
        own = self._window.state_dict()
        if STATE_NAMES.isdisjoint(state_dict):
            self._window.load_state_dict({n: torch.full_like(t, torch.nan) for n, t in own.items()})
            self._in_a_row = torch.zeros_like(self._in_a_row)
            return
        self._window.load_state_dict({name: state_dict[f"spike_{name}"] for name in own})
        self._in_a_row = state_dict[_IN_A_ROW].detach().clone().to(self._in_a_row.device)


def spike_policy(config: StepConfig, device: torch.device) -> SpikePolicy | None:
    """Return the policy that `config` sets; ``None`` if spikes change nothing."""
    if config.spike_policy == "record":
        return None
    return SpikePolicy(config.spike_policy, config.spike_limit, device)
