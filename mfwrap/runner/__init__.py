"""Recipes: training runs described by a YAML file."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.runner.document import RecipeError
    from mfwrap.runner.mindformers.importer import import_mindformers
    from mfwrap.runner.recipe import Recipe, RecipeWarning, load_recipe, parse_recipe
    from mfwrap.runner.run import RunResult, run_recipe

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
        "Recipe": "mfwrap.runner.recipe",
        "RecipeError": "mfwrap.runner.document",
        "RecipeWarning": "mfwrap.runner.recipe",
        "RunResult": "mfwrap.runner.run",
        "import_mindformers": "mfwrap.runner.mindformers.importer",
        "load_recipe": "mfwrap.runner.recipe",
        "parse_recipe": "mfwrap.runner.recipe",
        "run_recipe": "mfwrap.runner.run",
    },
)
