"""Act out ordinary mistakes of people who fine-tune, and write docs/mistakes.md.

python .ci/mistakes.py                  # as `make mistakes` does
python .ci/mistakes.py yaml_tab         # only these mistakes; the others stay as they are
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Act mistakes out, print what mfwrap says to each, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="mistakes to act out; by default all")
    parser.add_argument("--output", type=Path, help="page to write; by default the one in docs/")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from support.mistakes import table
    from support.mistakes.acting import act

    chosen = [each for each in table.MISTAKES if not arguments.names or each.id in arguments.names]
    unknown = set(arguments.names) - {each.id for each in table.MISTAKES}
    if unknown:
        parser.error(f"no mistake is named {', '.join(sorted(unknown))}")
    text = table.PAGE.read_text(encoding="utf-8") if table.PAGE.exists() else ""
    versions = table.versions_of(text) if arguments.names and text else table.present_versions()
    cells = {each.id: table.Cell("", "not acted out yet") for each in table.MISTAKES}
    cells |= table.read_cells(text)
    for mistake in chosen:
        with tempfile.TemporaryDirectory() as folder:
            answer = act(mistake, Path(folder))
        print(f"{mistake.id}: {answer.ends}: {answer.says}", flush=True)
        cells[mistake.id] = table.cell_of(mistake, *answer)
    page = table.PAGE if arguments.output is None else arguments.output
    page.write_text(table.page(cells, versions), encoding="utf-8")


if __name__ == "__main__":
    main()
