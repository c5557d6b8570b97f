"""At the end of a run, `model` and `model_ema` are the raw and averaged weights of one step."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from mfwrap.callbacks import EMACallback
from mfwrap.runner import parse_recipe
from mfwrap.runner.averages import average_of
from mfwrap.runner.run import build_trainer, run_recipe
from support.recipe_texts import SMALL_LLAMA, VIT, recipe_text
from support.training_state import assert_same_state

# Ignore the warnings of PEFT, TRL and datasets.
pytestmark = pytest.mark.filterwarnings("ignore")

LANGUAGE = {
    "task": "causal_lm",
    "model": {"config": SMALL_LLAMA, "tokenizer": "bytes"},
    "data": {"type": "python_topics", "sequence_length": 64},
}
IMAGES = {"task": "image_classification", "model": VIT, "data": {"type": "digits"}}
LORA = LANGUAGE | {"peft": {"type": "lora", "r": 2, "target_modules": ["q_proj"]}}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    # The losses fall, so the best checkpoint is the first one.
    "greater_is_better": True,
}
OWN = {"type": "EMACallback", "decay": 0.5}
FILES = ("model.safetensors", "adapter_model.safetensors")


def recipe_of(folder, **sections):
    """Return a recipe that loads its best checkpoint at the end."""
    training = BEST | sections.pop("training", {})
    text = recipe_text(**sections, training=training)
    return parse_recipe(text, "r.yaml", [f"training.output_dir={folder}"])


def weights_in(folder):
    """Return the weights in a folder of a model or an adapter."""
    (file,) = [folder / name for name in FILES if (folder / name).exists()]
    return load_file(file)


def evaluated(folder, weights, **sections):
    """Return the loss of some weights in a Trainer of the same recipe."""
    trainer, _ = build_trainer(recipe_of(folder, **sections))
    trainer.model.load_state_dict(weights)
    return trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    "sections",
    [
        {"ema": {"decay": 0.5}, "callbacks": [{"type": "EMACallback"}]},
        {"ema": {"decay": 0.5}, "callbacks": [{"type": "EMACallback", "load_best": True}]},
        {"callbacks": [OWN], **IMAGES},
        {"callbacks": [{"type": "EMACallback"}], "ema": {"decay": 0.5}, **LANGUAGE},
    ],
    ids=["its average", "load_best", "images", "texts"],
)
def test_the_best_checkpoint(tmp_path, sections):
    """`model` is the raw model of the best checkpoint, `model_ema` the averaged one."""
    result = run_recipe(recipe_of(tmp_path / "run", **sections))

    state = json.loads((tmp_path / "run" / "checkpoint-6" / "trainer_state.json").read_text())
    # The losses of six steps with images may rise.
    assert state["best_global_step"] == 2 or sections.get("task") == "image_classification"
    best = tmp_path / "run" / f"checkpoint-{state['best_global_step']}"
    raw, averaged = weights_in(best), weights_in(best / "ema")
    assert not all(torch.equal(raw[name], averaged[name]) for name in raw)
    kind = type(build_trainer(recipe_of(tmp_path, **sections))[0].model)
    for name, weights in (("model", raw), ("model_ema", averaged)):
        # transformers saves some models under other names.
        model = kind.from_pretrained(tmp_path / "run" / name)
        assert_same_state(weights, {each: model.state_dict()[each] for each in weights})
    for name, weights in (("eval_loss", raw), ("ema_eval_loss", averaged)):
        assert result.metrics[name] == evaluated(tmp_path / name, weights, **sections)
    assert result.metrics["ema_eval_loss"] == state["best_metric"]


@pytest.mark.parametrize(
    "sections",
    [
        {"ema": {"decay": 0.5}},
        {
            "ema": {"decay": 0.5},
            "callbacks": [{"type": "EMACallback"}],
            "training": {"save_only_model": True},
        },
        {"callbacks": [OWN], "training": {"save_only_model": True}},
        {"callbacks": [OWN | {"export": False}]},
        {"callbacks": [OWN | {"evaluate": False}]},
    ],
    ids=["no callback", "only the model", "own, only the model", "no export", "raw evaluations"],
)
def test_where_the_average_comes_from(tmp_path, sections):
    """`model_ema` is the average of the best step, however its checkpoint holds it."""
    averages = {}

    class Follower(TrainerCallback):
        def on_step_end(self, _args, state, _control, **_):
            own = [c for c in trainer.callback_handler.callbacks if isinstance(c, EMACallback)]
            average = trainer.ema or own[0].ema
            averages[state.global_step] = {
                name: value.clone() for name, value in average.named_averages()
            }

    trainer, _ = build_trainer(recipe_of(tmp_path, **sections))
    trainer.add_callback(Follower())
    trainer.train()

    assert trainer.state.best_global_step == 2
    assert_same_state(averages[2], dict(average_of(trainer).weights.named_averages()))
    assert_same_state(weights_in(tmp_path / "checkpoint-2"), dict(trainer.model.state_dict()))


def test_an_adapter(tmp_path):
    """The folders hold the adapters of the best checkpoint."""
    folder = tmp_path / "run"
    run_recipe(recipe_of(folder, **LORA, ema={"decay": 0.5}, callbacks=[{"type": "EMACallback"}]))

    best = folder / "checkpoint-2"
    raw, averaged = weights_in(best), weights_in(best / "ema")
    assert not all(torch.equal(raw[name], averaged[name]) for name in raw)
    assert_same_state(raw, weights_in(folder / "model"))
    assert_same_state(averaged, weights_in(folder / "model_ema"))


def test_weights_that_were_frozen_at_the_best_step(tmp_path):
    """Their average is the weight that the best checkpoint holds."""

    class Unfreezing(TrainerCallback):
        def on_step_begin(self, _args, state, _control, model=None, **_):
            next(model.parameters()).requires_grad_(state.global_step >= 3)

    trainer, _ = build_trainer(recipe_of(tmp_path, callbacks=[OWN]))
    name = next(name for name, _ in trainer.model.named_parameters())
    next(trainer.model.parameters()).requires_grad_(requires_grad=False)
    trainer.add_callback(Unfreezing())
    trainer.train()

    best = weights_in(tmp_path / "checkpoint-2")
    averages = dict(average_of(trainer).weights.named_averages())
    assert torch.equal(averages[name], best[name])
    other = next(each for each in averages if each != name)
    assert not torch.equal(averages[other], best[other])


@pytest.mark.parametrize("sections", [{"ema": {"decay": 0.5}}, {"callbacks": [OWN]}])
def test_a_best_checkpoint_without_an_average(tmp_path, sections):
    """The average is that of the last step, with a warning."""
    trainer, _ = build_trainer(recipe_of(tmp_path, **sections))
    trainer.train()
    last = {name: value.clone() for name, value in average_of(trainer).weights.named_averages()}
    for file in (tmp_path / "checkpoint-2").glob("mfwrap_*"):
        file.unlink()

    with pytest.warns(UserWarning, match="checkpoint-2 has no average; .* of the last step"):
        average = average_of(trainer)
    assert_same_state(last, dict(average.weights.named_averages()))
