"""Local norms of the Trainer on several ranks."""

import torch

from support.ranks.trainer import train_with_trainer


def test_in_the_trainer(two_ranks, tmp_path):
    """Local norms are those of each rank's own gradients, before compression and reduction."""
    results = two_ranks.run(train_with_trainer, str(tmp_path))

    for result in results:
        assert result["local_norms"].shape == (3, 4)
        torch.testing.assert_close(
            result["local_norms"].double(), result["expected"], rtol=1e-5, atol=0
        )
    assert not torch.allclose(*(result["local_norms"] for result in results), rtol=0.01)
