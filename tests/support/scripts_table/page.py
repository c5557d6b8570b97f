"""Compare each script, and read and write the page in docs/."""

import importlib.metadata
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from support.paths import ROOT
from support.scripts_table.launch import NOISE
from support.scripts_table.outcomes import Difference, Outcome, difference
from support.scripts_table.rows import LIBRARIES, RULES, SCRIPTS, Script

__all__ = [
    "NOT_COMPARED",
    "PAGE",
    "Cells",
    "cells",
    "page",
    "present_versions",
    "read_cells",
    "versions_of",
]

PAGE = ROOT / "docs" / "scripts_table.md"
TOLERANCE, BFLOAT16_TOLERANCE = 1e-5, 1e-2
"""Largest difference that the rounding of clipped gradients may make in these few updates, in
float32 and in bfloat16."""

_WIDTH = 120
_EQUAL = "equal"
_ROUNDED = "rounding of clipped gradients"
_NOT_RUN = "does not run without mfwrap: "
_DIFFERS = "differs: "
_INTRODUCTION = Path(__file__).with_name("introduction.md")


class Cells(NamedTuple):
    """What the page says about a script."""

    changes: str
    """How its text was changed, with and without mfwrap."""
    updates: str
    losses: str
    weights: str
    result: str


NOT_COMPARED = Cells("", "", "", "", "not compared yet")


def cells(script: Script, text: str, run: Callable[..., Outcome]) -> Cells:
    """Compare a script, and return its cells.

    Args:
        script: The script.
        text: Its text.
        run: Runs it, with keywords `mfwrap` and `clips`.
    """
    changes = _changes(script, text)
    stock = run(mfwrap=False, clips=True)
    if stock.error:
        return Cells(changes, "", "", "", _NOT_RUN + _code(stock.error))
    ours = run(mfwrap=True, clips=True)
    if ours.error:
        said = f"{_DIFFERS}only without mfwrap it runs: {_code(ours.error)}"
        return Cells(changes, f"{len(stock.digests)}", "", "", said)
    found = difference(stock, ours, script.intended)
    apart = (_apart(found.losses), _apart(found.weights))
    result = _result(script, found, run)
    if not result.startswith(_DIFFERS):
        result = "; ".join(dict.fromkeys([result, *script.intended.values()]))
    return Cells(changes, f"{found.updates}", *apart, result)


def _changes(script: Script, text: str) -> str:
    named = [rule.name for rule in script.rules(text)]
    replaced = [
        f"{_code(old)} becomes {_code(new)}" if new else f"without {_code(old)}"
        for old, new in script.replace
    ]
    return "; ".join([*filter(None, [", ".join(named)]), *replaced])


def _result(script: Script, found: Difference, run: Callable[..., Outcome]) -> str:
    tolerance = BFLOAT16_TOLERANCE if found.bfloat16 else TOLERANCE
    if found.is_none and found.numbers <= TOLERANCE:
        return _EQUAL
    faults = ", ".join(found.faults) or _unclipped_faults(script, run)
    largest = max(found.losses, found.weights, found.numbers)
    if not faults and largest > tolerance:
        faults = f"by {largest:.0e}, more than by rounding"
    return f"{_DIFFERS}{faults}" if faults else _ROUNDED


def _unclipped_faults(script: Script, run: Callable[..., Outcome]) -> str:
    """Return what differs without clipping; "" if nothing does."""
    stock, ours = (run(mfwrap=mfwrap, clips=False) for mfwrap in (False, True))
    if stock.error or ours.error:
        return f"without clipping, {_code(stock.error or ours.error)}"
    found = difference(stock, ours, script.intended)
    if found.is_none:
        return ""
    return (
        f"without clipping, losses by {_apart(found.losses)}, weights by {_apart(found.weights)}, "
        f"from update {found.equal_updates + 1} on"
    )


def _apart(largest: float) -> str:
    return f"{largest:.0e}" if largest else _EQUAL


def _code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    return f"`{' '.join(text.split())[:160].replace('|', '/').replace('`', chr(39))}`"


def page(
    all_cells: Mapping[tuple[str, str], Cells], sources: Mapping[str, str], versions: str
) -> str:
    """Return the text of the page.

    Args:
        all_cells: Cells of each script, by library and title.
        sources: Version of each library's scripts.
        versions: Paragraph that names the versions with which the scripts ran.
    """
    rows = [(script, all_cells[script.library, script.title]) for script in SCRIPTS]
    text = _INTRODUCTION.read_text(encoding="utf-8").format(
        summary=_summary(rows),
        tolerance=TOLERANCE,
        coarse=BFLOAT16_TOLERANCE,
        noise=NOISE,
        rows=48,
    )
    text += "| | change | reason |\n| --- | --- | --- |\n"
    for rule in RULES:
        text += f"| {rule.name} | {rule.change} | {rule.reason} |\n"
    text += f"\n{versions}\n"
    for library, heading in LIBRARIES.items():
        text += f"\n## {heading}\n\nScripts of {sources.get(library, 'no version yet')}.\n\n"
        text += "| script | changes | updates | losses | weights | result |\n"
        text += "| --- | --- | --- | --- | --- | --- |\n"
        for script, each in rows:
            if script.library == library:
                path, _, resumed = script.title.partition(" ")
                text += (
                    f"| {' '.join(filter(None, [f'`{path}`', resumed]))} | {' | '.join(each)} |\n"
                )
    return text


def _summary(rows: Sequence[tuple[Script, Cells]]) -> str:
    """Return the sentences that count the results."""
    compared = [each for _, each in rows if each.updates]
    equal = sum(each.result == _EQUAL for each in compared)
    rounded = sum(each.result == _ROUNDED for each in compared)
    differing = sum(each.result.startswith(_DIFFERS) for each in compared)
    unable = sum(each.result.startswith(_NOT_RUN) for _, each in rows)
    resumed = sum(bool(script.resumed and each.updates) for script, each in rows)
    text = (
        f"{len(compared) - resumed} scripts run here, and {resumed} of them also resume from a "
        f"checkpoint. Of these {len(compared)} runs, {equal} are equal bit for bit, {rounded} "
        "differ by the rounding of clipped gradients alone, "
        f"{len(compared) - equal - rounded - differing} for another reason that the table gives, "
        f"and {differing} for no known reason. Scripts that do not run with the installed "
        f"versions: {unable}."
    )
    return textwrap.fill(text, _WIDTH)


def read_cells(text: str) -> tuple[dict[tuple[str, str], Cells], dict[str, str]]:
    """Return the cells of a page, by library and title, and the versions of its scripts."""
    headings = {f"## {heading}": library for library, heading in LIBRARIES.items()}
    found, sources, library = {}, {}, ""
    for line in text.splitlines():
        library = headings.get(line, library)
        if library and line.startswith("Scripts of "):
            sources[library] = line.removeprefix("Scripts of ").removesuffix(".")
        if library and line.startswith("| `"):
            path, *rest = line.removeprefix("| ").removesuffix(" |").split(" | ")
            found[library, path.replace("`", "")] = Cells(*rest)
    return found, sources


def versions_of(text: str) -> str:
    """Return the paragraph of a page that names versions."""
    return next((part for part in text.split("\n\n") if part.startswith("Compared with ")), "")


def present_versions() -> str:
    """Return the paragraph that names the versions of the installed libraries."""
    named = [f"{each} {importlib.metadata.version(each)}" for each in ("torch", *LIBRARIES)]
    text = f"Compared with {', '.join(named)}."
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False, break_long_words=False)
