"""A unit of ``fully_shard`` is read and changed in each version of torch.

The tests in tests/unit/step/test_fsdp*.py use these functions on several ranks.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mfwrap.compatibility.fully_shard import groups_of, reset_iteration
from mfwrap.compatibility.gradient_dtypes import set_gradient_dtype
from support.versions import needs

pytestmark = pytest.mark.usefixtures("_one_rank")

INPUTS = torch.arange(6.0).reshape(2, 3)


def sharded(dtype=torch.float32, **policy):
    """Return a linear layer that is sharded over one rank."""
    module = nn.Linear(3, 1, bias=False).to(dtype)
    mesh = init_device_mesh("cpu", (1,))
    return fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


def test_what_a_group_knows():
    """A group has the sharded parameters, the ranks, the divisor and the dtype of gradients."""
    module = sharded(param_dtype=torch.bfloat16)
    [group] = groups_of(module)

    assert group.parameters == [module.weight]
    assert group.mesh.size() == 1
    assert group.divisor is None
    module.set_gradient_divide_factor(3.0)
    assert group.divisor == 3.0
    assert group.compute_dtypes == {torch.bfloat16}


def test_a_module_whose_parameters_are_in_others_has_no_group():
    """Only modules with parameters of their own are a unit."""
    outer = nn.Sequential(sharded())
    fully_shard(outer, mesh=init_device_mesh("cpu", (1,)))

    assert groups_of(outer) == []
    assert len(groups_of(outer[0])) == 1


def test_gradients_are_whole_before_the_reduction():
    """They are sums over all backward passes since the last reduction."""
    module, seen = sharded(), []
    [group] = groups_of(module)
    reduce = group.reduction

    def read(*arguments):
        seen.append([group.is_reducing, [(p, g.clone()) for p, g in group.gradients()]])
        reduce(*arguments)

    group.reduction = read
    for reduces in (False, True):
        module.set_requires_gradient_sync(reduces)
        module(INPUTS).sum().backward()

    assert [is_reducing for is_reducing, _ in seen] == [False, True]
    [(parameter, gradient)] = seen[1][1]
    assert parameter is module.weight
    assert torch.equal(gradient, 2 * INPUTS.sum(0, keepdim=True))
    assert groups_of(module)[0].reduction is read


def test_gradients_that_were_not_reduced_can_be_discarded():
    """After that, a reduction has the gradients of later backward passes only."""
    module = sharded()
    [group] = groups_of(module)
    module.set_requires_gradient_sync(False)
    module(INPUTS).sum().backward()

    group.discard_gradients()
    module.set_requires_gradient_sync(True)
    module(INPUTS).sum().backward()

    assert torch.equal(module.weight.grad.full_tensor(), INPUTS.sum(0, keepdim=True))


def _loaded(module):
    module.load_state_dict(module.state_dict())


EVENTS = {
    "none": lambda _: None,
    "load_state_dict": _loaded,
    "to": lambda module: module.to("cpu"),
}


@needs("torch", "2.10", "Tensor.grad_dtype")
@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
@pytest.mark.parametrize("begins_on", [True, False])
def test_gradients_are_added_up_in_float32_while_it_is_on(begins_on, event):
    """256 + 1 is no number of bfloat16; the dtype can be changed between updates.

    Loading or moving weights between updates, while the gradients have the dtype of the weights,
    does not change the result.
    """
    module = sharded(torch.bfloat16)
    nn.init.ones_(module.weight)
    [group] = groups_of(module)
    policies, reduce, was_on = group.policies(), group.reduction, None

    def reduced(*arguments):
        if group.is_reducing and is_on:
            group.keep_float32()
        reduce(*arguments)

    group.reduction = reduced
    for is_on in (begins_on, begins_on, not begins_on, begins_on):
        dtype = torch.float32 if is_on else torch.bfloat16
        if is_on != was_on:
            group.reduce_in_float32(policies, on=is_on)
        was_on = is_on
        set_gradient_dtype(module.weight, dtype)
        for reduces, value in ((False, 256.0), (True, 1.0)):
            module.set_requires_gradient_sync(reduces)
            module(torch.full((1, 3), value, dtype=torch.bfloat16)).sum().backward()
        gradient = module.weight.grad.full_tensor()

        assert gradient.dtype == dtype
        assert (gradient == (257.0 if is_on else 256.0)).all()
        module.weight.grad = None
        set_gradient_dtype(module.weight, module.weight.dtype)
        event(module)


def test_an_error_outside_of_the_module_changes_nothing():
    """If only the loss fails, the module can go on in every version of torch."""
    module = sharded()
    module(INPUTS)

    assert reset_iteration(module)
    module(INPUTS).sum().backward()
    assert torch.equal(module.weight.grad.full_tensor(), INPUTS.sum(0, keepdim=True))


def test_after_an_error_a_module_can_go_on_or_says_so():
    """Where torch can reset a module, the next forward works."""
    module = sharded()
    module(INPUTS).sum().backward()
    module.weight.grad = None
    with pytest.raises(RuntimeError, match="shape"):
        module(torch.ones(2, 5))

    can_go_on = reset_iteration(module)

    assert can_go_on == hasattr(module, "reset_iter_state")
    if can_go_on:
        module(INPUTS).sum().backward()
        assert torch.equal(module.weight.grad.full_tensor(), INPUTS.sum(0, keepdim=True))
