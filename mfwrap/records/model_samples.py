"""Read what a model has said about a few inputs during its training."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mfwrap.records.forms import Form, fitting, to_number

SAMPLES = "samples"
"""Name of the records of `mfwrap.callbacks.SampleMonitor`."""

_FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("step", "prompt"), int),
    **dict.fromkeys(("text", "input", "reference", "image"), str),
    "averaged": bool,
    "seconds": float,
}


@dataclass(slots=True)
class SampledPrompt:
    """An input, and what the model has said about it over the steps."""

    input: str
    reference: str | None = None
    """The expected result; ``None`` if it is unknown."""

    image: str | None = None
    """PNG in base 64; ``None`` if the input has no image."""

    raw: dict[int, str] = field(default_factory=dict)
    """Results of the raw weights by step, in ascending order."""

    averaged: dict[int, str] = field(default_factory=dict)
    """Results of the averaged weights by step, in ascending order."""


@dataclass(slots=True)
class ModelSamples:
    """The samples of a run."""

    prompts: list[SampledPrompt] = field(default_factory=list)
    seconds: float = 0.0
    """Time that all samples have taken."""

    def steps(self) -> list[int]:
        """Return the steps that have samples, in ascending order."""
        return sorted({step for each in self.prompts for step in {*each.raw, *each.averaged}})


def model_samples(records: Iterable[Mapping[str, Any]]) -> ModelSamples:
    """Return the samples in records; those without step, prompt or text are left out.

    If a step was recorded twice, the last record counts. A training that was resumed with other
    prompts adds them.

    Args:
        records: Records of ``samples.jsonl``, in their order. The first record of a prompt, and
            the first after a resume, say what it is.
    """
    found: dict[tuple[int, Any, Any], SampledPrompt] = {}
    present: dict[int, SampledPrompt] = {}
    seconds = 0.0
    for each in (fitting(record, _FORMS) for record in records):
        if not {"step", "prompt", "text"} <= each.keys():
            continue
        number, reference = each["prompt"], each.get("reference")
        if "input" in each or number not in present:
            text = each.get("input", f"prompt {number}")
            new = SampledPrompt(text, reference, each.get("image"))
            present[number] = found.setdefault((number, text, reference), new)
        prompt = present[number]
        (prompt.averaged if each.get("averaged") else prompt.raw)[each["step"]] = each["text"]
        time = to_number(each.get("seconds"))
        seconds += time if time is not None and math.isfinite(time) else 0.0
    for prompt in found.values():
        prompt.raw = dict(sorted(prompt.raw.items()))
        prompt.averaged = dict(sorted(prompt.averaged.items()))
    return ModelSamples(list(found.values()), seconds)
