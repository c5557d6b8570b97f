"""Each cause is chosen from its evidence, and evidence of several causes names the first."""

import dataclasses
import math

import pytest

from mfwrap.callbacks.culprit.anomaly_log import StateNorm
from mfwrap.callbacks.culprit.causes.evidence import Cause
from mfwrap.callbacks.culprit.judges.rates import RateRise
from mfwrap.callbacks.culprit.judges.settings import SettingChange
from mfwrap.callbacks.culprit.replay.difference import Difference
from mfwrap.callbacks.culprit.replay.replay import Origin
from mfwrap.callbacks.culprit.replay.verdict import Verdict
from support.cause_evidence import HIGH_LOSS, NAMES, NAN, RANK, cause, state, trace


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


def test_a_later_step_of_an_episode_is_explained_by_what_was_measured():
    """What speaks against bad data is asked at the first step alone."""
    assert cause().name == "data"
    assert cause(is_first=False).name == "unknown"
    jump = trace({"rate_rise": RateRise(0.001, 0.009, 1)}, HIGH_LOSS)
    assert cause(steps=jump, is_first=False).name == "learning_rate"


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


@pytest.mark.parametrize(
    ("others", "what"), [((), "of h.0.weight by"), (NAMES[2:], "of h.0.weight and 1 other weights")]
)
def test_a_hook_that_changes_gradients(others, what):
    """All of the weights are the place, so that those of several layers are in none."""
    found = cause(
        "spike", rank={"difference": Difference("gradient", NAMES[1], 9.0, others, by_hook=True)}
    )
    assert (found.name, found.tensors, found.where) == ("gradient", (NAMES[1], *others), "gradient")
    assert f"a hook has changed the gradient {what}" in found.explanation


def test_a_setting_that_has_changed():
    """It explains what a comparison of steps would explain otherwise."""
    changes = tuple(SettingChange(f"`{name}` of drop", 0.1, 0.9, 12) for name in ("p", "q"))
    found = cause(rank={"settings": changes})
    assert found.name == "setting"
    assert "`p` of drop changed from 0.1 to 0.9 in step 12, and 1 more" in found.explanation


def test_all_updates_that_are_far_above_the_usual_are_the_optimizers():
    """Also if no single weight's update is an anomaly yet, early in a training."""
    large = {"update_ratio": 0.02}
    before = tuple(each._replace(step=each.step - 4) for each in trace({}))
    found = cause("spike", before + trace(large, {"global_norm": 20.0}))
    assert found.name == "optimizer_state"
    assert "20 times the usual one" in found.explanation
    by_rate = before + trace({**large, "learning_rate": 0.02}, HIGH_LOSS)
    assert cause("spike", by_rate).name == "data"


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


def test_running_statistics():
    """Non-finite statistics are ruined; a step that only shifts them had an unusual batch."""
    nan = {"buffers": ("bn.running_mean",)}
    risen = {"states": (state("buffer", "bn.running_var", 1e6),)}
    by_input = cause("loss_not_finite", rank=nan, origin=Origin("input", "pixels", 0, rows=(3,)))
    assert by_input.name == cause("state_spike", rank=risen).name == "batch_norm"
    assert "non-finite values in input `pixels`" in by_input.explanation
    assert cause("spike", rank=risen).name == "data"
    assert cause("state_spike", rank={"buffers": ("mask",)}).name == "buffer_changed"


def test_inputs_of_a_normalization_that_have_grown():
    """They raise the variance by the square of what they raise the mean by."""
    mean, variance = (f"h.1.norm.running_{name}" for name in ("mean", "var"))
    grown = (state("buffer", variance, 60.0), state("buffer", mean, 7.0))
    found = cause("state_spike", rank={"states": grown})

    assert (found.name, found.tensors) == ("activation", ("h.1.norm",))
    assert "what h.1.norm receives is about" in found.explanation
    for odd in ((state("buffer", variance, 60.0),), (grown[0], state("buffer", mean, 60.0))):
        assert cause("state_spike", rank={"states": odd}).name == "batch_norm"


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


def test_gradients_of_weights_that_are_not_finite_by_themselves():
    """A weight's gradient goes nowhere, so those of others are not its consequence."""
    origin = Origin("gradient", NAMES[2], 0)
    one = cause("gradient_not_finite", origin=origin, rank={"norms": (1.0, 1.0, NAN)})
    both = cause("gradient_not_finite", origin=origin, rank={"norms": (NAN, 1.0, NAN)})

    assert (one.name, one.is_in_layer) == ("gradient", True)
    assert (both.name, both.tensors) == ("gradient", (NAMES[2], NAMES[0]))
    assert "h.1.weight and 1 other weights became non-finite" in both.explanation


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


def test_the_checkpoint_to_return_to_is_older_than_the_fault():
    """The suggestion names the step; if only a sample has shown the fault, the earliest one."""
    one = {"states": (state("weight", "h.0.weight", 900.0),)}
    jump = trace({"rate_rise": RateRise(0.001, 0.05, 1)}, HIGH_LOSS)
    assert "from before step 13;" in cause(rank=one).suggestion
    assert "from before step 11;" in cause("state_spike", rank=one, since=11).suggestion
    assert cause(steps=jump).suggestion.endswith("from before step 12")


def test_running_statistics_follow_the_weights():
    """A weight that has grown gives other statistics."""
    buffer, weight = state("buffer", "bn.running_var", 1e6), state("weight", "h.0.weight", 900.0)
    rank = {"states": (buffer, weight), "driven": ("h.0.weight",)}
    assert cause("state_spike", trace({}), rank=rank).name == "unknown"


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("input", "data"),
        ("targets", "data"),
        ("weight", "weight_changed"),
        ("weights", "unknown"),
        ("activation", "activation"),
        ("gradient", "gradient"),
        ("loss", "loss"),
    ],
)
def test_the_place_of_the_first_non_finite_value(where, name):
    """What a replay has found is the cause."""
    found = cause("loss_not_finite", origin=Origin(where, "h.0", 1))
    assert found.name == name


def test_verdicts_of_a_replay():
    """What a replay cannot repeat is outside of the network, in a hook, or transient."""
    outside = cause(
        "loss_not_finite",
        verdict=Verdict("not_covered", "the loss is computed outside of the network"),
        rank={"factors": (0.5, NAN)},
    )
    transient = {"verdict": Verdict("not_reproduced", "transient")}
    gradient = cause("gradient_not_finite", layer="h.1", **transient)

    assert (outside.name, outside.micro_batch) == ("loss", 1)
    assert (gradient.name, gradient.is_in_layer) == ("gradient", True)
    assert "if there is none, suspect the hardware" in gradient.suggestion
    assert cause("loss_not_finite", **transient).name == "transient"
    assert cause("gradient_not_finite", layer="h.1").suggestion.endswith("of this layer")


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


def test_bad_data():
    """The loss rises on the data of a step; on one rank or micro-batch alone, it says so."""
    calm, high = dataclasses.replace(RANK, rank=1), dataclasses.replace(RANK, loss_score=20.0)
    losses = {"loss_score": 20.0, "micro_losses": (3.0, 60.0)}
    alone = cause(others=(calm,), rank=losses)
    batch = cause(rank={"micro_losses": (3.0, 3.1, 60.0)})

    assert cause().name == cause(others=(dataclasses.replace(high, rank=1),)).name == "data"
    assert (alone.name, alone.micro_batch) == ("rank_data", 1)
    assert batch.micro_batch == 2


def test_worse_weights_are_no_bad_data():
    """If the data of the step before have a high loss, too, the weights have become worse."""
    assert cause(rank={"earlier_losses": ((3.0, 3.1),)}).name == "data"
    assert cause(rank={"earlier_losses": ((3.0, 5.9),)}).name == "unknown"
    assert cause(rank={"earlier_losses": ((3.0, NAN),)}).name == "unknown"
    # The network's loss is a mean, and the loop's a sum.
    assert cause(rank={"earlier_losses": ((0.3, 0.59),)}).name == "unknown"


def test_after_a_large_update_no_data_are_blamed():
    """The update is not large enough to be an anomaly by itself."""
    large = {"update_ratio": 3e-3}
    assert cause(steps=trace({}, {}, {}, large, HIGH_LOSS)).name == "unknown"


def test_the_loss_of_the_blamed_rank_counts():
    """This rank's loss may be ordinary where another rank's is the cause."""
    bad = {"rank": 1, "loss": 3000.0, "loss_score": 900.0, "norms": (900.0, 1000.0, 1100.0)}
    calm = dataclasses.replace(RANK, loss_score=0.1)
    found = cause("spike", trace({"global_norm": 20.0}), rank=bad, others=(calm,))
    assert found.name == "loss"
    on_data = {**bad, "loss": 30.0, "norms": (1.0, 2.0, 900.0)}
    assert cause("spike", trace({}), rank=on_data, others=(calm,)).name == "rank_data"


def test_without_enough_evidence_the_cause_is_unknown():
    """A spike of all gradients with an ordinary loss, and updates that may explain a high loss."""
    unknown = cause("spike", trace({"global_norm": 20.0}))
    assert unknown == Cause("unknown", "", "")
    large = trace({"update_ratio": 0.2}, HIGH_LOSS)
    assert cause(steps=large, rank={"earlier_losses": ()}).name == "unknown"
