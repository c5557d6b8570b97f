"""Weights that have changed are blamed where no ordinary update explains it."""

import pytest

from support.cause_evidence import HIGH_LOSS, NAMES, NAN, cause, state, trace


def test_weights_that_change_between_steps():
    """The weights are named, and a rise of the loss in the same step is explained."""
    found = cause(steps=trace({**HIGH_LOSS, "num_changed": 2}), rank={"changed": NAMES[1:]})
    assert (found.name, found.tensors, found.where) == ("weight_changed", NAMES[1:], "weight")


def test_a_weight_that_has_grown_without_an_update():
    """One weight is named; if most have risen, or an update explains it, it is not."""
    one = {"states": (state("weight", "h.0.weight", 900.0),)}
    most = {"states": tuple(state("weight", str(n), 900.0) for n in range(6))}
    assert cause(rank=one).name == "weight_changed"
    assert cause(rank=one).tensors == ("h.0.weight",)
    assert cause(rank=most).name != "weight_changed"
    assert cause(rank={**one, "driven": ("h.0.weight",)}).name != "weight_changed"
    assert cause(steps=trace({"num_moved": 3}, HIGH_LOSS), rank=one).name != "weight_changed"
    far = trace({"update": 12.0}, HIGH_LOSS)
    assert cause(steps=far, rank=one).name != "weight_changed"
    assert cause(steps=far, rank={**one, "changed": NAMES}).name == "weight_changed"
    assert cause("state_spike", trace({"update": 6.0}, {}, {}, {}), rank=one).name == "unknown"


def test_only_a_change_outside_of_the_updates_may_be_the_memory():
    """An update may write any number that is finite or not."""
    grown = cause(rank={"states": (state("weight", "h.0.weight", 900.0),)})
    outside = cause(steps=trace({"num_changed": 1}), rank={"changed": NAMES[1:2]})
    assert grown.name == outside.name == "weight_changed"
    assert "memory" not in grown.suggestion
    assert "memory" in outside.suggestion


def test_weights_that_have_changed_a_few_steps_before():
    """They explain what follows, and the suggestion names the step."""
    found = cause("zero_gradient", rank={"changed_before": (12, NAMES)})
    assert (found.name, found.tensors) == ("weight_changed", NAMES)
    assert "2 other weights changed between the updates of steps 11 and 12" in found.explanation
    assert "from before step 12;" in found.suggestion


def test_a_weight_that_became_non_finite():
    """Nothing is compared with NaN."""
    found = cause("loss_not_finite", rank={"states": (state("weight", "h.0.weight", NAN),)})
    assert found.name == "weight_changed"
    assert found.explanation.startswith("h.0.weight became non-finite, and no update of its")


def test_weights_that_no_update_has_ruined():
    """If most weights are non-finite after finite updates, something else has changed them."""
    ruined = tuple(state("weight", name, NAN) for name in NAMES)
    known = {"states": ruined, "num_weights": 3}
    found = cause("state_spike", rank=known)
    assert found.name == "weight_changed"
    assert "wte.weight and 2 other weights became non-finite, and the updates" in found.explanation
    assert cause("state_spike", rank={**known, "driven": NAMES[:1]}).name != "weight_changed"
    assert cause("state_spike", rank=known, is_first=False).name != "weight_changed"
    assert cause("loss_not_finite", rank=known).name != "weight_changed"


@pytest.mark.parametrize("follows", [True, False])
def test_a_weight_that_grows_by_what_its_gradients_ask_for(follows):
    """The update of SGD is the gradient times the rate, in elements that were sampled or not."""
    steps = trace({"learning_rate": 0.01}, {**HIGH_LOSS, "learning_rate": 0.01})
    last = (*steps[:-1], steps[-1]._replace(global_norm=4e4))
    grown = {"states": (state("weight", "h.0.weight", 400.0),), "follows_gradients": follows}
    large = {"states": (state("weight", "h.0.weight", 9e3),), "follows_gradients": follows}

    assert (cause(steps=last, rank=grown).name == "weight_changed") is not follows
    assert cause(steps=last, rank=large).name == "weight_changed"
