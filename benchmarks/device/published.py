"""Join the results of runs, and write them into RESULTS.md.

    make device-results FROM=build/device      # the results of a run, or a folder of several

The newest result of each section and GPU is kept in device_results.json, beside RESULTS.md, which
has a place for each section. Results of a CPU are not published.
"""

import argparse
import json
import sys
from pathlib import Path

from device.environment import BENCHMARKS
from device.plan import SECTIONS
from device.results import Joined, joined, read_runs, write_json
from device.tables import published
from run import replaced


def read_joined(file: Path) -> Joined:
    """Return the results that were joined before; none if there is no file."""
    if not file.exists():
        return {}
    found: Joined = json.loads(file.read_text(encoding="utf-8"))
    return found


def with_results(text: str, found: Joined) -> str:
    """Return the text of RESULTS.md with the results of all sections."""
    for name in SECTIONS:
        text = replaced(text, f"<!-- {name} cuda -->", published(found.get(name, {})))
    return text


def main() -> None:
    """Join, write both files, and say what was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", type=Path, help="file or folder of results")
    parser.add_argument("--results", type=Path, default=BENCHMARKS / "RESULTS.md")
    arguments = parser.parse_args()
    try:
        runs = read_runs(arguments.place)
    except ValueError as error:
        sys.exit(str(error))
    for file, run in runs:
        if run["machine"].get("kind") != "cuda" or run.get("small"):
            print(f"{file} is left out: it is of a CPU, or of tiny sizes")
    file = arguments.results.with_name("device_results.json")
    found = joined(read_joined(file), [run for _, run in runs])
    if not found:
        print("no section was measured on a GPU; nothing is changed")
        return
    write_json(file, found)
    text = arguments.results.read_text(encoding="utf-8")
    arguments.results.write_text(with_results(text, found), encoding="utf-8")
    for name in SECTIONS:
        print(f"{name}: {', '.join(found.get(name, {})) or 'not measured'}")


if __name__ == "__main__":
    main()
