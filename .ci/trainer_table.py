"""Compare the stock Trainer with MFTrainer option by option, and write docs/trainer_table.md.

    python .ci/trainer_table.py                       # as `make table` does
    python .ci/trainer_table.py sgd push_to_hub       # only these rows; the others stay as they are

The optimizers of some rows are in packages that nothing else in the project needs. They are
installed into build/trainer-table/, without their dependencies, which are all present.
"""

import argparse
import importlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "trainer-table"


def install(rows: Sequence[str]) -> None:
    """Install the packages that rows need; without rows, those that any row needs."""
    from support.trainer_table.packages import ALSO_NEEDED, PACKAGES, is_installed, package_of

    sys.path.append(str(FOLDER))
    needed = set(map(package_of, rows)) if rows else set(PACKAGES)
    missing = sorted(package for package in needed if not is_installed(package))
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        command = [*pip, "--target", str(FOLDER), *missing, *ALSO_NEEDED]
        subprocess.run(command, check=True)
        importlib.invalidate_caches()


def main() -> None:
    """Compare rows, print each result, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="rows to compare; by default all")
    parser.add_argument("--output", type=Path, help="page to write; by default the one in docs/")
    arguments = parser.parse_args()
    names = arguments.names
    sys.path.insert(0, str(ROOT / "tests"))
    # The optimizers, optuna and the hub's client warn about themselves.
    warnings.simplefilter("ignore")
    install(names)
    from support.trainer_table import page
    from support.trainer_table.rows import ROWS

    chosen = [row for row in ROWS if not names or row.name in names]
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"no row is named {', '.join(sorted(unknown))}")
    text = page.PAGE.read_text(encoding="utf-8") if page.PAGE.exists() else ""
    versions = page.versions_of(text) if names and text else page.present_versions()
    cells = {(row.section, row.name): "not compared yet" for row in ROWS} | page.read_cells(text)
    for row in chosen:
        with tempfile.TemporaryDirectory() as folder:
            cells[row.section, row.name] = page.cell(row, Path(folder))
        print(f"{row.section}: {row.name}: {cells[row.section, row.name]}", flush=True)
        output = arguments.output or page.PAGE
        output.write_text(page.page(cells, versions), encoding="utf-8")
    if any(cells[row.section, row.name].startswith("differs") for row in chosen):
        sys.exit("some rows differ")


if __name__ == "__main__":
    main()
