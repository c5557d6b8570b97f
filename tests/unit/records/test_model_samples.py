"""Samples of a model are read in the order of their steps, whatever a file holds."""

import pytest

from mfwrap.records.model_samples import SampledPrompt, model_samples


def record(step, text, number=0, **others):
    """Return a record of raw weights, unless told otherwise."""
    return {"step": step, "prompt": number, "averaged": False, "text": text, **others}


def test_samples():
    """Each prompt has its results by step; the last record of a step counts."""
    found = model_samples(
        [
            record(0, "a", input="2 + 2 =", reference="4", seconds=0.5),
            record(0, "b", number=1, input="x", image="iVBO", seconds=0.25),
            record(4, "5"),
            record(4, "6", averaged=True, seconds="nan"),
            record(2, "3"),
            record(4, "4"),
        ]
    )

    first, second = found.prompts
    assert first == SampledPrompt("2 + 2 =", "4", None, {0: "a", 2: "3", 4: "4"}, {4: "6"})
    assert list(first.raw) == [0, 2, 4]
    assert second == SampledPrompt("x", None, "iVBO", {0: "b"})
    assert (found.steps(), found.seconds) == ([0, 2, 4], 0.75)


def test_other_prompts_after_a_resume():
    """A resume that says the same adds to the prompt, and another prompt is another row."""
    found = model_samples(
        [record(0, "a", input="x"), record(1, "b", input="x"), record(2, "c", input="y")]
    )

    assert [(each.input, each.raw) for each in found.prompts] == [
        ("x", {0: "a", 1: "b"}),
        ("y", {2: "c"}),
    ]


@pytest.mark.parametrize(
    "wrong", [{"step": "1"}, {"prompt": None}, {"text": 5}, {"text": None}, {"prompt": True}]
)
def test_records_without_a_sample(wrong):
    """A record whose step, prompt or text is something else is left out."""
    assert model_samples([record(0, "a") | wrong]).prompts == []


def test_a_prompt_that_is_unknown():
    """A file that has lost its first records shows the number of the prompt."""
    [found] = model_samples([record(3, "a", number=7, seconds={})]).prompts

    assert found.input == "prompt 7"
