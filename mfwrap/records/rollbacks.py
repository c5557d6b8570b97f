"""Read which bad steps a run has gone back from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLLBACKS_FILE = "rollbacks.json"
"""File in the run folder with all rollbacks of the run."""


@dataclass(frozen=True, slots=True)
class RollbackRecord:
    """A rollback, as far as a reader of the run needs it."""

    kind: str
    """Kind of the anomaly, as in ``anomalies.jsonl``."""

    first_step: int
    last_step: int
    checkpoint: str
    """Name of the checkpoint that the training went back to."""

    num_rows: int
    """Number of rows of the data that are left out since then."""

    description: str
    """What went wrong, in one line."""


def read_rollbacks(folder: Path) -> list[RollbackRecord]:
    """Return the rollbacks of a run in the order in which they happened; empty if there were none.

    Args:
        folder: Run folder.

    Raises:
        ValueError: If ``rollbacks.json`` is damaged.
    """
    path = folder / ROLLBACKS_FILE
    if not path.is_file():
        return []
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        return [
            RollbackRecord(
                str(each["kind"]),
                int(each["first_step"]),
                int(each["last_step"]),
                str(each["checkpoint"]),
                len(each["rows"]),
                str(each["description"]),
            )
            for each in content["rollbacks"]
        ]
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        msg = f"{path} is damaged ({type(error).__name__}: {error}); expected a list of rollbacks"
        raise ValueError(msg) from error
