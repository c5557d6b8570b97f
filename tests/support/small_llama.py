"""A tiny Llama with bytes as its vocabulary, and batches of text for it."""

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from support.small_networks import IGNORED
from support.versions import needs

__all__ = ["byte_batch", "needs_stages", "small_llama", "split_for_generation"]

_TEXT = (
    "What drove the gradients mad? A scale too large by half, a norm that was not taken, a step "
    "that should have been left out. What brought them back? One flag, one factor, one reader. "
) * 8

needs_stages = needs("transformers", "5.16", "it splits no model into pipeline stages")
"""Mark of a test that calls `split_for_generation`."""


def small_llama() -> LlamaForCausalLM:
    """Return a Llama with two layers, hidden size 32 and the 256 bytes as its vocabulary."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def split_for_generation(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a model with the layers of the first of two of transformers' pipeline stages."""
    from transformers.distributed.pipeline_parallel import (  # noqa: PLC0415  (see `needs_stages`)
        apply_pipeline_parallelism,
    )

    # torch's fake process group has two ranks but needs one process.
    distributed.init_process_group("fake", rank=0, world_size=2, store=distributed.HashStore())
    try:
        return apply_pipeline_parallelism(model, init_device_mesh("cpu", (2,)))
    finally:
        distributed.destroy_process_group()


def byte_batch(lengths: list[int], *, start: int = 0) -> dict[str, Tensor]:
    """Return a batch of pieces of text as bytes, padded at the end to the longest piece.

    Args:
        lengths: Number of bytes of each piece.
        start: Position in the text at which the first piece begins.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels`` of shape ``(pieces, longest)``; the labels
        of padding are ignored by the loss.
    """
    ends = torch.tensor(lengths).cumsum(0) + start
    pieces = [
        torch.tensor(list(_TEXT[end - length : end].encode()))
        for end, length in zip(ends.tolist(), lengths, strict=True)
    ]
    mask = pad_sequence([torch.ones_like(piece) for piece in pieces], batch_first=True)
    return {
        "input_ids": pad_sequence(pieces, batch_first=True),
        "attention_mask": mask,
        "labels": pad_sequence(pieces, batch_first=True, padding_value=IGNORED),
    }
