"""Parameters have the same groups under MindFormers' names and under transformers'."""

from fnmatch import fnmatchcase

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mfwrap.runner.mindformers.rate_groups import MODEL_TYPES, converted_patterns
from support.versions import needs

NAMES = {
    "embedding.word_embeddings.weight": ["embed_tokens.weight"],
    "decoder.layers.1.input_layernorm.weight": ["layers.1.input_layernorm.weight"],
    "decoder.layers.1.pre_mlp_layernorm.weight": ["layers.1.post_attention_layernorm.weight"],
    "decoder.layers.1.self_attention.linear_proj.weight": ["layers.1.self_attn.o_proj.weight"],
    "decoder.final_layernorm.weight": ["model.norm.weight"],
    "output_layer.weight": ["lm_head.weight"],
}
ATTENTION = {
    "decoder.layers.1.self_attention.linear_qkv.weight": [
        f"layers.1.self_attn.{name}_proj.weight" for name in "qkv"
    ]
}
NORMS = {
    f"decoder.layers.1.self_attention.{name}_layernorm.weight": [
        f"layers.1.self_attn.{name}_norm.weight"
    ]
    for name in "qk"
}
LATENT = {
    "decoder.layers.1.self_attention.linear_qkv.weight": [
        "layers.1.self_attn.q_a_proj.weight",
        "layers.1.self_attn.kv_a_proj_with_mqa.weight",
    ],
    "decoder.layers.1.self_attention.linear_qb.weight": ["layers.1.self_attn.q_b_proj.weight"],
    "decoder.layers.1.self_attention.linear_kvb.weight": ["layers.1.self_attn.kv_b_proj.weight"],
    "decoder.layers.1.self_attention.q_layernorm.weight": [
        "layers.1.self_attn.q_a_layernorm.weight"
    ],
    "decoder.layers.1.self_attention.k_layernorm.weight": [
        "layers.1.self_attn.kv_a_layernorm.weight"
    ],
    "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": [
        "shared_experts.gate_proj.weight",
        "shared_experts.up_proj.weight",
    ],
    "decoder.layers.0.mlp.linear_fc1.weight": [
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
    ],
}
MLP = {
    "decoder.layers.1.mlp.linear_fc1.weight": [
        "layers.1.mlp.gate_proj.weight",
        "layers.1.mlp.up_proj.weight",
    ],
    "decoder.layers.1.mlp.linear_fc2.weight": ["layers.1.mlp.down_proj.weight"],
}
EXPERTS = {
    "decoder.layers.1.mlp.router.weight": ["layers.1.mlp.gate.weight"],
    "decoder.layers.1.mlp.experts.weight1": ["layers.1.mlp.experts.gate_up_proj"],
    "decoder.layers.1.mlp.experts.weight2": ["layers.1.mlp.experts.down_proj"],
}
OF_TYPE = {
    "qwen2": NAMES | ATTENTION | MLP,
    "qwen3": NAMES | ATTENTION | NORMS | MLP,
    "qwen3_moe": NAMES | ATTENTION | NORMS | EXPERTS,
    "deepseek_v3": NAMES | LATENT | EXPERTS,
}
"""MindFormers' names, and the ends of transformers' names, by type of the model."""


def parameter_names(model_type):
    """Return the names of the parameters of a model of two layers."""
    config = AutoConfig.for_model(model_type, num_hidden_layers=2)
    if model_type == "deepseek_v3":
        config.first_k_dense_replace = 1
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    return [name for name, _ in network.named_parameters()]


@needs("transformers", "5.5", "recipes")
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_names(model_type):
    """Each name of MindFormers stands for the parameters of transformers that it holds."""
    names = parameter_names(model_type)
    for theirs, ours in OF_TYPE[model_type].items():
        (found,) = converted_patterns(names, [[theirs]])
        matched = [name for name in names if any(fnmatchcase(name, each) for each in found)]
        assert matched == [name for name in names if name.endswith(tuple(ours))]


def test_layers_share_a_pattern():
    """A weight that all layers have in the group is one pattern; the first group counts."""
    names = parameter_names("qwen3")
    first, second = converted_patterns(names, [["*.linear_proj.*", "layers.0.mlp"], ["decoder."]])

    assert first == [
        "model.layers.*.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]
    assert "model.layers.*.self_attn.q_proj.weight" in second
    assert "model.layers.1.mlp.up_proj.weight" in second
    assert not set(first) & set(second)


def test_a_group_without_parameters():
    """A group that no parameter belongs to cannot be converted."""
    assert converted_patterns(parameter_names("qwen2"), [["decoder."], ["layers.0."]]) is None
