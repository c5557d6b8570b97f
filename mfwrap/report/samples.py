"""Say which samples of a bad step stand out, and how to leave them out."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mfwrap.records.forms import to_number
from mfwrap.report.curves import NUMBER

_MOST_SAMPLES = 8


NONE_NAMED = "none named: "
"""Start of the line that says why no row is named."""


def samples_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows that stand out, the worst of each step first; else why none is named."""
    rows = [row for record in records for row in record.get("samples") or ()]
    rows += [row for record in records for row in record.get("later_samples") or ()]
    lines = [_sample(row) for row in rows[:_MOST_SAMPLES]]
    if rows[_MOST_SAMPLES:]:
        lines.append(f"and {len(rows) - _MOST_SAMPLES} more, in anomalies.jsonl")
    for record in records:
        if not rows and record.get("rows"):
            rows_of_input = html.escape(", ".join(map(str, record["rows"])))
            lines.append(f"rows {rows_of_input} of the input are not finite")
        if not rows and record.get("indices"):
            indices = ", ".join(map(str, record["indices"]))
            lines.append(f"micro-batch of data set indices {html.escape(indices)}")
        if not rows and record.get("samples_detail"):
            lines.append(f"{NONE_NAMED}{html.escape(str(record['samples_detail']))}")
    # Each sample once: later records of an episode may name a row again.
    places = dict.fromkeys(
        json.dumps({name: row[name] for name in ("epoch", "position")})
        for row in rows[:_MOST_SAMPLES]
        if _can_be_left_out(row)
    )
    if places:
        what, line = ("them", "lines") if len(places) > 1 else ("it", "line")
        codes = " ".join(f"<code>{html.escape(place, quote=False)}</code>" for place in places)
        lines.append(
            f"to leave {what} out of this pass: write the {line} {codes} to a file, and "
            "give the file as <code>--skip-rows</code> or <code>MFTrainer(skip_rows=...)</code>"
            f"; to leave {what} out of all passes, remove {what} from the data"
        )
    num_steps = max(record.get("num_steps", 1) for record in records)
    num_searched = max(record.get("num_searched", 1) for record in records)
    if rows and num_searched < num_steps:
        # While the weights are ruined, or after many steps, no step is run again, row by row.
        lines.append(f"samples of {num_searched} of the {num_steps} steps of the episode only")
    exact = [record.get("are_samples_exact") for record in records]
    if rows and False in exact:
        lines.append("numbers of a later run of the rows, not of the step itself")
    return list(dict.fromkeys(lines))


def _can_be_left_out(row: Mapping[str, Any]) -> bool:
    """Return whether a sample has a place that ``--skip-rows`` takes."""
    return type(row.get("epoch")) is int and type(row.get("position")) is int


def _sample(row: Mapping[str, Any]) -> str:
    step = f"step {row['step']}, " if "step" in row else ""
    where = f"{step}rank {row['rank']}, micro-batch {row['micro_batch']}, row {row['row']}"
    place = html.escape(where)
    if "index" in row:
        index = f"data set index {html.escape(str(row['index']))}"
        source = html.escape(str(row["source"])) if row.get("source") else None
        place = f"<strong>{index if source is None else f'{source}</strong>, <strong>{index}'}"
        place = f"{place}</strong> ({where})"
    if _can_be_left_out(row):
        place += f", epoch {row['epoch']}, position {row['position']}"
    numbers = [
        *compared("loss", row.get("loss"), None),
        *compared("gradient norm", row.get("gradient_norm"), None),
        *compared("with this row left out, loss", row.get("loss_without"), None),
        *compared("gradient norm", row.get("gradient_norm_without"), None),
    ]
    text = f"<q>{html.escape(str(row['text']))}</q>" if row.get("text") else ""
    return place + (f": {', '.join(numbers)}" if numbers else "") + text


def compared(what: str, value: Any, usual: Any, word: str = "usually") -> list[str]:
    """Return a number with its name and its usual value; nothing if the number is unknown."""
    number, other = to_number(value), to_number(usual)
    if number is None:
        return []
    known = other is not None and not math.isnan(other)
    return [f"{what} {number:{NUMBER}}" + (f" ({word} {other:{NUMBER}})" if known else "")]
