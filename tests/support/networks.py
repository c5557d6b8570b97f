"""Small networks of transformers with hyperparameters written by hand."""

import torch
from transformers import (
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

__all__ = ["BY_HAND", "enlarge", "first_loss"]

_LLAMA = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.01,
    "max_position_embeddings": 64,
}
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_act": "gelu_pytorch_tanh",
    "num_labels": 3,
}
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
    sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    activation = "gelu_pytorch_tanh"
    sizes |= {"initializer_range": 0.01}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, activation_function=activation))


def bloom():
    """Return Bloom without dropout."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    return BloomForCausalLM(BloomConfig(**sizes, initializer_range=0.01))


def bert():
    """Return BERT with MindFormers' GELU and eps, without dropout."""
    config = BertConfig(
        vocab_size=300,
        **_ENCODER,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout=0.0,
        layer_norm_eps=1e-5,
        max_position_embeddings=64,
    )
    return BertForSequenceClassification(config)


def vit():
    """Return ViT."""
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        **_ENCODER,
        layer_norm_eps=1e-6,
    )
    return ViTForImageClassification(config)


BY_HAND = {
    "llama31": llama31,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "glm": glm,
    "deepseek_v3": deepseek_v3,
    "gpt2": gpt2,
    "bloom": bloom,
    "bert": bert,
    "vit": vit,
}
"""Functions that build a network, by its name."""


def enlarge(network):
    """Multiply all matrices, so that each hyperparameter of the network shows in its loss.

    With the small weights of a new network, attention is almost uniform: its rotary embeddings
    change the loss by less than rounding errors do.
    """
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(20 if weight.dim() > 1 else 1)


def first_loss(network):
    """Return the loss of a first batch, in training mode, with enlarged weights."""
    enlarge(network)
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([0, 2])
    network.train()
    if isinstance(network, ViTForImageClassification):
        images = torch.rand(2, 3, 16, 16, generator=generator)
        return network(pixel_values=images, labels=labels).loss.item()
    tokens = torch.randint(64, (2, 24), generator=generator)
    is_classifier = isinstance(network, BertForSequenceClassification)
    return network(input_ids=tokens, labels=labels if is_classifier else tokens).loss.item()
