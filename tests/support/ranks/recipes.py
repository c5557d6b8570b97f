"""Programs that each rank runs to train a recipe."""

import torch
from transformers import TrainerCallback

from mfwrap.runner import parse_recipe, run_recipe
from support.hub import client_of

__all__ = ["evaluations_on_each_rank", "resumed", "run_again", "run_with_hub", "train_recipe"]


def evaluations_on_each_rank(rank: int, text: str, factor: float) -> int:
    """Multiply the weights of rank 0 at the end of a run, and count this rank's evaluations."""

    class Changing(TrainerCallback):
        count = 0

        def on_evaluate(self, *_, **__):
            self.count += 1

        def on_train_end(self, *_, model=None, **__):
            with torch.no_grad():
                next(model.parameters()).mul_(factor if rank == 0 else 1.0)

    changing = Changing()
    run_recipe(parse_recipe(text, "r.yaml"), callbacks=[changing], overwrite=True)
    return changing.count


def run_again(rank: int, text: str) -> list[str]:
    """Start, resume or find the run of a recipe, and return what this rank says."""
    return resumed(rank, text, "auto")


def resumed(rank: int, text: str, resume: str) -> list[str]:
    """Start (with "") or resume the run of a recipe, and return what this rank says."""
    del rank
    said: list[str] = []
    run_recipe(parse_recipe(text, "r.yaml"), resume=resume, say=said.append)
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
