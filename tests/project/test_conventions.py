"""Conventions of the source that no linter checks."""

import re

from support.paths import ROOT

FOLDERS = ("mfwrap", "callbacks", "recipes", "tests", "benchmarks", ".ci")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

SUPPRESSION = re.compile(r"# (?:noqa: [A-Z0-9, ]+|type: ignore\[[a-z, -]+\])(?P<rest>.*)$")
"""mypy allows only a comment after ``type: ignore[...]``: there the reason starts with ``#``."""


def without_reason(source: str) -> list[int]:
    """Return the numbers of the lines that suppress a warning without a reason in parentheses."""
    found = (
        (number, SUPPRESSION.search(line)) for number, line in enumerate(source.split("\n"), 1)
    )
    return [
        number
        for number, match in found
        if match is not None and not re.search(r"^\(.+\)$", match["rest"].strip(" #"))
    ]


def test_each_suppression_has_a_reason():
    """Every line that suppresses a warning gives a reason."""
    missing = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        for line in without_reason(path.read_text(encoding="utf-8"))
    ]

    assert missing == []


def test_a_suppression_without_a_reason_is_found():
    """A suppression is reported if the line does not end with a text in parentheses."""
    noqa, ignore = "# " + "noqa: S603", "# " + "type: ignore[misc]"
    lines = [noqa, f"{noqa}  (our own program)", ignore, f"{ignore}  # (untyped)"]

    assert without_reason("\n".join(lines)) == [1, 3]
