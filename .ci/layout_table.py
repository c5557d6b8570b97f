"""Train each layout of ranks, and write the table in docs/ranks.md.

python .ci/layout_table.py                     # as `make layouts` does
python .ci/layout_table.py "tensor parallel"   # only rows with this text in their first cell

Rows that are not measured keep their cells.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure rows, print each, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", nargs="?", default="", help="part of the rows' first cells")
    parser.add_argument("--output", type=Path, help="page to write; by default docs/ranks.md")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from support.layouts import page
    from support.layouts.layouts import LAYOUTS

    text = page.PAGE.read_text(encoding="utf-8")
    rows = {row[0]: row for row in page.read_cells(text)}
    chosen = [layout for layout in LAYOUTS if arguments.text in layout.name]
    with page.Pools() as pools:
        for layout in chosen:
            rows[layout.name] = page.cells_of(layout, pools)
            print(" | ".join(rows[layout.name]), flush=True)
    ordered = [rows[layout.name] for layout in LAYOUTS if layout.name in rows]
    (arguments.output or page.PAGE).write_text(page.with_table(text, ordered), encoding="utf-8")
    if any(cell.startswith("differs") for row in ordered for cell in row):
        sys.exit("some layouts differ")


if __name__ == "__main__":
    main()
