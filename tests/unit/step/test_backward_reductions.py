"""Gradients that transformers reduces in backward can be accumulated."""

import torch

from support.layouts.reductions import accumulate
from support.versions import needs


@needs("transformers", "5.0", "ReplicatedWithGradAllReduce")
def test_each_backward_is_reduced_once(two_ranks):
    """Gradients of earlier backward passes are not added up again; other hooks stay."""
    for rank in two_ranks.run(accumulate):
        torch.testing.assert_close(rank["ours"], rank["expected"])
        # Since transformers 5.22, the forward of a copied module is that of the original.
        if rank["of a copy"] is not None:
            torch.testing.assert_close(rank["of a copy"], rank["expected"])
        assert rank["own hooks"] == ["own hook"] * 3
