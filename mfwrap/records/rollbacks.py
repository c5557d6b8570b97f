"""The content of ``rollbacks.json``: which bad steps a run has gone back from."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfwrap.records.forms import Form, fits
from mfwrap.records.json_lines import parsed_json
from mfwrap.records.skipped_rows import SkippedRow, checked_row

ROLLBACKS_FILE = "rollbacks.json"
"""File in the run folder with all rollbacks of the run."""

_FORMAT_VERSION = 1
_FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("kind", "checkpoint", "description"), str),
    **dict.fromkeys(("first_step", "last_step"), int),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRecord:
    """A rollback of a run."""

    kind: str
    """Kind of the anomaly, as in ``anomalies.jsonl``."""

    first_step: int
    last_step: int
    checkpoint: str
    """Name of the checkpoint that the training went back to."""

    rows: tuple[SkippedRow, ...]
    """Rows of the data that are left out since then."""

    description: str
    """What went wrong, in one line. The records of the bad steps are removed."""

    rate_factor: float = 1.0
    slow_updates: int = 0
    """As in `mfwrap.trainer.Rollback`, when the training went back."""

    def slows(self, step: int) -> bool:
        """Return whether the rates of a step are multiplied by `rate_factor`."""
        first = int(self.checkpoint.partition("-")[2]) + 1
        return first <= step < first + self.slow_updates


def rollbacks_text(rollbacks: Sequence[RollbackRecord], pending: str | None = None) -> str:
    """Return the content of ``rollbacks.json``.

    Args:
        rollbacks: All rollbacks of a run, in the order in which they happened.
        pending: Name of the checkpoint of the last rollback if it is not complete yet.
    """
    content = {
        "format_version": _FORMAT_VERSION,
        "pending": pending,
        "rollbacks": [dataclasses.asdict(each) for each in rollbacks],
    }
    return json.dumps(content) + "\n"


def read_rollbacks(folder: Path) -> tuple[list[RollbackRecord], str | None]:
    """Return the rollbacks of a run, and the checkpoint of one that was not completed.

    Args:
        folder: Run folder. Without ``rollbacks.json``, the run has no rollbacks.

    Raises:
        ValueError: If the file is damaged or has another format version.
    """
    path = folder / ROLLBACKS_FILE
    if not path.is_file():
        return [], None
    try:
        content: Any = parsed_json(path.read_text(encoding="utf-8"))
        version, pending = content["format_version"], content["pending"]
        if not fits(content["rollbacks"], [_FORMS]):
            msg = "expected a list of rollbacks"
            raise TypeError(msg)  # noqa: TRY301  (reported below)
        rollbacks = [
            RollbackRecord(**{**each, "rows": tuple(checked_row(*row) for row in each["rows"])})
            for each in content["rollbacks"]
        ]
        if pending is not None and Path(pending).name != pending:
            msg = f"expected the name of a checkpoint, got {pending!r}"
            raise ValueError(msg)  # noqa: TRY301  (reported below)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        msg = (
            f"{path} is damaged ({type(error).__name__}: {error}); to resume the run, delete it "
            "and give the rows to leave out as `skip_rows`"
        )
        raise ValueError(msg) from error
    if version != _FORMAT_VERSION:
        msg = f"{path}: expected format_version {_FORMAT_VERSION}, got {version!r}"
        raise ValueError(msg)
    return rollbacks, pending
