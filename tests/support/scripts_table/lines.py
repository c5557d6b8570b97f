"""Add mfwrap to the text of a script, with the lines that docs/coming_from.md shows."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["with_mfwrap", "without_clipping"]


class _Edit(NamedTuple):
    """A text that replaces a part of a line, or that is inserted there."""

    line: int
    """Number of the line, from 1."""
    start: int
    end: int
    """Columns of the part, in bytes of UTF-8, as `ast` counts them."""
    text: str


def with_mfwrap(text: str) -> str:
    """Return a script that trains with mfwrap.

    - After each statement that makes an accelerator whose `prepare` the script calls:
      ``attach(accelerator)``.
    - ``Trainer`` is replaced by ``MFTrainer``, and each other Trainer by a class that derives from
      `MFTrainerMixin` and from it.

    Args:
        text: Text of the script.

    Raises:
        ValueError: If the script makes neither an accelerator nor a Trainer.
    """
    tree = ast.parse(text)
    edits = [*_replaced_trainers(tree)]
    if not edits and ".prepare(" in text:
        edits = [*_attached(tree)]
    if not edits:
        msg = "the script makes neither an accelerator nor a Trainer"
        raise ValueError(msg)
    return _edited(text, edits)


def without_clipping(text: str) -> str:
    """Return a script whose training arguments have ``max_grad_norm=0.0``.

    Args:
        text: Text of a script that calls the class of its training arguments.
    """
    edits = []
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and _name(node.func).endswith(("TrainingArguments", "Config"))
            and any(keyword.arg == "output_dir" for keyword in node.keywords)
        ):
            first = node.keywords[0]
            edits.append(_Edit(first.lineno, first.col_offset, first.col_offset, _UNCLIPPED))
    return _edited(text, edits)


_UNCLIPPED = "max_grad_norm=0.0, "


def _attached(tree: ast.Module) -> Iterator[_Edit]:
    for statement in _statements(tree):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        calls = (node for node in ast.walk(statement.value) if isinstance(node, ast.Call))
        if any(_name(call.func) == "Accelerator" for call in calls):
            name = statement.targets[0].id
            yield _lines(
                statement,
                (statement.end_lineno or 0) + 1,
                "from mfwrap.accelerate import attach",
                f"attach({name})",
            )


def _replaced_trainers(tree: ast.Module) -> Iterator[_Edit]:
    for statement in _statements(tree):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        made = statement.value.func
        name = _name(made)
        if not name.endswith("Trainer"):
            continue
        if name == "Trainer":
            lines = ["from mfwrap.trainer import MFTrainer"]
        else:
            lines = [
                "from mfwrap.trainer import MFTrainerMixin",
                f"class MF{name}(MFTrainerMixin, {ast.unparse(made)}): pass",
            ]
        yield _lines(statement, statement.lineno, *lines)
        yield _Edit(made.lineno, made.col_offset, made.end_col_offset or 0, f"MF{name}")


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _name(called: ast.expr) -> str:
    """Return the last name of what a call calls; "" if it is no name."""
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def _lines(statement: ast.stmt, line: int, *lines: str) -> _Edit:
    """Return the edit that inserts lines with a statement's indentation before a line."""
    indented = "".join(f"{' ' * statement.col_offset}{each}\n" for each in lines)
    return _Edit(line, 0, 0, indented)


def _edited(text: str, edits: list[_Edit]) -> str:
    lines = [line.encode() for line in [*text.splitlines(keepends=True), ""]]
    # From the end, so that the places of the other edits stay valid.
    for edit in sorted(edits, reverse=True):
        line = lines[edit.line - 1]
        lines[edit.line - 1] = line[: edit.start] + edit.text.encode() + line[edit.end :]
    return b"".join(lines).decode()
