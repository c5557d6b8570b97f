"""Gradients that were seen, and what has happened to them since."""

import gc
import weakref

import pytest
import torch

from mfwrap.accelerate.window import SeenGradients


def gradients_of(count=3):
    """Return the gradients of `count` parameters after a backward."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]
    sum(parameter.sum() for parameter in parameters).backward()
    return [parameter.grad for parameter in parameters]


def test_gradients_that_nothing_has_touched_are_as_seen():
    """Reading a gradient does not change it."""
    gradients = gradients_of()
    seen = SeenGradients(gradients)
    torch._foreach_norm(gradients)

    assert seen
    assert seen.are(gradients)


@pytest.mark.parametrize("change", [lambda g: g.mul_(2), lambda g: g[:1].zero_()])
def test_a_write_is_noticed(change):
    """A write to a gradient, or to a view of it, is a change."""
    gradients = gradients_of()
    seen = SeenGradients(gradients)
    change(gradients[1])

    assert not seen.are(gradients)


def test_a_new_gradient_at_the_old_address_is_noticed():
    """A new tensor is not a gradient that was seen, whatever its address and version."""
    for _ in range(20):
        [gradient] = gradients_of(1)
        seen = SeenGradients([gradient])
        del gradient
        assert not seen.are(gradients_of(1))


def test_a_gradient_less_or_more_is_noticed():
    """Other gradients than those that were seen are a change."""
    gradients = gradients_of()
    seen = SeenGradients(gradients)

    assert not seen.are(gradients[:2])
    assert not seen.are([*gradients, *gradients_of(1)])
    assert not seen.are([gradients[1], gradients[0], gradients[2]])
    assert not SeenGradients().are(gradients)
    assert not SeenGradients()


def test_gradients_without_a_python_object_are_still_the_same():
    """A gradient that only its parameter holds is recognized when it is fetched again."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    sum(parameter.sum() for parameter in parameters).backward()
    seen = SeenGradients([parameter.grad for parameter in parameters])
    gc.collect()

    assert seen.are([parameter.grad for parameter in parameters])
    parameters[0].sum().backward()
    assert not seen.are([parameter.grad for parameter in parameters])


def test_no_gradient_is_kept_alive():
    """Released gradients are freed although they were seen."""
    gradients = gradients_of()
    alive = weakref.ref(gradients[0])
    seen = SeenGradients(gradients)
    gradients.clear()
    gc.collect()

    assert alive() is None
    assert not seen.are([])
