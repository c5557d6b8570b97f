"""Trainings that go wrong as real ones do, and what the run page says about each first."""

import html
import re
from pathlib import Path

import pytest

from mfwrap.records.run_record import read_run
from support.pathologies import NAN_IMAGE, run_pathology

_FIRST = {
    "a": ("learning_rate", 2, "learning rate too high", "lower the learning rate by orders of"),
    "b": ("data", 61, "bad data: the loss rose to", "look at the samples of this step"),
    "c": ("optimizer_epsilon", 2, "eps=1e-08 is zero in float16", "skipped all 39 updates"),
    "e": ("batch_norm", 78, "ruined BatchNorm statistics", f"data set index {NAN_IMAGE} "),
}
"""Cause and step in the record of each run, and what the first section of its page must say."""


def _first_section(page: Path) -> str:
    """Return the text of a page from the title to the first table."""
    body = page.read_text(encoding="utf-8").partition("</header>")[2].partition("<h2")[0]
    return " ".join(html.unescape(re.sub("<.*?>", "", body.replace("<d", " <d"))).split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`optimizer` makes float16 weights NaN")  # it is one of them
@pytest.mark.parametrize("name", _FIRST)
def test_the_page_begins_with_the_cause(tmp_path: Path, name: str) -> None:
    """The record has the right cause and step, and the first section of the page names both."""
    cause, step, *said = _FIRST[name]
    page = run_pathology(name, tmp_path)
    episodes = read_run(tmp_path / name).episodes
    text = _first_section(page)

    # Updates that are too large may also keep the loss high, which is an episode of its own.
    assert {one.cause for one in episodes} == {cause}
    assert episodes[0].step == step
    assert re.search(rf"Steps? {step}\b", text)
    for each in said:
        assert each in text


@pytest.mark.slow
def test_the_page_shows_growing_attention_logits(tmp_path: Path) -> None:
    """The logits of the layer whose query weights grow are on the page, and no other is named."""
    page = run_pathology("d", tmp_path)
    run = read_run(tmp_path / "d")
    logits = run.curves["max_attention_logit/model.layers.1.self_attn/max"].values

    assert logits[-1] > 100 * logits[0]
    assert '<section id="max_attention_logit">' in page.read_text(encoding="utf-8")
    first = run.episodes[0]
    assert first.records[0]["kind"] == "attention_logits"
    # What comes of the logits later has the same cause.
    assert {each.cause for each in run.episodes} == {"attention_logits"}
    assert first.records[0]["layer"] == "model.layers.1"
