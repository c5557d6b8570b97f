"""`MFTrainer` trains a model that transformers has distributed as one process trains the whole."""

import pytest
import torch

from support.layouts.page import Pools
from support.layouts.trainers import train_as_mftrainer, train_as_trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks", "data_ranks"),
    [
        ("transformers' tensor parallelism: `tp_size=2`", 2, 1),
        ("transformers' `fsdp_size=2`", 2, 2),
        ("transformers' `tp_size=2`, `fsdp_size=2`", 4, 2),
        ("transformers' experts: `ep_size=2`, `tp_size=2`", 2, 1),
        ("transformers' experts: `ep_size=2`, `fsdp_size=2`", 2, 2),
    ],
)
def test_losses_norms_and_weights_are_those_of_the_trainer_in_one_process(
    tmp_path, name, num_ranks, data_ranks
):
    """The loss scale is out of all results, also where gradients lie on several meshes."""
    expected = train_as_trainer(tmp_path / "one", name)

    with Pools() as pools:
        ranks = pools.run(num_ranks, train_as_mftrainer, str(tmp_path), name, data_ranks)

    for rank in ranks:
        torch.testing.assert_close(rank["log"], expected["log"], rtol=1e-6, atol=0)
        for key, weight in expected["weights"].items():
            torch.testing.assert_close(rank["weights"][key], weight, rtol=0, atol=1e-6)
