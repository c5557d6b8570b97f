"""Find the rows of a bad step that stand out: run its rows one by one, or leave rows out."""

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import nn

from mfwrap.callbacks.culprit.anomaly_log import BadRow
from mfwrap.callbacks.culprit.replay.batch_rows import BatchRows
from mfwrap.callbacks.culprit.replay.micro_batches import losses_of
from mfwrap.callbacks.culprit.replay.recorder import (
    RandomState,
    RecordedBatch,
    RecordedCall,
    StepRecorder,
    indices_of,
    loss_of,
    tensors_in,
)
from mfwrap.callbacks.culprit.replay.replay import (
    backward,
    gradients_aside,
    origins_in_columns,
    undisturbed,
)
from mfwrap.callbacks.culprit.replay.targets import IGNORED, is_target
from mfwrap.callbacks.culprit.replay.verdict import outside_of_replay
from mfwrap.collectives import num_ranks, this_rank
from mfwrap.compatibility.torch import BatchNorm
from mfwrap.tensors.norms import norms_of_each

_MOST_SINGLE_ROWS = 64
"""Largest number of rows that are run one by one. More rows are first run in groups."""

_NUM_GROUPS = 32
"""Number of groups into which many rows are divided."""

_NUM_LEFT_OUT = 16
"""Number of groups of a micro-batch that are left out in turn."""

MOST_NAMED = 8
"""Largest number of rows that are named."""

_OUTLIER = 5.0
"""A value is an outlier if it is so many deviations above the median of the other values."""

_OUTLIER_NORM = 8.0
"""As `_OUTLIER`, for the logarithms of the rows' norms: after a bad update these vary more."""

_SIMILAR = 5.0
"""Of several outliers, those are named whose value is within this factor of the worst value."""

_LEAST_LOG_DEVIATION = 0.25
"""Least deviation of the logarithms of the rows' norms: ordinary rows differ by such factors."""

_LEAST_DEVIATION = 0.1
"""Least deviation of the rows' losses, relative to their median."""

_NUM_TARGETS = "num_items_in_batch"
"""Argument by which a Trainer asks a network to divide its loss by the targets of all batches."""

_SAME_LOSS = 0.1
"""Largest relative difference of two losses of a step that count as the same."""

_OTHER_LOSS = (
    "not told: rows can be run only with the loss that the network returns, and the loss of the "
    "step, {:.4g}, is another one, computed outside of the network"
)

_TINY = 1e-30
"""Replaces 0 in logarithms and divisors."""

_TOLERANCE = 0.01
"""Largest difference between the loss of a batch and the mean of its rows' losses, relative to the
largest of them. It allows for bfloat16 and for small terms of the loss that are not additive."""


_OTHERS_NOW = "rows were run one by one: with the weights that the step has left, none has its loss"


class RowSearch(NamedTuple):
    """Result of the search for bad rows on one rank."""

    rows: tuple[BadRow, ...]
    """Rows that stand out, the worst first; empty if none does."""

    detail: str
    """How the rows were found, or why none is named."""

    is_exact: bool | None = None
    """Whether the weights and the random numbers were those of the step; ``None`` without a
    search."""

    losses: tuple[tuple[int, float], ...] = ()
    """Micro-batch and loss of each row, if all were run and none is named; comparable with the loss
    of the step."""

    span: str = ""
    """Where the rows of the step are in the data, if that is known and none is named."""

    lack_targets: bool = False
    """Whether none of the rows that are named has a target."""


def find_rows(
    recorder: StepRecorder,
    loss_scale: float,
    *,
    loss: float | None,
    is_finite: bool,
    is_exact: bool,
) -> RowSearch:
    """Run parts of the last step's batches again, and name the rows that stand out.

    Rows are run one by one; many rows are first run in groups. If the loss of a batch is not the
    mean or the sum of its rows' losses, as with BatchNorm or a contrastive loss, each row is left
    out in turn instead, with another row in its place.

    Does about a hundred forwards and backwards at most. Synchronizes with the device, starts no
    collective, and never raises an error of the network: other ranks may wait for the result.

    Args:
        recorder: Recorder that holds the step.
        loss_scale: Loss scale of the step.
        loss: Loss of the step on this rank; ``None`` if it is unknown, but finite.
        is_finite: Whether loss and gradients of the step were finite on all ranks. Otherwise only
            rows that are non-finite stand out.
        is_exact: Whether the weights are those of the step.
    """
    try:
        loss_is_finite = loss is None or math.isfinite(loss)
        outside = outside_of_replay(recorder, loss_is_finite=loss_is_finite)
        calls: Sequence[RecordedCall] = recorder.last_step
        if outside is not None:
            rows = () if is_finite else _of_columns(recorder)
            if rows:
                return RowSearch(rows, "rows that are not finite in the data", is_exact=True)
            calls = recorder.last_batches
        if outside is not None and not calls:
            return RowSearch((), f"not searched: {outside}")
        with undisturbed(recorder):
            passes = _Passes(recorder, calls, loss_scale, has_weights=is_exact)
            shares = None if _has_batch_norm(recorder.network) else _shares(passes)
            if shares is None:
                found = _leave_out(passes, is_finite=is_finite)
            else:
                found = _run_apart(passes, shares, is_finite=is_finite)
            if not found.rows and loss is not None and not passes.explain(loss):
                found = RowSearch((), _OTHER_LOSS.format(loss))
    # The search runs code of the network, which may raise any error, also because the network
    # cannot take a part of a batch. The error must not end the training, nor leave the other ranks
    # in a collective.
    except Exception as error:  # noqa: BLE001  (see above)
        text = str(error).partition("\n")[0]
        return RowSearch((), f"the search failed: {type(error).__name__}: {text}")
    is_exact = is_exact and (shares is None or not passes.draw_random_numbers)
    losses = [row.loss for row in found.rows if row.loss is not None]
    if not is_exact and loss is not None and losses and max(losses) < loss:
        # One of the rows of a mean is not below it: the update has changed what they had.
        return RowSearch((), _OTHERS_NOW)
    return found._replace(is_exact=is_exact, lack_targets=_lack_targets(calls, found.rows))


def _lack_targets(calls: Sequence[RecordedCall], rows: Sequence[BadRow]) -> bool:
    """Tell whether none of some rows has a target; false without rows, or columns of targets."""
    targets = [
        tensor[row.row] != IGNORED
        for row in rows
        for call in [calls[row.micro_batch]]
        for name, tensor in tensors_in([call.positional, call.keywords])
        if is_target(name, tensor) and tensor.dim() > 1 and row.row < len(tensor)
    ]
    return bool(targets) and not any(bool(each.any()) for each in targets)


def _of_columns(recorder: StepRecorder) -> tuple[BadRow, ...]:
    """Return the rows that are not finite in columns that the network did not get."""
    found = [(each.micro_batch, row) for each in origins_in_columns(recorder) for row in each.rows]
    return tuple(
        BadRow(rank=this_rank(), micro_batch=number, row=row)
        for number, row in dict.fromkeys(found)
    )


class _Part(NamedTuple):
    """Some rows of one micro-batch."""

    micro_batch: int
    rows: tuple[int, ...]


class _Value(NamedTuple):
    """Result of a forward and backward: the loss, and the norm of the unscaled gradients."""

    loss: float
    norm: float
    """0 if it is unknown, because only the loss was computed."""

    @property
    def size(self) -> float:
        """Norm to compare by; infinite if the loss or the norm is non-finite."""
        return self.norm if math.isfinite(self.loss) and math.isfinite(self.norm) else math.inf


@final
class _Passes:
    """Run the network on parts of the micro-batches of a step.

    Args:
        recorder: Recorder that holds the step.
        calls: Its calls of the network, or its micro-batches, whose gradients are unknown.
        loss_scale: Loss scale of the step.
        has_weights: Whether the weights are those of the step.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        calls: Sequence[RecordedCall],
        loss_scale: float,
        *,
        has_weights: bool,
    ) -> None:
        self.network, self._recorder = recorder.network, recorder
        self._has_weights = has_weights
        self.calls = calls
        self.batches = [BatchRows(call) for call in self.calls]
        self.draw_random_numbers = False
        """Whether any pass has drawn random numbers, for example for dropout."""
        self._device = recorder.device
        self._loss_scale = loss_scale

    def value(self, part: _Part, share: float = 1.0) -> _Value:
        """Run forward and backward of a part.

        Args:
            part: Rows of a micro-batch, in any order; a row may be repeated.
            share: Factor of the part's loss in the loss of its micro-batch.
        """
        call = self.batches[part.micro_batch].take(part.rows)
        if isinstance(call, RecordedBatch):
            return _Value(self.loss(part), 0.0)
        with gradients_aside(self.network) as weights, torch.enable_grad():
            loss = loss_of(call.run(self._recorder))
            if loss is None:
                msg = "the network returned no loss"
                raise ValueError(msg)
            seed = call.loss_gradient
            if seed is None or not seed.isfinite().all():
                scaled = (loss.float() * self._loss_scale * share).sum()
                backward([scaled], [None], weights.values())
            else:
                seed = (seed * share).to(loss.dtype).reshape(loss.shape)
                backward([loss], [seed], weights.values())
            norms = norms_of_each([w.grad for w in weights.values()], self._device)
        self.draw_random_numbers |= call.random.differs_from(RandomState.now(self._device))
        return _Value(loss.item(), norms.double().norm().item() / self._loss_scale)

    def loss(self, part: _Part, *, is_alone: bool = False) -> float:
        """Run the forward of a part.

        Args:
            part: Rows of a micro-batch.
            is_alone: Whether the loss is that of the part alone, even if the Trainer has divided
                the losses of the step by the number of all its targets.
        """
        call = self.batches[part.micro_batch].take(part.rows)
        if is_alone:
            others = {name: v for name, v in call.keywords.items() if name != _NUM_TARGETS}
            call = dataclasses.replace(call, keywords=others)
        with torch.no_grad():
            loss = loss_of(call.run(self._recorder))
        self.draw_random_numbers |= call.random.differs_from(RandomState.now(self._device))
        return math.nan if loss is None else loss.item()

    @property
    def difference(self) -> str:
        """What the passes had that the step had not, so that its loss is another one; or empty."""
        if not self._has_weights:
            return " with the weights after the update"
        return " with other random numbers" if self.draw_random_numbers else ""

    def explain(self, loss: float) -> bool:
        """Return whether the loss of the step is that which the network has returned.

        It is not if the loop adds something to it, such as the divergence from a teacher. An
        unknown or non-finite loss counts as explained.

        Args:
            loss: Loss of the step.
        """
        if any(isinstance(call, RecordedBatch) for call in self.calls):
            return True
        own = losses_of(self.calls)
        if not own or not all(map(math.isfinite, (loss, *own))):
            return True
        # The Trainer divides each loss by the targets of the whole step, perhaps of all ranks.
        is_share = all(map(_is_share, self.calls))
        whole = math.fsum(own) / (1 if is_share else len(own))
        known = (whole, whole * num_ranks()) if is_share else (whole,)
        return any(math.isclose(loss, each, rel_tol=_SAME_LOSS) for each in known)

    def own_loss(self, part: _Part, value: _Value) -> float:
        """Return the loss of a part alone, comparable with the loss of the step.

        Args:
            part: Rows of a micro-batch.
            value: Result of the part in the step.
        """
        call = self.calls[part.micro_batch]
        if not _is_share(call):
            return value.loss
        if call.keywords.get(_NUM_TARGETS) is not None:
            return self.loss(part, is_alone=True)
        # The loss is computed from a number of targets that cannot be left out.
        return value.loss * sum(batch.num_rows for batch in self.batches)

    def place_of(self, part: _Part) -> BadRow:
        """Return the place of the only row of a part."""
        (row,) = part.rows
        indices = indices_of(self.calls[part.micro_batch])
        is_known = len(indices) == self.batches[part.micro_batch].num_rows
        return BadRow(
            rank=this_rank(),
            micro_batch=part.micro_batch,
            row=row,
            index=indices[row] if is_known else None,
        )


def _is_share(call: RecordedCall) -> bool:
    """Tell whether the Trainer has asked the call to divide its loss by the targets of the step."""
    if call.keywords.get(_NUM_TARGETS) is not None:
        return True
    # A Trainer of TRL has the number in the batch.
    return any(name.endswith(f".{_NUM_TARGETS}") for name, _ in tensors_in(call.arguments))


def _has_batch_norm(network: nn.Module) -> bool:
    """Tell whether a BatchNorm mixes the rows of a batch."""
    return any(
        isinstance(module, BatchNorm) and (module.training or not module.track_running_stats)
        for module in network.modules()
    )


def _shares(passes: _Passes) -> list[tuple[float, ...]] | None:
    """Return the factor of each row's loss in the loss of its micro-batch.

    A loss may be the sum or the mean of the rows' losses, or a mean over all targets. The rule that
    fits is found by comparing the loss of a few rows with the loss of each of them.

    Returns:
        One factor per row of each micro-batch, 0 for a row without targets; ``None`` if no rule
        fits: the rows depend on each other.
    """
    rule = "mean"
    first = next((n for n, batch in enumerate(passes.batches) if batch.num_rows > 1), None)
    if first is not None:
        alone, together = _losses_of_some_rows(passes, first)
        # With fewer than two finite losses there is nothing to compare. A mean is most common.
        if len(alone) > 1:
            errors = {
                name: abs(_combined(name, [weights[row] for row in alone], alone) - together)
                for name, weights in _rules(passes.batches[first]).items()
            }
            rule = min(errors, key=lambda name: errors[name])
            if not errors[rule] <= _TOLERANCE * max(map(abs, alone.values())):
                return None
    shares = []
    for batch in passes.batches:
        weights = _rules(batch)[rule]
        total = 1.0 if rule == "sum" else sum(weights)
        shares.append(tuple(weight / max(total, 1.0) for weight in weights))
    return shares


def _losses_of_some_rows(passes: _Passes, micro_batch: int) -> tuple[dict[int, float], float]:
    """Return the finite losses of up to four rows, and their loss as one batch."""
    modes = [(module, module.training) for module in passes.network.modules()]
    # Dropout draws other random numbers for a part of a batch, so losses would not be comparable.
    passes.network.eval()
    try:
        alone: dict[int, float] = {}
        for row in range(min(passes.batches[micro_batch].num_rows, _MOST_SINGLE_ROWS)):
            loss = passes.loss(_Part(micro_batch, (row,)))
            if math.isfinite(loss):
                alone[row] = loss
            if len(alone) == 4:
                break
        together = passes.loss(_Part(micro_batch, tuple(alone))) if len(alone) > 1 else math.nan
    finally:
        for module, is_training in modes:
            module.training = is_training
    return alone, together


def _rules(batch: BatchRows) -> dict[str, tuple[float, ...]]:
    """Return the weights of the rows in the loss, by the name of the rule."""
    ones = (1.0,) * batch.num_rows
    ways = dict(zip(("targets", "targets after the first"), batch.num_targets(), strict=False))
    return {"mean": ones, "sum": ones, "targets": ones, "targets after the first": ones} | ways


def _combined(rule: str, weights: Sequence[float], losses: Mapping[int, float]) -> float:
    """Return the loss of a batch from its rows' losses."""
    total = sum(weight * loss for weight, loss in zip(weights, losses.values(), strict=True))
    return total if rule == "sum" else total / max(sum(weights), 1.0)


def _run_apart(passes: _Passes, shares: Sequence[Sequence[float]], *, is_finite: bool) -> RowSearch:
    """Run rows one by one, and return those that stand out."""

    def run(part: _Part) -> _Value:
        share = [shares[part.micro_batch][row] for row in part.rows]
        # The loss of a part is a mean, whose factor is the sum of its rows' factors, or a sum,
        # whose rows all have the factor 1.
        return passes.value(part, 1.0 if is_sum else sum(share))

    is_sum = all(share in {0.0, 1.0} for of_batch in shares for share in of_batch)
    parts = [
        _Part(number, tuple(row for row, share in enumerate(of_batch) if share > 0))
        for number, of_batch in enumerate(shares)
    ]
    parts = [part for part in parts if part.rows]
    num_rows = sum(len(part.rows) for part in parts)
    how, are_all = "rows were run one by one", num_rows <= _MOST_SINGLE_ROWS
    while num_rows > _MOST_SINGLE_ROWS:
        how = "groups of rows were run first, then the rows of the worst groups"
        parts = _worst_groups(_groups(parts, num_rows, _NUM_GROUPS), run)
        if not parts:
            return RowSearch((), f"{how}: the groups are all non-finite, so no row is named")
        num_rows = sum(len(part.rows) for part in parts)
    values = {part: run(part) for part in _groups(parts, num_rows, num_rows)}
    if len(values) < 2:
        return RowSearch((), "not searched: the step has only one row")
    worst = _non_finite(values) or (_outliers(values) if is_finite else [])
    if not worst:
        alike = any(math.isinf(value.size) for value in values.values())
        if alike:
            return RowSearch((), f"{how}: all of a micro-batch are non-finite")
        if not is_finite and (odd := _bad_without_targets(passes, shares)):
            rows = tuple(map(passes.place_of, odd[:MOST_NAMED]))
            return RowSearch(rows, f"{how}: {len(odd)} without targets made the loss non-finite")
        losses = [(part.micro_batch, passes.own_loss(part, one)) for part, one in values.items()]
        low, high = min(loss for _, loss in losses), max(loss for _, loss in losses)
        what = f"none of {len(losses)} stands alone, with losses from {low:.4g} to {high:.4g}"
        how += passes.difference
        return RowSearch((), f"{how}: {what}", losses=tuple(losses) if are_all else ())
    named = [
        dataclasses.replace(
            passes.place_of(part),
            loss=passes.own_loss(part, values[part]),
            gradient_norm=values[part].norm or None,
        )
        for part in worst[:MOST_NAMED]
    ]
    return RowSearch(tuple(named), f"{how}: {len(worst)} of {len(values)} stand out")


def _bad_without_targets(passes: _Passes, shares: Sequence[Sequence[float]]) -> list[_Part]:
    """Return rows without targets that make a micro-batch non-finite.

    Alone, a row without targets has no mean loss in any network, so it is run with all rows that
    have targets. A second term of the loss may be a mean over the targets of each row.
    """
    found = []
    for number, of_batch in enumerate(shares):
        others = tuple(row for row, share in enumerate(of_batch) if share > 0)
        without = [row for row, share in enumerate(of_batch) if share == 0][:_MOST_SINGLE_ROWS]
        if not (others and without) or math.isinf(passes.value(_Part(number, others)).size):
            continue
        found += [
            _Part(number, (row,))
            for row in without
            if math.isinf(passes.value(_Part(number, (*others, row))).size)
        ]
    return found


def _groups(parts: Sequence[_Part], num_rows: int, num_groups: int) -> list[_Part]:
    """Divide parts with `num_rows` rows together into about `num_groups` groups of equal size."""
    size = -(-num_rows // num_groups)
    return [
        _Part(part.micro_batch, part.rows[start : start + size])
        for part in parts
        for start in range(0, len(part.rows), size)
    ]


def _worst_groups(groups: Sequence[_Part], run: Callable[[_Part], _Value]) -> list[_Part]:
    """Return the groups in which bad rows are to be searched; empty if all are non-finite."""
    sizes = {group: run(group).size for group in groups}
    ranked = sorted(sizes, key=lambda group: -sizes[group])
    bad = [group for group in ranked if math.isinf(sizes[group])]
    if len(bad) == len(groups):
        return []
    # Three quarters at most, so that each round leaves fewer rows.
    return bad[: len(groups) * 3 // 4] or ranked[:2]


def _non_finite(values: Mapping[_Part, _Value]) -> list[_Part]:
    """Return the parts that are non-finite, unless the fault is not in single rows.

    It is not if all rows are non-finite, or all of the several rows of a micro-batch.
    """
    bad = [part for part in values if math.isinf(values[part].size)]
    if len(bad) == len(values):
        return []
    all_of, bad_of = (Counter(part.micro_batch for part in each) for each in (values, bad))
    return [
        part
        for part in bad
        if all_of[part.micro_batch] == 1 or bad_of[part.micro_batch] < all_of[part.micro_batch]
    ]


def _outliers(values: Mapping[_Part, _Value]) -> list[_Part]:
    """Return the parts whose loss or norm is far above the others, the worst first."""
    ranked = sorted(values, key=lambda part: -values[part].size)
    if math.isinf(values[ranked[0]].size):
        return []
    norms = [values[part].norm for part in ranked]
    losses = [values[part].loss for part in ranked]
    logs = [math.log(max(norm, _TINY)) for norm in norms]
    usual_loss = statistics.median(losses)
    by_norm = {
        number
        for number in range(len(ranked))
        if _deviations(logs, number, _LEAST_LOG_DEVIATION) > _OUTLIER_NORM
        and norms[number] > max(norms) / _SIMILAR
    }
    by_loss = {
        number
        for number in range(len(ranked))
        if _deviations(losses, number, _LEAST_DEVIATION * abs(usual_loss)) > _OUTLIER
        and losses[number] - usual_loss > (max(losses) - usual_loss) / _SIMILAR
    }
    found = sorted(by_norm | by_loss)
    # If many rows differ from the others, the rows are not the cause of the anomaly.
    return [ranked[number] for number in found] if len(found) <= max(1, len(ranked) // 4) else []


def _deviations(numbers: Sequence[float], which: int, least: float) -> float:
    """Return how many deviations a number is above the median of the other numbers."""
    others = [*numbers[:which], *numbers[which + 1 :]]
    middle = statistics.median(others)
    spread = 1.4826 * statistics.median(abs(number - middle) for number in others)
    return (numbers[which] - middle) / max(spread, least, _TINY)


def _leave_out(passes: _Passes, *, is_finite: bool) -> RowSearch:
    """Put another row in the place of each row, and return a row that stands out."""
    whole = [_Part(n, tuple(range(batch.num_rows))) for n, batch in enumerate(passes.batches)]
    before, part = max(((passes.value(part), part) for part in whole), key=lambda e: e[0].size)
    how = "rows were left out in turn, because the rows of a batch may depend on each other"
    if math.isfinite(before.size) and not is_finite:
        return RowSearch((), f"{how}: the batches are finite")
    left = part.rows
    while True:
        size = -(-len(left) // _NUM_LEFT_OUT)
        groups = [left[start : start + size] for start in range(0, len(left), size)]
        values = {group: passes.value(_without(part, group)) for group in groups}
        best = min(groups, key=lambda group: values[group].size)
        if size == 1 or len(groups) < 2:
            break
        left = best
    if len(part.rows) < 2 or not _is_cured(before, best, values):
        return RowSearch((), f"{how}: none stands out")
    after = values[best]
    row = dataclasses.replace(
        passes.place_of(_Part(part.micro_batch, best)),
        loss_without=after.loss,
        gradient_norm_without=after.norm,
    )
    return RowSearch((row,), how)


def _without(part: _Part, group: Sequence[int]) -> _Part:
    """Return the rows of a micro-batch with other rows in the places of a group."""
    others = [row for row in part.rows if row not in set(group)]
    replacement = dict(zip(group, itertools.cycle(others), strict=False))
    return _Part(part.micro_batch, tuple(replacement.get(row, row) for row in part.rows))


def _is_cured(
    before: _Value, best: tuple[int, ...], values: Mapping[tuple[int, ...], _Value]
) -> bool:
    """Tell whether leaving out one row, and only this row, makes the micro-batch good."""
    after = values[best]
    if math.isinf(after.size):
        return False
    if math.isinf(before.size):
        return True
    falls = [before.norm - value.norm for value in values.values()]
    number = list(values).index(best)
    is_outlier = _deviations(falls, number, _LEAST_DEVIATION * before.norm) > _OUTLIER
    return is_outlier or after.norm < before.norm / 2
