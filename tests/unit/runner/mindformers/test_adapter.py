"""MindFormers' LoRA becomes PEFT's, with transformers' names of the layers."""

import pytest

from mfwrap.runner import RecipeError
from mfwrap.runner.run import build_trainer
from support.mindformers_files import ABSENT, imported, imported_recipe, lost

PET = "model.model_config.pet_config"
LORA = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.1}
QWEN = {
    "model.arch.type": "QwenForCausalLM",
    "model.model_config.type": "QwenConfig",
    "model.model_config.intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        (".*wq|.*wv", ["q_proj", "v_proj"]),
        (".*wq|.*wk|.*wv|.*wo|.*w1|.*w2|.*w3", ["q_proj", "k_proj", "v_proj", "o_proj",
                                                "gate_proj", "down_proj", "up_proj"]),
        ("w2", ["down_proj"]),
    ],
)  # fmt: skip
def test_target_modules(rule, layers):
    """The rule selects the same layers as in MindFormers."""
    _, recipe = imported({PET: LORA | {"target_modules": rule}})

    assert recipe["peft"] == {
        "type": "lora",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": layers,
    }


def test_defaults_and_exclusions():
    """MindFormers' defaults are set, and excluded layers have no adapter."""
    pet = {"pet_type": "lora", "target_modules": ".*w", "exclude_layers": ["feed_forward", "wo"]}
    _, recipe = imported({PET: pet})

    assert recipe["peft"]["target_modules"] == ["q_proj", "k_proj", "v_proj"]
    assert [recipe["peft"][key] for key in ("r", "lora_alpha", "lora_dropout")] == [8, 16, 0.01]


@pytest.mark.parametrize("place", ["model.arch.pet", "model.model_config"])
def test_a_network_with_an_adapter_of_its_own(place):
    """Classes of MindFormers 0.6 choose the layers; the sizes are in one of two sections."""
    sizes = {"in_channels": 32, "out_channels": 32, "lora_rank": 4, "lora_dropout": 0.05}
    arch = {"model.arch.type": "LlamaForCausalLMWithLora"}
    _, recipe = imported(arch | {f"{place}.pet_config": sizes})

    assert recipe["peft"] == {
        "type": "lora",
        "r": 4,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "v_proj"],
    }
    assert lost({"model.arch.pet": {"pet_type": "prefix"}}, "lora") == ["lora"]


def test_weights_that_are_not_frozen():
    """Weights in ``freeze_exclude`` are trained beside the adapter."""
    pet = LORA | {"target_modules": ".*wq", "freeze_exclude": ["*wte*", "*lm_head*"]}
    _, recipe = imported({PET: pet, **QWEN})

    assert recipe["peft"]["modules_to_save"] == ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    "changes",
    [
        {PET: {"pet_type": "ptuning2"}},
        {PET: LORA | {"target_modules": ".*wq", "freeze_include": ["*"]}},
    ],
)
def test_what_peft_does_not_have(changes):
    """Another kind of adapter and other frozen weights are losses."""
    assert set(lost(changes, "lora")) == {"lora"}


GLM = {
    "model.arch.type": "ChatGLM2ForConditionalGeneration",
    "model.model_config": {
        "type": "ChatGLM2Config",
        "num_layers": 1,
        "padded_vocab_size": 300,
        "seq_length": 32,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "kv_channels": 8,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "add_qkv_bias": True,
        "hidden_dropout": 0.0,
        "compute_dtype": "bfloat16",
        "param_init_type": "float32",
    },
}
QKV = ["q_proj", "k_proj", "v_proj"]


@pytest.mark.parametrize(
    ("changes", "rule", "shared"),
    [
        (GLM, ".*query_key_value*", [QKV]),
        (
            {"model.model_config.qkv_concat": True},
            ".*w_qkv|.*w_gate_hidden|.*wo",
            [QKV, ["gate_proj", "up_proj"]],
        ),
    ],
)
def test_one_adapter_of_a_fused_layer(changes, rule, shared):
    """Layers that are one in MindFormers share A, and the rest of the adapter is not changed."""
    result, recipe = imported(changes | {PET: LORA | {"target_modules": rule}})

    assert result.losses == []
    assert recipe["peft"]["shared_a"] == shared
    assert {name for names in shared for name in names} <= {*recipe["peft"]["target_modules"]}


@pytest.mark.filterwarnings("ignore")
def test_the_trained_matrices_of_a_fused_layer(tmp_path):
    """A has MindFormers' shape, and the rows of B are those of the fused layer."""
    recipe = imported_recipe(
        GLM | {PET: LORA | {"target_modules": ".*query_key_value*"}},
        "data={type: docstrings, max_train_samples: 4}",
        f"training.output_dir={tmp_path}",
    )
    trainer, _ = build_trainer(recipe)
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}

    assert [tuple(p.shape) for n, p in trained.items() if "lora_A" in n] == [(4, 32)]
    rows = sum(len(p) for n, p in trained.items() if "lora_B" in n)
    assert rows == 32 + 2 * 2 * 8  # queries, and two groups of keys and values


def test_a_network_without_a_class():
    """The loss says the type of the network, which the file has in any case."""
    changes = {"model.arch": ABSENT, PET: LORA | {"target_modules": ".*wq"}}
    result, _ = imported(changes, ("lora",))

    assert "mfwrap cannot convert lora of llama;" in result.text


@pytest.mark.parametrize(
    ("pet", "says"),
    [
        (LORA, "target_modules: expected a regular expression that matches one of"),
        (LORA | {"target_modules": ".*c_attn"}, "expected a regular expression that matches one"),
        (LORA | {"target_modules": "*wq"}, "target_modules: expected regular expressions"),
        (LORA | {"lora_rang": 8}, "pet_config.lora_rang: unknown key; did you mean 'lora_rank'"),
        ([1], "pet_config: expected a mapping"),
    ],
)
def test_a_wrong_section(pet, says):
    """A rule that selects no layer is an error, as is an unknown key."""
    with pytest.raises(RecipeError, match=says):
        imported({PET: pet})


@pytest.mark.filterwarnings("ignore")
def test_the_adapter_alone_is_trained(tmp_path):
    """The Trainer of an imported recipe trains the matrices of the adapter and nothing else."""
    recipe = imported_recipe(
        {PET: LORA | {"target_modules": ".*wq|.*wv"}},
        "data={type: docstrings, max_train_samples: 4}",
        f"training.output_dir={tmp_path}",
    )
    trainer, _ = build_trainer(recipe)
    trained = [name for name, one in trainer.model.named_parameters() if one.requires_grad]

    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in trained)
