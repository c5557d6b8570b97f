"""Programs that each rank runs to train a recipe."""

from mfwrap.recipe import parse_recipe, run_recipe

__all__ = ["run_again"]


def run_again(rank: int, text: str) -> list[str]:
    """Run a recipe whose run has finished, and return what this rank says."""
    del rank
    said: list[str] = []
    run_recipe(parse_recipe(text, "r.yaml"), resume="auto", say=said.append)
    return said
