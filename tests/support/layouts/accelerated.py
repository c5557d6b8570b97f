"""Networks that accelerate distributes by its ``ParallelismConfig``."""

from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import distributed, nn
from torch.optim import Optimizer

from mfwrap import MFTrainOneStepCell
from support.attached_runs import new_accelerator
from support.fsdp.accelerated import enable_sharding, reset_accelerate_after
from support.layouts import networks
from support.layouts.layout import Layout
from support.layouts.pretrained import Pretrained

__all__ = ["Accelerated", "AcceleratedPretrained", "prepare_tensor_parallel_shards"]


def _accelerator(sizes: dict[str, int], layer: str) -> Accelerator:
    """Return an accelerator that shards on a CPU. accelerate itself does this on GPUs only."""
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        accelerator = new_accelerator(parallelism_config=ParallelismConfig(**sizes))
    if sizes.get("dp_shard_size", 1) > 1:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[layer],
            cpu_ram_efficient_loading=False,
        )
        enable_sharding(accelerator, plugin)
    return accelerator


class Accelerated(Layout):
    """A network of torch alone that ``accelerator.prepare`` distributes.

    Args:
        name: First cell of the row.
        ranks: Number of ranks that train.
        replicates: Whether to replicate over two groups of ranks.
        resumes_on: Numbers of ranks that resume the checkpoint of `ranks`, one after the other.
    """

    def __init__(
        self, name: str, ranks: int, *, replicates: bool, resumes_on: tuple[int, ...]
    ) -> None:
        super().__init__(name, ranks, self._prepare, resumes_on=resumes_on)
        self._replicates = replicates

    def _prepare(self, whole: nn.Module) -> nn.Module:
        world = distributed.get_world_size()
        sizes = {"dp_shard_size": world}
        if self._replicates and world > 2:
            sizes = {"dp_replicate_size": 2, "dp_shard_size": world // 2}
        self._accelerator = _accelerator(sizes, "Block")
        network: nn.Module
        network, self._optimizer = self._accelerator.prepare(whole, super().optimizer(whole))
        return network

    def cell(self, network: Any, **settings: Any) -> MFTrainOneStepCell:
        """Return the cell that trains this rank's part of the network."""
        optimizer: Optimizer = self._optimizer
        return MFTrainOneStepCell(
            network, optimizer, use_clip_grad=True, accelerator=self._accelerator, **settings
        )


class AcceleratedPretrained(Pretrained):
    """A model that transformers has distributed, prepared by accelerate."""

    def _load(self, whole: nn.Module) -> nn.Module:
        loaded = super()._load(whole)
        world = distributed.get_world_size()
        if world == 1:
            return loaded
        self._accelerator = _accelerator({"tp_size": world}, "LlamaDecoderLayer")
        prepared: nn.Module = self._accelerator.prepare(loaded)
        return prepared


@reset_accelerate_after()
def prepare_tensor_parallel_shards(rank: int) -> str:
    """Try to shard a network with tensor parallelism by accelerate; return the error."""
    del rank
    world = distributed.get_world_size()
    accelerator = _accelerator({"dp_shard_size": world // 2, "tp_size": 2}, "Block")
    mesh = accelerator.torch_device_mesh["tp"]
    network = networks.tensor_parallel(networks.Network(), mesh)
    try:
        accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
    except ImportError as error:
        return str(error)
    return "it runs"
