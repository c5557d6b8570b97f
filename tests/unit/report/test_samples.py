"""The page names the samples of a bad step, with their place, and how to leave them out."""

import html
import re

import pytest

from mfwrap.report.samples import compared, samples_of

ROW = {"rank": 1, "micro_batch": 2, "row": 3}
GIVEN = "to a file, and give the file as --skip-rows or MFTrainer(skip_rows=...); "


def text_of(record):
    """Return the lines of a record as text."""
    return [html.unescape(re.sub("<.+?>", "", line)) for line in samples_of([record])]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"index": 77, "epoch": 2, "position": 40}],
            [
                "data set index 77 (rank 1, micro-batch 2, row 3), epoch 2, position 40",
                (
                    'to leave it out of this pass: write the line {"epoch": 2, "position": 40} '
                    f"{GIVEN}to leave it out of all passes, remove it from the data"
                ),
            ],
        ),
        (
            [{"epoch": 0, "position": 1}, {"epoch": 0, "position": 2}],
            [
                "rank 1, micro-batch 2, row 3, epoch 0, position 1",
                "rank 1, micro-batch 2, row 3, epoch 0, position 2",
                (
                    'to leave them out of this pass: write the lines {"epoch": 0, "position": 1} '
                    f'{{"epoch": 0, "position": 2}} {GIVEN}'
                    "to leave them out of all passes, "
                    "remove them from the data"
                ),
            ],
        ),
        (
            [{"index": 77, "source": "a<b>.csv:5"}],
            ["a<b>.csv:5, data set index 77 (rank 1, micro-batch 2, row 3)"],
        ),
        ([{"epoch": "<b>", "position": 1}], ["rank 1, micro-batch 2, row 3"]),
    ],
)
def test_how_to_leave_samples_out(rows, said):
    """A sample with a place shows it, and the line of a file with rows to leave out."""
    assert text_of({"samples": [ROW | row for row in rows]}) == said


def test_samples_of_several_steps():
    """An episode of several steps has the samples of each; it says if some were not searched."""
    record = {"step": 61, "last_step": 75, "num_steps": 3, "samples": [ROW]}
    later = {"later_samples": [{"step": 62, **ROW}], "num_searched": 2}

    assert text_of(record) == [
        "rank 1, micro-batch 2, row 3",
        "samples of 1 of the 3 steps of the episode only",
    ]
    assert text_of(record | later) == [
        "rank 1, micro-batch 2, row 3",
        "step 62, rank 1, micro-batch 2, row 3",
        "samples of 2 of the 3 steps of the episode only",
    ]
    assert len(text_of(record | later | {"num_searched": 3})) == 2


def test_numbers_of_a_sample():
    """A sample has its loss and norm, those without it, and its text."""
    row = ROW | {"loss": 22.0, "gradient_norm": 3.0, "loss_without": 2.0, "text": "a <b> c"}

    assert text_of({"samples": [row], "are_samples_exact": False}) == [
        (
            "rank 1, micro-batch 2, row 3: loss 22, gradient norm 3, with this row left out, "
            "loss 2a <b> c"
        ),
        "numbers of a later run of the rows, not of the step itself",
    ]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"rows": [1, 2]}, ["rows 1, 2 of the input are not finite"]),
        ({"indices": [7, 8]}, ["micro-batch of data set indices 7, 8"]),
        ({"samples_detail": "the batch is gone"}, ["none named: the batch is gone"]),
        ({}, []),
    ],
)
def test_why_no_sample_is_named(record, said):
    """Without samples, the lines say what is known of the batch."""
    assert text_of(record) == said


def test_many_samples():
    """Eight samples are shown, and the rest is counted."""
    rows = [ROW | {"row": number} for number in range(11)]

    lines = text_of({"samples": rows})
    assert len(lines) == 9
    assert lines[-1] == "and 3 more, in anomalies.jsonl"


@pytest.mark.parametrize(
    ("value", "usual", "said"),
    [
        (2.0, 1.0, ["loss 2 (usually 1)"]),
        (2.0, "nan", ["loss 2"]),
        ("inf", None, ["loss inf"]),
        (None, 1.0, []),
        ("x", 1.0, []),
    ],
)
def test_compared_numbers(value, usual, said):
    """A number is shown beside the usual one if both are known."""
    assert compared("loss", value, usual) == said
