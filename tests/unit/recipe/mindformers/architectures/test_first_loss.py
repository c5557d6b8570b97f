"""The first loss of a converted network is that of the network written by hand."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from support.model_config import converted

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.01,
    "max_position_embeddings": 64,
}
_OWN = (
    "hidden_size: 32, num_layers: 2, num_heads: 4, n_kv_heads: 2, vocab_size: 64,"
    " intermediate_size: 48, seq_length: 64"
)
_CORE = (
    "hidden_size: 32, num_layers: 2, num_heads: 4, n_kv_heads: 2, head_dim: 16, vocab_size: 64,"
    " ffn_hidden_size: 48, rms_norm_eps: 1.0e-5, init_method_std: 0.01, max_position_embeddings: 64"
)
_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def llama31():
    """Return Llama 3.1."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, **_SCALING}
    return LlamaForCausalLM(LlamaConfig(**_LLAMA, rope_parameters=rope))


def qwen2():
    """Return Qwen 2, with a bias of queries, keys and values."""
    return Qwen2ForCausalLM(Qwen2Config(**_LLAMA))


def qwen3():
    """Return Qwen 3, with norms of queries and keys."""
    return Qwen3ForCausalLM(Qwen3Config(**_LLAMA, head_dim=16))


def qwen3_moe():
    """Return the mixture of experts of Qwen 3."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_LLAMA, **experts, head_dim=16))


def mixtral():
    """Return Mixtral."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": rope}
    return MixtralForCausalLM(MixtralConfig(**_LLAMA, **experts))


def glm():
    """Return GLM 4 as ChatGLM's files describe it."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    sizes = {**_LLAMA, "head_dim": 8, "attention_bias": True, "pad_token_id": 0}
    return GlmForCausalLM(GlmConfig(**sizes, rope_parameters=rope))


def deepseek_v3():
    """Return DeepSeek V3."""
    config = DeepseekV3Config(
        **{**_LLAMA, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "initializer_range": 0.006},
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    return DeepseekV3ForCausalLM(config)


def gpt2():
    """Return GPT-2 with MindSpore's GELU, without dropout."""
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    activation = "gelu_pytorch_tanh"
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, activation_function=activation))


def bloom():
    """Return Bloom without dropout."""
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))


def bert():
    """Return BERT with MindFormers' GELU and eps, without dropout."""
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_act="gelu_pytorch_tanh",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout=0.0,
        layer_norm_eps=1e-5,
        max_position_embeddings=64,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def vit():
    """Return ViT."""
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
        num_labels=3,
    )
    return ViTForImageClassification(config)


MODELS = [
    (
        llama31,
        (
            f"type: LlamaConfig, {_OWN}, theta: 500.0, extend_method: LLAMA3, scaling_factor:"
            " {factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0,"
            " original_max_position_embeddings: 16}"
        ),
    ),
    (qwen2, f"type: LlamaConfig, {_OWN}, qkv_has_bias: true"),
    (qwen3, f"model_type: qwen3, {_CORE}"),
    (
        qwen3_moe,
        (
            f"model_type: qwen3_moe, {_CORE}, num_moe_experts: 4, moe_router_topk: 2,"
            " moe_ffn_hidden_size: 16"
        ),
    ),
    (
        mixtral,
        (
            f"type: LlamaConfig, {_OWN}, moe_config: {{expert_num: 4, num_experts_chosen: 2,"
            " use_gmm: true}"
        ),
    ),
    (
        glm,
        (
            "type: ChatGLM2Config, hidden_size: 32, num_layers: 2, num_attention_heads: 4,"
            " multi_query_group_num: 2, kv_channels: 8, padded_vocab_size: 64, ffn_hidden_size: 48,"
            " seq_length: 64, rope_ratio: 500"
        ),
    ),
    (
        deepseek_v3,
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
        gpt2,
        (
            "type: GPT2Config, hidden_size: 32, num_layers: 2, num_heads: 4, vocab_size: 64,"
            " seq_length: 64, hidden_dropout_rate: 0.0, attention_dropout_rate: 0.0,"
            " embedding_dropout_prob: 0.0"
        ),
    ),
    (
        bloom,
        (
            "type: BloomConfig, hidden_size: 32, num_layers: 2, num_heads: 4, vocab_size: 64,"
            " hidden_dropout_rate: 0.0, attention_dropout_rate: 0.0"
        ),
    ),
    (
        bert,
        (
            "type: BertConfig, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,"
            " vocab_size: 64, intermediate_size: 48, max_position_embeddings: 64, num_labels: 3,"
            " hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, dropout_prob: 0.0"
        ),
    ),
    (
        vit,
        (
            "type: ViTConfig, image_size: 16, patch_size: 4, hidden_size: 32, num_hidden_layers: 2,"
            " num_attention_heads: 4, intermediate_size: 48, layer_norm_eps: 1.0e-6,"
            " num_classes: 3, use_mean_pooling: false, drop_path_rate: 0.0"
        ),
    ),
]
"""A network written by hand, and the keys of its MindFormers file."""


def first_loss(network):
    """Return the loss of a first batch, in training mode."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([0, 2])
    network.train()
    if isinstance(network, ViTForImageClassification):
        images = torch.rand(2, 3, 16, 16, generator=generator)
        return network(pixel_values=images, labels=labels).loss.item()
    tokens = torch.randint(64, (2, 24), generator=generator)
    is_classifier = isinstance(network, BertForSequenceClassification)
    return network(input_ids=tokens, labels=labels if is_classifier else tokens).loss.item()


@pytest.mark.parametrize(("by_hand", "text"), MODELS, ids=[build.__name__ for build, _ in MODELS])
@pytest.mark.fast_sample(1)
def test_the_first_loss(by_hand, text):
    """With the same seed, both networks have the same weights and the same first loss."""
    classifiers = {
        bert: (AutoModelForSequenceClassification, "sequence_classification"),
        vit: (AutoModelForImageClassification, "image_classification"),
    }
    auto_class, task = classifiers.get(by_hand, (AutoModelForCausalLM, "causal_lm"))
    model = converted(f"{{{text}}}", task)
    torch.manual_seed(0)
    expected = by_hand()
    torch.manual_seed(0)
    network = auto_class.from_config(AutoConfig.for_model(**model.config))

    assert (model.losses, model.unknown) == ([], [])
    assert [name for name, _ in network.named_parameters()] == [
        name for name, _ in expected.named_parameters()
    ]
    assert all(map(torch.equal, network.parameters(), expected.parameters()))
    assert first_loss(network) == first_loss(expected)
