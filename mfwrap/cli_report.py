"""The command that writes the page of runs."""

from collections.abc import Sequence
from pathlib import Path

import click

from mfwrap.recipe.document import RecipeError

__all__ = ["report"]

_PAGE = "run.html"


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, type=click.Path(path_type=Path), required=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="HTML file; by default RUN/run.html, of several runs run.html in this folder.",
)
def report(runs: Sequence[Path], output: Path | None) -> None:
    """Write a page of the folder RUN, or of several runs over each other.

    One file that opens without a network: losses, rate, scale, norms by layer, step and rank,
    throughput, and what went wrong.

    \b
    Examples:
      mfwrap report runs/causal_lm
      mfwrap report runs/first runs/second --output compared.html
    """  # noqa: D301  (\b is click's mark of lines that are kept)
    # Reading a recipe is quick without what drawing takes.
    try:
        from mfwrap.report.page import write_run_page  # noqa: PLC0415
    except ImportError as error:
        msg = f'a report needs {error.name}; pip install "mfwrap[report]"'
        raise RecipeError(msg) from error
    page = output
    if page is None:
        page = runs[0] / _PAGE if len(runs) == 1 else Path(_PAGE)
    try:
        write_run_page(runs, page)
    except (FileNotFoundError, ValueError) as error:
        raise RecipeError(str(error)) from error
    except OSError as error:
        msg = f"{page}: must be a file that can be written, got an error: {error.strerror}"
        raise RecipeError(msg) from error
    click.echo(f"wrote {page}")
