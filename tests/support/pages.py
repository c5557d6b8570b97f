"""The Python blocks, shell commands and YAML blocks of README.md and docs/."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from support.paths import ROOT

__all__ = [
    "PAGES",
    "README",
    "Snippet",
    "blocks",
    "commands",
    "shortened",
    "shown_files",
    "snippets",
]

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(
    r"(?P<left_out><!-- no-test: [^>]+ -->\n+)?^```(?P<language>bash|yaml)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PYTHON_BLOCK = re.compile(
    r"(?P<left_out><!-- no-test: [^>]+ -->\n+)?"
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)

FILE = re.compile(r'^```json title="(?P<name>[^"]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)

TINY = ["--set", "training.max_steps=2", "--set", "training.use_cpu=true"]
TINY += ["--set", "data.max_eval_samples=8", "--set", "training.save_steps=1"]


class Snippet(NamedTuple):
    """A Python block on a page, with the number of its first line of code."""

    line: int
    code: str


def snippets(text: str) -> list[Snippet]:
    """Return the Python blocks of a page, except those below ``<!-- no-test: reason -->``."""
    return [
        Snippet(
            line=text.count("\n", 0, match.start("code")) + 1,
            code=re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE),
        )
        for match in PYTHON_BLOCK.finditer(text)
        if not match["left_out"]
    ]


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's blocks of a language, except those below ``<!-- no-test: reason -->``."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [one["text"] for one in found if one["language"] == language and not one["left_out"]]


def shown_files(page: Path) -> dict[str, str]:
    """Return the files whose content a page shows, by their names."""
    found = FILE.finditer(page.read_text(encoding="utf-8"))
    return {one["name"]: one["text"] for one in found}


def commands(page: Path, program: str) -> list[list[str]]:
    """Return the arguments of each command on a page that starts a program."""
    texts = [text.replace("\\\n", " ") for text in blocks(page, "bash")]
    lines = [shlex.split(line, comments=True) for text in texts for line in text.splitlines()]
    return [words[1:] for words in lines if words[:1] == [program]]


def shortened(words: list[str]) -> list[str]:
    """Return a command of ``mfwrap``; a training of a recipe's full length gets two steps."""
    is_long = "train" in words and not any("max_steps" in word for word in words)
    return [*words, *(TINY if is_long else [])]
