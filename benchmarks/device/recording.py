"""What a section measures, written to a file after each entry, so that a kill loses nothing."""

import contextlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
"""Values of a row by column: texts, numbers, spreads (`device.measuring.spread`) or None."""


class AbsentError(Exception):
    """Something that a part of a section needs is absent; its text names that thing."""


class Recording:
    """Tables, failures and parts that were left out of a section.

    Args:
        file: JSON file, which is replaced after each entry.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._entries: dict[str, Any] = {
            "status": "running",
            "summary": "",
            "tables": {},
            "failures": [],
            "left_out": [],
        }
        self._write()

    def row(self, table: str, columns: Row) -> None:
        """Add a row to a table."""
        self._entries["tables"].setdefault(table, []).append(dict(columns))
        self._write()

    def table(self, name: str, rows: Sequence[Row]) -> None:
        """Set all rows of a table."""
        self._entries["tables"][name] = [dict(row) for row in rows]
        self._write()

    def summarize(self, text: str) -> None:
        """Set the line that stands for the section in the table at the end of the output."""
        self._entries["summary"] = text
        self._write()

    def summarize_more(self, text: str, *, before: str = "") -> None:
        """Add to the section's line; `before` begins it."""
        summary = self._entries["summary"]
        self.summarize(f"{summary}, {text}" if summary else before + text)

    def check(self, claim: str, *, holds: bool, found: str) -> None:
        """Record whether a claim holds; a claim that does not is a failure.

        Args:
            claim: What must be true.
            holds: Whether it is.
            found: What was found.
        """
        self.row("checks", {"claim": claim, "holds": "yes" if holds else "no", "found": found})
        if not holds:
            self.fail(claim, found)

    def fail(self, part: str, error: str) -> None:
        """Record a failure of a part, and continue."""
        self._entries["failures"].append({"part": part, "error": error[:2000]})
        self._write()

    def leave_out(self, part: str, reason: str) -> None:
        """Record that a part was not run."""
        self._entries["left_out"].append({"part": part, "reason": reason})
        self._write()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Continue after the block if it fails, and record its failure."""
        print(f"-- {name}", flush=True)
        try:
            yield
        except AbsentError as absent:
            self.leave_out(name, str(absent))
        except Exception as error:  # noqa: BLE001  (a failure of one part must not stop the others)
            traceback.print_exc()
            sys.stderr.flush()
            self.fail(name, f"{type(error).__name__}: {error}")

    def end(self) -> None:
        """Record that the section has ended by itself."""
        entries = self._entries
        if entries["failures"]:
            entries["status"] = "failed"
        elif entries["left_out"] and not entries["tables"]:
            entries["status"] = "not run"
        else:
            entries["status"] = "ok"
        self._write()

    def _write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._entries), encoding="utf-8")
        Path(new).replace(self._file)  # a reader never sees half of it


def need(*packages: str) -> None:
    """Check that packages can be imported.

    Raises:
        AbsentError: If one cannot.
    """
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        msg = f"needs {', '.join(absent)}"
        raise AbsentError(msg)
