"""The command that draws a run."""

from pathlib import Path

import click

from mfwrap.recipe.document import RecipeError

__all__ = ["plot"]


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="PNG; by default RUN/run.png.")
def plot(run: Path, output: Path | None) -> None:
    """Draw the loss and the norms of the folder RUN.

    \b
    Example:
      mfwrap plot runs/causal_lm
    """  # noqa: D301  (\b is click's mark of lines that are kept)
    # Reading a recipe is quick without what drawing takes.
    from mfwrap.callbacks.metrics_recorder import METRICS_FILE, limit_of  # noqa: PLC0415
    from mfwrap.report.picture import draw_run  # noqa: PLC0415

    metrics = run / METRICS_FILE
    if not metrics.is_file():
        msg = f"{run}: must be the folder of a run with {METRICS_FILE}, got none"
        raise RecipeError(msg)
    picture = run / "run.png" if output is None else output
    title = run.resolve().name
    try:
        limit = limit_of(metrics)
        draw_run(metrics, picture, max_grad_norm=limit, title=title, loss_title="Loss")
    except (KeyError, OSError, TypeError, ValueError) as error:
        msg = f"{metrics}: must be the record of a run, got what cannot be drawn: {error}"
        raise RecipeError(msg) from error
    click.echo(f"wrote {picture}")
