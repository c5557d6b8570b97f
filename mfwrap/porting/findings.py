"""Join the uses of each name in scripts, and say what to write for it."""

import ast
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mfwrap.names.counterparts import Counterpart, find
from mfwrap.names.texts import SAME
from mfwrap.porting.modules import Imported
from mfwrap.porting.script import Attribute, Script, Use, UserClass, UserModule
from mfwrap.porting.verdicts import of_name

T = TypeVar("T")
_MAX_PASSES = 8
"""How often scripts are read, at most, until nothing new is known about their classes."""

_NAME = "mfwrap does not know this name"
_STAR = "star imports are not followed; import the names that the script uses one by one"

UNKNOWN = "unknown"
VERDICTS = ("same", "write", "leave out", "no counterpart", UNKNOWN)
"""All verdicts, in the order of the summary."""


class Finding(NamedTuple):
    """A name that a script uses."""

    file: Path
    """The script."""

    lines: tuple[int, ...]
    """Lines that use the name, from 1, in order."""

    name: str
    """The name as it is shown."""

    verdict: str
    """One of `VERDICTS`."""

    text: str
    """What to write, or why nothing replaces the name."""

    def to_record(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return self._asdict() | {"file": str(self.file), "lines": list(self.lines)}

    def __str__(self) -> str:
        more = ", ".join(map(str, self.lines[1:]))
        where = f"{self.file}:{self.lines[0]}: {self.name}"
        return f"{where}{f' (also {more})' if more else ''}: {self.text}"


def read_scripts(files: Sequence[Path]) -> list[Finding]:
    """Find the names of MindSpore and MindFormers in scripts, without running them.

    Classes of one script are known in the others.

    Args:
        files: Python files.

    Returns:
        Findings in the order of the files and of the first lines.

    Raises:
        ValueError: If a file cannot be read, is a notebook or is no Python, with one sentence that
            names it.
    """
    trees = {file: _tree(file) for file in files}
    classes: dict[str, UserClass] = {}
    modules: dict[Path, UserModule] = {}
    # A class may derive from one in a file that is read later, and that from another.
    for _ in range(_MAX_PASSES):
        named = _of_one((name, one) for file, one in modules.items() for name in _names(file))
        beside = {
            folder: {file.stem: one for file, one in modules.items() if file.parent == folder}
            for folder in {file.parent for file in files}
        }
        scripts = {
            file: _read(file, tree, classes, named | beside[file.parent])
            for file, tree in trees.items()
        }
        before = classes, modules
        classes = _of_one(row for one in scripts.values() for row in one.classes.items())
        modules = {file: one.module for file, one in scripts.items()}
        if (classes, modules) == before:
            break
    return [finding for file, one in scripts.items() for finding in _findings(file, one.uses)]


def _of_one(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return a dict of the pairs whose name no other pair has."""
    listed = list(pairs)
    counts = Counter(name for name, _ in listed)
    return {name: one for name, one in listed if counts[name] == 1}


def _names(file: Path) -> list[str]:
    """Return the names by which a file can be imported: ``step``, ``src.step`` and so on."""
    parts = file.absolute().with_suffix("").parts[1:]
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return [".".join(parts[first:]) for first in range(len(parts))]


def _read(
    file: Path,
    tree: ast.Module,
    classes: Mapping[str, UserClass],
    modules: Mapping[str, UserModule],
) -> Script:
    try:
        return Script(tree, classes, modules)
    except RecursionError as error:
        msg = f"{file}: expected expressions that can be followed, got one with too many parts"
        raise ValueError(msg) from error


def _tree(file: Path) -> ast.Module:
    # JSON often parses as a Python expression, which has no names.
    if file.suffix == ".ipynb":
        msg = (
            f"{file}: expected a Python file, got a notebook; "
            f"convert it with `jupyter nbconvert --to script {file}`"
        )
        raise ValueError(msg)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script
            return ast.parse(file.read_bytes(), filename=str(file))
    except OSError as error:
        msg = f"{file}: expected a Python file, but it cannot be read ({error.strerror})"
        raise ValueError(msg) from error
    except SyntaxError as error:
        place = file if error.lineno is None else f"{file}:{error.lineno}"
        msg = f"{place}: expected Python 3, got a syntax error: {error.msg}"
        raise ValueError(msg) from error
    except (ValueError, RecursionError, MemoryError) as error:
        msg = f"{file}: expected a Python file, but it cannot be parsed: {error}"
        raise ValueError(msg) from error


def _findings(file: Path, uses: Iterable[Use]) -> list[Finding]:
    grouped: dict[tuple[str, ...], list[Use]] = {}
    for use in uses:
        grouped.setdefault(_key(use.subject), []).append(use)
    found = [
        Finding(file, tuple(sorted({use.line for use in group})), *_judged(group[0].subject))
        for group in grouped.values()
    ]
    return sorted(found, key=lambda finding: finding.lines[0])


def _key(subject: Imported | Attribute) -> tuple[str, ...]:
    if isinstance(subject, Imported):
        return ("name", subject.shown)
    return (subject.kind, subject.name, "sure" if subject.is_sure else "named so")


def _judged(subject: Imported | Attribute) -> tuple[str, str, str]:
    """Return the name as it is shown, the verdict and its sentence."""
    if isinstance(subject, Imported):
        found = of_name(subject)
        return (subject.shown, *_said(found, _STAR if subject.name == "*" else _NAME))
    found = find(subject.kind, subject.name)
    verdict, text = _said(found, f"mfwrap does not know this attribute of the {subject.kind}")
    if not subject.is_sure:
        text = f"if this is MindSpore's {subject.kind}: {text}"
    return subject.shown, verdict, text


def _said(found: Counterpart | None, unknown: str) -> tuple[str, str]:
    if found is None:
        return UNKNOWN, f"unknown: {unknown}"
    match found.verdict:
        case "same":
            return "same", "the same" if found.text == SAME else f"the same: {found.text}"
        case "no counterpart":
            return "no counterpart", f"no counterpart: {found.text}"
    return found.verdict, f"write {found.text}"
