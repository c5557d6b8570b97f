"""Tiny networks with experts, and what their routers choose, computed by hand."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

__all__ = [
    "SIZES",
    "WITH_BIAS",
    "bias_by_hand",
    "deepseek",
    "gpt_oss",
    "mixtral",
    "record_logits",
    "small_experts",
    "tokens",
]

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_EIGHT = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}


def mixtral() -> MixtralForCausalLM:
    """Return a small Mixtral of four experts, two for each token."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).train()


def gpt_oss() -> GptOssForCausalLM:
    """Return a small GPT-OSS of four experts."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8, rope_parameters=rope
    )
    model = GptOssForCausalLM(config).train()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.router.weight)
    return model


def deepseek(num_layers: int = 2, **settings: Any) -> DeepseekV3ForCausalLM:
    """Return a small DeepSeek with a dense first layer and grouped routing."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **{**SIZES, "num_hidden_layers": num_layers, **settings},
        moe_intermediate_size=8,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        **_LATENT,
    )
    return DeepseekV3ForCausalLM(config).train()


_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "Afmoe": {**_EIGHT, "num_experts": 8, "num_dense_layers": 1, "head_dim": 8},
    "Ernie4_5_Moe": {
        "moe_intermediate_size": 8,
        "moe_k": 2,
        "moe_layer_end_index": 1,
        "moe_layer_start_index": 0,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 1,
    },
    "Glm4Moe": {**_EIGHT, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "head_dim": 8},
    "Lfm2Moe": {
        **_EIGHT,
        "layer_types": ["full_attention", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 8,
        "use_expert_bias": True,
    },
    "LongcatFlash": {
        **_LATENT,
        "expert_ffn_hidden_size": 8,
        "ffn_hidden_size": 16,
        "head_dim": 4,
        "moe_topk": 2,
        "n_routed_experts": 8,
        "num_layers": 1,
        "zero_expert_num": 2,
    },
    "MiniMaxM2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
}

WITH_BIAS: Mapping[str, str] = {
    "Afmoe": "model.layers.1.mlp.expert_bias",
    "Ernie4_5_Moe": "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias",
    "Glm4Moe": "model.layers.1.mlp.gate.e_score_correction_bias",
    "Lfm2Moe": "model.layers.1.feed_forward.expert_bias",
    "MiniMaxM2": "model.layers.1.mlp.e_score_correction_bias",
}
"""Architectures of `small_experts`, and the name of the bias of their second layer."""


def small_experts(architecture: str) -> PreTrainedModel:
    """Return a small network of eight experts, two for each token."""
    if not hasattr(transformers, f"{architecture}Config"):
        pytest.skip(f"this transformers has no {architecture}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")
    network: Callable[[Any], PreTrainedModel] = getattr(transformers, f"{architecture}ForCausalLM")
    model = network(config(**{**SIZES, **_SETTINGS[architecture]}))
    for module in model.modules():
        if "Router" in type(module).__name__:
            for weight in module.parameters(recurse=False):
                torch.nn.init.normal_(weight)
    return model.train()


def tokens(seed: int, rows: int = 4) -> Tensor:
    """Return token ids of six columns."""
    return torch.randint(3, 32, (rows, 6), generator=torch.Generator().manual_seed(seed))


def record_logits(network: nn.Module) -> dict[str, list[Tensor]]:
    """Return lists that get the logits of each call of DeepSeek's routers, by their names."""
    found: dict[str, list[Tensor]] = {}
    for name, module in network.named_modules():
        if name.endswith("mlp.gate"):
            calls = found.setdefault(name, [])

            def keep(
                _: nn.Module,
                __: Any,
                output: Tensor | tuple[Tensor, ...],
                calls: list[Tensor] = calls,
            ) -> None:
                # Before transformers 5.17, a router returned nothing else.
                logits = output if isinstance(output, Tensor) else output[0]
                calls.append(logits.detach().double())

            module.register_forward_hook(keep)
    return found


def bias_by_hand(bias: Tensor, logits: Tensor, rate: float) -> Tensor:
    """Return DeepSeek's bias after an update, in float64, from the logits of all its tokens.

    The eight experts are two groups. A token goes to the group whose two best scores have the
    larger sum, and there to the two best experts.

    Args:
        bias: Bias before the update, shape ``(8,)``, float64.
        logits: Shape ``(tokens, 8)``, float64.
        rate: Rate of the update.
    """
    counts = [0.0] * 8
    for row in (1 / (1 + (-logits).exp()) + bias).tolist():
        halves = [sorted(range(start, start + 4), key=lambda e: -row[e]) for start in (0, 4)]
        best = max(halves, key=lambda half: row[half[0]] + row[half[1]])
        for expert in best[:2]:
            counts[expert] += 1
    mean = sum(counts) / 8
    moves = [rate if count < mean else -rate if count > mean else 0.0 for count in counts]
    return bias + torch.tensor(moves, dtype=torch.float64)
