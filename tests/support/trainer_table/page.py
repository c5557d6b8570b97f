"""Compare each row of the table, and read and write its page in docs/."""

import importlib.metadata
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from transformers import Trainer

from mfwrap.trainer import MFTrainer
from support.paths import ROOT
from support.trainer_table.rows import NOT_COMPARED, ROWS, Row
from support.trainer_table.trainings import Outcome, differences

__all__ = ["PAGE", "cell", "page", "present_versions", "read_cells", "versions_of"]

PAGE = ROOT / "docs" / "trainer_table.md"

_INTRODUCTION = """\
# The Trainer's options, compared

`make table` trains with the stock Trainer and with `MFTrainer`, once with each value of `optim` and
`lr_scheduler_type` and once with each option that changes the loop, and writes this page. "Equal"
means that all numbers in the log (losses, norms, rates and metrics), all final weights and the
predictions differ by at most 1e-5 of the largest magnitude. Logged numbers below 1 differ by at
most 1e-5.

Most rows train a Llama with two layers for a few updates on a CPU, with 4 micro-batches per update
and clipped gradients. Rows that need a package use wider layers, because 8-bit and 4-bit optimizers
do not quantize small weights. `make test` compares {fast} rows, `make test-full` all rows whose
package is installed, and `make table` all rows.

"""
_SECTIONS = {
    "optim": "## Optimizers: `optim`",
    "lr_scheduler_type": "## Schedules: `lr_scheduler_type`",
    "options": "## Other options",
}
_NOT_COMPARED = """\
## Options without a row

| reason | options |
| --- | --- |
"""
_REFUSAL = "`optim` must be an optimizer that changes its weights after backward"
_REFUSED = "refused: [changes weights during backward](loop.md#limits)"


def cell(row: Row, folder: Path) -> str:
    """Compare a row, and return its cell in the page."""
    try:
        ours = _trained(MFTrainer, row, folder / "ours")
    except ValueError as error:
        if not str(error).startswith(_REFUSAL):
            raise
        return _REFUSED
    stock = _trained(Trainer, row, folder / "stock")
    if stock is None or ours is None:
        neither = stock is ours is None
        return f"cannot train here: needs {row.lacks}" if neither else "differs: only one can train"
    found = differences(stock, ours)
    if found:
        return "differs: " + "; ".join(found)
    return f"equal but for {row.but}" if row.but else "equal"


def _trained(kind: type[Trainer], row: Row, folder: Path) -> Outcome | None:
    """Return the outcome of a row; ``None`` if it lacks something and the training fails."""
    try:
        return row.run(kind, folder, row.arguments)
    except (AssertionError, ValueError):
        if not row.lacks:
            raise
        return None


def page(cells: Mapping[tuple[str, str], str], versions: str) -> str:
    """Return the text of the page.

    Args:
        cells: Cell of each row, by section and name.
        versions: Line that names the versions with which the rows were compared.
    """
    text = _INTRODUCTION.format(fast=sum(row.is_fast for row in ROWS))
    text += f"{versions}\n"
    for section, heading in _SECTIONS.items():
        text += f"\n{heading}\n\n| | `MFTrainer` | with |\n| --- | --- | --- |\n"
        for row in ROWS:
            if row.section == section:
                text += f"| `{row.name}` | {cells[section, row.name]} | {_with(row)} |\n"
    text += f"\n{_NOT_COMPARED}"
    for reason, names in NOT_COMPARED.items():
        text += f"| {reason} | {', '.join(f'`{name}`' for name in names)} |\n"
    return text


def _with(row: Row) -> str:
    """Return the package, the note, and the arguments that the row's name does not show."""
    settings = [
        f"`{name}={value!r}`"
        for name, value in row.arguments.items()
        if row.name not in {str(value), f"{name}={value}"}
        and not (row.name == name and value is True)
    ]
    return ", ".join([*filter(None, [row.package, row.note]), *settings])


def read_cells(text: str) -> dict[tuple[str, str], str]:
    """Return the cells of a page, by section and name of the row."""
    cells = {}
    headings = {heading: section for section, heading in _SECTIONS.items()}
    section = None
    for line in text.splitlines():
        if line.startswith("## "):
            section = headings.get(line)
        found = re.fullmatch(r"\| `([^|]+)` \| ([^|]+) \| ([^|]*) ?\|", line)
        if found and section:
            cells[section, found[1]] = found[2]
    return cells


def versions_of(text: str) -> str:
    """Return the paragraph of a page that names versions."""
    return next((part for part in text.split("\n\n") if part.startswith("Compared with ")), "")


def present_versions() -> str:
    """Return the paragraph that names the versions of the installed libraries."""
    libraries = [
        "torch",
        "transformers",
        "accelerate",
        *sorted({row.package for row in ROWS} - {""}),
    ]
    named = [f"{each} {importlib.metadata.version(each)}" for each in libraries]
    text = f"Compared with {', '.join(named)}."
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)
