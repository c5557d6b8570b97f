"""Gradients that transformers reduces in backward can be accumulated."""

import torch
from torch import nn

from mfwrap.step.ranks.backward_reductions import _ReductionOfModule
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
        assert rank["number of forward hooks"] == 1


def test_a_parameter_that_returns_is_reduced_once():
    """Calls with other parameters, as of ``torch.func``, leave no second reduction behind."""

    def double(module, *_):
        for parameter in module.parameters():
            parameter.grad *= 2

    layer = nn.Linear(3, 1, bias=False)
    layer.register_forward_hook(_ReductionOfModule(double))
    inputs = torch.tensor([[1.0, 2.0, 3.0]])
    for _ in range(2):
        layer.zero_grad()
        layer(inputs).sum().backward()
        assert torch.equal(layer.weight.grad, 2 * inputs)
        others = {"weight": nn.Parameter(torch.ones(1, 3))}
        torch.func.functional_call(layer, others, (inputs,))
