"""A higher loss is that of the data only if something speaks for them."""

import dataclasses
import math

import pytest

from mfwrap.callbacks.culprit.anomaly_log import BadRow
from mfwrap.callbacks.culprit.judges.course import Shift
from mfwrap.callbacks.culprit.replay.reference import ProgramChange
from mfwrap.callbacks.culprit.replay.rows import RowSearch
from support.cause_evidence import HIGH_LOSS, NAN, RANK, cause, of_the_start, trace

UNKNOWN = {"earlier_losses": ()}
ROWS = {"search": RowSearch((BadRow(rank=0, micro_batch=0, row=2),), "")}


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        ({}, "data"),
        (UNKNOWN, "unknown"),
        ({**UNKNOWN, "search": RowSearch((), "no row stands out")}, "unknown"),
        ({**UNKNOWN, **ROWS}, "data"),
        ({**UNKNOWN, "micro_losses": (3.0, 3.1, 60.0)}, "data"),
    ],
)
def test_what_speaks_for_the_data(rank, name):
    """The data of the step before have their loss again, or a part of the data has the rise."""
    assert cause(rank=rank).name == name


@pytest.mark.parametrize(
    ("losses", "steps", "said"),
    [
        ([90.0], (), "one row has a loss of 90 (usually 3)"),
        ([90.0, 60.0], (), "2 rows have losses of 60 or more (usually 3)"),
        ([90.0, 20.0], (), None),
        ([90.0, None], (), None),
        ([90.0], ({"update_ratio": 0.6},), None),
    ],
)
@pytest.mark.parametrize("kind", ["spike", "loss_spike"])
def test_rows_far_above_the_usual_loss(kind, losses, steps, said):
    """They are the cause of a spike of which else nothing is known, unless weights are spoilt."""
    rows = tuple(BadRow(rank=0, micro_batch=0, row=2, loss=loss) for loss in losses)
    rank = {**UNKNOWN, "search": RowSearch(rows, ""), "loss_score": math.nan}
    found = cause(kind, trace(*steps, {}), rank=rank)

    assert (found.name == "data") is (said is not None)
    assert said is None or found.explanation == said


@pytest.mark.parametrize(("loss", "says"), [(90.0, "one row has a loss of 90"), (9.0, "the loss")])
def test_a_row_far_above_the_usual_loss_in_a_later_pass(loss, says):
    """It is named as in the first pass, where the loss of the step could not be judged yet."""
    row = BadRow(rank=0, micro_batch=2, row=2, loss=loss)
    found = cause(rank={"micro_losses": (3.0, 3.1, 60.0), "search": RowSearch((row,), "")})

    assert (found.name, found.micro_batch) == ("data", 2)
    assert found.explanation.startswith(says)


def test_without_anything_that_speaks_for_one_of_them_both_are_named():
    """The reader learns what was ruled out, and that two causes are left."""
    said = cause(rank=UNKNOWN).explanation

    assert said == (
        "the loss rose to 6 (usually 3), and the updates were ordinary: either the data of this "
        "step are at fault, or the computation of the loss"
    )


@pytest.mark.parametrize("rank", [UNKNOWN, {"own_losses": ((6.0, 3.0),)}])
def test_after_updates_that_have_spoilt_the_weights(rank):
    """Any loss may follow them, so that neither data nor program are suspected."""
    ordinary, spoilt = (trace(*[{"update_ratio": one}] * 3, HIGH_LOSS) for one in (0.001, 0.6))
    rank = {**rank, "loss": 6.0}

    assert "the loss rose to 6" in cause(steps=ordinary, rank=rank).explanation
    found = cause(steps=of_the_start(spoilt), rank=rank)
    assert found.name == "learning_rate"
    assert "changed the weights by 0.6 times their size" in found.explanation


def test_a_micro_batch_of_a_loss_outside_of_the_network():
    """It is named, though its data and its computation cannot be told apart."""
    found = cause(rank={**UNKNOWN, "outer_losses": (3.0, 3.1, 60.0)})

    assert (found.name, found.micro_batch) == ("unknown", 2)
    assert "either the data of micro-batch 2 are at fault, or the computation" in found.explanation
    whole = cause(rank={**UNKNOWN, "outer_losses": (22.0, 21.0, 20.0)})
    assert (whole.name, whole.micro_batch) == ("unknown", None)


def test_one_rank_alone():
    """With the same weights on all ranks, it is the data of this rank."""
    calm = dataclasses.replace(RANK, rank=1)

    assert cause(others=(calm,), rank=UNKNOWN).name == "rank_data"


def test_a_higher_loss_with_ordinary_gradients():
    """The data raise gradients, too; rows that have all of the rise decide."""
    calm, high = trace(), {"loss_score": 20.0}

    assert cause(steps=calm, rank={"loss": 9.0, **high}).name == "unknown"
    said = cause(steps=calm, rank=high).explanation
    assert "the gradients of all layers are ordinary" in said
    assert cause(steps=calm, rank={**ROWS, **high}).name == "data"
    assert cause(steps=calm, rank={"scores": (0.0, 4.0, 0.0), **high}).name == "data"


@pytest.mark.parametrize(
    ("program", "own", "name"),
    [
        ((3.0, 3.1), (6.0, 5.9), "data"),
        ((3.0, 3.1), (6.0, 3.5), "unknown"),
        ((3.0, 4.0), (6.0, 5.9), "unknown"),
        ((3.0, math.nan), (6.0, 5.9), "unknown"),
        ((math.nan, 3.1), (6.0, 5.9), "unknown"),
    ],
)
def test_data_that_have_had_a_higher_loss_for_some_steps(program, own, name):
    """With the same weights, earlier data have their loss again, and so have those of the step."""
    known = {
        "loss": 6.0,
        "micro_losses": own[:1],
        "own_losses": (own,),
        "program": ProgramChange(12, *program, None, 0.1),
    }
    found = cause("loss_shift", trace({}), rank=known, shift=Shift("loss", 3.0, 6.0, 3))

    assert found.name == name
    if name == "data":
        assert found.explanation == (
            "the loss has been about 6 for 3 steps, after about 3; with the present weights, the "
            "data of 12 steps before have 1.03 times the loss that they had, and those of this "
            "step have theirs again"
        )


@pytest.mark.parametrize(("own", "name"), [(29.0, "data"), (20.0, "data"), (9.0, "unknown")])
def test_most_of_the_rise_is_that_of_the_network(own, name):
    """The rest is of the code behind it."""
    known = {"loss": 30.0, "loss_score": 90.0, "micro_losses": (own,)}
    assert cause(steps=trace(HIGH_LOSS), rank=known).name == name


def test_data_shift_only_a_loss_that_has_risen():
    """A norm that shifts, or a loss that is lower now, tells nothing of the data."""
    known = {"own_losses": ((6.0, 6.0),), "program": ProgramChange(12, 3.0, 3.0, None, 0.1)}

    for shift in (Shift("global norm", 3.0, 6.0, 3), Shift("loss", 6.0, 3.0, 3)):
        assert cause("norm_shift", trace({}), rank=known, shift=shift).name == "unknown"


@pytest.mark.parametrize(
    ("losses", "name", "said"),
    [
        (((3.0, 3.1),), "data", "on the data of this step"),
        (((3.0, 5.9),), "unknown", "not the data have changed"),
        (((3.0, NAN),), "unknown", "not the data have changed"),
        # The network's loss is a mean, and the loop's a sum.
        (((0.3, 0.59),), "unknown", "have 1.97 times the loss that they had (0.59, not 0.3)"),
        (((2.0, 8.0), (4.0, 16.1)), "loss", "by the same factor or amount"),
        (((2.0, 8.0), (4.0, 10.1)), "loss", "by the same factor or amount"),
        (((2.0, 8.0), (4.0, 7.0)), "unknown", "not the data have changed"),
    ],
)
def test_the_data_of_the_step_before_have_another_loss(losses, name, said):
    """The program or the weights have changed; a factor of the loss is that of all."""
    found = cause(rank={"earlier_losses": losses})

    assert found.name == name
    assert said in found.explanation


def test_a_small_share_of_a_huge_rise_is_a_rise():
    """Data that have four times their loss do not have it again, whatever the loss is now."""
    known = {"loss": 1000.0, "loss_score": 200.0, "earlier_losses": ((3.0, 12.0),)}
    found = cause("spike", trace(HIGH_LOSS), rank=known)

    assert found.name == "unknown"
    assert "the data of the step before have 4 times the loss that they had" in found.explanation


def test_a_micro_batch_without_a_loss_before():
    """Its loss has no ratio."""
    known = {"loss": 20.0, "loss_score": 20.0, "earlier_losses": ((0.0, 0.0), (6.0, 40.0))}
    assert cause(steps=trace(HIGH_LOSS), rank=known).name == "unknown"
    known = {"loss": 20.0, "loss_score": 20.0, "own_losses": ((20.0, 20.0),)}
    assert cause(steps=trace(HIGH_LOSS), rank={**known, "micro_losses": (NAN,)}).name != "loss"


def test_after_a_large_update_nothing_is_said():
    """The weights may have another loss, for the data of the step before, too."""
    large = trace({"update_ratio": 0.2}, HIGH_LOSS)

    for losses in ((), ((3.0, 5.9),)):
        found = cause(steps=large, rank={"earlier_losses": losses})
        assert (found.name, found.explanation) == ("unknown", "")


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


@pytest.mark.parametrize("known", [{"earlier_losses": ((0.0, 0.0),)}, {"usual_loss": 0.0}])
def test_a_loss_that_was_zero_before(known):
    """Nothing is known of how far the same data have risen."""
    assert cause(rank=known).name in {"unknown", "data"}


@pytest.mark.parametrize(
    ("earlier", "name", "said"),
    [
        (3.05, "data", "while weights and updates were ordinary"),
        (3.9, "unknown", "have 1.3 times the loss that they had"),
        (4.5, "unknown", "not the data have changed"),
    ],
)
def test_how_much_of_the_rise_the_step_before_has(earlier, name, said):
    """As a share of the rise from 3 to 6, however small that is beside the loss."""
    found = cause(rank={"earlier_losses": ((3.0, earlier),)})
    assert found.name == name
    assert said in found.explanation

    little = {"loss": 3.6, "earlier_losses": ((3.0, 3.0 + (earlier - 3) / 5),)}
    assert cause(rank=little).name == name


@pytest.mark.parametrize(
    ("losses", "again", "name"),
    [
        ((6.0,), (5.0,), "data"),
        ((6.0,), (3.2,), "unknown"),
        ((3.0, 60.0), (3.0, 50.0), "data"),
        ((3.0, 60.0), (3.0, 4.0), "unknown"),
    ],
)
def test_data_that_do_not_have_their_loss_again(losses, again, name):
    """They are not at fault, but what the program did with them in that step."""
    pairs = tuple(zip(losses, again, strict=True))
    found = cause(rank={"micro_losses": losses, "own_losses": pairs})

    assert found.name == name
    assert ("do not have it if they are computed again" in found.explanation) is (name != "data")


def test_a_step_before_that_had_the_rise():
    """It tells nothing of this step."""
    own = {"own_losses": ((6.0, 6.0),)}
    assert cause(rank={**own, "earlier_losses": ((3.1, 3.1),)}).name == "data"
    assert cause(rank={**own, "earlier_losses": ((5.5, 5.5),)}).name != "data"


def test_weights_that_have_moved_are_no_factor_in_the_loss():
    """They may raise the loss of all micro-batches alike."""
    alike = {"earlier_losses": ((2.0, 8.0), (4.0, 16.1))}
    assert cause(rank=alike).name == "loss"
    moved = {"moved": ("wte.weight",)}
    assert cause(rank={**alike, **moved}).name == "unknown"
