"""The first loss of a converted network is that of the network written by hand."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from support.model_config import converted
from support.networks import BY_HAND, first_loss

_OWN = (
    "hidden_size: 32, num_layers: 2, num_heads: 4, n_kv_heads: 2, vocab_size: 300,"
    " intermediate_size: 48, seq_length: 64"
)
_CORE = (
    "hidden_size: 32, num_layers: 2, num_heads: 4, n_kv_heads: 2, head_dim: 16, vocab_size: 300,"
    " ffn_hidden_size: 48, rms_norm_eps: 1.0e-5, init_method_std: 0.01, max_position_embeddings: 64"
)
MODELS = [
    (
        "llama31",
        (
            f"type: LlamaConfig, {_OWN}, theta: 500.0, extend_method: LLAMA3, scaling_factor:"
            " {factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0,"
            " original_max_position_embeddings: 16}"
        ),
    ),
    ("qwen2", f"type: LlamaConfig, {_OWN}, qkv_has_bias: true"),
    ("qwen3", f"model_type: qwen3, {_CORE}"),
    (
        "qwen3_moe",
        (
            f"model_type: qwen3_moe, {_CORE}, num_moe_experts: 4, moe_router_topk: 2,"
            " moe_ffn_hidden_size: 16"
        ),
    ),
    (
        "mixtral",
        (
            f"type: LlamaConfig, {_OWN}, moe_config: {{expert_num: 4, num_experts_chosen: 2,"
            " use_gmm: true}"
        ),
    ),
    (
        "glm",
        (
            "type: ChatGLM2Config, hidden_size: 32, num_layers: 2, num_attention_heads: 4,"
            " multi_query_group_num: 2, kv_channels: 8, padded_vocab_size: 300,"
            " ffn_hidden_size: 48, seq_length: 64, rope_ratio: 500"
        ),
    ),
    (
        "deepseek_v3",
        (
            f"type: DeepseekV3Config, {_OWN}, max_position_embeddings: 64, extend_method: None,"
            " q_lora_rank: 16, kv_lora_rank: 8, qk_rope_head_dim: 8, qk_nope_head_dim: 8,"
            " v_head_dim: 8, moe_config: {expert_num: 4, num_experts_chosen: 2,"
            " shared_expert_num: 1, moe_intermediate_size: 16, first_k_dense_replace: 1,"
            " n_group: 2, topk_group: 1,"
            " topk_method: noaux_tc, use_gating_sigmoid: true, routed_scaling_factor: 2.5,"
            " use_gmm: true}"
        ),
    ),
    (
        "gpt2",
        (
            "type: GPT2Config, hidden_size: 32, num_layers: 2, num_heads: 4, vocab_size: 300,"
            " seq_length: 64, hidden_dropout_rate: 0.0, attention_dropout_rate: 0.0,"
            " embedding_dropout_prob: 0.0"
        ),
    ),
    (
        "bloom",
        (
            "type: BloomConfig, hidden_size: 32, num_layers: 2, num_heads: 4, vocab_size: 300,"
            " hidden_dropout_rate: 0.0, attention_dropout_rate: 0.0"
        ),
    ),
    (
        "bert",
        (
            "type: BertConfig, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,"
            " vocab_size: 300, intermediate_size: 48, max_position_embeddings: 64, num_labels: 3,"
            " hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, dropout_prob: 0.0"
        ),
    ),
    (
        "vit",
        (
            "type: ViTConfig, image_size: 16, patch_size: 4, hidden_size: 32, num_hidden_layers: 2,"
            " num_attention_heads: 4, intermediate_size: 48, layer_norm_eps: 1.0e-6,"
            " num_classes: 3, use_mean_pooling: false, drop_path_rate: 0.0"
        ),
    ),
]
"""Name of a network written by hand, and the keys of its MindFormers file."""


@pytest.mark.parametrize(("name", "text"), MODELS, ids=[name for name, _ in MODELS])
@pytest.mark.fast_sample(1)
def test_the_first_loss(name, text):
    """With the same seed, both networks have the same weights and the same first loss."""
    classifiers = {
        "bert": (AutoModelForSequenceClassification, "sequence_classification"),
        "vit": (AutoModelForImageClassification, "image_classification"),
    }
    auto_class, task = classifiers.get(name, (AutoModelForCausalLM, "causal_lm"))
    model = converted(f"{{{text}}}", task)
    torch.manual_seed(0)
    expected = BY_HAND[name]()
    torch.manual_seed(0)
    network = auto_class.from_config(AutoConfig.for_model(**model.config))

    # The norm of the class token is an accepted loss: MindFormers has none.
    assert [loss.name for loss in model.losses] == ["architecture"] * (name == "vit")
    assert [name for name, _ in network.named_parameters()] == [
        name for name, _ in expected.named_parameters()
    ]
    assert all(map(torch.equal, network.parameters(), expected.parameters()))
    assert first_loss(network) == first_loss(expected)
