"""Which kinds of faults rules are written on, and which they are judged on.

The halves were drawn once, with a fixed seed, from the draws that balance what is changed, how and
for how long. A kind never changes its half. A new kind is added to the half that has fewer of what
it changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from support.faults.faults import KINDS, Kind

__all__ = ["JUDGED_ON", "MAX_READINGS", "READINGS", "WRITTEN_ON", "Reading", "kinds_of"]

WRITTEN_ON = (
    "weight zero",
    "weight negated",
    "weight NaN",
    "weight infinite",
    "weight with a flipped bit",
    "weight stale, lasting",
    "gradient lowered",
    "gradient with noise",
    "gradient zero, lasting",
    "activation raised",
    "activation with noise",
    "activation zero, lasting",
    "activation clamped, lasting",
    "activation gradient raised",
    "buffer NaN",
    "buffer with a flipped bit",
    "first moment NaN",
    "second moment raised",
    "second moment lowered",
    "second moment infinite",
    "step count zero",
    "rate raised, growing",
    "rate zero, lasting",
    "rate negated, lasting",
    "epsilon raised, lasting",
    "betas raised, lasting",
    "weight decay raised, lasting",
    "momentum zero, lasting",
    "temperature raised, lasting",
    "label smoothing raised",
    "kl weight raised, lasting",
    "soft cap lowered, lasting",
    "dropout raised",
    "mode of evaluation",
    "loss raised, lasting",
    "loss raised, growing",
    "loss lowered",
    "loss with a term of its own, lasting",
    "outer loss raised",
    "outer loss NaN",
    "inputs raised",
    "inputs NaN",
    "targets permuted",
    "targets constant",
    "all weights averaged",
    "dtype float16, lasting",
)
"""Kinds whose runs and records may be looked at while rules are written."""

JUDGED_ON = (
    "weight raised",
    "weight raised, growing",
    "weight lowered",
    "weight with noise",
    "weight permuted",
    "weight stale",
    "gradient raised",
    "gradient negated, lasting",
    "gradient NaN",
    "activation raised, growing",
    "activation NaN",
    "activation infinite",
    "activation gradient zero, lasting",
    "activation gradient NaN",
    "buffer raised",
    "first moment raised",
    "first moment zero",
    "second moment zero",
    "second moment NaN",
    "second moment with a flipped bit",
    "step count raised",
    "rate raised",
    "rate raised, lasting",
    "epsilon zero, lasting",
    "betas lowered, lasting",
    "weight decay raised",
    "momentum raised, lasting",
    "temperature lowered, lasting",
    "label smoothing raised, lasting",
    "kl weight zero, lasting",
    "soft cap raised, lasting",
    "dropout raised, lasting",
    "mode of evaluation, lasting",
    "loss raised",
    "loss negated, lasting",
    "loss NaN",
    "loss infinite",
    "loss shifted",
    "outer loss negated, lasting",
    "inputs with noise",
    "inputs constant",
    "targets permuted, lasting",
    "targets stale, lasting",
    "targets missing",
    "all weights of another run",
    "dtype rounded, lasting",
)
"""Kinds whose score shows whether the rules hold for faults that nobody has listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One reading of the score of the judged half."""

    date: str
    commit: str
    """Commit whose rules were judged."""

    seeds: tuple[int, ...]
    score: str
    """The table by classes, in a line."""


READINGS: tuple[Reading, ...] = (
    Reading(
        date="2026-11-27",
        commit="b47223566a5b",
        seeds=(100,),
        score="300 faults (faults, in time, right cause, wrong cause, wrong place): not finite 55, "
        "55, 46, 6, 2; visible 103, 72, 60, 7, 2; weak 131, 84, 83, 1, 0; without effect 11, 4, 4, "
        "0, 0; 2 alarms in the twins. The table of kinds was seen, too, and the record of an "
        "infinite loss mended after it, so this kind is no longer an unseen one",
    ),
)
"""All readings so far. After each, add it here, in the commit that follows."""

MAX_READINGS = 3
"""More readings would teach the rules the judged half by its scores."""


def kinds_of(*, judged: bool, readings: Sequence[Reading] = READINGS) -> list[Kind]:
    """Return the kinds of a half.

    Args:
        judged: Whether to take the judged half.
        readings: Readings of its score so far.

    Raises:
        PermissionError: If the judged half is asked for after its last reading.
    """
    if judged and len(readings) >= MAX_READINGS:
        msg = f"the judged half may be read {MAX_READINGS} times, and has {len(readings)} readings"
        raise PermissionError(msg)
    names = JUDGED_ON if judged else WRITTEN_ON
    return [kind for kind in KINDS if str(kind) in names]
