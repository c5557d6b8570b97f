"""The command ``mfwrap average``."""

import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mfwrap.runner.command import allow_code_option, checked_recipe, warn
from mfwrap.runner.document import RECIPE_FILE, RecipeError
from mfwrap.runner.terminal import echo

if TYPE_CHECKING:
    from mfwrap.runner.recipe import Recipe


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--sigma", type=float, help="Relative length of a power-function average.")
@click.option("--last", type=click.IntRange(1), help="Number of checkpoints of a plain average.")
@click.option(
    "--at",
    type=click.IntRange(1),
    metavar="UPDATE",
    help="Applied update at which the average of --sigma ends; by default the last stored one.",
)
@click.option(
    "--output",
    "--out",
    type=click.Path(path_type=Path),
    help="New folder; by default RUN/model_sigma_SIGMA or RUN/model_last_LAST.",
)
@click.option("--evaluate", is_flag=True, help="Evaluate the average as the run's recipe says.")
@allow_code_option
def average(
    run: Path,
    sigma: float | None,
    last: int | None,
    at: int | None,
    output: Path | None,
    *,
    evaluate: bool,
    allow_code: bool,
) -> None:
    """Build an average of the weights in the run folder RUN, for from_pretrained.

    With --sigma, it is a power-function average of this relative length, in (0, 0.2886], from the
    averages that the training has stored: in its checkpoints if it had an average with sigma_rel,
    and in average_snapshots if an EMACallback had snapshot_every. The output has the relative error
    of its profile. The more averages are stored, the smaller it is.

    With --last, it is the plain average of the weights in the last checkpoints (SWA). Integer
    buffers are those of the newest one.

    RUN may also be a folder of checkpoints of save_sharded. Checkpoints are compared with their
    checksums, and damaged ones are left out.

    \b
    Examples:
      mfwrap average runs/my --sigma 0.15
      mfwrap average runs/my --sigma 0.15 --at 300 --output averaged
      mfwrap average runs/my --last 5 --evaluate
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    from mfwrap.callbacks.average.built_model import write_model  # noqa: PLC0415  (slow)
    from mfwrap.callbacks.average.snapshots import build_average  # noqa: PLC0415  (slow)

    if (sigma is None) == (last is None) or (at is not None and sigma is None):
        msg = "give either --sigma, perhaps with --at, or --last."
        raise click.UsageError(msg)
    length = f"sigma_{sigma}" if last is None else f"last_{last}"
    folder = run / f"model_{length}" if output is None else output
    if os.path.lexists(folder):
        msg = f"{folder} exists already; choose another folder with --output"
        raise RecipeError(msg)
    if not run.is_dir():
        msg = f"{run}: there is no such folder; expected the folder of a run"
        raise RecipeError(msg)
    recipe = _recipe_of(run, allow_code=allow_code) if evaluate else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            built = build_average(run, sigma_rel=sigma, last=last, at=at)
            write_model(built, run, folder)
        except (OSError, ValueError) as error:
            raise RecipeError(str(error)) from error
        finally:
            warn(str(run), [str(one.message) for one in caught])
    precision = f"; relative error of its profile: {built.response_error:.1e}" if sigma else ""
    echo(f"wrote {folder} from {len(built.parts)} stored sets of weights{precision}")
    if recipe is not None:
        metrics = _evaluated(recipe, run, folder)
        echo(", ".join(f"{name} {value:.6g}" for name, value in metrics.items()))


def _recipe_of(run: Path, *, allow_code: bool) -> "Recipe":
    """Return the recipe of a run."""
    if not (run / RECIPE_FILE).is_file():
        msg = f"{run} has no {RECIPE_FILE} that says how to evaluate; leave --evaluate out"
        raise RecipeError(msg)
    return checked_recipe(str(run / RECIPE_FILE), [], allow_code=allow_code)


def _evaluated(recipe: "Recipe", run: Path, folder: Path) -> dict[str, float]:
    """Return the metrics of a model with the held-out data of the recipe of its run."""
    from mfwrap.callbacks.average.files import load_averages  # noqa: PLC0415  (slow)
    from mfwrap.records.evaluations import AVERAGED, results_of  # noqa: PLC0415  (slow)
    from mfwrap.runner.rehearsal import limited, quiet  # noqa: PLC0415  (slow)
    from mfwrap.runner.run import build_trainer  # noqa: PLC0415  (slow)

    with (
        tempfile.TemporaryDirectory(prefix="mfwrap-") as temporary,
        recipe.code.importable(),
        quiet(),
    ):
        trainer, _ = build_trainer(limited(recipe, temporary, None, None))
        if trainer.eval_dataset is None:
            msg = f"{run} has no held-out rows to evaluate; leave --evaluate out"
            raise RecipeError(msg)
        load_averages(trainer.model, folder)
        return results_of(trainer.evaluate(), AVERAGED)
