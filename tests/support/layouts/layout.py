"""A row of the table in docs/ranks.md: a way to distribute a network over ranks."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from mfwrap import MFTrainOneStepCell
from support.layouts import networks

__all__ = ["NUM_ROWS", "NUM_TOKENS", "Layout", "batches_of"]

NUM_ROWS = 12
"""Number of rows of the batch of all ranks together; 2, 3 and 4 ranks can share it evenly."""
NUM_TOKENS = 12


def batches_of(step: int) -> tuple[int, int]:
    """Return the numbers of the batches of a step, the mean of whose losses is minimized."""
    return 2 * step, 2 * step + 1


class Layout:
    """A way to distribute a network and its data over ranks: one row of the table.

    Override a method for a layout that needs another network, other data or another cell.

    Args:
        name: First cell of the row.
        ranks: Number of ranks that train.
        distribute: Returns a network distributed over all ranks of the process group; any number of
            ranks in `resumes_on`, too.
        ranks_per_share: Number of neighboring ranks that get the same rows of a batch; 0 for all.
        resumes_on: Numbers of ranks that resume the checkpoint of `ranks`, one after the other.
    """

    local_norms = "of the rank's loss"
    """What local norms belong to, if they are right."""

    def __init__(
        self,
        name: str,
        ranks: int,
        distribute: Callable[[nn.Module], nn.Module],
        *,
        ranks_per_share: int = 1,
        resumes_on: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.resumes_on = resumes_on
        self._distribute = distribute
        self._ranks_per_share = ranks_per_share

    def whole_network(self) -> nn.Module:
        """Return the network that one process trains, with the same weights in each call."""
        torch.manual_seed(0)
        return networks.Network()

    def network(self) -> Any:
        """Return what the cell trains on this rank; every rank must call this method."""
        return self._distribute(self.whole_network())

    def module(self, network: Any) -> nn.Module:
        """Return the module that holds the parameters of this rank."""
        return network

    def whole_batch(self, number: int) -> dict[str, Any]:
        """Return the keyword arguments of the network in one process."""
        generator = torch.Generator().manual_seed(number)
        shape = (2, NUM_ROWS, NUM_TOKENS, networks.WIDTH)
        inputs, targets = torch.randn(shape, generator=generator).unbind()
        return {"inputs": inputs, "targets": targets}

    def batch(self, number: int, rank: int) -> dict[str, Any]:
        """Return this rank's part of the batch."""
        world = distributed.get_world_size()
        together = min(self._ranks_per_share or world, world)

        def share(tensor: Tensor) -> Tensor:
            return tensor.chunk(math.ceil(world / together))[rank // together]

        return {name: share(tensor) for name, tensor in self.whole_batch(number).items()}

    def optimizer(self, network: nn.Module) -> Optimizer:
        """Return the optimizer of a network, distributed or not."""
        return torch.optim.AdamW(network.parameters(), lr=1e-3, eps=1e-4, fused=True)

    def cell(self, network: Any, **settings: Any) -> MFTrainOneStepCell:
        """Return the cell that trains this rank's part of the network."""
        optimizer = self.optimizer(self.module(network))
        return MFTrainOneStepCell(network, optimizer, use_clip_grad=True, **settings)

    def update(self, cell: MFTrainOneStepCell, batches: list[dict[str, Any]]) -> Any:
        """Do one update from this rank's parts of batches; return the output of the step."""
        return cell.step(batches)

    @contextlib.contextmanager
    def bad_loss(self, cell: MFTrainOneStepCell) -> Iterator[None]:
        """Make the loss of this rank NaN within the block."""

        def spoil(_module: nn.Module, _arguments: object, output: Any) -> Any:
            if isinstance(output, Tensor):
                return output * math.nan
            output.loss = output.loss * math.nan
            return output

        with cell.network.register_forward_hook(spoil):
            yield
