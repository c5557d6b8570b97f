"""Programs that each rank runs to train a recipe."""

from mfwrap.runner import parse_recipe, run_recipe
from support.hub import client_of

__all__ = ["run_again", "run_with_hub", "train_recipe"]


def run_again(rank: int, text: str) -> list[str]:
    """Start, resume or find the run of a recipe, and return what this rank says."""
    del rank
    said: list[str] = []
    run_recipe(parse_recipe(text, "r.yaml"), resume="auto", say=said.append)
    return said


def train_recipe(rank: int, text: str) -> dict[str, float]:
    """Run a recipe, and return its metrics."""
    del rank
    return run_recipe(parse_recipe(text, "r.yaml")).metrics


def run_with_hub(rank: int, text: str, url: str) -> str:
    """Run a recipe that pushes to the hub at an address; return this rank's error, or nothing."""
    del rank
    with client_of(url):
        try:
            run_recipe(parse_recipe(text, "r.yaml"), resume="auto")
        except RuntimeError as error:
            return str(error)
    return ""
