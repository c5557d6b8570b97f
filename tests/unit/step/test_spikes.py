"""A global norm far above those before it is skipped or clipped, until it is the usual one."""

import copy
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.optim import SGD, AdamW

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell
from mfwrap.step.spikes import STATE_NAMES, SpikePolicy
from mfwrap.tensors.robust_window import RobustWindow
from support.operations import Operations
from support.small_networks import LinearProbe
from support.training_state import assert_unchanged, training_state

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
USUAL = [1.0, 1.1, 0.9, 1.05, 0.95] * 6
"""Global norms of updates without a spike."""


def probe_cell(policy: str = "skip", **keywords) -> MFTrainOneStepCell:
    """Return a cell whose global norm is the norm of its input's only row."""
    network = LinearProbe()
    optimizer = SGD(network.parameters(), lr=1.0, fused=True)
    return MFTrainOneStepCell(network, optimizer, spike_policy=policy, **keywords)


def update(cell: MFTrainOneStepCell, norm: float) -> float:
    """Do an update with a global norm, and return how far the weights have moved."""
    before = cell.network.weight.detach().clone()
    cell(torch.tensor([[0.6 * norm, 0.8 * norm]]))
    return (cell.network.weight.detach() - before).norm().item()


def skips_of(policy: SpikePolicy, norms: list[float]) -> list[bool]:
    """Return whether a policy skips each of a sequence of updates."""
    skips = []
    for norm in norms:
        verdict = policy.judge(torch.tensor(norm))
        skips.append(verdict.skips.item())
        policy.count(verdict, ~verdict.skips & math.isfinite(norm))
    return skips


def test_a_spike_is_skipped_and_changes_nothing():
    """A norm of five times the usual one is skipped: neither weights nor expectations change."""
    cell = probe_cell()
    for norm in USUAL:
        assert update(cell, norm) > 0
    usual_state = cell.state_dict()
    before = training_state(cell.network, cell.optimizer)

    moved = update(cell, 5.0)

    report = cell.last_report
    assert moved == 0
    assert report.skipped.item()
    assert not report.output.overflow.item()
    assert report.output.global_norm.item() == pytest.approx(5.0)
    assert report.spike_score.item() > 6
    assert_unchanged(before, training_state(cell.network, cell.optimizer))
    for name in ("spike_values", "spike_distances"):
        torch.testing.assert_close(cell.state_dict()[name], usual_state[name], equal_nan=True)
    assert update(cell, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("second", "skipped"), [(15.0, False), (25.0, True)])
def test_the_second_update_is_judged_already(second, skipped):
    """With one norm known, a spike is more than about 20 times that norm."""
    assert skips_of(SpikePolicy("skip", 6.0, CPU), [1.0, second]) == [False, skipped]


@settings(max_examples=10)
@given(
    ratio=st.floats(5, 1e12),
    usual=st.floats(1e-6, 1e6),
    noise=st.lists(st.floats(-0.1, 0.1), min_size=40, max_size=40),
)
def test_a_norm_that_stays_high_is_skipped_at_most_twelve_times(ratio, usual, noise):
    """No new level is skipped for good, whatever its height."""
    after = [usual * ratio * math.exp(each) for each in noise]

    skips = skips_of(SpikePolicy("skip", 6.0, CPU), [usual * each for each in USUAL] + after)

    assert not any(skips[: len(USUAL)])
    assert skips[len(USUAL) :] == [True] * 12 + [False] * 28


def test_spikes_between_usual_norms_are_all_skipped():
    """Only spikes in a row are a new level."""
    skips = skips_of(SpikePolicy("skip", 6.0, CPU), USUAL + [50.0, 1.0] * 30)

    assert skips == [False] * len(USUAL) + [True, False] * 30


norms = st.sampled_from([0.0, NAN, INF]) | st.floats(1e-4, 1e4)


@settings(max_examples=50)
@given(st.sampled_from(["skip", "clip"]), st.floats(0.5, 8), st.lists(norms, max_size=40))
def test_each_update_is_treated_as_the_docstring_says(policy, limit, sequence):
    """Scores, factors and the window equal those of the rules in Python's numbers."""
    judged = SpikePolicy(policy, limit, CPU)
    window = RobustWindow(1, prior=0.5)
    in_a_row = 0
    for norm in sequence:
        verdict = judged.judge(torch.tensor(norm))

        level = math.log(norm) if norm > 0 else -INF
        expected, deviation = window.expected.item(), window.deviation.item()
        score = (level - expected) / deviation
        can_judge = math.isfinite(score)
        is_spike = can_judge and score > limit
        clipped = expected + limit**2 / score * deviation if is_spike else level
        assert verdict.is_spike.item() == is_spike
        assert verdict.score.item() == pytest.approx(
            score if can_judge else NAN, rel=1e-3, abs=1e-3, nan_ok=True
        )
        assert verdict.skips.item() == (is_spike and policy == "skip")
        factor = math.exp(clipped - level) if is_spike and policy == "clip" else 1.0
        assume(abs(score - limit) > 1e-4)
        if policy == "clip":
            assert verdict.coefficient.item() == pytest.approx(factor, rel=1e-3)

        applied = math.isfinite(norm) and not verdict.skips.item()
        judged.count(verdict, torch.tensor(applied))
        if can_judge:
            in_a_row = in_a_row + 1 if is_spike else 0
        is_new_level = is_spike and in_a_row >= 10
        entered = verdict.level if is_new_level else verdict.level + math.log(factor)
        window.add(entered.reshape(1), torch.tensor(applied or is_new_level))
        torch.testing.assert_close(
            judged.state_dict()["spike_values"],
            window.state_dict()["values"],
            equal_nan=True,
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("clips", [False, True], ids=["alone", "with max_grad_norm"])
def test_a_clipped_spike_moves_the_weights_by_little_more_than_usual(clips):
    """The higher the spike, the closer to the usual norm it is clipped; a lower limit holds."""
    moves = []
    for spike in (2.0, 5.0, 1e6):
        cell = probe_cell("clip", use_clip_grad=clips, max_grad_norm=0.5 if clips else 1.0)
        for norm in USUAL:
            update(cell, norm)
        moves.append(update(cell, spike))
        assert not cell.last_report.skipped.item()
        assert cell.last_report.output.global_norm.item() == pytest.approx(spike)

    if clips:
        assert moves == pytest.approx([0.5, 0.5, 0.5], rel=1e-4)
    else:
        assert 2.0 > moves[0] > moves[1] > moves[2] > 1.0
        assert moves[2] < 1.05


def test_a_clip_of_the_loop_counts_for_the_clip_of_a_spike():
    """The smaller of both factors is used; a loop that has clipped by more gets nothing back."""
    policy = SpikePolicy("clip", 6.0, CPU)
    for norm in USUAL:
        policy.count(policy.judge(torch.tensor(norm)), torch.tensor(data=True))
    verdict = policy.judge(torch.tensor(5.0))
    own = verdict.coefficient
    assert 0 < own < 0.3

    assert verdict.clipped(None, None) == own
    assert verdict.clipped(None, 2 * own).item() == pytest.approx(0.5)
    assert verdict.clipped(None, own / 1.5) == 1
    assert verdict.clipped(torch.tensor(0.25), 2 * own) == 0.25


def test_a_norm_that_stays_high_is_no_longer_clipped():
    """After twelve clipped updates, the new level is the usual one."""
    cell = probe_cell("clip")
    moves = [update(cell, norm) for norm in USUAL + [1000.0] * 14][len(USUAL) :]

    assert max(moves[:12]) < 1.3
    assert moves[12:] == pytest.approx([1000.0, 1000.0])


def test_an_overflow_neither_enters_nor_ends_a_row_of_spikes():
    """Twelve spikes are skipped, also if updates with a NaN come between them."""
    cell = probe_cell(scale_sense=DynamicLossScaleUpdateCell(4.0, 2, 1000))
    for norm in USUAL:
        update(cell, norm)
    skipped = []
    for norm in [50.0, NAN] * 12 + [50.0]:
        update(cell, norm)
        skipped.append(cell.last_report.skipped.item())
        assert math.isnan(norm) == cell.last_report.output.overflow.item()

    assert skipped == [True] * 24 + [False]


def test_a_spike_above_the_absolute_threshold_is_skipped_too():
    """Both rules hold beside each other."""
    cell = probe_cell(
        use_clip_grad=True,
        max_grad_norm=INF,
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=1.08,
    )
    for norm in USUAL:
        assert (update(cell, norm) == 0) == (norm >= 1.08)
    assert update(cell, 50.0) == 0
    assert cell.state_dict()["spike_values"].max() < math.log(1.08)


def test_the_policy_can_be_switched_on_and_off_between_runs():
    """A state without earlier norms starts with none, and a cell without a policy ignores them."""
    judging, recording = probe_cell(), probe_cell("record")
    for norm in USUAL:
        update(judging, norm)
        update(recording, norm)
    assert recording.last_report.spike_score is None
    assert recording.last_report.output.global_norm is None

    states = judging.state_dict(), recording.state_dict()
    assert set(states[0]) == {*states[1], *STATE_NAMES}
    judging.load_state_dict(states[1])
    recording.load_state_dict(states[0])

    assert judging.state_dict()["spike_values"].isnan().all()
    assert update(judging, 50.0) > 0


@pytest.mark.parametrize("policy", ["skip", "clip"])
@pytest.mark.parametrize("stop", [1, 35, 42])
def test_a_resumed_run_is_the_unbroken_run(policy, stop):
    """A run that is resumed, also within a row of spikes, continues bitwise."""

    def build() -> MFTrainOneStepCell:
        network = LinearProbe()
        return MFTrainOneStepCell(
            network, AdamW(network.parameters(), lr=0.1, fused=True), spike_policy=policy
        )

    sequence = USUAL + [30.0] * 15 + [25.0, 900.0]
    unbroken = build()
    for norm in sequence[:stop]:
        update(unbroken, norm)
    resumed = build()
    for name in ("network", "optimizer"):
        state = copy.deepcopy(getattr(unbroken, name).state_dict())
        getattr(resumed, name).load_state_dict(state)
    resumed.load_state_dict(unbroken.state_dict())

    for norm in sequence[stop:]:
        assert update(resumed, norm) == update(unbroken, norm)
        scores = [cell.last_report.spike_score for cell in (resumed, unbroken)]
        torch.testing.assert_close(*scores, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"spike_values": torch.zeros(5)}, ValueError, r"spike_values.*shape \(1, 5\)"),
        ({"spikes_in_a_row": torch.zeros(())}, ValueError, "dtype torch.int64, got"),
        ({"spike_distances": 3}, TypeError, "`state_dict.'spike_distances'.` must be a tensor"),
        ({"spike_distances": None}, KeyError, "spike_distances"),
    ],
    ids=["shape", "dtype", "number", "missing"],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, error, message):
    """The error names the entry."""
    cell = probe_cell()
    for norm in USUAL:
        update(cell, norm)
    before = cell.state_dict()
    damaged = {k: v for k, v in {**before, **change}.items() if v is not None}

    with pytest.raises(error, match=message):
        cell.load_state_dict({**damaged, "applied_updates": torch.tensor(77)})

    assert torch.equal(cell.state_dict()["spike_values"], before["spike_values"])
    assert cell.state_dict()["applied_updates"] == len(USUAL)


@pytest.mark.parametrize(("policy", "operations"), [("skip", 66), ("clip", 78)])
def test_the_cost_is_that_of_the_documentation(policy, operations):
    """An update costs fewer small operations than docs/scaling.md says."""
    judged = SpikePolicy(policy, 6.0, CPU)
    skips_of(judged, USUAL)
    norm, applied = torch.tensor(1.0), torch.tensor(1) > 0
    with Operations() as counted:
        judged.count(judged.judge(norm), applied)

    assert counted.number == operations
    assert counted.num_bytes < 6000
