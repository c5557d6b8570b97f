"""The recipes that come with the package, and what a word on the command line names."""

from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import mfwrap.recipes
from mfwrap.recipe.document import RecipeError, nearest

__all__ = ["ShippedRecipe", "find_recipe", "shipped_recipes"]


class ShippedRecipe(NamedTuple):
    """A recipe that comes with the package."""

    name: str
    summary: str
    """Its first line."""

    text: str


def shipped_recipes() -> dict[str, ShippedRecipe]:
    """Return the recipes by name."""
    found = {}
    for file in sorted(files(mfwrap.recipes).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            text = file.read_text(encoding="utf-8")
            name = file.name.removesuffix(".yaml")
            found[name] = ShippedRecipe(name, text.split("\n", 1)[0].removeprefix("# "), text)
    return found


def find_recipe(word: str) -> tuple[str, str]:
    """Return text and name of the file ``word``, or of the shipped recipe of that name.

    Raises:
        RecipeError: If there is neither.
    """
    if Path(word).is_file():
        try:
            return Path(word).read_text(encoding="utf-8"), word
        except (OSError, UnicodeDecodeError) as error:
            msg = f"{word}: must be a recipe in YAML, got a file that cannot be read: {error}"
            raise RecipeError(msg) from error
    shipped = shipped_recipes()
    if word in shipped:
        return shipped[word].text, word
    guess = nearest(word, shipped)
    hint = f"did you mean {guess!r}?" if guess else f"shipped are {list(shipped)}"
    msg = f"{word}: must be a file or the name of a shipped recipe, got neither; {hint}"
    raise RecipeError(msg)
