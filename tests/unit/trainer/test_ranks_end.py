"""Local norms, losses and checkpoints of the Trainer on several ranks."""

import pytest
import torch

from support.ranks.trainer import save_on_own_disk, train_with_trainer


def test_in_the_trainer(two_ranks, tmp_path):
    """Local norms are those of each rank's own gradients, before compression and reduction."""
    results = two_ranks.run(train_with_trainer, str(tmp_path))

    for result in results:
        assert result["local_norms"].shape == (3, 4)
        torch.testing.assert_close(
            result["local_norms"].double(), result["expected"], rtol=1e-5, atol=0
        )
    assert not torch.allclose(*(result["local_norms"] for result in results), rtol=0.01)


@pytest.mark.parametrize("each_node", [False, True])
def test_nodes_with_disks_of_their_own(two_ranks, tmp_path, each_node):
    """Each node removes what a killed run has left; ``save_on_each_node`` gives each a model.

    On several ranks, all micro-batches weigh equally in the loss, whatever their targets.
    """
    first, second = two_ranks.run(save_on_own_disk, str(tmp_path), each_node)

    for files in (first["files"], second["files"]):
        assert "left_over" not in files
    assert "model.safetensors" in first["files"]
    assert ("model.safetensors" in second["files"]) == each_node
    assert [first["share"], second["share"]] == [0.5, 0.5]
