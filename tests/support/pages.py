"""The shell commands and YAML blocks of README.md and docs/."""

import re
import shlex
from pathlib import Path

from support.paths import ROOT

__all__ = ["PAGES", "blocks", "commands"]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(
    r"(?P<left_out><!-- no-test: [^>]+ -->\n+)?^```(?P<language>bash|yaml)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's blocks of a language, except those below ``<!-- no-test: reason -->``."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [one["text"] for one in found if one["language"] == language and not one["left_out"]]


def commands(page: Path, program: str) -> list[list[str]]:
    """Return the arguments of each command on a page that starts a program."""
    texts = [text.replace("\\\n", " ") for text in blocks(page, "bash")]
    lines = [shlex.split(line, comments=True) for text in texts for line in text.splitlines()]
    return [words[1:] for words in lines if words[:1] == [program]]
