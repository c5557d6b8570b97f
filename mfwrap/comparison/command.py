"""The command ``mfwrap compare``."""

import json
import sys
from pathlib import Path

import click

from mfwrap.comparison.comparison import compare_runs
from mfwrap.comparison.sentences import sentences
from mfwrap.records.json_lines import to_plain
from mfwrap.runner.document import RecipeError
from mfwrap.runner.terminal import echo


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option(
    "--tolerance",
    type=float,
    default=0.0,
    help="Largest relative difference that counts as equal. The default 0 demands equal bits.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(first: Path, second: Path, tolerance: float, *, as_json: bool) -> None:
    """Find the first step at which the run folders FIRST and SECOND differ.

    The output names the step, what differs first (a loss, the gradient or the weight of a layer),
    and whether the data, the learning rate, the loss scale or the random numbers differed before.
    The runs need records of their steps: metrics.jsonl or training_state.jsonl. With
    fingerprints.jsonl, which `fingerprints: true` in the section monitor_config writes, tensors and
    data are compared, too.

    The exit code is 0 if the runs are equal in all steps that both have recorded, 1 if they
    differ, and 2 if they cannot be compared.

    \b
    Examples:
      mfwrap compare runs/first runs/second
      mfwrap compare runs/one_gpu runs/two_gpus --tolerance 1e-4
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    try:
        found = compare_runs(first, second, tolerance)
    except (OSError, ValueError) as error:
        raise RecipeError(str(error)) from error
    if as_json:
        echo(json.dumps(to_plain(found.to_record()), default=str))
    else:
        for line in sentences(found):
            echo(line)
    if not found.is_equal:
        sys.exit(1)
