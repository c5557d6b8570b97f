"""Join the records of anomalies into episodes, bad steps in a row, and list the notes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mfwrap.records.forms import Form, fitting

_FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("step", "last_step", "num_steps", "num_skipped", "num_searched"), int),
    **dict.fromkeys(("micro_batch", "since"), int),
    **dict.fromkeys(("kind", "cause", "where", "replay", "device"), str),
    **dict.fromkeys(("rows", "indices", "losses", "weights", "states", "moved", "buffers"), list),
    "ranks": [int],
    "gradients": [dict],
    "samples": [{"rank": int, "micro_batch": int, "row": int}],
    "later_samples": [{"step": int, "rank": int, "micro_batch": int, "row": int}],
}
"""Forms of those fields of an anomaly that are more than shown."""

_NOTE = "note"
"""Kind of a record that says what should not be so in any run, and is no anomaly."""


@dataclass(slots=True)
class Episode:
    """Bad steps in a row that belong together."""

    step: int
    """First step."""

    kind: str
    """Kind of the first anomaly, as in ``anomalies.jsonl``."""

    last_step: int
    num_steps: int
    """Number of bad steps; a good step may be between two of them."""

    num_skipped: int
    """Number of bad steps whose update was skipped."""

    records: list[dict[str, Any]]
    """First record of each rank that has found the episode, with the fields of its last record."""

    @property
    def cause(self) -> str | None:
        """Cause as in ``anomalies.jsonl``; ``None`` in files of older versions."""
        return self.records[0].get("cause")

    @property
    def has_diverged(self) -> bool:
        """Whether the loss has left its course for good, as far as the run has gone."""
        return "diverged" in self.records[0] and self.records[0].get("back") is None


def episodes_of(files: Iterable[tuple[int, Sequence[Mapping[str, Any]]]]) -> list[Episode]:
    """Return the episodes of a run, ordered by their first steps.

    An episode of several steps has two records: one when it begins, and one with ``last_step`` when
    it ends. Episodes of several ranks with the same first step, kind and cause are one episode.
    Notes, and records without a step number, are left out.

    Args:
        files: Rank and records of each file of anomalies.
    """
    found: dict[tuple[int, str, str | None], Episode] = {}
    for rank, records in files:
        for episode in _of_rank(records, rank):
            known = found.setdefault((episode.step, episode.kind, episode.cause), episode)
            if known is not episode:
                known.records += episode.records
                known.last_step = max(known.last_step, episode.last_step)
                known.num_steps = max(known.num_steps, episode.num_steps)
                known.num_skipped = max(known.num_skipped, episode.num_skipped)
    return sorted(found.values(), key=lambda episode: episode.step)


def notes_of(files: Iterable[tuple[int, Sequence[Mapping[str, Any]]]]) -> list[dict[str, Any]]:
    """Return the notes of a run, ordered by their steps; what several ranks note is one note.

    Args:
        files: Rank and records of each file of anomalies.
    """
    notes: dict[tuple[int, Any], dict[str, Any]] = {}
    for _, records in files:
        for record in (fitting(record, _FORMS) for record in records):
            if record.get("kind") == _NOTE and "step" in record:
                new = {"ranks": [], **record}
                known = notes.setdefault((record["step"], record.get("explanation")), new)
                known["ranks"] = sorted({*known["ranks"], *new["ranks"]})
    return sorted(notes.values(), key=lambda note: note["step"])


def _of_rank(records: Iterable[Mapping[str, Any]], rank: int) -> list[Episode]:
    known = [fitting(record, _FORMS) for record in records]
    numbered = [each for each in known if "step" in each and each.get("kind") != _NOTE]
    found: list[Episode] = []
    for record in sorted(numbered, key=lambda record: int(record["step"])):
        step, kind = record["step"], record.get("kind", "anomaly")
        if "last_step" in record:
            begun = (one for one in reversed(found) if (one.step, one.kind) == (step, kind))
            if (episode := next(begun, None)) is None:
                # The file has lost the first record, for example because a user has cut it.
                episode = Episode(step, kind, step, 1, 0, [_of(record, rank)])
                found.append(episode)
            episode.last_step = record["last_step"]
            episode.num_steps = record.get("num_steps", 1)
            episode.num_skipped = record.get("num_skipped", 0)
            episode.records = [{**episode.records[0], **record}]
        else:
            num_skipped = int(record.get("skipped") is True)
            found.append(Episode(step, kind, step, 1, num_skipped, [_of(record, rank)]))
    return found


def _of(record: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return a record that names its rank. A file of rank 0 may speak for all ranks."""
    return {"ranks": [rank], **record} if rank else dict(record)
