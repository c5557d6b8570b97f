"""Each cause is chosen from its evidence, and evidence of several causes names the first."""

import ast
import dataclasses
import re

import pytest

from mfwrap.callbacks.culprit.anomaly_log import UNKNOWN_CAUSE
from mfwrap.callbacks.culprit.causes.evidence import Cause
from mfwrap.callbacks.culprit.causes.rate import LOWER_RATE
from mfwrap.callbacks.culprit.episodes import DIVERGED
from mfwrap.callbacks.culprit.judges.course import Shift
from mfwrap.callbacks.culprit.judges.rates import RateRise
from mfwrap.callbacks.culprit.replay.replay import Origin
from support.cause_evidence import HIGH_LOSS, RANK, cause, state, trace
from support.paths import ROOT


def test_a_later_step_of_an_episode_is_explained_by_what_was_measured():
    """What speaks against bad data is asked at the first step alone."""
    assert cause().name == "data"
    assert cause(is_first=False).name == "unknown"
    jump = trace({"rate_rise": RateRise(0.001, 0.009, 1)}, HIGH_LOSS)
    assert cause(steps=jump, is_first=False).name == "learning_rate"


@pytest.mark.parametrize("origin", [None, Origin("gradient", "h.0", 0), Origin("weight", "h.0", 0)])
def test_what_follows_a_divergence(origin):
    """It is no reason to look for faults in the program: ruined weights make anything go wrong."""
    kind = "spike" if origin is None else "gradient_not_finite"
    found = cause(kind, origin=origin, diverged_step=2)

    assert (found.name, found.explanation) == ("diverged", "it follows the divergence of step 2")
    assert found.suggestion.startswith("look at step 2 first")
    shift = cause("loss_shift", shift=Shift("loss", 3.0, 6.0, 3), diverged_step=2)
    assert shift.explanation.endswith("; it follows the divergence of step 2")
    assert shift.explanation.startswith("the loss")


def test_what_comes_at_a_rate_that_was_too_high_before():
    """What only compares the step with those before is no reason to look for anything else."""
    assert cause().name == "data"
    found = cause(rate_step=2)
    assert (found.name, found.suggestion) == ("learning_rate", LOWER_RATE)
    assert "the learning rate is about as high as in step 2" in found.explanation
    bad = cause("loss_not_finite", origin=Origin("input", "x", 0), rate_step=2)
    assert bad.name == "data"


def test_what_cannot_follow_from_a_divergence():
    """Data that are not finite, a rate that jumps, and weights that code has changed."""
    bad = cause("loss_not_finite", origin=Origin("input", "x", 0), diverged_step=2)
    jump = cause(steps=trace({"rate_rise": RateRise(0.001, 0.05, 1)}, HIGH_LOSS), diverged_step=2)
    changed = cause(
        "state_spike", trace({"num_changed": 1}), rank={"changed": ("w",)}, diverged_step=2
    )

    assert [one.name for one in (bad, jump, changed)] == ["data", "learning_rate", "weight_changed"]


def test_the_checkpoint_to_return_to_is_older_than_the_fault():
    """The suggestion names the step; if only a sample has shown the fault, the earliest one."""
    one = {"states": (state("weight", "h.0.weight", 900.0),)}
    jump = trace({"rate_rise": RateRise(0.001, 0.05, 1)}, HIGH_LOSS)
    assert "from before step 13;" in cause(rank=one).suggestion
    assert "from before step 11;" in cause("state_spike", rank=one, since=11).suggestion
    assert cause(steps=jump).suggestion.endswith("from before step 12")


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


def test_the_docs_list_each_cause():
    """The lists in docs/how-to/find_a_nan.md have each cause that a record may name, once."""
    page = (ROOT / "docs" / "how-to" / "find_a_nan.md").read_text(encoding="utf-8")
    lists = page.partition("\n## What was the cause\n")[2].partition("\n## ")[0]
    items = re.findall(r"^- (`.+?):", lists, re.MULTILINE)
    named = {
        ast.unparse(call.args[0]).strip("'")
        for path in (ROOT / "callbacks" / "culprit" / "causes").glob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Cause"
    }
    of_others = {UNKNOWN_CAUSE, DIVERGED, "rank_differs", "silent_data_corruption"}

    assert sorted(name for item in items for name in item.split(", ")) == sorted(
        f"`{name}`" for name in (named - {"UNKNOWN_CAUSE"}) | of_others
    )
