"""The command line: recipes are checked, run, made and drawn.

Exit codes: 0 if all went well, 1 if a run failed, 2 if a recipe or the command is wrong, 130 if it
was interrupted.
"""

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from mfwrap.recipe.document import RecipeError

__all__ = [
    "cli",
    "main",
]

if TYPE_CHECKING:
    from mfwrap.recipe.recipe import Recipe

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


def write_new(file: Path, text: str) -> None:
    """Write a text to a file that is not there yet.

    Raises:
        RecipeError: If it is there, or cannot be written.
    """
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except OSError as error:
        msg = f"{file}: must be a new file, got one that cannot be written: {error.strerror}"
        raise RecipeError(msg) from error


def warn_of(name: str, notes: Sequence[str]) -> None:
    """Say notes on a file, a line each."""
    for note in notes:
        say(f"warning: {name}: {note}")


def say(line: str) -> None:
    """Write a line to standard error, from the first process alone."""
    if is_first_process():
        click.echo(f"mfwrap: {line}", err=True)


def is_first_process() -> bool:
    """Return whether this is the process that speaks, of those that a launcher has started."""
    return os.environ.get("RANK", "0") == "0"


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


try:
    import click
    from click.shell_completion import CompletionItem

    from mfwrap.cli import is_first_process, plot, report, say, warn_of, write_new
    from mfwrap.recipe.document import RecipeError
except ImportError as error:  # an ordinary install has no extra
    sys.exit(f'mfwrap: the command line needs {error.name}; pip install "mfwrap[recipes]"')


_RESUME_NEWEST = ""

_overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the recipe: --set training.max_steps=10. May be given several times.",
)


def _recipe_names(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names of shipped recipes, and of files."""
    del context, parameter
    from mfwrap.recipe.library import shipped_recipes  # noqa: PLC0415

    names = [CompletionItem(one) for one in shipped_recipes() if one.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]


_recipe = click.argument("recipe", shell_complete=_recipe_names)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mfwrap")
def cli() -> None:
    """MindFormers' training step for PyTorch: training runs from one YAML file.

    RECIPE is a YAML file, or the name of a recipe that comes with the package.

    \b
    Examples:
      mfwrap recipes
      mfwrap train image_classification --set training.num_train_epochs=3
      mfwrap init causal_lm && mfwrap validate causal_lm.yaml
      torchrun --nproc-per-node 2 -m mfwrap train causal_lm.yaml
      accelerate launch -m mfwrap train causal_lm.yaml
      mfwrap import-mindformers pretrain_llama.yaml > llama.yaml

    \b
    Shell completion, for bash (zsh and fish in the same way):
      eval "$(_MFWRAP_COMPLETE=bash_source mfwrap)"
    """  # noqa: D301  (\b is click's mark of lines that are kept)


@cli.command()
@_recipe
@_overrides
@click.option(
    "--resume",
    is_flag=False,
    flag_value=_RESUME_NEWEST,
    default=None,
    metavar="[PATH]",
    help="Go on from a checkpoint: from PATH, or from the newest one of the run's folder.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Remove the checkpoints, models and records of a former run from the run's folder.",
)
def train(recipe: str, overrides: Sequence[str], resume: str | None, *, overwrite: bool) -> None:
    """Run RECIPE.

    The run's folder gets recipe.yaml, metrics.jsonl with all that each step reports, checkpoints,
    model, and with an average of the weights model_ema. One that holds checkpoints is refused
    without --resume or --overwrite.

    \b
    Examples:
      mfwrap train causal_lm --set training.max_steps=20
      mfwrap train my.yaml --set callbacks.0.per_print_times=1 --set ema=null
      mfwrap train my.yaml --resume
      mfwrap train my.yaml --resume runs/my/checkpoint-50
      mfwrap train my.yaml --overwrite
    """  # noqa: D301
    checked = _checked(recipe, overrides)
    if resume is not None:
        _check_resume(checked, resume, overwrite=overwrite)
    _silence_bars(checked)
    # Reading a recipe is quick without what running it takes.
    from mfwrap.recipe.objects import REFUSALS  # noqa: PLC0415
    from mfwrap.recipe.run import run_recipe  # noqa: PLC0415

    try:
        from_newest = resume == _RESUME_NEWEST
        result = run_recipe(checked, resume=resume or from_newest, overwrite=overwrite, say=say)
    except RecipeError:
        raise
    except REFUSALS as error:
        _fail(checked, error)
    finally:
        _leave_process_group()
    if is_first_process():
        for name, value in result.metrics.items():
            click.echo(f"{name}: {value:.6g}")
        click.echo(f"run folder: {result.folder}")


@cli.command()
@_recipe
@_overrides
def validate(recipe: str, overrides: Sequence[str]) -> None:
    """Check RECIPE to its last value, and train nothing.

    \b
    Example:
      mfwrap validate my.yaml --set training.learning_rate=1e-3
    """  # noqa: D301
    _checked(recipe, overrides)
    click.echo(f"{recipe}: valid")


@cli.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    from mfwrap.recipe.library import shipped_recipes  # noqa: PLC0415

    shipped = shipped_recipes()
    width = max(map(len, shipped))
    for one in shipped.values():
        click.echo(f"{one.name:{width}}  {one.summary}")


@cli.command()
@click.argument("name", shell_complete=_recipe_names)
@click.option("--output", type=click.Path(path_type=Path), help="File; by default NAME.yaml.")
def init(name: str, output: Path | None) -> None:
    """Write the shipped recipe NAME to a file, to be changed.

    \b
    Example:
      mfwrap init regression --output my.yaml
    """  # noqa: D301
    from mfwrap.recipe.library import find_recipe, shipped_recipes  # noqa: PLC0415

    shipped = shipped_recipes()
    text = shipped[name].text if name in shipped else find_recipe(name)[0]
    file = Path(f"{Path(name).stem}.yaml") if output is None else output
    write_new(file, text)
    click.echo(f"wrote {file}; train it with: mfwrap train {file}")


@cli.command("import-mindformers")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="File; by default standard output.")
def import_mindformers(file: Path, output: Path | None) -> None:
    """Turn a MindFormers YAML FILE into a recipe, and say what was left out.

    \b
    Example:
      mfwrap import-mindformers finetune_llama2_7b.yaml --output llama.yaml
    """  # noqa: D301
    from mfwrap.recipe.library import find_recipe  # noqa: PLC0415
    from mfwrap.recipe.mindformers import import_mindformers as imported_from  # noqa: PLC0415

    if not file.is_file():
        msg = f"{file}: must be a MindFormers YAML file, got none"
        raise RecipeError(msg)
    imported = imported_from(find_recipe(str(file))[0], str(file))
    warn_of(str(file), imported.notes)
    if output is None:
        click.echo(imported.text, nl=False)
    else:
        write_new(output, imported.text)
        click.echo(f"wrote {output}")


cli.add_command(plot)
cli.add_command(report)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, and leave with its exit code.

    Args:
        arguments: Words after the program's name; by default those of the process.
    """
    try:
        code = cli.main(
            None if arguments is None else list(arguments),
            prog_name="mfwrap",
            standalone_mode=False,
        )
    except click.ClickException as error:
        say(f"{error.format_message()}; see mfwrap --help")
        code = 2
    except RecipeError as error:
        say(str(error))
        code = 2
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _checked(word: str, overrides: Sequence[str]) -> "Recipe":
    from mfwrap.recipe.library import find_recipe  # noqa: PLC0415
    from mfwrap.recipe.recipe import RecipeWarning, parse_recipe  # noqa: PLC0415

    text, name = find_recipe(word)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        recipe = parse_recipe(text, name, overrides)
    if recipe.without_meaning:
        warn_of(name, ["without a meaning here: " + ", ".join(recipe.without_meaning)])
    return recipe


def _check_resume(recipe: "Recipe", resume: str, *, overwrite: bool) -> None:
    from transformers.trainer_utils import get_last_checkpoint  # noqa: PLC0415

    if overwrite:
        msg = "--overwrite: must be given without --resume, which goes on from what is there"
        raise RecipeError(msg)
    folder = recipe.arguments.output_dir or ""
    if resume == _RESUME_NEWEST:
        if not Path(folder).is_dir() or get_last_checkpoint(folder) is None:
            msg = f"--resume: `training.output_dir` must hold a checkpoint, got {folder} with none"
            raise RecipeError(msg)
    elif not Path(resume).is_dir():
        msg = f"--resume: must be the folder of a checkpoint, got {resume}"
        raise RecipeError(msg)


def _silence_bars(recipe: "Recipe") -> None:
    """Show no bars where the recipe wants none, or nobody would see them move."""
    if not sys.stderr.isatty():
        recipe.arguments.disable_tqdm = True
    if recipe.arguments.disable_tqdm:
        import datasets  # noqa: PLC0415
        from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

        datasets.disable_progress_bars()
        disable_progress_bar()


def _fail(recipe: "Recipe", error: BaseException) -> NoReturn:
    """Say in one line what ended a run, keep the rest in its folder, and leave."""
    rank = os.environ.get("RANK", "0")
    file = Path(recipe.arguments.output_dir or "") / f"error_rank_{rank}.txt"
    where = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        where = f"; traceback in {file}"
    except OSError:  # a full disk may be what ended it
        traceback.print_exception(error)
    line = " ".join(str(error).split())
    click.echo(f"mfwrap: the run failed: {type(error).__name__}: {line}{where}", err=True)
    sys.exit(1)


def _leave_process_group() -> None:
    from accelerate import PartialState  # noqa: PLC0415

    # A network that outlives its group of processes can keep them from ending.
    gc.collect()
    PartialState().destroy_process_group()
