"""An optimizer's closure."""

import torch

from mfwrap.optimizers.closure import evaluated


def test_a_closure_computes_gradients():
    """A closure runs with gradients enabled, also where an optimizer has disabled them."""
    weight = torch.ones((), requires_grad=True)
    with torch.no_grad():
        loss = evaluated(lambda: 3 * weight)

    assert loss.requires_grad
    assert evaluated(None) is None
