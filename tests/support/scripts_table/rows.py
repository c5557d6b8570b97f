"""Read the scripts of the table, and how their texts are changed."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.scripts_table.lines import with_mfwrap, without_clipping

__all__ = ["LIBRARIES", "RULES", "SCRIPTS", "Rule", "Script"]

_ROWS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("rows.toml").read_text(encoding="utf-8")
)
LIBRARIES: dict[str, str] = _ROWS["library"]
"""Heading of each library's table, by the name of its repository of huggingface."""


@dataclass(frozen=True)
class Rule:
    """A change of the text of each script, with and without mfwrap."""

    name: str
    """Letter that stands for it in the table."""
    change: str
    """What it does, for the page."""
    pattern: str
    """Regular expression."""
    by: str
    """Text that replaces each match."""
    reason: str


RULES = [Rule(**rule) for rule in _ROWS["rule"]]


_UNCLIPPED = ["--max_grad_norm", "0"]


@dataclass(frozen=True)
class Script:
    """A script of another library."""

    library: str
    """Name of its repository of huggingface."""
    path: str
    """File in the repository."""
    arguments: Sequence[str] = ()
    """Arguments of its command line."""
    resumed: Sequence[str] = ()
    """Arguments of a second run in the same folder, which resumes from a checkpoint of the first
    one, and which is compared."""
    replace: Sequence[tuple[str, str]] = ()
    """Texts that are replaced in this script alone, and what replaces them."""
    unclipped: Sequence[tuple[str, str]] = ()
    """The same, for a script with a loop of its own that shall not clip."""
    package: str = ""
    """Package that only this script needs."""
    intended: Mapping[str, str] = field(default_factory=dict)
    """Numbers of the log that mfwrap means to change, by name, and how. They are not compared."""

    @property
    def title(self) -> str:
        """Name of the script in the table."""
        return f"{self.path} resumed" if self.resumed else self.path

    def rules(self, text: str) -> list[Rule]:
        """Return the rules that change the script's text."""
        return [rule for rule in RULES if re.search(rule.pattern, text)]

    def text(self, text: str, *, clips: bool, mfwrap: bool) -> str:
        """Return the text that is run.

        Args:
            text: Text of the script.
            clips: Whether it clips gradients, if it does so by itself.
            mfwrap: Whether it trains with mfwrap.

        Raises:
            ValueError: If it has not the texts that are to be replaced.
        """
        for old, new in (*self.replace, *(() if clips else self.unclipped)):
            if old not in text:
                msg = f"{self.path} has no {old!r}"
                raise ValueError(msg)
            text = text.replace(old, new)
        for rule in RULES:
            text = re.sub(rule.pattern, rule.by, text)
        if not clips:
            text = without_clipping(text)
        return with_mfwrap(text) if mfwrap else text

    def command_lines(self, text: str, *, clips: bool) -> list[list[str]]:
        """Return the arguments of each run of the script.

        Args:
            text: Text of the script.
            clips: Whether it clips gradients, if it does so by itself.
        """
        parses = re.search(r"\b(HfArgumentParser|TrlParser)\(", text)
        added = [] if clips or not parses or without_clipping(text) != text else _UNCLIPPED
        lines = [self.arguments, *([self.resumed] if self.resumed else [])]
        return [[*line, *added] for line in lines]


SCRIPTS = [Script(**row) for row in _ROWS["script"]]
