"""Each shipped recipe trains on two ranks as it does on one process."""

import math

import pytest
import yaml

from mfwrap.runner import parse_recipe, run_recipe
from mfwrap.runner.library import shipped_recipes
from support.ranks.recipes import train_recipe
from support.shipped_recipes import provide

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TRAINING = {
    "max_steps": 2,
    "gradient_accumulation_steps": 1,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}
BATCH = 4
"""Rows of an update."""

DRAWS = {"grpo", "distillation"}
"""Recipes whose model writes answers at random, which differ on each rank."""

IN_BATCH = {"embedding"}
"""Recipes whose loss compares the rows of a rank with each other."""


def small(name, folder, run, ranks):
    """Return the text of a shipped recipe that makes two small updates in a folder."""
    text = shipped_recipes()[name].text.replace("runs/", f"{folder}/runs/")
    recipe = yaml.safe_load(text)
    recipe["data"] |= {"max_train_samples": 16, "max_eval_samples": 4}
    recipe["training"] |= TRAINING | {
        "output_dir": str(folder / run),
        "per_device_train_batch_size": BATCH // ranks,
    }
    if name == "grpo":
        recipe["training"] |= {"num_generations": 2}
    if name in DRAWS:
        recipe["training"] |= {"max_completion_length": 8}
    return yaml.safe_dump(recipe, sort_keys=False)


@pytest.mark.parametrize("name", shipped_recipes())
def test_two_ranks(name, tmp_path, two_ranks):
    """Two ranks train to the loss of one process with the same rows in each update."""
    provide(name, tmp_path)
    both = two_ranks.run(train_recipe, small(name, tmp_path, "ranks", 2))

    assert both[0] == both[1]
    assert all(math.isfinite(value) for value in both[0].values())
    assert (tmp_path / "ranks" / "model").is_dir()
    if name not in DRAWS | IN_BATCH:
        alone = run_recipe(parse_recipe(small(name, tmp_path, "alone", 1), "r.yaml")).metrics
        losses = {key for key in alone if key.endswith("loss")}
        assert losses
        for key in losses:
            # A mean over rows weighs a batch by its rows, and its rows by their targets.
            rel = 1e-3 if key == "eval_loss" else 1e-4
            assert both[0][key] == pytest.approx(alone[key], rel=rel), key
