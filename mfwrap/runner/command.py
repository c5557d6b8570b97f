"""The commands about a recipe that train nothing, and what all commands with a recipe share."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from mfwrap.runner.document import check_override
from mfwrap.runner.library import find_recipe, shipped_recipes
from mfwrap.runner.terminal import echo

# Reading a recipe must be quick, so modules that load transformers are imported inside the commands
# that need them (PLC0415).
if TYPE_CHECKING:
    from mfwrap.runner.recipe import Recipe


def recipe_names(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return shell completions for RECIPE: the names of shipped recipes, and files."""
    del context, parameter
    names = [CompletionItem(one) for one in shipped_recipes() if one.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]


recipe_argument = click.argument("recipe", shell_complete=recipe_names)
"""Argument ``recipe``: the name of a shipped recipe, or a file."""


def _checked(
    context: click.Context, parameter: click.Parameter, overrides: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse ``--set key value``, whose value click would call an unexpected argument."""
    del context, parameter
    for override in overrides:
        check_override(override)
    return overrides


overrides_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    callback=_checked,
    metavar="KEY=VALUE",
    help="Replace a value of the recipe: --set training.max_steps=10. May be given several times.",
)
"""Option ``overrides``, which replaces values of a recipe."""

allow_code_option = click.option(
    "--allow-code",
    is_flag=True,
    help="Run Python code that RECIPE names, as in type: my_module.MyCallback: import the module "
    "beside RECIPE, or an installed one. Use it only for code that you trust.",
)
"""Option ``allow_code``, without which no code that a recipe names is imported."""


@click.command()
@recipe_argument
@overrides_option
@allow_code_option
def validate(recipe: str, overrides: Sequence[str], *, allow_code: bool) -> None:
    """Check every value of RECIPE, and try its first step.

    The step has two rows in each batch, or a whole batch if the loss compares its rows or is told
    by row, and writes to a temporary folder. It is not tried if the data or the model are on the
    hub, or if the model has more than 30 million parameters.

    Classes of your own that RECIPE names are checked only with --allow-code. Without it, the output
    names what was not checked.

    \b
    Example:
      mfwrap validate my.yaml --set training.learning_rate=1e-3
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    checked = checked_recipe(recipe, overrides, allow_code=allow_code)
    from mfwrap.runner.folder import check_others_files  # noqa: PLC0415  (loads transformers)
    from mfwrap.runner.rehearsal import rehearse  # noqa: PLC0415  (loads transformers)

    check_others_files(checked.document, Path(checked.arguments.output_dir or ""))
    reason = rehearse(checked, lambda line: echo(f"{recipe}: {line}"))
    note = "" if reason is None else f"; its first step was not tried, because {reason}"
    unchecked = [
        f"{'.'.join(map(str, path[:-1]))} ({name})" for path, name in checked.unchecked.items()
    ]
    if unchecked:
        note = f", except what only --allow-code checks: {', '.join(unchecked)}{note}"
    echo(f"{recipe}: valid{note}")


@click.command()
@recipe_argument
@overrides_option
@allow_code_option
@click.option(
    "--rows", default=5, show_default=True, type=click.IntRange(1), help="Number of rows."
)
@click.option("--held-out", is_flag=True, help="Show held-out rows instead of training rows.")
def data(
    recipe: str, overrides: Sequence[str], rows: int, *, held_out: bool, allow_code: bool
) -> None:
    """Show the first rows of RECIPE as the model will see them.

    If the task takes several forms of rows, such as conversations and texts, the first line says
    which of them the rows are. For texts, the output has the tokens of each sequence as text again,
    and which of them count in the loss. For images and tables it has the values, and the class or
    the target. All rows are checked, but the model's weights are neither built nor loaded.

    \b
    Examples:
      mfwrap data supervised_tuning
      mfwrap data my.yaml --rows 20 --set data.path=other.csv
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    checked = checked_recipe(recipe, overrides, allow_code=allow_code)
    from mfwrap.runner.preview import preview  # noqa: PLC0415  (loads transformers)

    for line in preview(checked, rows, held_out=held_out):
        echo(line)


def checked_recipe(word: str, overrides: Sequence[str], *, allow_code: bool = False) -> "Recipe":
    """Read and check a recipe, and print its warnings.

    Args:
        word: Name of a shipped recipe, or path of a file.
        overrides: Entries of the form ``section.key=value``.
        allow_code: Whether to import the modules whose classes the recipe names.
    """
    from mfwrap.runner.recipe import RecipeWarning, parse_recipe  # noqa: PLC0415  (slow)

    text, name = find_recipe(word)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UserWarning)
        # Silence this warning: the line printed below lists the same keys.
        warnings.simplefilter("ignore", RecipeWarning)
        # TRL's own default of this key causes the warning, whether a recipe has the key or not.
        warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)
        recipe = parse_recipe(text, name, overrides, allow_code=allow_code)
    warn(name, [" ".join(str(warning.message).split()) for warning in caught])
    if recipe.without_meaning:
        warn(name, ["ignored keys: " + ", ".join(recipe.without_meaning)])
    return recipe


def warn(name: str, notes: Sequence[str]) -> None:
    """Print warnings about a file, one per line."""
    for note in notes:
        say(f"warning: {name}: {note}")


def say(line: str) -> None:
    """Print a line to standard error, in the first process only."""
    if is_first_process():
        echo(f"mfwrap: {line}", err=True)


def is_first_process() -> bool:
    """Return whether this is rank 0 of its launcher, or runs without one."""
    return os.environ.get("RANK", "0") == "0"  # also without a launcher
