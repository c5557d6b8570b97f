"""Judge the numbers of each step by the steps before it, on the device."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from mfwrap.callbacks.culprit.judges.forward import JudgedForward
from mfwrap.callbacks.culprit.judges.updates import Change
from mfwrap.callbacks.culprit.judges.windows import NamedWindow
from mfwrap.tensors.shards import on_device

LIMITS = {"global_norm": 8.0, "local_norm": 9.0, "update": 10.0}
"""Smallest scores that are anomalies, see `RobustWindow`."""

_PRIORS = {"global_norm": 0.5, "local_norm": 0.7, "update": 0.8}
"""Deviations of the natural logarithms that are assumed before there are values."""

_FLOOR = 1e-5
"""Smallest share of the global norm at which a group's norm is judged. The gradients of some
weights, such as the bias of attention keys, are zero but for rounding."""

_FALL, _FALL_LIMIT = 30.0, -12.0
"""Smallest ratio of the usual norm of a group to one that has fallen too far, and the largest score
of such a norm. Few rows may have no gradient for some weights, so it is farther than a spike."""

FEWEST_NORMS, EARLY_FACTOR = 4, 60.0
"""Number of distances of norms before a rise to less than so many times the usual one is a spike.
The first gradients may be small by chance."""

_FEWEST_DISTANCES = 8
"""Number of values after which a group's norm may have fallen too far."""

_IMPOSSIBLE = 3.0
"""Smallest ratio of an update to the largest one of Adam that rounding does not explain."""

_LONG_WAIT = 3
"""Number of steps that a group has waited for a gradient from which on it tells nothing more of
other groups."""

_EARLY_WAIT = 8
"""Number of steps that a group with few norms so far may wait longer for a gradient."""

_FEWEST_QUIET = 3
"""Number of steps without a change from outside after which one is an anomaly."""

_MANY_STEPS = 50
"""Number of steps after a change from outside in which another one is no anomaly."""

EXPERT = re.compile(r"\bexperts?\.\d+\b")
"""Matches names of weights of one expert, which gets no gradient in a step without tokens."""


class JudgedStep(NamedTuple):
    """Judgement of a step, on the device. ``G`` is the number of groups, ``P`` that of weights."""

    summary: Tensor
    """The fields of `StepScores`, float32; those of state and forwards come with `Judges`."""

    names: tuple[str, ...]
    """Names of the groups of gradients; empty without local norms."""

    local_norm: Tensor
    """Local norms, shape ``(G,)``, float32."""

    usual_norm: Tensor
    """Expected local norms, shape ``(G,)``, float32; NaN for a group without a norm so far."""

    local_norm_scores: Tensor
    """Shape ``(G,)``, float32."""

    is_dead: Tensor
    """Whether a group's norm has been zero for more steps than usual, although others had one.
    Shape ``(G,)``, bool; false for a group that has never had a norm."""

    weights: tuple[str, ...]
    """Names of the weights whose updates are measured."""

    change: Change | None
    """Changes of these weights; ``None`` if they were not measured."""

    ordinary_update: float
    """Largest update, divided by the rate, that Adam makes by its moments; 0 if unknown."""

    update_scores: Tensor
    """Scores of the updates divided by the learning rate, shape ``(P,)``, float32."""

    watched: tuple[str, ...]
    """Names of the weights that are measured, and of frozen ones."""

    outside: Tensor | None
    """Change of these weights that is no update, shape ``(len(watched),)``, float32; ``None`` if
    unknown."""

    is_new_change: Tensor | None
    """Whether such a change is the first one in a while, shape ``(len(watched),)``, bool."""

    travel: Tensor
    """Sum of the root mean squares of each weight's updates that were no anomalies, since the last
    sample of the weights. Shape ``(P,)``, float32; infinite if an update has made the weight
    non-finite."""

    optimizer: Any = None
    """Optimizer, for a later look at its state; ``None`` if unknown."""

    forward: JudgedForward | None = None
    """Judgement of the last forwards that were watched."""

    def changed(self) -> tuple[str, ...]:
        """Return the weights that have changed between two steps; synchronizes.

        Those that code changes again and again, such as those of a teacher, are returned only if no
        others have changed.
        """
        if self.outside is None or self.is_new_change is None:
            return ()
        columns = (self.watched, self.outside.tolist(), self.is_new_change.tolist())
        changed = [(name, is_new) for name, size, is_new in zip(*columns, strict=True) if size != 0]
        new = tuple(name for name, is_new in changed if is_new)
        return new or tuple(name for name, _ in changed)

    def travelled(self) -> dict[str, float]:
        """Return `travel` by weight, empty if no changes were measured; synchronizes."""
        return {} if self.change is None else _named(self.weights, self.travel)

    def dead(self) -> tuple[str, ...]:
        """Return the groups whose norm has been zero for more steps than usual; synchronizes."""
        return tuple(name for name, is_dead in _named(self.names, self.is_dead).items() if is_dead)

    def impossible(self, rate: float) -> dict[str, float]:
        """Return updates, divided by the rate, that no moments of Adam give; synchronizes.

        Args:
            rate: Largest learning rate of the step.
        """
        limit = _IMPOSSIBLE * self.ordinary_update
        if self.change is None or not (limit > 0 and rate > 0):
            return {}
        updates = _named(self.weights, self.change.update / rate)
        return {name: size for name, size in updates.items() if limit < size < math.inf}

    def moved(self) -> tuple[str, ...]:
        """Return the weights whose update is an anomaly, the worst first; synchronizes."""
        if self.change is None:
            return ()
        # A weight that cannot be sampled has neither a size nor an update.
        columns = (self.weights, self.update_scores, self.change.update, self.change.weight)
        listed = (column if isinstance(column, tuple) else column.tolist() for column in columns)
        found = [
            (score if math.isfinite(update) else math.inf, name)
            for name, score, update, weight in zip(*listed, strict=True)
            if score > LIMITS["update"] or (math.isfinite(weight) and not math.isfinite(update))
        ]
        return tuple(name for _, name in sorted(found, key=lambda pair: -pair[0]))


class StepScores(NamedTuple):
    """The summary of a judgement, on the host. NaN where a number is unknown."""

    global_norm: float
    """Score of the global norm."""

    usual_global_norm: float
    local_norm: float
    """Highest score of a group's norm."""

    num_risen: float
    """Number of groups whose norm is an anomaly."""

    num_fallen: float
    """Number of groups whose norm is not zero, and far below the usual one."""

    num_dead: float
    """Number of groups whose norm has been zero for more steps than usual only since this step."""

    update: float
    """Highest score of a weight's update."""

    num_moved: float
    """Number of weights whose update is an anomaly, or not finite."""

    num_changed: float
    """Number of weights that have changed between two steps, for the first time; NaN if unknown."""

    learning_rate: float
    """Largest learning rate of the step."""

    lowest_rate: float
    """Smallest learning rate of the step."""

    ordinary_rate: float
    """Largest learning rate that the schedule has for the step, which a rollback may lower."""

    update_ratio: float
    """Median over the weights of the ratio of the update to the weight, both as root mean squares.
    Ordinary ratios are about 1e-3. For a weight that began at zero, the middle size of the others
    is taken."""

    highest_state: float = math.nan
    """Highest score of the norm of a weight or a buffer, in a step with a sample of the state."""

    num_bad_states: float = math.nan
    """Number of tensors of the state that have become non-finite since the sample before."""

    num_logits: float = math.nan
    """Number of modules whose attention logits are an anomaly; NaN without watched forwards."""

    num_loads: float = math.nan
    """Number of modules whose load of experts is an anomaly; NaN without watched forwards."""


@final
class StepJudge:
    """Score global norm, local norms and updates of each step, without waiting for a device.

    All of them are series of one `RobustWindow`. So a step costs about forty operations on tensors
    with one element, or a window of 64, for each group and weight.

    Args:
        names: Names of the ``G`` groups of gradients.
        weights: Names of the ``P`` weights whose updates are measured.
        device: Device of the numbers.
        frozen: Names of weights that no update changes.
        scalars: Names of weights with one element, whose gradient may be zero at any step.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[str],
        device: torch.device | str,
        scalars: Collection[str] = (),
        frozen: Sequence[str] = (),
    ) -> None:
        self.names = tuple(names)
        self.weights = tuple(weights)
        self.watched = (*weights, *frozen)
        sizes = {"global_norm": 1, "local_norm": len(names), "update": len(weights)}
        self._priors = [_PRIORS[kind] for kind, size in sizes.items() for _ in range(size)]
        self._split = list(sizes.values())
        groups = [f"local_norm/{name}" for name in names]
        self._series = ("global_norm", *groups, *(f"update/{name}" for name in weights))
        self._windows = NamedWindow()
        self._window = self._windows.use(self._series, self._priors, device)
        self._device = torch.device(device)
        self._quiet_steps = torch.zeros(len(self.watched), dtype=torch.int32, device=device)
        self._travel = torch.zeros(len(weights), device=device)
        self._from_zero = torch.zeros(len(weights), dtype=torch.bool, device=device)
        self._zero_steps = torch.zeros(len(names), dtype=torch.int32, device=device)
        self._longest_zeros = torch.zeros_like(self._zero_steps)
        watched = [EXPERT.search(name) is None and name not in scalars for name in names]
        self._is_watched = torch.tensor(watched, dtype=torch.bool).to(device)

    @torch.no_grad()
    def judge(
        self,
        global_norm: Tensor | None,
        local_norm: Tensor | None,
        change: Change | None,
        learning_rates: Tensor | None,
        applied: Tensor,
        *,
        of_frozen: Tensor | None = None,
        rate_factor: float = 1.0,
        ordinary_update: float = 0.0,
    ) -> JudgedStep:
        """Score the numbers of a step, and then include them in what is usual.

        Args:
            global_norm: Shape ``()``; ``None`` if unknown.
            local_norm: Shape ``(G,)``; ``None`` only if there are no groups.
            change: Sampled changes of the weights; ``None`` if unknown.
            learning_rates: Learning rates of the parameter groups; ``None`` if unknown.
            applied: Whether the update was applied, shape ``()``, bool. A skipped step is scored,
                but changes nothing of what is usual.
            of_frozen: Changes of the frozen weights since the last step; ``None`` without any.
            rate_factor: Factor that lowers the learning rate of the step for a while. The return to
                the ordinary rate does not count as a rise.
            ordinary_update: Largest update, divided by the rate, that is never an anomaly.
        """
        window, device = self._window, self._device
        if change is not None:
            self._from_zero |= change.weight == 0
        unknown = torch.full((1,), torch.nan, device=device)
        norm = unknown if global_norm is None else global_norm.detach().float().reshape(1)
        norms = unknown.expand(self._split[1]) if local_norm is None else local_norm.float()
        changes = unknown.expand(self._split[2]) if change is None else change.update
        rate, lowest, per_rate = unknown, unknown, changes
        if learning_rates is not None:
            rate, lowest = learning_rates.float().max()[None], learning_rates.float().min()[None]
            per_rate = changes / rate.abs()
        # Without a gradient, only weight decay and momentum change the weights.
        per_rate = torch.where(norm == 0, torch.nan, per_rate)
        values = torch.cat([norm, norms, per_rate]).log()
        scores, expected = window.scores(values), window.expected
        window.add(values, applied)
        norm_score, group_scores, update_scores = scores.split(self._split)
        if ordinary_update:
            is_ordinary = per_rate.abs() <= ordinary_update
            update_scores = torch.where(is_ordinary, torch.nan, update_scores)
        usual_norm, usual_norms, usual_updates = expected.exp().split(self._split)
        is_ruined = ~changes.isfinite() & usual_updates.isfinite() & applied
        # Below the floor in this step and usually, a norm is but rounding.
        is_judged = torch.maximum(norms, usual_norms) >= _FLOOR * torch.minimum(norm, usual_norm)
        num_distances = self._window.num_distances.split(self._split)[1]
        is_early = (num_distances < FEWEST_NORMS) & (norms < EARLY_FACTOR * usual_norms)
        is_judged = (is_judged | norm.isnan()) & ~is_early
        group_scores = torch.where(is_judged, group_scores, torch.nan)
        is_known = num_distances >= _FEWEST_DISTANCES
        is_far = (norms > 0) & (norms < usual_norms / _FALL) & self._is_watched
        is_fallen = (group_scores < _FALL_LIMIT) & is_far & is_known
        # Without a gradient anywhere, there was nothing to learn, or the loss is at fault.
        has_others = ~(norms == 0).all()
        is_zero = (norms == 0) & usual_norms.isfinite() & self._is_watched
        before, limit = self._zero_steps, _zero_limit(self._longest_zeros)
        limit = torch.where(num_distances < FEWEST_NORMS, limit + _EARLY_WAIT, limit)
        counted = torch.where(is_zero, before + 1, 0)
        self._zero_steps = torch.where(applied & has_others, counted, before)
        # What ends by itself is usual, such as the head of another task, which waits for its turn.
        ended = torch.where(self._zero_steps == 0, before, 0)
        self._longest_zeros = torch.maximum(self._longest_zeros, ended)
        is_dead = self._zero_steps >= limit
        outside = None if change is None else change.outside
        if outside is not None and of_frozen is not None:
            outside = torch.cat([outside, on_device(of_frozen, outside.device)])
        is_new = self._new_changes(outside)
        summary = torch.cat(
            [
                norm_score,
                usual_norm,
                highest(group_scores),
                (group_scores > LIMITS["local_norm"]).sum(dim=0, keepdim=True),
                is_fallen.sum(dim=0, keepdim=True),
                (is_dead & (before < limit)).sum(dim=0, keepdim=True),
                highest(update_scores),
                ((update_scores > LIMITS["update"]) | is_ruined).sum(dim=0, keepdim=True),
                unknown if is_new is None else is_new.sum(dim=0, keepdim=True),
                rate,
                lowest,
                rate if rate_factor == 1 else rate / rate_factor,
                _median_ratio(change, self._from_zero, unknown),
            ]
        )
        if change is not None:
            # A change in a skipped step is no update, and one that is an anomaly may be none.
            is_update = applied & ~(update_scores > LIMITS["update"])
            self._travel = self._travel + torch.where(is_update, _length(change), 0.0)
        return JudgedStep(
            summary=summary,
            names=self.names,
            local_norm=norms,
            usual_norm=usual_norms,
            local_norm_scores=group_scores,
            is_dead=is_dead,
            weights=self.weights,
            change=change,
            ordinary_update=ordinary_update,
            update_scores=update_scores,
            watched=self.watched,
            outside=outside,
            is_new_change=is_new,
            travel=self._travel,
        )

    def forget(self, *, global_norm: bool) -> None:
        """Forget how far the numbers of the last step were from the usual ones.

        Args:
            global_norm: Whether to forget that of the global norm, too.
        """
        self._window.forget(0 if global_norm else 1)

    def begin_travel(self) -> None:
        """Add up the updates of the weights from here on."""
        self._travel = torch.zeros_like(self._travel)

    def _new_changes(self, outside: Tensor | None) -> Tensor | None:
        """Tell which weights have changed outside of steps for the first time in a while.

        A loop may change weights on purpose, such as to clip them. So only the first change after
        a few steps without one counts.
        """
        if outside is None:
            return None
        has_changed = outside != 0
        is_new = has_changed & (self._quiet_steps >= _FEWEST_QUIET)
        self._quiet_steps = torch.where(has_changed, -_MANY_STEPS, self._quiet_steps + 1)
        return is_new

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual on this rank, ready for JSON; synchronizes with the device."""
        return {
            "window": self._windows.state_dict(),
            "zero_steps": _named(self.names, self._zero_steps),
            "longest_zeros": _named(self.names, self._longest_zeros),
            "travel": _named(self.weights, self._travel),
            "from_zero": [
                name for name, one in _named(self.weights, self._from_zero).items() if one
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a series whose name is not in the state starts empty."""
        self._windows.load_state_dict(state["window"])
        self._window = self._windows.use(self._series, self._priors, self._device)
        for key, counts in (
            ("zero_steps", self._zero_steps),
            ("longest_zeros", self._longest_zeros),
        ):
            known = state.get(key, {})
            saved = [known.get(name, 0) for name in self.names]
            counts.copy_(torch.tensor(saved, dtype=torch.int32))
        # Changes of weights between steps are not counted at first: a loop may load them only now.
        travel = [state["travel"].get(name, 0.0) for name in self.weights]
        self._travel.copy_(torch.tensor(travel))
        from_zero = set(state.get("from_zero", ()))
        self._from_zero.copy_(torch.tensor([name in from_zero for name in self.weights]))


def _zero_limit(longest: Tensor) -> Tensor:
    """Return from how many steps in a row on a norm of zero is an anomaly, shape ``(G,)``.

    Where layers are left out at random, the first wait of a group may be longer than one step. So
    the waits of other groups count, too.

    Args:
        longest: Largest number of steps that each group has waited for a gradient, shape ``(G,)``.
    """
    if not len(longest):
        return longest
    return torch.maximum(2 * longest + 2, 3 + 3 * longest.max().clamp(max=_LONG_WAIT))


def _named(names: Sequence[str], values: Tensor) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))


def _length(change: Change) -> Tensor:
    """Return the size of each update; infinite if it has made the weight non-finite."""
    is_ruined = change.weight.isfinite() & ~change.update.isfinite()
    return torch.where(is_ruined, torch.inf, change.update.nan_to_num())


def _median_ratio(change: Change | None, from_zero: Tensor, unknown: Tensor) -> Tensor:
    """Return the middle ratio of the updates to the weights, shape ``(1,)``.

    A weight that began at zero, such as B of LoRA, has no size of its own at first: the middle one
    of the other weights stands for it.
    """
    if change is None or not change.update.numel():
        return unknown
    known = (change.weight > 0) & ~from_zero
    usual = torch.where(known, change.weight, torch.nan).nanmedian()
    size = torch.where(from_zero & usual.isfinite(), usual, change.weight)
    ratios = torch.where(size > 0, change.update / size, torch.nan)
    return ratios.nanmedian().reshape(1)


def highest(scores: Tensor) -> Tensor:
    """Return the highest of scores that may be NaN, shape ``(1,)``; NaN without a score."""
    if not scores.numel():
        return scores.new_full((1,), torch.nan)
    found = torch.where(scores.isnan(), -torch.inf, scores).amax(dim=0, keepdim=True)
    return torch.where(found.isfinite(), found, torch.nan)
