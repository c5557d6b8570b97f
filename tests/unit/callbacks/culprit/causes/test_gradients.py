"""Gradients that are non-finite, zero or too large by themselves."""

from support.cause_evidence import NAMES, NAN, cause, trace


def test_gradients_that_are_not_finite_in_an_applied_update():
    """Nothing but the backward has made them, if the loss is finite."""
    steps = trace({"num_moved": 8})
    found = cause("gradient_not_finite", steps, global_norm=NAN)

    assert (found.name, found.is_in_layer) == ("gradient", False)
    assert "the loss is finite, the global norm of the gradients is not" in found.explanation
    ruined = {"buffers": ("bn.running_mean",)}
    assert cause("gradient_not_finite", steps, rank=ruined, global_norm=NAN).name == "gradient"
    skipped = trace({}, applied=False)
    assert cause("gradient_not_finite", skipped, global_norm=NAN).name == "unknown"


def test_a_dead_layer():
    """A layer is dead, or all of them."""
    one = cause("zero_gradient", rank={"dead": NAMES[:1]}, layer="wte")
    whole = cause("zero_gradient", rank={"dead": NAMES})
    assert one.name == whole.name == "dead_layer"
    # A global norm of zero is found at once.
    at_once = cause("vanishing_gradient", trace({}), global_norm=0.0)
    assert (one.is_in_layer, whole.is_in_layer, at_once.is_in_layer) == (True, False, False)
    assert at_once.name == "dead_layer"
    assert "all layers" in whole.explanation
    assert at_once.explanation == whole.explanation


def test_gradients_of_one_layer():
    """The layer's own backward is at fault if the loss has not risen."""
    calm = cause("spike", trace({"global_norm": 20.0}), layer="h.1")
    assert (calm.name, calm.is_in_layer) == ("gradient", True)
    assert cause("spike", layer="h.1").name == "data"


def test_the_gradient_of_one_weight():
    """If it alone has risen, its layer's backward has not."""
    alone = {"scores": (0.1, 0.2, 30.0), "norms": (1.0, 1.0, 100.0)}
    found = cause("spike", trace({"global_norm": 20.0}), layer="h.1", rank=alone)

    assert (found.name, found.tensors, found.where) == ("gradient", NAMES[2:], "gradient")
    assert "only the gradient of h.1.weight has risen" in found.explanation
