r"""Show the examples in the help of a command as code blocks in the documentation's site.

mkdocs calls `on_config`. click keeps the lines of a paragraph that begins with ``\b``.
mkdocs-click removes the mark and copies the paragraph to Markdown, which would join its lines.
"""

import inspect
from collections.abc import Iterator
from typing import Any

_KEPT = "\b"
"""Line that marks a paragraph whose lines click keeps."""


def with_blocks(help_text: str) -> str:
    """Return a help text in Markdown, with a code block for each paragraph whose lines are kept."""
    return "\n".join(_shown(iter(inspect.cleandoc(help_text).splitlines())))


def _shown(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line != _KEPT:
            yield line
            continue
        yield from (next(lines), "", "```text")
        for example in iter(lambda: next(lines, ""), ""):
            yield example.removeprefix("  ")
        yield from ("```", "")


def on_config(config: Any) -> Any:
    """Change the help texts of mfwrap's commands in this process, which mkdocs-click reads."""
    from mfwrap.cli import cli

    for command in (cli, *cli.commands.values()):
        command.help = with_blocks(command.help or "")
    return config
