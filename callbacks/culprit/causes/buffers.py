"""Rule for buffers that have become non-finite or have risen."""

import math

from mfwrap.callbacks.culprit.causes.evidence import Cause, CauseEvidence, counted
from mfwrap.callbacks.culprit.replay.samples import IN_ROWS

_VARIANCE = 3.0
"""Largest ratio of the rise of a variance to the square of that of the mean, if both are of inputs
that have grown."""


def changed(evidence: CauseEvidence) -> Cause | None:
    """Find what has changed buffers: an input, larger inputs of a module, or code."""
    names, origin = evidence.buffers, evidence.origin
    if not names or (origin is not None and origin.where != "input"):
        return None
    if not any(name.rpartition(".")[2].startswith("running_") for name in names):
        return Cause(
            "buffer_changed",
            f"the buffer {names[0]} has changed",
            "look at the code that writes this buffer",
            tensors=tuple(names),
        )
    if evidence.blamed.weights and not evidence.blamed.buffers:
        return None  # another weight gives other statistics
    if evidence.kind in IN_ROWS and not evidence.blamed.buffers:
        return Cause(
            "data",
            f"the batch is far from those before: it changed the running statistics in {names[0]}",
            f"look at the samples of step {evidence.now.step}, and go back to a checkpoint from "
            "before it",
        )
    grown = _grown_inputs(evidence)
    if grown is not None:
        return grown
    by = "something has" if origin is None else f"non-finite values in input `{origin.name}` have"
    return Cause(
        "batch_norm",
        f"{by} ruined the running statistics in {counted(names, 'buffers')}",
        f"{'' if origin is None else 'remove the sample, and '}go back to a checkpoint from before "
        f"step {evidence.first_bad_step}: skipping the update does not repair the statistics",
        tensors=tuple(names) if origin is None else (),
    )


def _grown_inputs(evidence: CauseEvidence) -> Cause | None:
    """Find running statistics that have grown as those of larger inputs do: means and variances."""
    risen = [one for one in evidence.blamed.states if one.kind == "buffer" and one.norm_before > 0]
    rises = {one.name: one.rise for one in risen if math.isfinite(one.norm)}
    for name, variance in rises.items():
        module, _, last = name.rpartition(".")
        mean = rises.get(f"{module}.running_mean", 0.0)
        if last == "running_var" and mean**2 / _VARIANCE < variance < mean**2 * _VARIANCE:
            return Cause(
                "activation",
                f"what {module} receives is about {math.sqrt(variance):.3g} times as large as "
                "before: mean and variance have grown alike",
                "look at the layers before it",
                tensors=(module,),
            )
    return None
