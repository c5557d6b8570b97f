"""Add the samples that stand out to the anomaly of a bad step."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, final

from mfwrap.callbacks.culprit.anomaly_log import NON_FINITE, OF_TERMS, Anomaly, BadRow, Kind
from mfwrap.callbacks.culprit.replay.batch_rows import BatchRows
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder, tensors_in
from mfwrap.callbacks.culprit.replay.rows import MOST_NAMED, RowSearch, find_rows
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.collectives import this_rank
from mfwrap.records.skipped_rows import RowPlace, RowPlaces

IN_ROWS: frozenset[Kind] = frozenset({"spike", "loss_spike", "local_norm_spike"})
"""Kinds of finite anomalies that a row may have caused."""

_CAUSES_IN_DATA = frozenset({"data", "rank_data"})

_LONGEST_TEXT = 500
"""Largest number of characters of a text that is shown."""

SPOILT_BY_UPDATE = "not searched: the update of the step has changed the weights too far"

_LARGER = 10.0
"""Smallest ratio of the size of a row's input to that of the middle row which is named by it."""

_SIMILAR = 5.0
"""Rows of other ranks are named whose norm is within this factor of the worst norm."""


@final
class SampleSearch:
    """Search the rows of the batches of a bad step for those that stand out.

    Args:
        recorder: Recorder of the steps.
        shows_texts: Whether to add the texts of samples whose tokens are known.
        tokenizer: Decodes the texts; without one, the numbers of the tokens are shown.
        row_places: Tells where this rank's rows are in the training data; ``None`` if that is
            unknown.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        *,
        shows_texts: bool = False,
        tokenizer: Any = None,
        row_places: RowPlaces | None = None,
    ) -> None:
        self._recorder = recorder
        self._shows_texts = shows_texts
        self._tokenizer = tokenizer
        self._row_places = row_places

    def search(
        self, numbers: StepNumbers, *, is_finite: bool, weights_have_moved: bool
    ) -> RowSearch:
        """Return the rows of this rank that stand out. Synchronizes with the device.

        Args:
            numbers: Numbers of the step.
            is_finite: Whether loss and gradients of the step were finite on all ranks.
            weights_have_moved: Whether a later update has already changed the weights.
        """
        found = find_rows(
            self._recorder,
            1.0 if numbers.loss_scale is None else numbers.loss_scale,
            loss=numbers.loss,
            is_finite=is_finite,
            is_exact=(numbers.overflow or bool(numbers.skipped)) and not weights_have_moved,
        )
        if not found.rows:
            return found._replace(span=self._span(numbers.step))
        return self._shown(found, numbers.step)

    def of_micro_batch(self, number: int, step: int) -> RowSearch:
        """Return the rows of a micro-batch of this rank, none of which has targets.

        Args:
            number: Number of the micro-batch.
            step: The step.
        """
        num_rows = BatchRows(self._recorder.last_step[number]).num_rows
        rows = (
            BadRow(rank=this_rank(), micro_batch=number, row=row)
            for row in range(min(num_rows, MOST_NAMED))
        )
        return self._shown(RowSearch(tuple(rows), "no row of the micro-batch has targets"), step)

    def of_input(self, name: str, step: int) -> RowSearch:
        """Return the rows of this rank whose input is far larger than that of the others.

        Nothing is run. Synchronizes with the device.

        Args:
            name: Dotted name of the input among the arguments of the network.
            step: The step.
        """
        sizes = []
        for number, call in enumerate(self._recorder.last_step):
            tensor = dict(tensors_in(call.arguments)).get(name)
            if tensor is not None and tensor.dim() > 0:
                norms = tensor.detach().float().reshape(len(tensor), -1).norm(dim=1).tolist()
                sizes += [(size, number, row) for row, size in enumerate(norms)]
        usual = statistics.median(size for size, *_ in sizes) if sizes else math.inf
        rows = tuple(
            BadRow(rank=this_rank(), micro_batch=number, row=row)
            for size, number, row in sorted(sizes, reverse=True)
            if size > _LARGER * usual
        )
        if not rows:
            return RowSearch((), SPOILT_BY_UPDATE, span=self._span(step))
        detail = f"rows whose `{name}` is more than {_LARGER:.0f} times as large as that of others"
        return RowSearch(self._with_places(rows, step), detail, is_exact=True)

    def _shown(self, found: RowSearch, step: int) -> RowSearch:
        """Return rows with their places in the training data and, if it is asked for, texts."""
        rows = self._with_places(found.rows, step)
        return found._replace(rows=tuple(map(self._with_text, rows)) if self._shows_texts else rows)

    def _with_places(self, rows: tuple[BadRow, ...], step: int) -> tuple[BadRow, ...]:
        """Return rows of this rank with their places in the training data."""
        places = self._places(step) if rows else ()
        if not places:
            return rows
        return tuple(_placed(row, places[row.micro_batch][row.row]) for row in rows)

    def _places(self, step: int) -> Sequence[Sequence[RowPlace | None]]:
        """Return the places of this rank's rows in the step; empty if they are unknown."""
        if self._row_places is None:
            return ()
        calls = self._recorder.last_step
        return self._row_places(step, [BatchRows(call).num_rows for call in calls])

    def _span(self, step: int) -> str:
        """Say where the rows of the step are in the data; empty if that is unknown."""
        places = [place for of_batch in self._places(step) for place in of_batch]
        rows = sorted(place.row for place in places if place is not None)
        if not rows or len(rows) < len(places):
            return ""
        first, last = rows[0], rows[-1]
        return f"; they are at positions {first.position} to {last.position} of epoch {first.epoch}"

    def _with_text(self, row: BadRow) -> BadRow:
        call = self._recorder.last_step[row.micro_batch]
        tokens = BatchRows(call).tokens(row.row)
        decode = getattr(self._tokenizer, "decode", None)
        text = " ".join(map(str, tokens)) if decode is None else str(decode(tokens))
        return dataclasses.replace(row, text=text[:_LONGEST_TEXT]) if tokens else row


def _placed(row: BadRow, place: RowPlace | None) -> BadRow:
    if place is None:
        return row
    # If the batch has indices, they are those that the data set itself gave.
    index = place.index if row.index is None else row.index
    return dataclasses.replace(
        row,
        index=index,
        source=place.source,
        epoch=place.row.epoch,
        position=place.row.position,
    )


def with_samples(anomaly: Anomaly, searches: Sequence[RowSearch | None]) -> Anomaly:
    """Return an anomaly with the samples that stand out.

    An anomaly that follows a divergence gets none: with ruined weights, any row may stand out.

    Args:
        anomaly: Anomaly of a step.
        searches: Result of each rank that is known; ``None`` if it has not searched.
    """
    done = [each for each in searches if each is not None]
    if not done or anomaly.cause == "diverged":
        return anomaly
    named = [each for each in done if each.rows]
    rows = sorted((row for each in named for row in each.rows), key=_order)
    detail = (named or done)[0].detail
    if not named and anomaly.cause in _CAUSES_IN_DATA:
        detail += done[0].span
    if named and anomaly.kind in NON_FINITE and all(each.lack_targets for each in named):
        anomaly = _without_targets(anomaly, len(rows))
    return dataclasses.replace(
        anomaly,
        samples=tuple(row for row in rows if _order(row) <= _order(rows[0]) / _SIMILAR),
        samples_detail=detail,
        are_samples_exact=all(each.is_exact for each in named) if named else None,
    )


def _without_targets(anomaly: Anomaly, num_rows: int) -> Anomaly:
    """Return an anomaly of rows without targets; a mean over none of them is not finite."""
    what = "a row" if num_rows == 1 else f"{num_rows} rows"
    _, mark, terms = (anomaly.explanation or "").partition(OF_TERMS)
    return dataclasses.replace(
        anomaly,
        cause="data",
        explanation=f"{what} without targets made the loss non-finite{mark}{terms}",
        suggestion="leave out rows without targets; if texts are cut, allow more tokens",
    )


def _order(row: BadRow) -> float:
    """Return the key by which rows are sorted, the worst first."""
    norm = row.gradient_norm
    # A row without a norm of its own was left out, which made a difference.
    return -norm if norm is not None and math.isfinite(norm) else -math.inf
