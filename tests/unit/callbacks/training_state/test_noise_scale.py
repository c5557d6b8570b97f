"""The gradient noise scale of networks whose noise is known."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap import MFTrainOneStepCell, StepReport
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.callbacks.training_state import TrainingStateSettings
from mfwrap.callbacks.training_state.noise_scale import NoiseScale
from support.host_reads import HostReads
from support.operations import Operations
from support.ranks.monitors import estimate_noise
from support.small_networks import LinearProbe


def report_of(own: float, reduced: float, *, skipped: bool = False) -> StepReport:
    """Return the report of a step with norms before and after a reduction."""
    network = LinearProbe()
    cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1, fused=True))
    cell(torch.full((1, 2), math.nan if skipped else 1.0))
    values = {name: getattr(cell.last_report, name) for name in StepReport.__dataclass_fields__}
    return StepReport(**values | {"reduction_norms": torch.tensor([own, reduced])})


def test_a_step_costs_what_the_documentation_says():
    """A step within an interval does nine operations on at most three elements each."""
    noise_scale, report = NoiseScale(4, 2, 100), report_of(3.0, 2.0)
    with Operations() as counted:
        noise_scale.end_step(1, report)

    assert counted.number == 9
    assert counted.num_bytes < 9 * 3 * 8


@given(st.floats(0.1, 10), st.floats(0, 10), st.integers(2, 9), st.integers(1, 8))
def test_norms_without_chance_give_the_scale(signal, noise, num_ranks, rows):
    """If each norm is what is expected of it, one step gives the noise scale exactly."""
    batch_size = rows * num_ranks
    own, reduced = (math.sqrt(signal + noise / size) for size in (rows, batch_size))
    scale = NoiseScale(batch_size, num_ranks, 1).end_step(1, report_of(own, reduced))

    assert scale.item() == pytest.approx(noise / signal, rel=1e-3, abs=1e-3)


def test_squares_and_not_scales_are_averaged_over_the_applied_steps():
    """The scale is the ratio of two means; a skipped step is in none of them."""
    noise_scale = NoiseScale(batch_size=4, num_ranks=2, interval=4)
    steps = [(3.0, 2.0), (2.0, 1.5), (math.nan, math.nan), (1.0, 1.5)]
    values = [
        noise_scale.end_step(number, report_of(*norms, skipped=math.isnan(norms[0])))
        for number, norms in enumerate(steps, start=5)
    ]
    expected = sum(4 * (o**2 - r**2) for o, r in steps if not math.isnan(o))
    expected /= sum(2 * r**2 - o**2 for o, r in steps if not math.isnan(o))

    assert [value is None for value in values] == [True, True, True, False]
    assert values[-1].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("own", "reduced", "scale"),
    [(2.0, 1.0, math.inf), (1.0, 1.0, 0.0), (1.0, 1.1, 0.0)],
    ids=["noise alone", "the same samples", "less than no noise"],
)
def test_the_ends_of_the_range(own, reduced, scale):
    """Noise that hides the gradient is infinite; ranks that agree have none."""
    found = NoiseScale(batch_size=4, num_ranks=2, interval=1).end_step(1, report_of(own, reduced))

    assert found.item() == scale


def test_an_interval_without_an_applied_step_has_no_scale():
    """The scale is NaN."""
    skipped = report_of(math.nan, math.nan, skipped=True)

    assert NoiseScale(4, 2, 1).end_step(1, skipped).isnan()


def test_a_resumed_interval_continues():
    """The state holds the sums of the interval; a step reads nothing on the host."""
    one, other = (NoiseScale(batch_size=4, num_ranks=2, interval=2) for _ in range(2))
    first, second = report_of(3.0, 2.0), report_of(1.0, 1.5)
    with HostReads() as counted:
        one.end_step(1, first)
    other.load_state_dict(one.state_dict())

    assert counted.reads == []
    assert torch.equal(one.end_step(2, second), other.end_step(2, second))
    assert torch.equal(one.end_step(4, second), NoiseScale(4, 2, 2).end_step(2, second))


def test_two_ranks_find_the_closed_form(two_ranks, tmp_path):
    """Each rank is within 10 % of the known noise scale, and sends nothing for it."""
    mean, deviation = 0.5, 2.0
    ranks = two_ranks.run(estimate_noise, str(tmp_path), mean, deviation, "own", 60)

    expected = deviation**2 / mean**2
    for rank in ranks:
        assert list(rank["scales"]) == [30, 60]
        assert list(rank["scales"].values()) == pytest.approx([expected, expected], rel=0.1)
        assert rank["sent"] == []


def test_ranks_with_the_same_samples_have_no_noise(two_ranks, tmp_path):
    """A noise scale of 0 shows that the ranks train on the same rows."""
    ranks = two_ranks.run(estimate_noise, str(tmp_path), 0.5, 2.0, "same", 20)

    for rank in ranks:
        assert max(rank["scales"].values()) < 1e-3


def test_one_rank_is_told_that_it_has_no_noise_scale(caplog):
    """A warning says what is missing."""
    network = LinearProbe()
    cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1, fused=True))
    cell(torch.ones(1, 2))
    from transformers import TrainerControl, TrainerState  # noqa: PLC0415  (slow to load)

    monitor = TrainingStateMonitor(noise_scale_format="log", dataset_size=1, origin_epochs=1)
    state = TrainerState(max_steps=1, global_step=1)
    monitor.on_step_end(None, state, TrainerControl(), step_report=cell.last_report)

    assert "cannot show the noise scale: it needs two ranks" in caplog.text


def test_the_interval_is_checked():
    """An interval below 1 is refused."""
    with pytest.raises(ValueError, match="`noise_scale_steps` must be >= 1, got 0"):
        TrainingStateSettings(noise_scale_steps=0)


def test_the_batch_of_an_update_may_differ():
    """The noise of an update is that of its own samples."""
    report = report_of(3.0, 2.0)
    usual = NoiseScale(batch_size=4, num_ranks=2, interval=1).end_step(1, report)
    grown = NoiseScale(batch_size=64, num_ranks=2, interval=1).end_step(1, report, batch_size=4)

    assert torch.equal(usual, grown)
