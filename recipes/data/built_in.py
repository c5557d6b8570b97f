"""Data that need no download: Python's documentation and source, and scikit-learn's data sets."""

import ast
import io
import itertools
import keyword
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, NamedTuple, final

import numpy as np
from datasets import Dataset

from mfwrap.arguments import check_int
from mfwrap.recipes.data.source import DataSource, Rows

_MODULES = (
    "argparse", "ast", "bdb", "calendar", "codecs", "configparser", "datetime", "difflib", "dis",
    "fractions", "ftplib", "heapq", "imaplib", "inspect", "ipaddress", "locale", "mailbox",
    "optparse", "pathlib", "pickle", "pickletools", "plistlib", "random", "shutil", "smtplib",
    "socket", "statistics", "string", "subprocess", "tarfile", "textwrap", "threading", "tokenize",
    "turtle", "typing", "uuid", "warnings", "weakref", "zipfile",
)  # fmt: skip
"""Modules of the standard library. A module that is not installed is skipped."""


@final
@dataclass(frozen=True, kw_only=True)
class PythonTopicsSource(DataSource):
    """The topics of Python's ``help()``; every tenth is held out. Column: ``text``."""

    type: Literal["python_topics"] = "python_topics"

    known_columns = frozenset({"text"})

    def read(self) -> Rows:
        texts = [topics[name] for name in sorted(topics)]
        return Rows(
            Dataset.from_dict({"text": [text for i, text in enumerate(texts) if i % 10]}),
            Dataset.from_dict({"text": texts[::10]}),
        )


class _Described(NamedTuple):
    module: str
    signature: str
    docstring: str


@final
@dataclass(frozen=True, kw_only=True)
class DocstringsSource(DataSource):
    """Functions of the standard library and their docstrings.

    Columns:

    - ``prompt``: a question with the function's signature;
    - ``completion``, ``chosen``: first paragraph of the docstring;
    - ``messages``: prompt and completion as a conversation;
    - ``rejected``: first paragraph of another function's docstring;
    - ``text``: the whole docstring;
    - ``label``: the module.
    """

    type: Literal["docstrings"] = "docstrings"

    known_columns = frozenset(
        {"prompt", "completion", "messages", "chosen", "rejected", "text", "label"}
    )

    def read(self) -> Rows:
        found = [one for module, source in _sources() for one in _described(module, source)]
        paragraphs = [one.docstring.split("\n\n")[0] for one in found]
        prompts = [f"What does {one.signature} do?\n" for one in found]
        # For `rejected`, shift the paragraphs by half the list: the paragraph is then that of
        # another function, usually in another module.
        others = paragraphs[len(found) // 2 :] + paragraphs[: len(found) // 2]
        columns = {
            "prompt": prompts,
            "completion": paragraphs,
            "messages": [_conversation(*pair) for pair in zip(prompts, paragraphs, strict=True)],
            "chosen": paragraphs,
            "rejected": others,
            "text": [one.docstring for one in found],
            "label": [one.module for one in found],
        }
        return Rows(Dataset.from_dict(columns))


@final
@dataclass(frozen=True, kw_only=True)
class PythonTokensSource(DataSource):
    """Source lines of the standard library. Columns: ``tokens``; ``labels``, each token's kind."""

    type: Literal["python_tokens"] = "python_tokens"

    known_columns = frozenset({"tokens", "labels"})

    def read(self) -> Rows:
        lines = [line for _, source in _sources() for line in _token_lines(source)]
        columns = {
            "tokens": [[token for token, _ in line] for line in lines],
            "labels": [[kind for _, kind in line] for line in lines],
        }
        return Rows(Dataset.from_dict(columns))


@final
@dataclass(frozen=True, kw_only=True)
class DigitsSource(DataSource):
    """scikit-learn's hand-written digits. Columns: ``image``, 8 x 8 in [0, 1]; ``label``."""

    type: Literal["digits"] = "digits"

    known_columns = frozenset({"image", "label"})

    def read(self) -> Rows:
        from sklearn.datasets import load_digits  # noqa: PLC0415  (slow; part of an extra)

        digits = load_digits()
        images = (digits.images / 16).astype(np.float32)
        columns = {"image": images.tolist(), "label": digits.target.tolist()}
        return Rows(Dataset.from_dict(columns))


@final
@dataclass(frozen=True, kw_only=True)
class DiabetesSource(DataSource):
    """scikit-learn's diabetes study. Columns: ``features``, ten numbers; ``target``.

    The target measures the progression of the disease. It is scaled to mean 0 and variance 1.
    """

    type: Literal["diabetes"] = "diabetes"

    known_columns = frozenset({"features", "target"})

    def read(self) -> Rows:
        from sklearn.datasets import load_diabetes  # noqa: PLC0415  (slow; part of an extra)

        study = load_diabetes()
        features = (study.data / study.data.std(axis=0)).astype(np.float32)
        target = ((study.target - study.target.mean()) / study.target.std()).astype(np.float32)
        columns = {"features": features.tolist(), "target": target.tolist()}
        return Rows(Dataset.from_dict(columns))


def _conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def _sources() -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each module in `_MODULES` that is installed."""
    folder = Path(sysconfig.get_path("stdlib"))
    for module in _MODULES:
        file = folder / f"{module}.py"
        if file.exists():
            yield module, file.read_text(encoding="utf-8")


def _described(module: str, source: str) -> Iterator[_Described]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            signature = f"{module}.{node.name}({ast.unparse(node.args)})"
            yield _Described(module, signature, docstring)


_KINDS = {
    tokenize.NUMBER: "number",
    tokenize.STRING: "string",
    tokenize.OP: "operator",
    tokenize.COMMENT: "comment",
}


def _token_lines(source: str) -> Iterator[list[tuple[str, str]]]:
    """Yield, for each source line with more than two tokens, a list of tokens and their kinds."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    for _, line in itertools.groupby(tokens, key=lambda token: token.start[0]):
        kinds = [(token.string, _kind(token)) for token in line]
        known = [(text, kind) for text, kind in kinds if kind is not None]
        if len(known) > 2:
            yield known


def _kind(token: tokenize.TokenInfo) -> str | None:
    if token.type == tokenize.NAME:
        return "keyword" if keyword.iskeyword(token.string) else "name"
    return _KINDS.get(token.type)


_PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "http", "importlib", "logging",
    "multiprocessing", "unittest", "urllib", "wsgiref", "xml",
)  # fmt: skip
"""Packages with many docstrings, in every Python since 3.11."""

_SHORTEST = 40
_DESCRIBED = (ast.AsyncFunctionDef, ast.ClassDef, ast.FunctionDef, ast.Module)


@final
@dataclass(frozen=True, kw_only=True)
class PackageDocstringsSource(DataSource):
    """Docstrings of packages of the standard library, without duplicates.

    Columns: ``text``, a docstring of at least 40 characters; ``label``, the package.
    """

    type: Literal["package_docstrings"] = "package_docstrings"

    most_of_a_package: int = 200
    """Maximum number of docstrings of one package, in the order of its files."""

    known_columns = frozenset({"text", "label"})

    def __post_init__(self) -> None:
        """Check that values are in range."""
        super().__post_init__()
        check_int("most_of_a_package", self.most_of_a_package)

    def read(self) -> Rows:
        found: dict[str, str] = {}
        for package in _PACKAGES:
            new = (text for text in _docstrings(package) if text not in found)
            for text, _ in zip(dict.fromkeys(new), range(self.most_of_a_package), strict=False):
                found[text] = package
        columns = {"text": list(found), "label": list(found.values())}
        return Rows(Dataset.from_dict(columns))


def _docstrings(package: str) -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib")) / package
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, _DESCRIBED):
                docstring = ast.get_docstring(node)
                if docstring is not None and len(docstring) >= _SHORTEST:
                    yield docstring
