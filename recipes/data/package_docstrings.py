"""Docstrings of Python's own packages, by package."""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from datasets import Dataset

from mfwrap.recipes.data.source import DataSource, Rows

__all__ = ["PackageDocstringsSource"]

_PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "http", "importlib", "logging",
    "multiprocessing", "unittest", "urllib", "wsgiref", "xml",
)  # fmt: skip
"""Those that every Python since 3.11 has, with enough to say."""

_SHORTEST = 40
_DESCRIBED = (ast.AsyncFunctionDef, ast.ClassDef, ast.FunctionDef, ast.Module)


@final
@dataclass(frozen=True, kw_only=True)
class PackageDocstringsSource(DataSource):
    """Docstrings of packages of the standard library, each once.

    Columns: ``text``, the docstring, of 40 characters at least; ``label``, the package.
    """

    type: Literal["package_docstrings"] = "package_docstrings"

    most_of_a_package: int = 200
    """Docstrings that are taken of one package, in the order of its files."""

    known_columns = frozenset({"text", "label"})

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        if self.most_of_a_package < 1:
            msg = f"`most_of_a_package` must be >= 1, got {self.most_of_a_package}"
            raise ValueError(msg)

    def read(self) -> Rows:
        found: dict[str, str] = {}
        for package in _PACKAGES:
            new = (text for text in _docstrings(package) if text not in found)
            for text, _ in zip(dict.fromkeys(new), range(self.most_of_a_package), strict=False):
                found[text] = package
        columns = {"text": list(found), "label": list(found.values())}
        return Rows(Dataset.from_dict(columns), None)


def _docstrings(package: str) -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib")) / package
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, _DESCRIBED):
                docstring = ast.get_docstring(node)
                if docstring is not None and len(docstring) >= _SHORTEST:
                    yield docstring
