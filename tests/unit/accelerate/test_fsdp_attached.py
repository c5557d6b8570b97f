"""With a sharded network, an attached step agrees with the training cell."""

import pytest
import torch

from support.fsdp.attached import train_attached, train_by_cell
from support.versions import needs


@needs("accelerate", "1.14", "it wraps networks that are prepared in DistributedDataParallel")
@pytest.mark.parametrize("way", ["folded", "in place"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_attached_loop_on_shards_does_what_the_cell_does(two_ranks, accumulation, way):
    """The loop's norms before clipping, local norms and weights equal those of the cell.

    The norms around the reduction are those of the local norms together and of the reduced
    gradients.
    """
    cells = two_ranks.run(train_by_cell, accumulation)
    loops = two_ranks.run(train_attached, accumulation, way)

    for ours, theirs in zip(loops, cells, strict=True):
        torch.testing.assert_close(ours["norms"], theirs["norms"], rtol=1e-6, atol=0)
        torch.testing.assert_close(ours["local norms"], theirs["local norms"], rtol=1e-6, atol=0)
        around = torch.stack((theirs["local norms"].norm(dim=1), theirs["norms"]), dim=1)
        torch.testing.assert_close(ours["reduction norms"], around, rtol=1e-5, atol=0)
        for actual, expected in zip(ours["weights"], theirs["weights"], strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert theirs["norms"].max() > 0.1
