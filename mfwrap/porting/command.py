"""The command ``mfwrap port``."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from mfwrap.porting.findings import VERDICTS, Finding, read_scripts
from mfwrap.runner.document import RecipeError
from mfwrap.runner.terminal import echo

_MEANINGS = {
    "same": "the same",
    "write": "to write otherwise",
    "leave out": "to leave out",
    "no counterpart": "without a counterpart",
    "unknown": "unknown",
}


@click.command()
@click.argument(
    "scripts", metavar="SCRIPT...", nargs=-1, type=click.Path(path_type=Path), required=True
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per name and file.")
def port(scripts: Sequence[Path], *, as_json: bool) -> None:
    """List the names of MindSpore and MindFormers in SCRIPT, and what to write for each.

    The Python files are read, but neither run nor imported nor changed. The output has a line for
    each name that a file imports or uses: the first line that uses it, the other lines, and what to
    write with mfwrap and PyTorch, or why nothing replaces the name. It also covers attributes: of
    training cells and of classes that derive from them, of `cb_params`, of optimizers, networks,
    tensors and data sets. Give all files of a project together, so that a class of one file is
    known in the others.

    Arguments of functions are not compared, except `loss_scale` of an optimizer; a text says so
    where defaults differ. A name that mfwrap does not know is "unknown", and so is a star import of
    MindSpore, which is not followed.

    The exit code is 0 if every name has a counterpart, 1 if a name is unknown or has none, and 2
    if a file cannot be read or is a notebook.

    \b
    Examples:
      mfwrap port train.py
      mfwrap port train.py src/callbacks.py --json
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    try:
        found = read_scripts(scripts)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    for finding in found:
        echo(json.dumps(finding.to_record()) if as_json else str(finding))
    if not as_json:
        echo(_summary(found))
    if any(finding.verdict in {"no counterpart", "unknown"} for finding in found):
        sys.exit(1)


def _summary(found: Sequence[Finding]) -> str:
    if not found:
        return "no names of MindSpore or MindFormers found"
    counts = Counter(finding.verdict for finding in found)
    parts = [f"{counts[one]} {_MEANINGS[one]}" for one in VERDICTS if counts[one]]
    return f"{len(found)} names: {', '.join(parts)}"
