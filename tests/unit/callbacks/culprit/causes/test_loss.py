"""Causes that lie in the loss, or between the loss and the gradients."""

import math

import pytest

from mfwrap.callbacks.culprit.anomaly_log import BadRow
from mfwrap.callbacks.culprit.judges.course import Shift
from mfwrap.callbacks.culprit.replay.reference import ProgramChange
from mfwrap.callbacks.culprit.replay.rows import RowSearch
from support.cause_evidence import HIGH_LOSS, NAN, cause, state, trace


def test_a_loss_that_was_multiplied():
    """The factor shows in the backward, or in loss and gradients alike."""
    factor = cause("spike", rank={"factors": (0.5, 500.0)})
    alike = {
        "loss": 3000.0,
        "norms": (900.0, 1000.0, 1100.0),
        "micro_losses": (3.0, 3000.0),
    }
    found = cause("spike", trace(HIGH_LOSS), rank=alike)
    unlike = {**alike, "norms": (1.0, 1000.0, 1e6)}

    assert (factor.name, factor.micro_batch) == (found.name, found.micro_batch) == ("loss", 1)
    assert cause("spike", trace(HIGH_LOSS), rank=unlike).name == "data"
    # A group far below the global norm varies by large factors.
    small = {**unlike, "norms": (1000.0, 1000.0, 1e6 * 1e-3), "usual_norms": (1.0, 1.0, 1e-3)}
    assert cause("spike", trace(HIGH_LOSS), rank=small).name == "loss"


def test_what_is_no_factor_in_the_loss():
    """Gradients must rise as much as the loss, and all of them, but for a few."""
    alike = {"loss": 30.0, "norms": (9.0, 10.0, 11.0)}
    assert cause("spike", trace(HIGH_LOSS), rank=alike).name == "loss"
    root = {**alike, "norms": (3.0, 3.2, 3.4)}
    assert cause("spike", trace(HIGH_LOSS), rank=root).name != "loss"
    names = tuple(f"h.{number}.weight" for number in range(20))
    many = {"names": names, "usual_norms": (1.0,) * 20, "scores": (9.0,) * 20, "loss": 30.0}
    few = cause("spike", trace(HIGH_LOSS), rank={**many, "norms": (0.1, 300.0, *[10.0] * 18)})
    assert few.name == "loss"
    most = cause("spike", trace(HIGH_LOSS), rank={**many, "norms": (*[0.1] * 9, *[10.0] * 11)})
    assert most.name != "loss"


def test_a_part_of_the_step_that_has_all_of_the_rise_is_no_factor():
    """A factor in a loss of the program raises all micro-batches, and all rows of one."""
    alike = {"loss": 30.0, "norms": (9.0, 10.0, 11.0)}
    one = {**alike, "outer_losses": (1.5, 1.4, 27.0)}
    all_of_them = {**alike, "outer_losses": (10.0, 9.9, 10.1)}
    row = {"search": RowSearch((BadRow(rank=0, micro_batch=0, row=2),), "")}

    assert cause("spike", trace(HIGH_LOSS), rank=all_of_them).name == "loss"
    assert cause("spike", trace(HIGH_LOSS), rank=one).name != "loss"
    assert cause("spike", trace(HIGH_LOSS), rank={**alike, **row}).name == "data"


def test_a_factor_outside_of_the_network_explains_statistics_that_have_moved():
    """Running statistics that began at zero rise in the first steps of any training."""
    buffers = {"states": (state("buffer", "bn.running_mean", 9.0),), "factors": (0.5, 500.0)}
    assert cause("spike", rank=buffers).name == "loss"


def test_a_negative_factor():
    """The gradient of the loss tells the sign, whatever the loss is."""
    found = cause("loss_drop", trace({}), rank={"loss": -3.0, "factors": (-0.5, -0.5)})
    assert found.name == "loss"
    assert found.explanation == "the loss was multiplied by a negative number before the backward"


@pytest.mark.parametrize(
    ("own", "name"), [((3.1,), "loss"), ((1.5, 1.6), "loss"), ((30.0,), "data"), ((), "data")]
)
def test_a_loss_that_rises_behind_the_network(own, name):
    """What the network returned is as in the step before, whatever the loop divides it by."""
    known = {"loss": 30.0, "loss_score": 90.0, "micro_losses": own}
    assert cause("loss_spike", trace(HIGH_LOSS), rank=known).name == name


def test_a_rise_that_began_before_tells_nothing_of_the_code_behind():
    """The network's losses of the step before had risen already."""
    known = {
        "loss": 22.0,
        "loss_score": 90.0,
        "micro_losses": (22.0,),
        "earlier_losses": ((12.0, 12.0),),
        "own_losses": ((22.0, 22.0),),
    }
    assert cause("loss_spike", trace(HIGH_LOSS), rank=known).name == "unknown"


def test_losses_are_compared_with_those_of_the_same_rows():
    """The step before was high already, and the network's loss has risen like the step's."""
    known = {
        "loss": 190.0,
        "loss_score": 90.0,
        "usual_loss": 10.0,
        "micro_losses": (190.0,),
        "earlier_losses": ((57.0, 57.0),),
        "own_losses": ((190.0, 190.0),),
    }
    steps = trace({}, HIGH_LOSS)
    assert cause("loss_spike", steps, rank=known).name == "loss"
    before = (*steps[:-2], steps[-2]._replace(loss=57.0), steps[-1])
    assert cause("loss_spike", before, rank=known).name != "loss"


def test_a_rise_after_a_far_update_is_no_factor():
    """Weights that have changed by a third of their size may raise loss and gradients alike."""
    alike = {"loss": 30.0, "norms": (9.0, 10.0, 11.0)}
    assert cause("spike", trace({}, HIGH_LOSS), rank=alike).name == "loss"
    far = trace({"update_ratio": 0.8}, HIGH_LOSS)
    assert cause("spike", far, rank=alike).name != "loss"


def test_a_shift_of_a_loss_behind_the_network():
    """The network's loss is compared with that of the call of an earlier step."""
    shift = Shift("loss", 3.0, 30.0, 6)
    known = {
        "loss": 30.0,
        "micro_losses": (3.2,),
        "own_losses": ((3.2, 3.2),),
        "program": ProgramChange(12, 3.0, 3.0, None, 0.1),
    }
    found = cause("loss_shift", trace({}), rank=known, shift=shift, is_first=False)

    assert found.name == "loss"
    assert "10 times the usual one, and what the network returned is 1.07 times" in (
        found.explanation
    )


def test_a_factor_of_all_micro_batches_shows_against_the_step_before():
    """So a step with one micro-batch has a culprit, too; a loss scale changes by small factors."""
    found = cause("spike", rank={"factors": (1000.0,), "factor_change": 1000.0})
    assert (found.name, found.micro_batch) == ("loss", None)
    assert found.explanation == "the loss was multiplied before the backward"
    assert cause("spike", rank={"factors": (2.0,), "factor_change": 2.0}).name == "data"


@pytest.mark.parametrize(
    ("norm", "rank", "name", "said"),
    [
        (0.0, {"loss": 0.0}, "unknown", "the loss and all gradients are exactly zero"),
        (1e-3, {"loss": 0.003}, "loss", "the loss and all gradients are about 0.001 times"),
        (1e-3, {"factor_change": 1e-3}, "loss", "the loss was multiplied by 0.001 before"),
        (1e-3, {"factor_change": 1.0}, "gradient", "and the backward began with an ordinary"),
        (1e-3, {}, "unknown", "the global norm is 0.001 times the usual one, the loss has not"),
    ],
)
def test_why_a_gradient_vanishes(norm, rank, name, said):
    """The loss, what multiplies it, and its gradient tell where the gradients were lost."""
    found = cause("vanishing_gradient", trace({}), global_norm=norm, rank=rank)
    assert found.name == name
    assert said in found.explanation
    assert not found.is_in_layer


@pytest.mark.parametrize(
    ("loss", "micro_losses", "name", "micro_batch"),
    [
        (0.01, (), "loss", None),
        (0.5, (), "unknown", None),
        (1.5, (3.0, 1e-4), "loss", 1),
        (1.5, (1.4, 1.6), "unknown", None),
        (1.5, (3.0, 0.0), "unknown", None),
        (-2.5, (), "loss", None),
        (-0.3, (), "unknown", None),
    ],
)
def test_a_loss_that_has_dropped(loss, micro_losses, name, micro_batch):
    """A factor of fifteen or more, in the step or in a micro-batch, or a sign is in the loss."""
    found = cause("loss_drop", trace({}), rank={"loss": loss, "micro_losses": micro_losses})
    assert (found.name, found.micro_batch) == (name, micro_batch)
    assert ("either the data" in found.explanation) is (name == "unknown")


@pytest.mark.parametrize(
    ("loss", "micro_losses", "name"),
    [(NAN, (3.0, 2.0), "loss"), (NAN, (), "unknown"), (NAN, (3.0, NAN), "unknown")],
)
def test_a_loss_that_is_ruined_behind_the_network(loss, micro_losses, name):
    """It is the loop's, if the network has returned finite losses."""
    known = {"loss": loss, "micro_losses": micro_losses}
    assert cause("loss_not_finite", trace({}), rank=known).name == name


def test_a_loss_that_is_less_than_at_first():
    """Any bad data raise it like the gradients: a cross-entropy is about as large as they are."""
    alike = {"loss": 30.0, "norms": (9.0, 10.0, 11.0)}
    assert cause("spike", trace(HIGH_LOSS), rank={**alike, "first_loss": 20.0}).name == "loss"
    assert cause("spike", trace(HIGH_LOSS), rank={**alike, "first_loss": 40.0}).name != "loss"


@pytest.mark.parametrize(
    ("losses", "micro_batch", "name"),
    [
        (((0, 36.0), (0, 36.5), (1, 35.5), (1, 36.2)), None, "loss"),
        (((0, 36.0), (0, 50.0), (1, 20.0), (1, 36.2)), None, "unknown"),
        (((0, 3.0), (0, 3.5), (1, 35.5), (1, 36.2)), 1, "loss"),
        ((), None, "unknown"),
    ],
)
def test_rows_that_have_risen_by_the_same_amount(losses, micro_batch, name):
    """Without larger gradients, a term of the loss has changed."""
    micro_losses = (3.2, 35.8) if micro_batch is not None else (36.2, 35.8)
    known = {"loss": 36.0, "micro_losses": micro_losses, "search": RowSearch((), "", losses=losses)}
    found = cause(steps=trace({}), rank={**known, "loss_score": 20.0})

    assert (found.name, found.micro_batch) == (name, micro_batch)
    assert ("alike, and the gradients" in found.explanation) is (name == "loss")


@pytest.mark.parametrize(
    ("kind", "terms", "said"),
    [
        ("loss_spike", {"ce": 2.1, "kl": 40.0}, "kl has risen to 40 (usually 5)"),
        ("spike", {"ce": 2.1, "kl": 40.0}, "kl has risen to 40 (usually 5)"),
        ("loss_spike", {"ce": 21.0, "kl": 40.0}, None),
        ("loss_spike", {"ce": 2.1, "kl": 6.0}, None),
        ("loss_spike", {"kl": 40.0}, None),
        ("loss_spike", {"ce": 2.1, "new": 40.0}, None),
        ("loss_not_finite", {"ce": 2.1, "kl": math.inf}, "kl is not finite (ce 2.1, kl inf)"),
    ],
)
def test_terms_of_the_loss(kind, terms, said):
    """Those in which the fault shows are named, unless it shows in all of them."""
    usual = [{"ce": 2.0, "kl": loss} for loss in (5.0, 4.0, math.nan, 6.0)]
    before = trace(*[{}] * 4)
    steps = (
        *(one._replace(terms=each) for one, each in zip(before, usual, strict=True)),
        before[0],
    )
    loss = math.inf if kind == "loss_not_finite" else 40.0
    found = cause(kind, steps, rank={"terms": terms, "earlier_losses": (), "loss": loss})

    of_terms = found.explanation.partition("; of the terms of the step's loss, ")[2]
    assert of_terms == (said or "")
