"""Callbacks and monitors of a MindFormers file are those of the recipe."""

import math

import pytest

from mfwrap.runner import RecipeError
from support.mindformers_files import imported, imported_recipe

CURVES = {
    "tensorboard_dir": "curves",
    "tensorboard_queue_size": 10,
    "log_loss_scale_to_tensorboard": True,
    "log_expert_load_to_tensorboard": False,
}
STATE_MONITOR = {"monitor_on": True, "device_local_norm_format": "tensorboard"}


def test_callbacks():
    """Old spellings are known; callbacks and keys without effect are left out, with one note."""
    result, recipe = imported({
        "callbacks": [
            {"type": "MFLossMonitor", "per_print_times": 2},
            {"type": "CheckpointMointor", "prefix": "llama", "save_checkpoint_steps": 5,
             "keep_checkpoint_max": 3, "integrated_save": False},
            {"type": "ObsMonitor"},
        ]
    })  # fmt: skip

    assert recipe["callbacks"] == [
        {"type": "MFLossMonitor", "per_print_times": 2},
        {"type": "CheckpointMonitor", "save_checkpoint_steps": 5, "keep_checkpoint_max": 3},
    ]
    assert recipe["training"]["save_strategy"] == "no"
    for name in ("callbacks.1.prefix", "callbacks.1.integrated_save", "callbacks.2 (ObsMonitor)"):
        assert name in result.notes[-1]


def test_checkpoints_of_each_step():
    """Without an interval, MindFormers saves each step; its threshold is a squared norm."""
    monitor = {"type": "CheckpointMonitor", "embedding_local_norm_threshold": 270.0}
    _, recipe = imported({"callbacks": [monitor]})

    assert recipe["callbacks"] == [
        {
            "type": "CheckpointMonitor",
            "embedding_local_norm_threshold": math.sqrt(270),
            "save_checkpoint_steps": 1,
        }
    ]


@pytest.mark.parametrize("is_async", [True, False])
def test_checkpoints_in_the_background(is_async):
    """`async_save` of the callback has an effect; its default is left out."""
    monitor = {"type": "CheckpointMonitor", "save_checkpoint_steps": 5, "async_save": is_async}
    result, recipe = imported({"callbacks": [monitor]})

    assert recipe["callbacks"][0].get("async_save", False) is is_async
    assert not any("async_save" in note for note in result.notes)


def test_curves():
    """The monitors get the folder and the keys that they have; a note names the others."""
    result, recipe = imported({"tensorboard": CURVES, "monitor_config": STATE_MONITOR})

    assert recipe["callbacks"] == [
        {
            "type": "MFLossMonitor",
            "tensorboard_dir": "curves",
            "log_loss_scale_to_tensorboard": True,
        }
    ]
    assert recipe["monitor_config"] == STATE_MONITOR | {"tensorboard_dir": "curves"}
    assert "tensorboard.tensorboard_queue_size" in result.notes[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"tensorboard": CURVES, "callbacks": []},
        {"tensorboard": CURVES | {"tensorboard_on": False}},
        {"tensorboard": {"tensorboard_queue_size": 1}},
    ],
)
def test_curves_that_nobody_draws(changes):
    """A section ``tensorboard`` without a monitor, or without a folder, has no effect."""
    result, recipe = imported(changes)

    assert "curves" not in str(recipe)
    assert "tensorboard" in result.notes[-1]


def test_the_nan_check():
    """The check for nan is the monitor's, or that of a monitor of its own."""
    check = {"check_for_nan_in_loss_and_grad": True}
    on = imported(check | {"monitor_config": {"monitor_on": True}})[1]
    off = imported(check | {"callbacks": []})[1]

    assert on["monitor_config"] == {"monitor_on": True} | check
    assert off["callbacks"] == [{"type": "TrainingStateMonitor"} | check]


def test_a_monitor_that_shows_local_norms_gets_them():
    """The step computes local norms if the monitor shows them, over ``local_norm: False``."""
    shown = {"monitor_on": True, "local_norm_format": "log"}
    recipe = imported_recipe({"monitor_config": shown, "runner_wrapper.local_norm": False})

    assert recipe.step.config.local_norm


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [
        (3, "callbacks: expected a list, got 3"),
        ([{"type": "MFLossMonitor", "per_print": 1}], "callbacks.0.per_print: unknown key"),
        ([{"type": "Unknown"}], "callbacks.0.type: expected one of"),
    ],
)
def test_wrong_callbacks(callbacks, says):
    """Unknown callbacks and keys are errors."""
    with pytest.raises(RecipeError, match=says):
        imported({"callbacks": callbacks})


def balanced(model, callback, **changes):
    """Return the import of a DeepSeek V3 of the core with a callback, and its recipe."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
    kind = {
        "model_type": "deepseek_v3",
        "mtp_num_layers": 0,
        "mscale": 0.0,
        "first_k_dense_replace": 1,
    }
    settings = {
        **sizes,
        **kind,
        "seq_length": 32,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        **model,
    }
    return imported(
        {
            "model": {"model_config": settings},
            "callbacks": [{"type": "MFLossMonitor"}, *callback],
            **changes,
        },
        accept=("moe",),
    )


BALANCE = {"type": "TopkBiasBalanceCallback"}
RATE = "moe_router_bias_update_rate"


@pytest.mark.parametrize(
    ("model", "callback", "rate"),
    [
        ({}, [BALANCE], 1e-3),
        ({RATE: 2e-4}, [BALANCE], 2e-4),
        ({RATE: 2e-4}, [], None),
        ({"moe_router_enable_expert_bias": False}, [BALANCE], None),
        ({RATE: 0.0}, [BALANCE], None),
    ],
)
def test_a_callback_that_balances_experts(model, callback, rate):
    """The biases of a core model move only if the file has the callback; a note says if not."""
    result, recipe = balanced(model, callback)

    assert recipe.get(RATE) == rate
    assert [loss.name for loss in result.losses] == []
    assert [note.startswith("callbacks: the file has no Topk") for note in result.notes].count(
        True
    ) == (not callback)
    without_effect = "callbacks.1 (TopkBiasBalanceCallback)" in result.notes[-1]
    assert without_effect == (bool(callback) and rate is None)


@pytest.mark.parametrize("model", [{"first_k_dense_replace": 2}, {"moe_layer_freq": [0, 0]}])
def test_a_callback_for_a_model_without_experts(model):
    """If all layers are dense, no bias moves, and the recipe is accepted."""
    result, recipe = balanced(model, [BALANCE])

    assert RATE not in recipe
    assert recipe["model"]["config"]["first_k_dense_replace"] == 2
    assert "callbacks.1 (TopkBiasBalanceCallback)" in result.notes[-1]


def test_a_callback_for_a_model_without_biases():
    """The callback's own rate is a loss if the recipe's model has no biases to move."""
    own = {**BALANCE, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.01}
    result, recipe = imported({"callbacks": [own]}, accept=("moe",))
    assert [loss.name for loss in result.losses] == ["moe"]
    assert RATE not in recipe
    result, recipe = imported({"callbacks": [BALANCE]})
    assert result.losses == []


@pytest.mark.parametrize(
    ("flag", "own", "expected"), [(True, 0.01, 0.01), (True, None, None), (False, None, None)]
)
def test_a_callback_with_a_rate_of_its_own(flag, own, expected):
    """Before MindFormers' core, the model says whether there are biases, the callback the rate."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
    model = {"type": "DeepseekV3Config", **sizes, "seq_length": 32, "extend_method": "None"}
    experts = {
        "expert_num": 8,
        "num_experts_chosen": 2,
        "shared_expert_num": 1,
        "moe_intermediate_size": 16,
        "capacity_factor": -1,
        "use_gating_sigmoid": True,
        "balance_via_topk_bias": flag,
        "topk_bias_update_rate": 0.5,
    }
    rate = {} if own is None else {"balance_via_topk_bias": True, "topk_bias_update_rate": own}
    result, recipe = imported({
        "model": {"model_config": model},
        "moe_config": experts,
        "callbacks": [{**BALANCE, **rate}],
    })  # fmt: skip

    assert recipe.get(RATE) == expected
    assert result.losses == []
