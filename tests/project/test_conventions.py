"""Conventions of the source that no linter checks."""

import ast
import re
from collections.abc import Iterator

from support.paths import ROOT

FOLDERS = ("mfwrap", "callbacks", "recipes", "tests", "benchmarks", ".ci")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

SUPPRESSION = re.compile(r"# (?:noqa: [A-Z0-9, ]+|type: ignore\[[a-z, -]+\])(?P<rest>.*)$")
"""mypy allows only a comment after ``type: ignore[...]``: there the reason starts with ``#``."""


LONG = {
    "callbacks/checkpoint_monitor.py::__init__": "takes the settings of a monitor, and checks them",
    "callbacks/culprit/finder.py::_completed": "fills in the fields that all kinds have",
    "callbacks/culprit/gathering.py::gather": "asks each judge and each replay for what it knows",
    "callbacks/culprit/judges/step.py::judge": "one formula after the other, on the device",
    "callbacks/loop/monitor.py::__init__": "takes the settings of a monitor, and checks them",
    "callbacks/training_state/run.py::__init__": "builds the parts of a run, in their order",
    "callbacks/training_state/run.py::end_step": "starts to copy all that a step tells",
    "mfwrap/mindspore/run.py::__init__": "builds the parts of a run, in their order",
    "mfwrap/runner/mindformers/importer.py::_convert": "takes the sections of a file in turn",
    "mfwrap/runner/recipe.py::read_document": "takes the sections of a recipe in turn",
    "mfwrap/runner/run.py::build_trainer": "builds the parts of a training, in their order",
    "mfwrap/step/cell.py::__init__": "takes the settings of a step, and gives them to its parts",
    "mfwrap/trainer/mixin.py::__init__": "builds the parts of a trainer, in their order",
    "mfwrap/trainer/trainer.py::__init__": "names the arguments of two classes for editors",
}
"""Functions of more than 50 lines of code, and why they are not several functions."""


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


def code_lines(source: str) -> Iterator[tuple[str, int]]:
    """Yield each function and its number of lines without comments, docstrings and blanks."""
    tree, lines = ast.parse(source), source.splitlines()
    texts = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            own = range(node.lineno, (node.end_lineno or 0) + 1)
            code = [lines[number - 1].strip() for number in own if number not in texts]
            yield node.name, sum(bool(line) and not line.startswith("#") for line in code)


def test_each_long_function_has_a_reason():
    """A function of more than 50 lines of code is in `LONG`, and nothing else is."""
    found = {
        f"{path.relative_to(ROOT)}::{name}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] in {"mfwrap", "callbacks", "recipes"}
        for name, number in code_lines(path.read_text(encoding="utf-8"))
        if number > 50
    }

    assert found == set(LONG)


def test_lines_of_code_are_counted():
    """Comments, docstrings and blank lines do not count."""
    source = 'def f():\n    """Text."""\n    # why\n\n    return (\n        1\n    )\n'

    assert list(code_lines(source)) == [("f", 4)]
