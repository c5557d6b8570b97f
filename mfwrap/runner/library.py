"""List the recipes that come with the package, and find the recipe that a command line names."""

from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import mfwrap.recipes
from mfwrap.names import hint
from mfwrap.runner.document import RecipeError, read_text


class ShippedRecipe(NamedTuple):
    """A recipe that comes with the package."""

    name: str
    summary: str
    """First line of the recipe."""

    text: str


def shipped_recipes() -> dict[str, ShippedRecipe]:
    """Return the recipes that come with the package, by name."""
    found = {}
    for file in sorted(files(mfwrap.recipes).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            text = file.read_text(encoding="utf-8")
            name = file.name.removesuffix(".yaml")
            found[name] = ShippedRecipe(name, text.split("\n", 1)[0].removeprefix("# "), text)
    return found


def find_recipe(word: str) -> tuple[str, str]:
    """Return the text and the name of a recipe.

    Args:
        word: Path of a file, or name of a shipped recipe.

    Raises:
        RecipeError: If there is no such file or recipe, or the file cannot be read.
    """
    if Path(word).is_file():
        return read_text(word), word
    shipped = shipped_recipes()
    if word in shipped:
        return shipped[word].text, word
    msg = f"{word}: expected a file or the name of a shipped recipe{hint(word, shipped)}"
    raise RecipeError(msg)
