"""The state of the optimizer is blamed only where it, or its update, was measured."""

import math

import pytest

from mfwrap.callbacks.culprit.anomaly_log import StateNorm
from support.cause_evidence import HIGH_LOSS, NAMES, NAN, cause, state, trace


def test_an_epsilon_that_is_zero():
    """Adam divides by zero where weights have moved: in all layers, or in one."""
    why = "eps=1e-08 is zero in float16"
    names = [f"h.0.{number}" for number in range(6)]
    moved = {"states": tuple(state("weight", name, math.inf) for name in names)}
    found = cause("loss_not_finite", rank={**moved, "undivided": dict.fromkeys(names, why)})
    assert found.name == "optimizer_epsilon"
    assert why in found.explanation
    assert found.tensors == tuple(names)
    other = cause("loss_not_finite", rank={**moved, "undivided": {names[0]: why}})
    assert other.name != "optimizer_epsilon"


@pytest.mark.parametrize(
    ("kind", "rises", "tensors"),
    [
        ("exp_avg", (1e5, 1e5), NAMES[1:]),
        ("exp_avg", (math.inf, 10.0), NAMES[1:2]),
        # All moments may have fallen, some of them less than the limit.
        ("exp_avg_sq", (1e-8, 1e-8), ()),
    ],
)
def test_an_optimizer_state_that_has_changed(kind, rises, tensors):
    """An update that is too large, with a state that has changed, is the optimizer's."""
    states = tuple(state(kind, name, rise) for name, rise in zip(NAMES[1:], rises, strict=True))
    found = cause("update_spike", trace({"num_moved": 2}), rank={"states": states})
    of_all = cause("update_spike", trace({"num_moved": 8}), rank={"states": states})
    assert found.name == of_all.name == "optimizer_state"
    # Two states do not explain the updates of all weights.
    assert (found.tensors, of_all.tensors) == (tensors, ())
    assert f"norm of {kind} of h.0.weight" in found.explanation


def test_a_state_that_is_not_finite_is_the_cause_alone():
    """Also without a large update; not if the weight is non-finite itself."""
    ruined = (state("exp_avg_sq", "h.0.weight", math.inf),)
    found = cause("loss_spike", rank={"states": ruined})
    assert (found.name, found.tensors) == ("optimizer_state", ("h.0.weight",))
    both = (*ruined, state("weight", "h.0.weight", math.inf))
    assert cause("loss_spike", rank={"states": both}).name != "optimizer_state"


def test_a_weight_that_has_moved_is_not_explained_by_the_state_of_another():
    """What is listed of other weights may be a consequence."""
    other = {"states": (state("exp_avg", "h.1.weight", 50.0),), "moved": ("h.0.weight",)}
    found = cause("update_spike", trace({"num_moved": 1}), rank=other, knows_optimizer=True)
    assert found.name == "unknown"
    assert "gradients and learning rate were ordinary, and so is the state" in found.explanation
    zero = StateNorm(kind="exp_avg", name="h.0.weight", norm=1.0, norm_before=0.0, rise=9.0)
    first = {"states": (zero,), "moved": ("h.0.weight",)}
    assert cause("update_spike", trace({"num_moved": 1}), rank=first).name == "unknown"


def test_all_updates_that_are_far_above_the_usual_are_the_optimizers():
    """Also if no single weight's update is an anomaly yet, early in a training."""
    large = {"update_ratio": 0.02}
    before = tuple(each._replace(step=each.step - 4) for each in trace({}))
    found = cause("spike", before + trace(large, {"global_norm": 20.0}))
    assert found.name == "optimizer_state"
    assert "20 times the usual one" in found.explanation
    by_rate = before + trace({**large, "learning_rate": 0.02}, HIGH_LOSS)
    assert cause("spike", by_rate).name == "data"


def test_updates_that_have_risen_with_the_gradients_are_not_the_optimizers():
    """Of SGD, for example, also where no norm counts as a spike, because norms vary as much."""
    steps = trace({}, {}, {}, {"update_ratio": 0.02}, HIGH_LOSS)
    norms = (1.0, 1.2, 0.9, 1.1, 15.0, 15.0)
    followed = tuple(
        each._replace(global_norm=norm)
        for each, norm in zip(steps, norms[-len(steps) :], strict=True)
    )
    constant = tuple(each._replace(global_norm=1.0) for each in steps)
    assert cause(steps=constant).name == "optimizer_state"
    assert cause(steps=followed).name != "optimizer_state"


def test_the_state_of_another_weight_explains_nothing():
    """A weight that has risen is not overruled by a moment elsewhere."""
    moment = state("exp_avg", "h.0.weight", 50.0)
    bias = state("weight", "wte.weight", 250.0)
    steps = trace({"num_moved": 1}, HIGH_LOSS)
    found = cause(steps=steps, rank={"states": (bias, moment), "earlier_losses": ()})
    assert found.name == "unknown"
    assert "too large for 1 weight" in found.explanation
    of_bias = state("exp_avg", "wte.weight", 50.0)
    assert cause(steps=steps, rank={"states": (bias, of_bias)}).tensors == ("wte.weight",)


def test_an_update_that_adam_cannot_make():
    """Its state was changed before the update, whatever it is afterwards."""
    steps = trace({"num_moved": 1})
    known = {"moved": ("wte.weight",)}
    found = cause("update_spike", steps, rank={**known, "impossible": {"wte.weight": 500.0}})
    assert (found.name, found.tensors) == ("optimizer_state", ("wte.weight",))
    assert "500 times the rate, which no moments of Adam give" in found.explanation
    assert cause("update_spike", steps, rank=known).name == "unknown"


def test_large_updates_after_a_spike_of_the_gradients_are_ordinary():
    """The gradients asked for them."""
    found = cause(steps=trace({"num_moved": 8, "global_norm": 20.0}, HIGH_LOSS))
    assert found.name != "optimizer_state"


def test_a_lone_update_that_is_too_large():
    """Its gradient may explain it; without a change of the optimizer's state nothing is blamed."""
    moved = {"moved": ("h.0.weight",)}
    steps = trace({"num_moved": 1})
    found = cause("update_spike", steps, rank=moved, knows_optimizer=True)
    assert found.name == "unknown"
    assert "too large for 1 weight" in found.explanation
    risen = cause("update_spike", steps, rank={**moved, "norms": (1.0, 9.0, 1.0)})
    assert (risen.name, risen.explanation) == ("unknown", "")
    # Of most weights, only the state of the optimizer is left.
    all_far = trace({}, {}, {}, {"num_moved": 1, "update_ratio": 0.1})
    found = cause("update_spike", all_far, rank=moved, knows_optimizer=True)
    assert (found.name, found.tensors) == ("optimizer_state", ())


def test_an_update_of_gradients_that_nobody_has_measured():
    """The state of the optimizer may be ruined by them."""
    ruined = tuple(state(kind, "wte.weight", NAN) for kind in ("weight", "exp_avg"))
    known = {"states": ruined, "num_weights": 1, "names": (), "norms": (), "usual_norms": ()}
    found = cause("update_spike", trace({"num_moved": 1}), rank=known)

    assert found.name == "unknown"
    assert "gradients and" not in found.explanation
    assert "either the gradients" in found.explanation


def test_a_state_that_has_ruined_its_weight():
    """Where loss and gradients are finite, they have not ruined the state."""
    states = (state("weight", "wte.weight", NAN), state("square_avg", "wte.weight", NAN))
    found = cause("state_spike", trace({}), rank={"states": states}, global_norm=1.0)

    assert (found.name, found.tensors) == ("optimizer_state", ("wte.weight",))
    unknown = cause("state_spike", trace({}), rank={"states": states})
    assert unknown.name != "optimizer_state"


def test_a_state_that_no_gradient_has_reached():
    """The update was skipped, so that the non-finite state is older than these gradients."""
    states = (state("weight", "wte.weight", NAN), state("square_avg", "wte.weight", math.inf))
    skipped = cause("loss_not_finite", trace({}, applied=False), rank={"states": states})
    applied = cause("loss_not_finite", trace({}), rank={"states": states})

    assert (skipped.name, skipped.tensors) == ("optimizer_state", ("wte.weight",))
    assert applied.name != "optimizer_state"


def test_second_moments_that_have_fallen_ruin_no_loss():
    """They make updates too large, which is another kind."""
    fallen = {"states": (state("exp_avg_sq", "wte.weight", 1e-6),)}
    assert cause("state_spike", rank=fallen).name == "optimizer_state"
    assert cause("loss_not_finite", rank=fallen).name != "optimizer_state"


def test_an_update_of_few_weights_whose_gradients_are_unknown():
    """The global norm says little of one weight."""
    moved = {"moved": ("wte.weight",)}
    steps = trace({}, {}, {}, {"num_moved": 1, "update_ratio": 0.1})
    alone = {**moved, "names": (), "norms": (), "usual_norms": (), "scores": ()}

    assert cause("update_spike", steps, rank=moved).name == "optimizer_state"
    assert cause("update_spike", steps, rank=alone, global_norm=1.0).name == "unknown"
