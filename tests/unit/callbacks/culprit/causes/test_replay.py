"""What a replay has found is the cause."""

import pytest

from mfwrap.callbacks.culprit.judges.course import Shift
from mfwrap.callbacks.culprit.replay.difference import Difference
from mfwrap.callbacks.culprit.replay.reference import ProgramChange
from mfwrap.callbacks.culprit.replay.replay import Origin
from mfwrap.callbacks.culprit.replay.verdict import TOO_LARGE, Verdict
from support.cause_evidence import NAMES, NAN, cause, of_the_start, trace


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


@pytest.mark.parametrize("where", ["weight", "weights"])
def test_weights_that_were_non_finite_before_the_first_update(where):
    """At step 1 there is no earlier checkpoint or update: the weights were loaded or made so."""
    steps = [step._replace(step=step.step - 11) for step in trace()[-2:]]
    first, second = (
        cause("loss_not_finite", steps=steps[:number], origin=Origin(where, "h.0", 1))
        for number in (1, 2)
    )

    assert [step.step for step in steps] == [1, 2]
    assert "the file that the weights were loaded from" in first.suggestion
    later = "in which it is finite; if there is none" if where == "weight" else "the update before"
    assert later in second.suggestion


def test_gradients_of_weights_that_are_not_finite_by_themselves():
    """A weight's gradient goes nowhere, so those of others are not its consequence."""
    origin = Origin("gradient", NAMES[2], 0)
    one = cause("gradient_not_finite", origin=origin, rank={"norms": (1.0, 1.0, NAN)})
    both = cause("gradient_not_finite", origin=origin, rank={"norms": (NAN, 1.0, NAN)})

    assert (one.name, one.is_in_layer) == ("gradient", True)
    assert (both.name, both.tensors) == ("gradient", (NAMES[2], NAMES[0]))
    assert "h.1.weight and 1 other weights became non-finite" in both.explanation


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


@pytest.mark.parametrize(
    ("loss", "start"),
    [(4e28, "the loss is 4e+28 (usually 3), and the fault is"), (9.0, "the fault is")],
)
def test_a_loss_outside_of_the_network_that_is_far_too_large(loss, start):
    """It may be why the norm of the gradients overflows."""
    outside = Verdict("not_covered", "the loss is computed outside of the network")
    found = cause("gradient_not_finite", verdict=outside, rank={"loss": loss})
    assert found.explanation.startswith(start)


@pytest.mark.parametrize(
    ("norms", "name"),
    [((NAN, NAN, 1.0), "gradient"), ((NAN, NAN, 0.0), "gradient"), ((NAN, NAN, NAN), "loss")],
)
def test_a_backward_that_fails_inside_of_the_network(norms, name):
    """A loss outside of it is not at fault if layers behind have finite gradients."""
    outside = Verdict("not_covered", "the loss is computed outside of the network")
    found = cause("gradient_not_finite", verdict=outside, layer="h.0", rank={"norms": norms})
    assert found.name == name


@pytest.mark.parametrize(
    ("loss", "name", "todo"),
    [(4e30, "loss", "look for a factor in the loss"), (2.0, "gradient", "custom backwards")],
)
def test_gradients_whose_norm_alone_is_too_large(loss, name, todo):
    """A loss that is as large tells where it comes from."""
    verdict = Verdict("reproduced", TOO_LARGE)
    found = cause("gradient_not_finite", verdict=verdict, layer="h.1", rank={"loss": loss})

    assert found.name == name
    assert todo in found.suggestion


@pytest.mark.parametrize(
    "known",
    [
        {"verdict": Verdict("reproduced", TOO_LARGE)},
        {"layer": "h.1"},
        {"origin": Origin("gradient", "h.1", 0)},
    ],
)
def test_gradients_that_overflow_in_a_run_that_has_diverged(known):
    """No backward is at fault where the steps before have raised the loss so far."""
    for is_first, name in ((True, {"loss", "gradient"}), (False, {"unknown"})):
        found = cause("gradient_not_finite", rank={"loss": 4e30}, is_first=is_first, **known)
        assert found.name in name


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


@pytest.mark.parametrize(
    ("where", "ratio", "said"),
    [
        ("activation", 9.0, "the output of h.0 is 9 times as large as on the data of the step"),
        ("activation", 0.0, "the output of h.0 is zero, which it is not on the data of the step"),
        ("gradient", 30.0, "a gradient of h.0 is the first that is 30 times as large as on the"),
    ],
)
def test_the_first_value_that_differs_from_the_step_before(where, ratio, said):
    """Its module is the place."""
    calm = {"difference": Difference(where, "h.0", ratio), "loss_score": 0.3}
    found = cause("spike", rank=calm)
    assert (found.name, found.tensors, found.where) == (where, ("h.0",), where)
    assert said in found.explanation
    # Where the loss has risen, so have the gradients.
    high = cause("spike", rank={**calm, "loss_score": 20.0})
    assert high.name == ("data" if where == "gradient" else where)


def test_an_input_that_differs_from_the_step_before():
    """The data are at fault, and no module."""
    found = cause("spike", rank={"difference": Difference("input", "pixels", 9.0)})
    assert (found.name, found.tensors, found.where) == ("data", (), None)
    assert "input `pixels` is 9 times as large" in found.explanation


CHANGED = ProgramChange(num_steps=5, then=3.0, again=5.4, name="h.0.attn", distance=1.3)
"""The earlier data have most of the rise of the loss from 3 to 6."""


def test_a_program_that_has_changed():
    """The first module that returns something else is the place; without one, the loss is it."""
    module = cause(rank={"program": CHANGED})
    loss = cause(rank={"program": CHANGED._replace(name=None, distance=0.03)})

    assert (module.name, module.tensors, module.where) == (
        "activation",
        ("h.0.attn",),
        "activation",
    )
    assert "the data of 5 steps before have 1.8 times the loss that they had" in module.explanation
    assert "1.3 times its size away" in module.explanation
    far = cause(rank={"program": CHANGED._replace(again=3.1, distance=9.0)})
    assert far.name == "activation"
    assert (loss.name, loss.tensors) == ("loss", ())
    assert "and the outputs that they had" in loss.explanation


@pytest.mark.parametrize(
    "known",
    [
        {"program": CHANGED._replace(again=3.2)},
        {"program": CHANGED._replace(again=NAN)},
        {"program": CHANGED._replace(then=NAN)},
        {"program": CHANGED._replace(then=0.0)},
        {"program": CHANGED._replace(name=None, distance=0.1)},
        {"program": CHANGED, "moved": ("wte.weight",)},
        {"program": CHANGED, "loss_score": 0.3},
    ],
)
def test_a_program_that_may_be_as_before(known):
    """Earlier data must have much of the rise, and no weight may explain it."""
    assert "run again" not in cause(rank=known).explanation


def test_a_program_after_an_update_that_was_too_large():
    """The weights give other outputs, too."""
    moved = trace({"num_moved": 3, "global_norm": 20.0})
    assert "run again" not in cause("spike", moved, rank={"program": CHANGED}).explanation


def test_a_program_after_updates_that_were_large_all_along():
    """Since the earlier call, the weights have moved by half of their size."""
    changes = [{"update_ratio": 0.15}] * 4 + [{"update_ratio": 0.15, "global_norm": 4.0}]
    steps = of_the_start(trace(*changes))
    known = {"program": CHANGED, "loss_score": 20.0, "loss": 6.0, "earlier_losses": ()}
    found = cause(steps=steps, rank=known)
    assert found.name == "learning_rate"
    assert (
        "at learning rates of up to 0.001, changed the weights by 0.15 times" in found.explanation
    )


def test_a_program_that_has_changed_before_a_shift():
    """The rise is that of the shift."""
    shift = Shift("loss", 3.0, 6.0, 3)
    known = {"program": CHANGED, "loss": 6.1, "usual_loss": 6.0, "loss_score": 0.1}
    found = cause("loss_shift", trace({}), rank=known, shift=shift, is_first=False)

    assert found.name == "activation"
    small = CHANGED._replace(again=3.6)
    found = cause("loss_shift", trace({}), rank={**known, "program": small}, shift=shift)
    assert found.name != "activation"
