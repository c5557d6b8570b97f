"""The page of the command line shows each example of a command in a line of a code block."""

import importlib.util
import inspect
import re

import pytest

from mfwrap.cli import cli
from support.paths import ROOT

SPEC = importlib.util.spec_from_file_location(
    "command_line_examples", ROOT / ".ci" / "command_line_examples.py"
)
examples = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(examples)


@pytest.mark.parametrize("command", [cli, *cli.commands.values()], ids=lambda one: one.name)
def test_examples_are_blocks(command):
    """The lines that click keeps, and they alone, are in a code block, in order."""
    kept = re.findall(r"^\x08\n.*:\n((?:  .*\n?)+)", inspect.cleandoc(command.help), re.MULTILINE)
    shown = examples.with_blocks(command.help)
    blocks = re.findall(r":\n\n```text\n(.*?)```$", shown, re.DOTALL | re.MULTILINE)

    assert blocks or command.name == "recipes"
    assert "\b" not in shown
    assert blocks == [
        "".join(f"{line.removeprefix('  ')}\n" for line in body.splitlines()) for body in kept
    ]


def test_options_are_as_click_prints_them():
    """A table of defaults would show a Python object of click's where an option has no default."""
    page = (ROOT / "docs/reference/command_line.md").read_text(encoding="utf-8")

    assert ":style: plain" in page
    assert "hooks: [.ci/command_line_examples.py]" in (ROOT / "mkdocs.yml").read_text("utf-8")
