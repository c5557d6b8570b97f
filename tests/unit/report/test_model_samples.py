"""The page shows what the model has said, over a few steps, as text."""

import re

import pytest

from mfwrap.records.run_record import read_run
from mfwrap.report.model_samples import model_sample_tables
from support.run_folders import write_lines, write_run


def page(folder, *records, num_runs=1):
    """Return the tables of runs with given records."""
    runs = [write_run(folder / str(number)) for number in range(num_runs)]
    for run in runs:
        write_lines(run / "samples.jsonl", records)
    return model_sample_tables([read_run(run) for run in runs])


def record(step, text="said", **others):
    """Return a record of the only prompt."""
    return {"step": step, "prompt": 0, "averaged": False, "text": text, "input": "in", **others}


def heads(text):
    """Return the heads of the columns."""
    return re.findall("<th>(.*?)</th>", text)


def test_a_run_without_samples(tmp_path):
    """Without samples there is no heading."""
    assert model_sample_tables([read_run(write_run(tmp_path))]) == ""


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ([5], [5]),
        ([0, 10, 20], [0, 10, 20]),
        (range(0, 110, 10), [0, 20, 50, 80, 100]),
        (range(100), [0, 25, 50, 74, 99]),
    ],
)
def test_columns(tmp_path, steps, shown):
    """The first and the last step are shown, and some between them."""
    text = page(tmp_path, *(record(step, seconds=0.5) for step in steps))

    assert heads(text) == ["Input", *(f"Step {step}" for step in shown)]
    assert ("All of them are in samples.jsonl" in text) == (len(steps) > len(shown))
    assert f"Samples at {len(steps)} step" in text


def test_raw_and_averaged(tmp_path):
    """The averaged weights are below the raw ones, and said once if they say the same."""
    text = page(
        tmp_path,
        *(record(1, "one", reference="ref"), record(1, "two", averaged=True)),
        *(record(2, "three"), record(2, "three", averaged=True)),
    )

    assert heads(text) == ["Input", "Expected", "Step 1", "Step 2"]
    assert text.index("one") < text.index("two")
    assert text.count("three") == 1
    assert "averaged weights:</span> the same" in text


def test_an_answer_of_white_space_that_is_cut(tmp_path):
    """The mark of a cut answer is no text of it."""
    text = page(tmp_path, record(1, "\n\n [...]"))
    assert '<span class="note">only white space, cut</span>' in text


def test_an_empty_answer(tmp_path):
    """An answer without text is called empty; a dash is an input that was not asked at a step."""
    asked, other = record(1, ""), record(2, " \n", input="another input")
    text = page(tmp_path, asked, other)
    cells = re.findall('<td data-column="Step .">(.*?)</td>', text)

    assert cells == [
        '<div><span class="note">empty</span></div>',
        "\N{EN DASH}",
        "\N{EN DASH}",
        '<div><span class="note">only white space</span></div>',
    ]


def test_markup_is_text(tmp_path):
    """Nothing in a record becomes markup: texts, references, images."""
    bad = '"><script>alert(1)</script>'
    fields = {"input": bad, "reference": bad, "image": bad}
    text = page(tmp_path, record(1, bad, **fields), record(2, bad * 30))

    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text


def test_control_characters_are_spelled_out(tmp_path):
    """They appear as escapes. White space and joiners of letters, as in Persian, stay."""
    said = "\x05 of 5\tmm\x7f\u200c."

    assert "\\x05 of 5\tmm\\x7f\u200c." in page(tmp_path, record(1, said))


def test_a_long_text_is_folded(tmp_path):
    """The rest of a long text is in a fold, and nothing is there twice."""
    words = " ".join(map(str, range(200)))
    text = page(tmp_path, record(1, words))

    [(start, rest)] = re.findall("<details><summary>(.*?)</summary>(.*?)</details>", text)
    assert start + rest == words
    assert len(start) == 160


def test_images_and_several_runs(tmp_path):
    """An image is within the page; each run has its table, under one heading."""
    text = page(tmp_path, record(1, image="iVBORw0KGgo="), num_runs=2)

    assert text.count('<img src="data:image/png;base64,iVBORw0KGgo="') == 2
    assert text.count("<h2") == 1
    assert text.count("<table") == 2
