"""Recipes: training runs described by a YAML file."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.recipe.document import RecipeError
    from mfwrap.recipe.mindformers.importer import import_mindformers
    from mfwrap.recipe.recipe import Recipe, RecipeWarning, load_recipe, parse_recipe
    from mfwrap.recipe.run import RunResult, run_recipe

__all__ = [
    "Recipe",
    "RecipeError",
    "RecipeWarning",
    "RunResult",
    "import_mindformers",
    "load_recipe",
    "parse_recipe",
    "run_recipe",
]

__getattr__ = package_getattr(
    __name__,
    {
        "Recipe": "mfwrap.recipe.recipe",
        "RecipeError": "mfwrap.recipe.document",
        "RecipeWarning": "mfwrap.recipe.recipe",
        "RunResult": "mfwrap.recipe.run",
        "import_mindformers": "mfwrap.recipe.mindformers.importer",
        "load_recipe": "mfwrap.recipe.recipe",
        "parse_recipe": "mfwrap.recipe.recipe",
        "run_recipe": "mfwrap.recipe.run",
    },
)
