"""The halves of the kinds: rules are written with one, and judged by the other.

Whoever changes a rule of the monitor may look at all that the development half records. The unseen
half is read at most three times; the campaign notes each reading in ``readings.jsonl`` beside this
file. Kinds of which records were looked at are in the development half now: six after the first
reading, and seven later. Both times, ten new kinds, which were written without the monitor, came to
the unseen half.
"""

import datetime as dt
import json
import subprocess
from pathlib import Path
from typing import Any

from support.healthy.kinds import KINDS
from support.paths import ROOT

__all__ = [
    "DEVELOPMENT",
    "JUMPING",
    "MOST_READINGS",
    "UNSEEN",
    "begin_reading",
    "end_reading",
    "readings",
]

JUMPING = (
    "harder tasks",
    "clipped critic",
    "target network",
    "outlier rows",
    "scheduled weights",
    "heavy tails",
    "more classes",
    "late judge",
)
"""Kinds of the development half whose data, task or loss change in truth: no monitor that finds bad
data can tell the first change from a fault."""

DEVELOPMENT = (
    "sparse rewards",
    "alternating tasks",
    "longer sequences",
    "image and text",
    "restarted codes",
    "recurrent language",
    "new experts",
    "frozen midway",
    "resumed midway",
    "warm restarts",
    "momentum",
    "unequal rows",
    "solved margins",
    "small normalized batches",
    "growing loss scale",
    "differential equation",
    "skipped layers",
    "rare positives",
    "group advantages",
    "low-rank embeddings",
    *JUMPING,
)

UNSEEN = tuple(name for name in KINDS if name not in DEVELOPMENT)

MOST_READINGS = 3

_READINGS = Path(__file__).with_name("readings.jsonl")


def readings(path: Path = _READINGS) -> list[dict[str, Any]]:
    """Return the readings of the unseen half so far, each with date, commit, seed and episodes."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def begin_reading(seed: int, steps: int, path: Path = _READINGS) -> None:
    """Note a reading of the unseen half before it runs: one that is interrupted counts, too.

    Raises:
        PermissionError: If there have been `MOST_READINGS` readings.
    """
    earlier = readings(path)
    if len(earlier) >= MOST_READINGS:
        msg = f"{path}: the unseen half may be read {MOST_READINGS} times, and has been"
        raise PermissionError(msg)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    reading = {"date": today, "commit": commit, "seed": seed, "steps": steps, "episodes": None}
    _write(path, [*earlier, reading])


def end_reading(steps: int, episodes: int, path: Path = _READINGS) -> None:
    """Write into the last reading how many steps it had, and how many episodes were found."""
    *earlier, last = readings(path)
    _write(path, [*earlier, last | {"steps": steps, "episodes": episodes}])


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
