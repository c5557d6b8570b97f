"""The sections of a run, in the order of their worth, and the time that each may take."""

from collections.abc import Sequence
from dataclasses import dataclass

LIMITS = {"cuda": 420.0, "cpu": 3600.0}
"""Seconds for a whole run by type of device, if none are asked for."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a run that has a process of its own.

    Args:
        shows: What the section shows, in a few words.
        share: Seconds that the section may take on an H100.
    """

    shows: str
    share: float


SECTIONS = {
    "tests": Section(shows="the tests marked cuda", share=90),
    "waits": Section(shows="synchronizations of whole steps", share=40),
    "update": Section(shows="everything after backward", share=40),
    "host": Section(shows="host time and launches of small networks", share=75),
    "steps": Section(shows="whole steps", share=120),
    "captured": Section(shows="captured steps", share=75),
    "fp16": Section(shows="float16 with real overflows", share=40),
    "recipes": Section(shows="recipes, killed and resumed; a planted NaN", share=110),
    "ranks": Section(shows="DistributedDataParallel and FSDP2", share=75),
    "memory": Section(shows="peak memory", share=40),
    "background": Section(shows="checkpoints in the background", share=200),
    "randomness": Section(shows="random states and pinned batches", share=60),
    "recompute": Section(shows="steps that are run again, bit by bit", share=30),
    "compiled": Section(shows="whole steps with torch.compile", share=60),
    "monitors": Section(shows="the cost of monitors", share=100),
}
"""By name. Each name is that of a module in ``device.sections``."""

SMALLEST = 5.0
"""Seconds below which a section is not started."""


def chosen(names: str) -> list[str]:
    """Return the sections that a text names, in the order of `SECTIONS`; all of them for no name.

    Args:
        names: Names separated by spaces or commas.

    Raises:
        ValueError: If a name is not that of a section.
    """
    given = names.replace(",", " ").split()
    unknown = [name for name in given if name not in SECTIONS]
    if unknown:
        msg = f"SECTIONS: expected names among {', '.join(SECTIONS)}, got {', '.join(unknown)}"
        raise ValueError(msg)
    return [name for name in SECTIONS if name in given or not given]


def limits(names: Sequence[str], total: float) -> dict[str, float]:
    """Return the seconds that each section may take.

    The sections share the time of a run that is longer than all of them need. In a shorter run
    each section keeps its time, and the last ones may not be run.

    Args:
        names: Chosen sections.
        total: Seconds for the whole run.
    """
    shares = {name: SECTIONS[name].share for name in names}
    factor = max(1.0, total / sum(shares.values()))
    return {name: min(total, share * factor) for name, share in shares.items()}
