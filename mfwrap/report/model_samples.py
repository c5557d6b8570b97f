"""Show what the model has said about a few inputs, over the steps of a run."""

import html
import re
from collections.abc import Mapping, Sequence

from mfwrap.records.model_samples import ModelSamples, SampledPrompt
from mfwrap.records.run_record import RunRecord
from mfwrap.report.about import duration

_MOST_STEPS = 5
"""Number of steps that have a column."""

_MOST_PROMPTS = 50
_SHORT = 160
"""Characters of a text that are shown at once."""

_BASE_64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")
"""A character that a browser does not show. A model that has learned little may say one."""

_CUT = " [...]"
"""End of an answer that has reached the largest number of tokens; see `SampleMonitor`."""

_NOTHING = "\N{EN DASH}"


def model_sample_tables(runs: Sequence[RunRecord]) -> str:
    """Return a table for each run that has samples: a row for each input, a column for each step.

    The results of raw and averaged weights are below each other.
    """
    tables = [_table(run, has_name=len(runs) > 1) for run in runs if run.samples.prompts]
    return f'<h2 id="samples">What the model says</h2>{"".join(tables)}' if tables else ""


def _table(run: RunRecord, *, has_name: bool) -> str:
    samples = run.samples
    steps = _shown_steps(samples)
    heads = ["Input"]
    if has_references := any(each.reference is not None for each in samples.prompts):
        heads.append("Expected")
    heads += [f"Step {step}" for step in steps]
    rows = "".join(
        _row(each, heads, steps, has_references=has_references)
        for each in samples.prompts[:_MOST_PROMPTS]
    )
    name = f"{html.escape(run.name)}: " if has_name else ""
    return (
        f'<p class="note">{name}{_told(samples, len(steps))}</p>'
        '<div class="wide"><table class="rows said"><thead><tr>'
        f"{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _told(samples: ModelSamples, num_shown: int) -> str:
    """Say what the samples have cost, and where the others are."""
    number = len(samples.steps())
    told = f"Samples at {number} step{'s' if number > 1 else ''} took {duration(samples.seconds)}."
    is_cut = number > num_shown or len(samples.prompts) > _MOST_PROMPTS
    return f"{told} All of them are in samples.jsonl." if is_cut else told


def _shown_steps(samples: ModelSamples) -> list[int]:
    """Return the first and the last step, and some between them."""
    steps = samples.steps()
    if len(steps) <= _MOST_STEPS:
        return steps
    places = [round(n * (len(steps) - 1) / (_MOST_STEPS - 1)) for n in range(_MOST_STEPS)]
    return [steps[place] for place in places]


def _row(
    prompt: SampledPrompt, heads: Sequence[str], steps: Sequence[int], *, has_references: bool
) -> str:
    image = prompt.image or ""
    picture = f'<img src="data:image/png;base64,{image}" alt="">' * bool(_BASE_64.fullmatch(image))
    cells = [picture + _text(prompt.input)]
    if has_references:
        cells.append(_NOTHING if prompt.reference is None else _text(prompt.reference))
    cells += [_answers(prompt.raw, prompt.averaged, step) for step in steps]
    listed = zip(heads, cells, strict=True)
    return "<tr>{}</tr>".format(
        "".join(f'<td data-column="{head}">{cell}</td>' for head, cell in listed)
    )


def _answers(raw: Mapping[int, str], averaged: Mapping[int, str], step: int) -> str:
    found = [] if step not in raw else [_text(raw[step])]
    if step in averaged:
        is_same = averaged[step] == raw.get(step)
        text = "the same" if is_same else _text(averaged[step])
        found.append(f'<span class="note">averaged weights:</span> {text}')
    return "".join(f"<div>{each}</div>" for each in found) or _NOTHING


def _text(text: str) -> str:
    """Return a text as HTML: the rest of a long text is folded, and an empty one is called so."""
    text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
    if not text.removesuffix(_CUT).strip():
        cut = ", cut" if text.endswith(_CUT) else ""
        return f'<span class="note">{f"only white space{cut}" if text else "empty"}</span>'
    if len(text) <= _SHORT:
        return f"<span>{html.escape(text)}</span>"
    start, rest = html.escape(text[:_SHORT]), html.escape(text[_SHORT:])
    return f"<details><summary>{start}</summary>{rest}</details>"
