"""A file of MindFormers' PyNative trainer becomes a recipe of the same step."""

import copy
import re
from typing import Any

import pytest
import yaml

from mfwrap.runner import RecipeError, import_mindformers, parse_recipe
from support.mindformers_files import ABSENT

FILE: dict[str, Any] = {
    "checkpoint": {
        "enable_save": True,
        "save_path": "./saved",
        "save_max": 3,
        "save_interleaved_steps": 20,
        "no_save_optim": False,
        "load_path": "",
        "no_load_optim": True,
    },
    "training": {
        "steps": 40,
        "local_batch_size": 2,
        "global_batch_size": 8,
        "max_norm": 0.5,
        "seed": 7,
        "deterministic": True,
    },
    "parallelism": {"tensor_parallel": 2, "pipeline_parallel_layers_per_stage": None},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.1},
    "lr_scheduler": {"type": "CosineWithWarmUpLR", "learning_rate": 1e-3, "warmup_ratio": 0.1},
    "train_dataset": {
        "dataloader": {"type": "MindDataset", "dataset_files": "/data", "shuffle": True},
        "drop_remainder": False,
        "num_parallel_workers": 8,
    },
    "model": {
        "model_type": "qwen3",
        "architectures": "Qwen3ForCausalLM",
        "seq_length": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 300,
        "hidden_dropout": 0.0,
        "params_dtype": "float32",
        "compute_dtype": "bfloat16",
    },
    "context": {"mode": 1, "device_target": "Ascend"},
    "profiler": {"enable_profiling": False},
}


def imported(changes=None, accept=()):
    """Return what is imported of the file with changes, by dotted names, and the recipe."""
    file = copy.deepcopy(FILE)
    for name, value in (changes or {}).items():
        *outer, key = name.split(".")
        section = file
        for each in outer:
            section = section.setdefault(each, {})
        if value is ABSENT:
            section.pop(key, None)
        else:
            section[key] = value
    found = import_mindformers(yaml.safe_dump(file), "f.yaml", accept)
    parse_recipe(found.text, "f.yaml")
    return found, yaml.safe_load(found.text)


def lost(changes):
    """Return the names of what the file with changes loses."""
    with pytest.raises(RecipeError) as raised:
        imported(changes)
    return str(raised.value).partition("--accept ")[2].split(" --accept ")


def test_a_whole_file():
    """Each section arrives, and nothing is lost."""
    found, recipe = imported()

    assert found.losses == []
    assert recipe["training"] == {
        "max_steps": 40,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "seed": 7,
        "save_strategy": "steps",
        "save_steps": 20,
        "save_total_limit": 3,
        "output_dir": "./saved",
        "bf16": True,
    }
    assert recipe["runner_wrapper"] == {
        "type": "MFTrainOneStepCell",
        "scale_sense": 1.0,
        "use_clip_grad": True,
        "max_grad_norm": 0.5,
        "calculate_per_token_loss": False,
    }
    assert recipe["optimizer"] == FILE["optimizer"]
    assert recipe["lr_schedule"] == FILE["lr_scheduler"]
    assert recipe["data"] == {
        "type": "mindformers",
        "loader": "MindDataset",
        "path": "/data",
        "sequence_length": 32,
    }
    assert recipe["model"]["config"]["model_type"] == "qwen3"
    assert recipe["model"]["dtype"] == "float32"
    assert recipe["callbacks"] == [{"type": "MFLossMonitor"}]


def test_defaults():
    """What the file leaves out has MindFormers' defaults."""
    names = ("shuffle", "drop_remainder", "learning_rate")
    sections = ("train_dataset.dataloader", "train_dataset", "lr_scheduler")
    missing = {f"{section}.{name}": ABSENT for section, name in zip(sections, names, strict=True)}
    whole = {"checkpoint": ABSENT, "training": {}, "optimizer": ABSENT}
    _, recipe = imported({**whole, **missing})

    assert recipe["training"] == {
        "max_steps": 1000,
        "per_device_train_batch_size": 1,
        "seed": 42,
        "save_strategy": "steps",
        "save_steps": 1000,
        "save_total_limit": 5,
        "train_sampling_strategy": "sequential",
        "dataloader_drop_last": True,
        "bf16": True,
    }
    assert recipe["optimizer"] == {
        "type": "AdamW",
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    assert recipe["runner_wrapper"]["max_grad_norm"] == 1.0
    assert recipe["lr_schedule"]["learning_rate"] == 1e-5


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model.hidden_dropout": ABSENT}, ["dropout"]),
        ({"model.calculate_per_token_loss": True}, ["gradients"]),
        ({"parallelism.disable_gradient_division": False}, ["gradients"]),
        ({"checkpoint.load_path": "/old"}, ["weights"]),
        (
            {"checkpoint.load_path": "/old", "checkpoint.no_load_optim": False},
            ["weights", "resume"],
        ),
        ({"optimizer.use_fused": True, "optimizer.amsgrad": True}, ["optimizer"]),
        ({"callbacks": [{"type": "Mine", "every": 2}]}, ["callbacks"]),
        (
            {
                "lora_config": {"target_modules": "linear_qkv"},
                "optimizer.weight_decay_include": ["lora_a"],
            },
            ["weight_decay"],
        ),
    ],
)
def test_losses(changes, names):
    """What changes the numbers and cannot be carried over is a loss by its name."""
    assert lost(changes) == names
    found, _ = imported(changes, accept=names)
    assert [loss.name for loss in found.losses] == names


@pytest.mark.parametrize(
    ("changes", "place", "value"),
    [
        ({"training.max_norm": 0}, ("runner_wrapper", "use_clip_grad"), False),
        ({"checkpoint.enable_save": False}, ("training", "save_strategy"), "no"),
        ({"checkpoint.no_save_optim": True}, ("training", "save_only_model"), True),
        ({"checkpoint.async_save": True}, ("async_save",), True),
        ({"training.global_batch_size": 9}, ("training", "gradient_accumulation_steps"), 4),
        ({"training.rampup_batch_size": [2, 2, 100]}, ("rampup_batch_size",), [2, 2, 100]),
        (
            {"optimizer.weight_decay_exclude": ["*.linear_qkv.*"],
             "optimizer.weight_decay_include": ["layernorm", "decoder.layers.1.mlp.linear_fc2"]},
            ("optimizer",),
            FILE["optimizer"] | {
                "weight_decay_include": [
                    "model.layers.*.self_attn.q_norm.weight",
                    "model.layers.*.self_attn.k_norm.weight",
                    "model.layers.*.input_layernorm.weight",
                    "model.layers.*.post_attention_layernorm.weight",
                    "model.layers.1.mlp.down_proj.weight",
                    "model.norm.weight",
                ],
                "weight_decay_exclude": [
                    "model.layers.*.self_attn.q_proj.weight",
                    "model.layers.*.self_attn.k_proj.weight",
                    "model.layers.*.self_attn.v_proj.weight",
                ],
            },
        ),
        (
            {"optimizer.weight_decay_include": ["lm_head"],
             "optimizer.weight_decay_exclude": ["no_such_name"]},
            ("optimizer",),
            FILE["optimizer"],
        ),
        (
            {"optimizer.weight_decay_include": ["k_layernorm"],
             "optimizer.weight_decay_exclude": ["bias"]},
            ("optimizer", "weight_decay_include"),
            ["model.layers.*.self_attn.k_norm.weight"],
        ),
        (
            {"lr_scheduler": {"type": "cosine", "learning_rate": 1e-3, "warmup_steps": 2,
                              "power": 3}},
            ("lr_schedule",),
            {"type": "cosine", "learning_rate": 1e-3, "warmup_steps": 2},
        ),
        ({"monitor.tensorboard.output_dir": "/t"}, ("callbacks", 0, "tensorboard_dir"), "/t"),
        (
            {"monitor.train_state.local_loss": True},
            ("monitor_config",),
            {"monitor_on": True, "local_loss_format": "log"},
        ),
        (
            {"monitor.train_state.local_norm": ["a.b"]},
            ("monitor_config", "target"),
            [r"a\.b"],
        ),
        (
            {"callbacks": [{"type": "MaxLogitsMonitor"}]},
            ("monitor_config", "max_attention_logit_format"),
            "log",
        ),
        ({"lr_scheduler": {"type": "CosineWithWarmUpLR"}}, ("lr_schedule", "warmup_steps"), 0),
        (
            {"lr_scheduler": {"type": "CosineAnnealingLR", "base_lr": 1e-3, "t_max": 10,
                              "learning_rate": 1e-5}},
            ("lr_schedule",),
            {"type": "CosineAnnealingLR", "base_lr": 1e-3, "t_max": 10},
        ),
    ],
)  # fmt: skip
def test_what_a_key_becomes(changes, place, value):
    """Each key becomes what the step, the Trainer or a monitor has for it."""
    _, found = imported(changes)
    for key in place:
        found = found[key]
    assert found == value


@pytest.mark.parametrize(
    ("growth", "total", "says"),
    [
        ([3, 1, 100], 8, "each size .* a multiple of 2, .*, got 3"),
        ([2, 4, 100], 8, "from 2 in steps of 4 to the global batch, 8 rows"),
        ([2, 2, 100], 7, "from 2 in steps of 2 to the global batch, 7 rows"),
        ([2, 2], 8, "must be .start, increment, samples. with"),
        ("often", 8, "a table of sizes by updates, got 'often'"),
    ],
)
def test_a_growth_that_mindformers_refuses(growth, total, says):
    """The file would not run there; the error names the key."""
    changes = {"training.rampup_batch_size": growth, "training.global_batch_size": total}
    with pytest.raises(RecipeError, match=f"training.rampup_batch_size: MindFormers .*{says}"):
        imported(changes)


@pytest.mark.parametrize(
    "section", [{"mode": "full"}, {"mode": "select"}, {"full_recompute": True}]
)
def test_recomputation(section):
    """Which layers recompute their activations does not change the numbers."""
    assert True in imported({"recompute": section})[1]["training"].values()
    before, after = (imported(change)[1]["training"] for change in ({}, {"recompute": section}))
    (added,) = after.keys() - before.keys()
    assert added.endswith("_checkpointing")
    assert imported({"recompute": {"mode": "None"}})[1]["training"] == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training.stepz": 3}, r"training\.stepz: unknown key"),
        (
            {"lora_confg": {"lora_rank": 4}},
            "lora_confg: unknown section; did you mean 'lora_config",
        ),
        ({"parallelism.tensor_paralel": 3}, r"tensor_paralel: unknown key; did you mean"),
        ({"checkpoint.save_maxx": 3}, r"checkpoint\.save_maxx: unknown key"),
        ({"training.steps": "ten"}, r"training\.steps: expected an integer >= 1"),
        ({"training.global_batch_size": 1}, "expected at least local_batch_size, 2, got 1"),
        ({"optimizer.type": "Lion"}, r"expected one of \['AdamW', 'Muon'\], got 'Lion'"),
        ({"optimizer.weight_decay_include": "bias"}, "weight_decay_include: expected a list"),
        ({"lr_scheduler": ABSENT}, "lr_scheduler: required"),
        ({"train_dataset.dataloader.type": "Mine"}, r"dataloader\.type: expected one of"),
        ({"model": 3}, "model: expected a mapping, got 3"),
        ({"model.hidden_sise": 3}, r"model\.hidden_sise: unknown key"),
        ({"callbacks": {}}, None),
        ({"callbacks": "Mine"}, "callbacks: expected a list"),
        ({"lr_scheduler.warmup_step": 3}, r"lr_schedule\.warmup_step: unknown key"),
    ],
)
def test_errors(changes, says):
    """One sentence says what is wrong, and where."""
    if says is None:
        imported(changes)
        return
    with pytest.raises(RecipeError, match=says) as raised:
        imported(changes)
    assert ("PyNative" in str(raised.value)) == ("warmup_step" not in says)


def test_what_mindformers_does_otherwise_is_said():
    """The rules of mfwrap's step hold."""
    notes = " ".join(imported({"optimizer.use_fused": True})[0].notes)

    for says in (
        "MindFormers adds 1e-6 to the norm",
        "a gradient that is not finite is skipped",
        "MindFormers takes labels as they are",
        "fused optimizer lags by one rate",
        "divide training.gradient_accumulation_steps by n",
    ):
        assert says in notes


def test_keys_that_the_trainer_does_not_read():
    """A key of the graph mode is named as unread, and not as one without effect."""
    found, _ = imported({"data_skip_steps": 5, "parallel": {"parallel_mode": 1}})

    says = "data_skip_steps, parallel: MindFormers' PyNative trainer does not read these keys"
    assert any(note.startswith(says) for note in found.notes)
    assert not any("data_skip_steps" in note for note in found.notes if "no effect" in note)


def test_a_muon():
    """It is that of the graph mode, with the decay of this trainer."""
    _, recipe = imported(
        {"optimizer": {"type": "Muon", "momentum": 0.9, "comm_strategy": "allgather"}},
        accept=["optimizer"],
    )

    assert recipe["optimizer"] == {
        "type": "Muon",
        "momentum": 0.9,
        "weight_decay": 0.01,
        "qk_clip_threshold": 100,
    }


@pytest.mark.parametrize(
    ("more", "losses"),
    [
        ({"eps": 1e-7, "ns_coefficients": [3.4445, -4.775, 2.0315], "adamw_include": []}, 1),
        ({"eps": 1e-5}, 2),
        ({"ns_coefficients": [2.0, -1.5, 0.5]}, 2),
        ({"adamw_include": ["linear_proj"]}, 2),
    ],
)
def test_what_a_muon_has_otherwise(more, losses):
    """A value that the recipe cannot have is a loss; a limit that is off is left out."""
    section = {"type": "Muon", "qk_clip_enabled": False, **more}
    found, recipe = imported({"optimizer": section}, accept=["optimizer"])

    assert [loss.name for loss in found.losses] == ["optimizer"] * losses
    assert recipe["optimizer"] == {"type": "Muon", "weight_decay": 0.01}


@pytest.mark.parametrize(("rate", "expected"), [(ABSENT, 1e-3), (0.01, 0.01), (0.0, None)])
def test_biases_of_experts(rate, expected):
    """The biases of DeepSeek V3 move without a callback, by 0.001 if the file has no rate."""
    model = {
        "model_type": "deepseek_v3",
        "architectures": "DeepseekV3ForCausalLM",
        "mtp_num_layers": 0,
        "mscale": 0.0,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "head_dim": ABSENT,
        "moe_router_bias_update_rate": rate,
    }
    found, recipe = imported({f"model.{key}": value for key, value in model.items()})

    assert found.losses == []
    assert recipe.get("moe_router_bias_update_rate") == expected


DEEPSEEK = {
    "model": {
        "model_type": "deepseek_v3",
        "architectures": "DeepseekV3ForCausalLM",
        "seq_length": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 300,
    }
}
QKV = ["q_proj", "k_proj", "v_proj"]
MLP = ["gate_proj", "up_proj"]
LATENT = ["q_a_proj", "kv_a_proj_with_mqa"]


@pytest.mark.parametrize(
    ("model", "rule", "excluded", "targets", "shared"),
    [
        ({}, "linear_proj", None, ["o_proj"], None),
        ({}, "self_attention", None, [*QKV, "o_proj"], [QKV]),
        ({}, r"linear_(qkv|fc2)$", "mlp", QKV, [QKV]),
        (
            {},
            r"^model\.decoder\.layers\.1\.mlp",
            None,
            [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")],
            [MLP],
        ),
        ({}, "output_layer|linear_fc1", "layers.0$", None, [MLP]),
        (DEEPSEEK, "linear_qkv|linear_q?b|linear_kvb", None,
         ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"], [LATENT]),
        (DEEPSEEK, "shared_experts", None,
         [f"model.layers.1.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")],
         [MLP]),
    ],
)  # fmt: skip
def test_adapters(model, rule, excluded, targets, shared):
    """The rule finds cells by their paths; layers that are one cell share A."""
    section = {"target_modules": rule, "exclude_layers": excluded, "lora_rank": 4}
    found, recipe = imported(
        model | {"lora_config": section | {"lora_alpha": 8, "lora_dropout": 0.1}},
        accept=["moe", "mtp", "attention"],
    )
    if targets is None:
        targets = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "lm_head"]
    expected = {
        "type": "lora",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": targets,
        "shared_a": shared,
        "a_std": 0.01,
    }
    assert recipe["peft"] == {key: value for key, value in expected.items() if value is not None}
    names = {loss.name for loss in found.losses}
    assert "lora" not in names
    assert ("moe" in names) == (model is DEEPSEEK)  # its biases of experts


def test_defaults_of_adapters():
    """MindFormers' defaults are set; B is drawn only with a standard deviation."""
    _, recipe = imported({"lora_config": {"target_modules": "linear_qkv", "lora_b_std": 0.02}})
    defaults = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "a_std": 0.01, "b_std": 0.02}
    assert recipe["peft"] == {
        "type": "lora", "target_modules": QKV, "shared_a": [QKV], **defaults
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"target_modules": "wq"}, "expected a regular expression that finds the path of one of"),
        ({"lora_rank": 4}, "expected a regular expression that finds the path of one of"),
        ({"target_modules": "(qkv"}, "target_modules: expected regular expressions"),
        ({"target_modules": "qkv", "lora_rang": 4}, "lora_config.lora_rang: unknown key"),
    ],
)
def test_wrong_adapters(section, says):
    """A rule that finds no layer is an error, as in MindFormers."""
    with pytest.raises(RecipeError, match=re.escape(says)):
        imported({"lora_config": section})


def test_adapters_of_other_networks_are_a_loss():
    """The names of layers are known only for the networks of `MODEL_TYPES`."""
    model = FILE["model"] | {"model_type": "glm4", "architectures": "Glm4ForCausalLM"}
    model["pad_token_id"] = 0
    changes = {"model": model, "lora_config": {"target_modules": "linear_qkv"}}
    found, recipe = imported(changes, accept=["lora", "dropout", "attention"])
    assert "lora" in {loss.name for loss in found.losses}
    assert "peft" not in recipe
