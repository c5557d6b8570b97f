"""Turn results into Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from device.results import has_ended

NOT_MEASURED = "Not measured on a GPU."


def number(value: float) -> str:
    """Format a number: whole ones with all digits, others with three."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:.0f}"
    if value == 0:
        return "0"
    digits = 3
    magnitude = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - magnitude)}f}" if abs(value) >= 1e-2 else f"{value:.2g}"


def cell(value: Any) -> str:
    """Format a value of a row."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        median, low, high = (number(value[key]) for key in ("median", "low", "high"))
        return f"{median} ({low} to {high})"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a table, with the columns in the order in which they first occur."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(section: Mapping[str, Any]) -> str:
    """Return all tables of a section, and what failed or was left out."""
    parts = [f"{name}:\n\n{table(rows)}" for name, rows in section["tables"].items()]
    parts += [f"Failed: {_named(each, 'error')}." for each in section["failures"]]
    parts += [f"Not run: {_named(each, 'reason')}." for each in section["left_out"]]
    return "\n\n".join(parts)


def _named(entry: Mapping[str, str], key: str) -> str:
    return f"{entry['part']} ({cell(entry[key])[:300]})"


def published(by_device: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a section's part of RESULTS.md.

    Args:
        by_device: Results by the name of the GPU; none if the section was never measured.
    """
    return "\n\n".join(_of_device(entry) for _, entry in sorted(by_device.items())) or NOT_MEASURED


def _of_device(entry: Mapping[str, Any]) -> str:
    machine = entry["machine"]
    reason = entry.get("reason", "the run was killed")
    text = f"`{entry['command']}`:\n\n{tables(entry)}"
    text = text if has_ended(entry) else f"Incomplete: {reason}.\n\n{text}"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{entry['date'][:10]}, {machine['name']}, {versions}"
        f"{', revision ' + machine['revision'] if machine.get('revision') else ''}; copies move "
        f"{machine['copied_gb_per_second']} GB/s.\n\n{text}"
    )


def overview(sections: Mapping[str, Mapping[str, Any]], shown: Iterable[str]) -> str:
    """Return the short table at the end of a run: a line for each section.

    Args:
        sections: Results by section.
        shown: Names of the chosen sections.
    """
    rows = []
    for name in shown:
        section = sections.get(name, {"status": "not run", "reason": "not started"})
        failures = [f"{each['part']}: {each['error']}" for each in section.get("failures", [])]
        notes = [section.get("reason", ""), section.get("summary", ""), *failures[:3]]
        notes += [f"not run: {each['part']}" for each in section.get("left_out", [])]
        rows.append(
            {
                "section": name,
                "result": section["status"],
                "s": section.get("seconds"),
                "what was found": cell("; ".join(filter(None, notes)))[:600],
            }
        )
    return table(rows)
