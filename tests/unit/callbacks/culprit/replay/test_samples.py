"""An anomaly names the samples that stand out, of all ranks."""

import itertools
import math
import re
import statistics

import pytest
import torch

from mfwrap.callbacks.culprit.anomaly_log import Anomaly
from mfwrap.callbacks.culprit.replay.micro_batches import losses_of
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.culprit.replay.samples import SampleSearch, with_samples
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.records.skipped_rows import RowPlace, SkippedRow
from support.spoilt.rows import Regression, planted


def numbers_of(step, *, loss=math.nan, overflow=True, skipped=True):
    """Return the numbers of a step."""
    return StepNumbers(
        step=step,
        loss=loss,
        overflow=overflow,
        global_norm=1.0,
        loss_scale=None,
        skipped=skipped,
        consecutive_skips=0,
    )


def searched(search, number, *, kind="loss_not_finite", loss=math.nan, skipped=True, **known):
    """Return an anomaly of a step with its samples."""
    moved = known.pop("moved", False)
    anomaly = Anomaly(step=number, kind=kind, ranks=(0,), layer=None, **known)
    numbers = numbers_of(number, loss=loss, overflow=skipped and kind != "spike", skipped=skipped)
    found = search.search(numbers, is_finite=kind == "spike", weights_have_moved=moved)
    return with_samples(anomaly, [None, found])


def test_a_sample_is_added():
    """Record and log line name the sample; the search is exact if the update was skipped."""
    step = planted("GroupNorm", "nan", 0)
    found = searched(SampleSearch(step.recorder), 7)
    (sample,) = found.as_record()["samples"]

    assert (sample["micro_batch"], sample["row"]) == (step.micro_batch, step.row)
    assert "index" not in sample
    assert f"row {step.row} of micro-batch {step.micro_batch} on rank 0 has loss nan" in str(found)
    assert found.are_samples_exact
    assert not searched(SampleSearch(step.recorder), 7, skipped=False).are_samples_exact
    assert not searched(SampleSearch(step.recorder), 7, moved=True).are_samples_exact


def test_when_nothing_is_searched():
    """An anomaly stays as it is without a search."""
    anomaly = Anomaly(step=7, kind="spike", ranks=(0,), layer=None)

    assert with_samples(anomaly, [None, None]) is anomaly


def test_the_samples_of_a_consequence_say_nothing():
    """Ruined weights make some rows worse than others; these are not the ones to leave out."""
    step = planted("GroupNorm", "nan", 0)
    found = searched(SampleSearch(step.recorder), 7, cause="diverged")

    assert (found.samples, found.samples_detail) == ((), None)


def test_why_no_sample_is_named():
    """If no row stands out, the record says so."""
    step = planted("GroupNorm", "nan", 0)
    with torch.no_grad():
        for weight in step.recorder.network.parameters():
            weight.fill_(math.nan)
    found = searched(SampleSearch(step.recorder), 7)

    assert (found.samples, found.are_samples_exact) == ((), None)
    assert found.samples_detail == "rows were run one by one: all of a micro-batch are non-finite"


def test_places_are_added():
    """A sample has the place of its row in its micro-batch of its step, in record and log line."""
    step = planted("GroupNorm", "nan", 0)
    calls = step.recorder.last_step
    asked = []

    def places(number, sizes):
        asked.append((number, sizes))
        return [
            [RowPlace(100 * batch + row, SkippedRow(batch, 7 * row)) for row in range(size)]
            for batch, size in enumerate(sizes)
        ]

    found = searched(SampleSearch(step.recorder, row_places=places), 7)
    (sample,) = found.as_record()["samples"]
    index, position = 100 * step.micro_batch + step.row, 7 * step.row

    assert [(number, len(sizes)) for number, sizes in asked] == [(7, len(calls))]
    assert set(asked[0][1]) == {len(next(iter(calls[0].keywords.values())))}
    assert [sample[name] for name in ("index", "epoch", "position")] == [
        index,
        step.micro_batch,
        position,
    ]
    place = f"(data set index {index}; epoch {step.micro_batch}, position {position})"
    assert f"on rank 0 {place} has loss nan" in str(found)


def test_places_may_be_unknown():
    """Without places of the step or of the row, the sample has none."""
    step = planted("GroupNorm", "nan", 0)
    for places in (lambda *_: (), lambda _, sizes: [[None] * size for size in sizes]):
        found = searched(SampleSearch(step.recorder, row_places=places), 7)
        (sample,) = found.as_record()["samples"]
        assert not {"index", "epoch", "position"} & sample.keys()


def test_bad_data_without_a_row_that_stands_out_are_placed():
    """All rows of the step are suspects then; for other causes, and with a row unknown, none is."""

    def detail_of(unknown=None, **known):
        def places(_, sizes):
            numbers = itertools.count(40)
            found = [[RowPlace(0, SkippedRow(2, next(numbers))) for _ in range(n)] for n in sizes]
            return found if unknown is None else [[None, *found[0][1:]], *found[1:]]

        step = planted("tokens", None, 0)
        search = SampleSearch(step.recorder, row_places=places)
        loss = statistics.fmean(losses_of(step.recorder.last_step))
        found = searched(search, 7, kind="spike", loss=loss, **known)
        assert found.samples == ()
        return found.samples_detail

    assert re.search(
        r"to [\d.]+; they are at positions 40 to \d+ of epoch 2$", detail_of(cause="data")
    )
    assert "positions" not in detail_of(cause="gradient")
    assert "positions" not in detail_of(0, cause="rank_data")


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens):
        """Return the text of tokens."""
        return "".join(chr(ord("a") + token) for token in tokens)


def test_texts_are_added_only_if_asked_for():
    """The text of a sample is decoded; without a tokenizer the tokens are shown."""
    step = planted("tokens", "labels", 0)
    tokens = step.recorder.last_step[step.micro_batch].keywords["tokens"][step.row].tolist()
    texts = [
        searched(SampleSearch(step.recorder, **known), 7, kind="spike", loss=1.0).samples[0].text
        for known in ({}, {"shows_texts": True}, {"shows_texts": True, "tokenizer": Letters()})
    ]

    assert texts == [None, " ".join(map(str, tokens)), Letters().decode(tokens)]


@pytest.mark.parametrize("name", ["images", "labels"])
def test_rows_with_a_far_larger_input(name):
    """They are named by their size alone; rows of one size name none."""
    network = Regression()
    recorder = StepRecorder(network)
    for number in range(2):
        batch = {"images": torch.ones(4, 3, 8, 8), "labels": torch.ones(4)}
        if number == 1:
            batch[name][2] = 1e4
        network(**batch)["loss"].backward()
    recorder.end_step()
    search = SampleSearch(recorder)
    (row,) = search.of_input(name, 1).rows
    other = "labels" if name == "images" else "images"

    assert (row.micro_batch, row.row) == (1, 2)
    assert search.of_input(other, 1).rows == ()
    assert search.of_input("absent", 1).rows == ()
