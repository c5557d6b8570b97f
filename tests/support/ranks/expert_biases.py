"""Programs that each rank runs to balance experts by their biases."""

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from mfwrap import MFTrainOneStepCell
from mfwrap.optimizers import ExpertBias
from mfwrap.tensors.experts import expert_biases
from support.experts import deepseek, record_logits, small_experts, tokens

__all__ = ["NUM_UPDATES", "RATE", "balance_deepseek", "balance_sharded", "balance_with_idle_rank"]

NUM_UPDATES, RATE = 20, 0.01


def balance_deepseek(rank: int, layout: str) -> tuple[dict[str, list[Tensor]], list[list[Tensor]]]:
    """Train updates of two micro-batches.

    Args:
        rank: Rank, which gets its own tokens.
        layout: ``"ddp"`` or ``"fsdp"``.

    Returns:
        By the names of the routers, their logits in each micro-batch; and the biases of all
        routers after each update.
    """
    network = deepseek(num_layers=3)
    logits = record_logits(network)
    cell = _cell(network, layout, accumulation=2)
    biases: list[list[Tensor]] = []
    for update in range(NUM_UPDATES):
        batch = tokens(2 * update + rank)
        cell(input_ids=batch, labels=batch)
        biases.append([place.tensor().clone() for place in expert_biases(network).values()])
    return logits, biases


def balance_sharded(rank: int, layout: str, architecture: str) -> list[Tensor]:
    """Train three updates of a network, and return its biases, put together from their shards."""
    network = small_experts(architecture)
    cell = _cell(network, layout)
    for update in range(3):
        batch = tokens(2 * update + rank)
        cell(input_ids=batch, labels=batch)
    found = [place.tensor() for place in expert_biases(network).values()]
    assert all(isinstance(bias, nn.Parameter) for bias in found)
    return [bias.full_tensor() if layout == "fsdp" else bias.detach() for bias in found]  # type: ignore[operator]  # (a DTensor)


def balance_with_idle_rank(rank: int) -> list[Tensor]:
    """Train one update, whose only tokens are those of rank 1, and return the biases."""
    network = small_experts("Glm4Moe")
    optimizer = SGD(network.parameters(), lr=0.0)
    ExpertBias(optimizer, network, RATE)
    if rank == 1:
        batch = tokens(0)
        network(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    return [place.tensor() for place in expert_biases(network).values()]


def _cell(network: nn.Module, layout: str, accumulation: int = 1) -> MFTrainOneStepCell:
    wrapped = network
    if layout == "fsdp":
        for layer in network.model.layers:  # type: ignore[union-attr]  # (transformers' models have it)
            fully_shard(layer)
        fully_shard(network)
    else:
        wrapped = DistributedDataParallel(network, find_unused_parameters=True)
    optimizer = AdamW(network.parameters(), lr=0.01, fused=True)
    ExpertBias(optimizer, network, RATE)
    return MFTrainOneStepCell(wrapped, optimizer, gradient_accumulation_steps=accumulation)
