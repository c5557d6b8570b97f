"""Write the tables of docs/names.md and docs/migration.md that come from the table of names.

python .ci/name_tables.py     # as `make names` does

Below ``<!-- names: AREA -->`` the whole table is written: all names of an area, or all attributes
of a kind of object. Below ``<!-- counterparts -->`` the first cells are kept, and the second cells
are written where the table of names has each name in the first cell. A second cell that begins with
"the same" is kept, because it may say more.
"""

import re
from pathlib import Path

from mfwrap.names import attributes, libraries, training
from mfwrap.names.counterparts import Counterpart, find
from mfwrap.names.resolution import home_of
from mfwrap.names.texts import Without

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "names.md", ROOT / "docs" / "migration.md")
_ALL = re.compile(r"^<!-- names: (?P<area>[^>]+) -->\n(?P<table>(?:\|.*\n)*)", re.MULTILINE)
_CELLS = re.compile(r"^<!-- counterparts -->\n(?:\|.*\n)*", re.MULTILINE)
_AREAS = (
    *("mindspore", "nn", "ops", "dataset", "mindformers", "callbacks", "network", "tensor"),
    *("data set", "argument of GeneratorDataset"),
)
_PACKAGES = {"ds": "dataset", "ms": "mindspore", "mstype": "mindspore", "F": "ops"}


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text: str) -> str:
    """Return the text of a page with its tables as the table of names has them."""
    text = _ALL.sub(lambda found: _whole(found["area"]), text)
    return _CELLS.sub(lambda found: _with_cells(found[0]), text)


def _whole(area: str) -> str:
    rows: dict[str, str] = {}
    for table in (training.ROWS, libraries.ROWS, attributes.ROWS):
        rows |= table.get(area, {})
    grouped: dict[str, list[str]] = {}
    for name in sorted(rows, key=str.lower):
        grouped.setdefault(_template(name, rows[name]), []).append(name)
    lines = [f"<!-- names: {area} -->", "| name | write |", "| --- | --- |"]
    for template, names in grouped.items():
        text = template if len(names) > 1 else _said(rows[names[0]])
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {listed} | {text} |")
    return "\n".join(lines) + "\n"


def _said(text: str) -> str:
    return f"no counterpart: {text}" if isinstance(text, Without) else text


def _template(name: str, text: str) -> str:
    """Return a text with NAME for the name, so that the rows of many names become one."""
    return re.sub(rf"^(`[\w.]+\.){re.escape(name)}`", r"\1NAME`", _said(text))


def _with_cells(block: str) -> str:
    marker, head, line, *rows = block.splitlines()
    return "\n".join([marker, head, line, *map(_with_cell, rows)]) + "\n"


def _with_cell(row: str) -> str:
    first, second, *others = _cells(row)
    names = _names(first)
    known = [one.text for name in names if (one := _counterpart(name)) is not None]
    if second.startswith("the same") or not known or len(known) < len(names):
        return row
    # One text may begin with another.
    texts = [one for one in dict.fromkeys(known) if not any(t.startswith(f"{one},") for t in known)]
    return f"| {' | '.join([first, '; '.join(texts), *others])} |"


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def _names(cell: str) -> list[str]:
    """Return the names in a cell, without arguments: ``nn.Momentum`` of ``nn.Momentum(lr)``.

    The cell is about an argument, not about the name, if dots stand for all other arguments.
    """
    if "(..." in cell or re.fullmatch(r"(?:`[^`]+`(?:, )?)+", cell) is None:
        return []
    return [name.partition("(")[0] for name in re.findall("`([^`]+)`", cell)]


def _counterpart(name: str) -> Counterpart | None:
    package, _, last = name.rpartition(".")
    areas = _AREAS
    if package:
        short = package.rpartition(".")[2]
        is_long = package.startswith("mindformers")
        areas = ("mindformers",) if is_long else (_PACKAGES.get(short, short),)
    found = next((one for area in areas if (one := find(area, last)) is not None), None)
    home = home_of(last)
    if found is None and home is not None:
        return Counterpart("same", f"`{home}.{last}`")
    return found


if __name__ == "__main__":
    main()
