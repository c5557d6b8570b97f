"""The table of mistakes: its data, and the page that is written from them."""

import importlib.metadata
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from support.paths import ROOT, TESTS

__all__ = [
    "MISTAKES",
    "PAGE",
    "Cell",
    "Mistake",
    "cell_of",
    "page",
    "present_versions",
    "read_cells",
    "versions_of",
]

PAGE = ROOT / "docs" / "mistakes.md"

_WAYS = {
    "command": "the command line",
    "recipe": "a recipe",
    "trainer": "`MFTrainer`",
    "accelerate": "`attach`",
    "loop": "the cell",
}

_HEAD = """\
# Ordinary mistakes

What mfwrap says to 100 mistakes that people make when they fine-tune, drawn from public questions
about transformers, TRL, accelerate, axolotl and PEFT. `make mistakes` acts each of them out, on a
CPU with small models and without network, and writes this page. A test acts them out again.

- **Ends** is how a mistake shows. `exit 2`: the command refuses the recipe before it trains.
  `exit 1`: the run fails, and its traceback is in the run folder. An exception is raised where the
  script calls mfwrap. After a warning the training goes on.
- **°** marks the sentence of another library, which mfwrap passes on.

"""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake, and what its maker must be told."""

    id: str
    """Name of the function that acts it out."""

    area: str
    """Subject."""

    way: str
    """Way into mfwrap: ``command``, ``recipe``, ``trainer``, ``accelerate`` or ``loop``."""

    does: str
    """What the person does."""

    source: str
    """Address of the public question or page that it is drawn from."""

    told: str
    """What a beginner must be told."""

    ends: str = ""
    """How it ends; see `support.mistakes.acting.Answer`."""

    says: tuple[str, ...] = ()
    """Parts of the sentence: what is wrong, where, and what to do."""

    theirs: bool = False
    """Whether the sentence is that of another library."""

    remark: str = ""
    """Why the sentence says less than it should, for the page."""


def _read(file: Path) -> tuple[Mistake, ...]:
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["mistake"]
    return tuple(Mistake(**row | {"says": tuple(row.get("says", ()))}) for row in rows)


MISTAKES = _read(TESTS / "mistakes" / "mistakes.toml")


class Cell(NamedTuple):
    """What the page says of a mistake."""

    ends: str
    says: str


def page(cells: Mapping[str, Cell], versions: str) -> str:
    """Return the text of the page.

    Args:
        cells: What mfwrap says, by mistake.
        versions: Line that names the versions with which the mistakes were acted out.
    """
    lines = [f"{_HEAD}{versions}", ""]
    for area in dict.fromkeys(mistake.area for mistake in MISTAKES):
        lines += [
            f"## {area[0].upper()}{area[1:]}",
            "",
            "| mistake | way | ends | mfwrap says | source |",
            "| --- | --- | --- | --- | --- |",
            *(_row(mistake, cells[mistake.id]) for mistake in MISTAKES if mistake.area == area),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def cell_of(mistake: Mistake, ends: str, says: str) -> Cell:
    """Return what the page says of a mistake.

    Args:
        mistake: The mistake.
        ends: How it has ended.
        says: What its maker has been told; empty if nothing.
    """
    text = _literal(says) if says else "nothing"
    text += " °" if mistake.theirs else ""
    text += f"<br>{mistake.remark}" if mistake.remark else ""
    return Cell(f"`{ends}`" if ends not in {"warning", "nothing"} else ends, text)


def _row(mistake: Mistake, cell: Cell) -> str:
    anchor = f'<a id="{mistake.id}"></a>'
    cells = (f"{anchor}{mistake.does}", _WAYS[mistake.way], *cell)
    return f"| {' | '.join(cells)} | [source]({mistake.source}) |"


_SHOWN = 800


def _literal(text: str) -> str:
    """Return a text as code in a cell of a table, shortened to 800 characters."""
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def present_versions() -> str:
    """Return the line that names the versions of Python and of the libraries."""
    names = ("torch", "transformers", "trl", "accelerate", "peft", "datasets")
    found = [f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names]
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return f"Acted out with {', '.join([python, *found])}."


def versions_of(text: str) -> str:
    """Return the line of a page that names versions."""
    return next(line for line in text.splitlines() if line.startswith("Acted out with "))


def read_cells(text: str) -> dict[str, Cell]:
    """Return what a page says, by mistake."""
    cells = {}
    for line in text.splitlines():
        if line.startswith('| <a id="'):
            name = line.split('"')[1]
            _, _, _, ends, says, _, _ = line.replace("\\|", "\0").split("|")
            cells[name] = Cell(ends.strip(), says.strip().replace("\0", "\\|"))
    return cells
