"""The file of a run's results, and the file that joins the results of several runs.

The file of a run has ``format``, ``command``, ``date``, ``machine`` (`device.machine.describe`),
``wheels`` and ``sections``: what each section has recorded (`device.recording`), with ``seconds``
and ``limit``. A section's ``status`` is one of

- ``ok``: it ended, and nothing failed;
- ``failed``: it ended, and parts of it failed, or its process ended early;
- ``not run``: it was cut by its limit, not started, or needs what is absent; ``reason`` says which;
- ``running``: the run was killed while the section was running.

The joined file has, for each section and the name of each GPU, the newest result of a section that
ended. Where there is none, it has the newest tables of a section that did not end.
"""

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from device.plan import SECTIONS

FORMAT = 1
FILE = "device.json"

Joined = dict[str, dict[str, dict[str, Any]]]
"""Results by section and name of the GPU."""


def now() -> str:
    """Return the time in UTC, to the second."""
    return dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds")


def write_json(file: Path, value: Any) -> None:
    """Write a file as a whole, so that a reader never sees half of it."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    Path(new).replace(file)


def read_runs(place: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the results of runs in a file, or in a folder and the folders in it.

    Raises:
        ValueError: If the file, or no file of the folder, has results of a run.
    """
    files = sorted(place.rglob("*.json")) if place.is_dir() else [place]
    runs = []
    for file in files:
        try:
            run = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            msg = f"{file}: expected the results of `make device`, got {error}"
            raise ValueError(msg) from error
        if isinstance(run, dict) and run.get("format") == FORMAT and "machine" in run:
            runs.append((file, run))
    if not runs:
        msg = f"{place}: expected the results of `make device`, got none; name {FILE} or its folder"
        raise ValueError(msg)
    return runs


def joined(before: Joined, runs: Iterable[dict[str, Any]]) -> Joined:
    """Return the newest results of each section and GPU.

    Results of a CPU are left out. A section that did not end counts only if it has measured
    something and there is none that ended.

    Args:
        before: Results that were joined before; not changed.
        runs: Results of runs, in any order.
    """
    found = {section: dict(by_device) for section, by_device in before.items()}
    for run in runs:
        if run["machine"].get("kind") != "cuda" or run.get("small"):
            continue
        for name, section in run["sections"].items():
            if name not in SECTIONS or not (has_ended(section) or section["tables"]):
                continue
            entry = {key: run[key] for key in ("date", "command", "machine")} | section
            by_device = found.setdefault(name, {})
            device = run["machine"]["name"]
            if device not in by_device or _worth(by_device[device]) < _worth(entry):
                by_device[device] = entry
    return found


def has_ended(section: Mapping[str, Any]) -> bool:
    """Return whether a section has ended by itself, so that its tables are complete."""
    return section["status"] in {"ok", "failed"}


def _worth(entry: Mapping[str, Any]) -> tuple[bool, str]:
    return has_ended(entry), entry["date"]
