"""The section ``optimizer`` builds the optimizer that MindFormers builds."""

import pytest
import torch
from torch import nn

from mfwrap import AdamWeightDecay, ChainedOptimizer
from mfwrap.runner import RecipeError, run_recipe
from mfwrap.runner.optimizers import OPTIMIZERS
from support.attention import AttentionNetwork, logits_by_hand
from support.recipe_texts import message, parsed, recipe_text


def test_optimizer_section():
    """MindFormers' section ``optimizer`` sets the Trainer's arguments."""
    optimizer = {"type": "AdamW", "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    arguments = parsed(optimizer=optimizer).arguments

    assert (arguments.adam_beta1, arguments.adam_beta2) == (0.8, 0.95)
    assert (arguments.adam_epsilon, arguments.weight_decay) == (1e-7, 0.1)
    assert str(arguments.optim.value) == "adamw_torch_fused"


class Block(nn.Module):
    """A block with matrices, biases and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


def built(network, **section):
    """Return the optimizer of a recipe for a network; only ``linear.weight`` has weight decay."""
    recipe = parsed(optimizer=section)
    return recipe.optimizer.build(recipe.arguments, network, ["linear.weight"])


@pytest.mark.parametrize(
    ("name", "fp32_state"),
    [
        ("AdamWeightDecay", False),
        ("FP32StateAdamWeightDecay", True),
        ("FusedAdamWeightDecay", True),
        ("FusedFP32StateAdamWeightDecay", True),
    ],
)
def test_adam_weight_decay(name, fp32_state):
    """MindFormers' spellings give Adam without bias correction, with MindFormers' decay groups."""
    network = Block()
    settings = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
    optimizer = built(network, type=name, **settings)

    assert type(optimizer) is AdamWeightDecay
    decayed, others = optimizer.param_groups
    assert decayed["params"] == [network.linear.weight]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(others["params"]) == 4
    for group in optimizer.param_groups:
        # MindFormers' default of eps is 1e-6; the Trainer's is 1e-8.
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.9, 0.95), 1e-6)
        assert group["fp32_state"] is fp32_state


@pytest.mark.parametrize("name", ["AdamW", "AdamWeightDecay", "Muon"])
def test_weight_decay_by_patterns(name):
    """The first rule that matches a name counts, and otherwise the kind of the parameter."""
    network = Block()
    rules = {"weight_decay_include": ["norm*", "embed"], "weight_decay_exclude": ["*.weight"]}
    optimizer = built(network, type=name, weight_decay=0.1, **rules)
    decays = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }

    assert {name for name, each in network.named_parameters() if decays[id(each)]} == {
        "embed.weight",
        "norm.weight",
        "norm.bias",
    }
    with pytest.raises(RecipeError, match=r"weight_decay_include: expected a list of patterns"):
        parsed(optimizer={"type": name, "weight_decay_include": "norm"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["AdamW", "FusedAdamW", "AdamWeightDecayX"])
def test_adamw_for_half_precision_weights(name, dtype):
    """MindFormers' AdamW has a float32 state, so it is not torch's if the weights are not float32.

    With bias correction, its state has a step count.
    """
    recipe = parsed(optimizer={"type": name, "betas": [0.9, 0.95]}, model={"dtype": dtype})
    (group,) = recipe.optimizer.build(recipe.arguments, nn.Linear(2, 2), []).param_groups

    assert (group["betas"], group["eps"]) == ((0.9, 0.95), 1e-8)
    assert group["fp32_state"]
    assert group["bias_correction"]


def test_muon():
    """Matrices are trained by Muon, embeddings and vectors by AdamW, with MindFormers' defaults."""
    network = Block()
    optimizer = built(network, type="Muon", adamw_betas=[0.9, 0.95], adamw_eps=1e-9, momentum=0.8)

    assert type(optimizer) is ChainedOptimizer
    muon, adamw = optimizer.optimizers
    (matrices,), (others,) = muon.param_groups, adamw.param_groups
    assert matrices["params"] == [network.linear.weight]
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (matrices["momentum"], matrices["adjust_lr_fn"]) == (0.8, "match_rms_adamw")
    assert (others["betas"], others["eps"]) == ((0.9, 0.95), 1e-9)
    assert matrices["lr"] == others["lr"] == 0.01


def test_muon_without_matrices():
    """A network without matrices is trained by AdamW alone."""
    network = nn.LayerNorm(4)
    recipe = parsed(optimizer={"type": "Muon"})
    optimizer = recipe.optimizer.build(recipe.arguments, network, [])

    assert [type(part) for part in optimizer.optimizers] == [torch.optim.AdamW]


def test_a_recipe_trains_with_it(tmp_path):
    """The Trainer of a recipe uses the optimizer of the section, and can resume."""
    training = {"output_dir": str(tmp_path), "max_steps": 2, "save_strategy": "steps"}
    recipe = parsed(
        optimizer={"type": "FP32StateAdamWeightDecay"}, training=training | {"save_steps": 1}
    )
    whole = run_recipe(recipe).metrics
    resumed = run_recipe(recipe, resume=str(tmp_path / "checkpoint-1")).metrics

    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert [group["fp32_state"] for group in saved["param_groups"]] == [True, True]
    assert resumed == whole


def test_qk_clip():
    """The threshold limits the attention logits; a network without attention is an error."""
    recipe = parsed(
        optimizer={"type": "Muon", "qk_clip_threshold": 1e-3}, training={"learning_rate": 0}
    )
    network, inputs = AttentionNetwork(), torch.ones(2, 3, 12).cumsum(1)
    optimizer = recipe.optimizer.build(recipe.arguments, network, ())
    network(inputs).backward()
    optimizer.step()

    [first, _] = logits_by_hand(network, inputs)
    assert first.max() <= 1.001e-3
    with pytest.raises(RecipeError, match="qk_clip_threshold: must be left out: `network` must"):
        recipe.optimizer.build(recipe.arguments, torch.nn.Linear(2, 2), ())


def test_all_optimizers_are_built():
    """Each name gives an optimizer of the recipe's, or one of the Trainer's."""
    for name, kind in OPTIMIZERS.items():
        choice = parsed(optimizer={"type": name}).optimizer
        assert (choice is None) is (kind.make is None)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"type": "AdamWeightDecays"}, "did you mean 'AdamWeightDecay'?"),
        ({"type": "AdamWeightDecay", "momentum": 0.9}, "optimizer.momentum: unknown key"),
        ({"type": "AdamWeightDecay", "beta2": 1.0}, "optimizer.beta2: expected a number < 1"),
        ({"type": "Muon", "beta1": 0.9}, "optimizer.beta1: unknown key"),
        ({"type": "Muon", "adamw_betas": 0.9}, "optimizer.adamw_betas: expected a list of two"),
        ({"type": "Muon", "momentum": 1.0}, "optimizer.momentum: must be in [0, 1), got 1.0"),
        ({"type": "Muon", "nesterov": "no"}, "optimizer.nesterov: expected true or false"),
        ({"type": "Muon", "ns_steps": 0}, "optimizer.ns_steps: must be in [1, 99], got 0"),
        ({"type": "Muon", "matched_adamw_rms": 0.3}, "must be 0.2, as in torch, got 0.3"),
        ({"type": "Muon", "qk_clip_threshold": 0}, "optimizer.qk_clip_threshold: must be"),
    ],
)
def test_a_wrong_key_is_named(section, says):
    """A wrong name, key or value of the section is an error that names it."""
    assert says in message(text=recipe_text(optimizer=section))


def test_the_trainers_own_name_contradicts_the_section():
    """``training.optim`` must be left out if the section names an optimizer of another kind."""
    text = recipe_text(optimizer={"type": "Muon"}, training={"optim": "adamw_torch"})

    assert "training.optim: must be left out, because the section optimizer names Muon" in message(
        text=text
    )
