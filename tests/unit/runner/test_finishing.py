"""At its end, a run evaluates the weights that it saves, once, and records their step."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from mfwrap.records import read_json_lines
from mfwrap.records.run_record import read_run
from mfwrap.runner import parse_recipe, run_recipe
from mfwrap.runner.run import build_trainer
from support.ranks.recipes import evaluations_on_each_rank
from support.recipe_texts import recipe_text

pytestmark = pytest.mark.filterwarnings("ignore")

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
BEST = EVALUATED | {
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    # The losses fall, so the best checkpoint is the first one.
    "greater_is_better": True,
}
OWN = {"type": "EMACallback", "decay": 0.5}


class Evaluations(TrainerCallback):
    """Collect the steps and the losses of all evaluations, and change the weights at the end."""

    def __init__(self, factor=1.0):
        self.seen, self.factor = [], factor

    def on_evaluate(self, _args, state, _control, metrics=None, **_):
        self.seen.append((state.global_step, metrics["eval_loss"]))

    def on_train_end(self, _args, _state, _control, model=None, **_):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(self.factor)


def run(folder, *callbacks, **sections):
    """Run a recipe, and return its result and what it said."""
    said = []
    recipe = parse_recipe(recipe_text(**sections), "r.yaml", [f"training.output_dir={folder}"])
    return run_recipe(recipe, callbacks=callbacks, say=said.append), said


def loss_of(weights, folder, **sections):
    """Return the loss of the weights in a folder in a Trainer of the same recipe."""
    recipe = parse_recipe(recipe_text(**sections), "r.yaml", [f"training.output_dir={folder}"])
    trainer, _ = build_trainer(recipe)
    trainer.model.load_state_dict(load_file(weights / "model.safetensors"))
    return trainer.evaluate()["eval_loss"]


def recorded(folder, name):
    """Return all that a run has recorded under a name, by step; each step once."""
    records = [one for one in read_json_lines(folder / "metrics.jsonl") if name in one]
    found = {one["step"]: one[name] for one in records}
    assert len(found) == len(records)
    return found


@pytest.mark.parametrize(
    "sections",
    [{}, {"ema": {"decay": 0.5}}, {"callbacks": [OWN]}],
    ids=["raw", "averages beside", "averages evaluated"],
)
def test_results_are_recorded_at_the_step_of_their_weights(tmp_path, sections):
    """The results of the best checkpoint are those of its step, and not of the last one."""
    folder = tmp_path / "run"
    seen = Evaluations()
    result, said = run(folder, seen, **sections, training=BEST)
    is_averaged = "callbacks" in sections

    raw = loss_of(folder / "checkpoint-2", tmp_path / "a", training=BEST)
    assert result.metrics["eval_loss"] == raw
    losses = recorded(folder, "eval_loss")
    assert losses[2] == raw
    assert set(losses) == ({2} if is_averaged else {2, 4, 6})
    if not is_averaged:
        assert losses[6] == loss_of(folder / "checkpoint-6", tmp_path / "b", training=BEST)
    if sections:
        averages = recorded(folder, "ema_eval_loss")
        assert set(averages) == ({2, 4, 6} if is_averaged else {2})
        assert averages[2] == loss_of(folder / "model_ema", tmp_path / "c", training=BEST)
        assert result.metrics["ema_eval_loss"] == averages[2]
    # Trackers and callbacks see the same step.
    assert (2, raw) in seen.seen
    assert (6, raw) not in seen.seen

    models = "model and model_ema are those" if sections else "model is that"
    metric = "ema_eval_loss" if is_averaged else "eval_loss"
    assert said == [f"{models} of checkpoint-2, the best by {metric}"]
    assert result.checkpoint == "checkpoint-2"
    assert json.loads((folder / "result.json").read_text())["checkpoint"] == "checkpoint-2"
    for name in ("model", "model_ema") if sections else ("model",):
        card = (folder / name / "README.md").read_text()
        assert f"those after step 2 of 6, the best by `{metric}`." in card


def test_the_last_step_is_not_named(tmp_path):
    """Without a best checkpoint, the model is that of the last step, as everyone expects."""
    result, said = run(tmp_path, training=EVALUATED)
    assert (result.checkpoint, said) == (None, [])
    assert "checkpoint" not in json.loads((tmp_path / "result.json").read_text())
    assert "the best by" not in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("sections", "steps"),
    [
        ({"training": EVALUATED}, [2, 4, 6]),
        ({"training": BEST | {"greater_is_better": False}}, [2, 4, 6]),
        ({"training": EVALUATED | {"eval_steps": 4}}, [4, 6]),
        ({"training": {}}, [6]),
        ({"training": EVALUATED, "ema": {"decay": 0.5}}, [2, 4, 6, 6]),
        ({"training": EVALUATED, "callbacks": [OWN]}, [2, 4, 6, 6]),
        ({"training": EVALUATED, "callbacks": [OWN | {"evaluate": False}]}, [2, 4, 6, 6]),
        ({"training": BEST}, [2, 4, 6, 2]),
    ],
    ids=["raw", "best is last", "no multiple", "never", "beside", "averaged", "kept", "best"],
)
def test_the_same_weights_are_evaluated_once(tmp_path, sections, steps):
    """The last evaluation of the training is taken if it was one of the weights that are saved."""
    seen = Evaluations()
    result, _ = run(tmp_path / "run", seen, **sections)

    assert [step for step, _ in seen.seen] == steps
    for name, prefix in (("model", ""), ("model_ema", "ema_")):
        if (folder := tmp_path / "run" / name).exists():
            expected = loss_of(folder, tmp_path / name, training=sections["training"])
            assert result.metrics[f"{prefix}eval_loss"] == expected


def test_weights_that_a_callback_changes_at_the_end(tmp_path):
    """They are evaluated again."""
    seen = Evaluations(0.5)
    result, _ = run(tmp_path / "run", seen, training=EVALUATED)

    assert [step for step, _ in seen.seen] == [2, 4, 6, 6]
    expected = loss_of(tmp_path / "run" / "model", tmp_path / "again", training=EVALUATED)
    assert result.metrics["eval_loss"] == expected != seen.seen[2][1]


def test_ranks_decide_alike(tmp_path, two_ranks):
    """If one rank has to evaluate again, all ranks do; else none does."""
    text = recipe_text(training=EVALUATED | {"output_dir": str(tmp_path)})

    assert two_ranks.run(evaluations_on_each_rank, text, 1.0) == [3, 3]
    assert two_ranks.run(evaluations_on_each_rank, text, 0.5) == [4, 4]


def test_the_log_of_a_run_outlives_its_checkpoints(tmp_path):
    """The page has all of it, also if only the best checkpoint is left."""
    folder = tmp_path / "run"
    run(folder, training=BEST | {"save_total_limit": 1})

    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    assert read_run(folder).curves["eval_runtime"].steps == [2, 4, 6]
