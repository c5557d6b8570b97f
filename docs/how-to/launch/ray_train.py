"""Run a recipe with Ray Train: ``python ray_train.py causal_lm.yaml --workers 8 --gpu``.

If a worker or its machine fails, Ray starts all workers again, and the training resumes from its
newest checkpoint. With several machines, start it in a folder on a disk that all of them share.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(settings: dict[str, Any]) -> None:
    """Train in one worker. Ray has started the process group of all workers."""
    # Ray starts each worker in a folder of its own. Relative paths are those of the driver.
    os.chdir(settings["folder"])
    from mfwrap.runner import load_recipe, run_recipe  # noqa: PLC0415  (only workers need torch)

    recipe = load_recipe(settings["recipe"], settings["overrides"])
    run_recipe(recipe, resume="auto")


def main() -> None:
    """Parse the command line, and train until the recipe is finished."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, help="YAML file of the recipe")
    parser.add_argument("--workers", type=int, default=2, help="processes, on all machines")
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--max-failures", type=int, default=3, help="restarts; -1: no limit")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    chosen = parser.parse_args()
    TorchTrainer(
        train,
        train_loop_config={
            "folder": str(Path.cwd()),
            "recipe": str(chosen.recipe),
            "overrides": chosen.overrides,
        },
        scaling_config=ScalingConfig(num_workers=chosen.workers, use_gpu=chosen.gpu),
        run_config=RunConfig(
            name=chosen.recipe.stem,
            storage_path=str(Path("runs/ray").absolute()),
            failure_config=FailureConfig(max_failures=chosen.max_failures),
        ),
    ).fit()


if __name__ == "__main__":
    main()
