"""Networks that transformers distributes while it loads them."""

import tempfile
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from support.layouts.layout import NUM_ROWS, NUM_TOKENS, Layout

__all__ = ["Pretrained"]

_VOCABULARY = 60
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "attn_implementation": "eager",
}


class Pretrained(Layout):
    """A language model that ``from_pretrained(distributed_config=...)`` distributes.

    Args:
        name: First cell of the row.
        ranks: Number of ranks that train.
        kind: What is distributed: ``"tp"``, ``"fsdp"``, ``"replicas"``, ``"tp and fsdp"``,
            ``"experts"`` or ``"tp and experts"``.
        resumes_on: Numbers of ranks that resume the checkpoint of `ranks`, one after the other.
    """

    def __init__(
        self, name: str, ranks: int, kind: str, *, resumes_on: tuple[int, ...] = ()
    ) -> None:
        together = {"tp": 0, "tp and experts": 0, "tp and fsdp": 2}.get(kind, 1)
        super().__init__(name, ranks, self._load, ranks_per_share=together, resumes_on=resumes_on)
        self._kind = kind

    def whole_network(self) -> PreTrainedModel:
        """Return a small Llama, or a small model with experts."""
        torch.manual_seed(0)
        if "experts" in self._kind:
            experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=8, **experts, **_SIZES))
        return LlamaForCausalLM(LlamaConfig(**_SIZES))

    def _load(self, whole: nn.Module) -> nn.Module:
        world = distributed.get_world_size()
        sizes = {
            "tp": {"tp_size": world},
            "fsdp": {"fsdp_size": world},
            "tp and fsdp": {"tp_size": min(2, world), "fsdp_size": max(1, world // 2)},
            "replicas": {
                "dp_replicate_size": min(2, world),
                "fsdp_size": max(1, world // 2),
            },
            "experts": {"fsdp_size": world, "ep_size": min(2, world)},
            "tp and experts": {"tp_size": world, "ep_size": world},
        }[self._kind]
        logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            # `save_pretrained` would write the weights on rank 0 only.
            whole.config.save_pretrained(folder)
            save_file(whole.state_dict(), f"{folder}/model.safetensors", metadata={"format": "pt"})
            loaded: nn.Module = type(whole).from_pretrained(
                folder, distributed_config=DistributedConfig(**sizes)
            )
        return loaded.train()

    def whole_batch(self, number: int) -> dict[str, Any]:
        """Return tokens, which are the labels, too."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, _VOCABULARY, (NUM_ROWS, NUM_TOKENS), generator=generator)
        return {"input_ids": tokens, "labels": tokens}
