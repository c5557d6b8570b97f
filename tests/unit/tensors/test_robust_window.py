"""Tests of scores by medians over a window."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mfwrap.tensors.robust_window import RobustWindow


class Reference:
    """One series in float64 with numpy, as the docstring of `RobustWindow` says it."""

    def __init__(self, prior: float, length: int, second: float) -> None:
        self.prior, self.length, self.second = prior, length, second
        self.values: list[float] = []
        self.distances: list[float] = []

    @property
    def expected(self) -> float:
        return _lower_median(self.values[-5:])

    def deviation(self, sign: int) -> float:
        last = np.array(self.distances[-self.length :])
        number = len(last)
        sizes = np.abs(last)
        high = np.sort(sizes)[int(0.95 * (number - 1))] / 1.96 if number else 0.0
        spread = max(1.4826 * _lower_median(list(sizes)), high) if number else 0.0
        spread = max(spread, self.second * np.sort(sign * last)[-2]) if number > 1 else spread
        prior = (self.prior * max(3 / (3 + number), 0.15)) ** 2
        return math.sqrt(prior + spread**2 * (1 + 4 / max(number, 1)))

    def score(self, value: float) -> float:
        distance = value - self.expected
        deviation = self.deviation(1 if distance > 0 else -1)
        return distance / deviation if math.isfinite(value) else math.nan

    def add(self, value: float) -> None:
        if math.isfinite(value):
            if self.values:
                self.distances.append(value - self.expected)
            self.values.append(value)


def _lower_median(values: list[float]) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2]) if values else math.nan


values = st.floats(-100, 100, width=32) | st.sampled_from([math.nan, math.inf, -math.inf])


@settings(max_examples=40)
@given(
    st.lists(st.tuples(values, values, st.booleans()), max_size=40),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.3, 2.0]),
)
@example([(-1.0, 0.0, True), (0.0, 0.0, True), (0.0, 0.0, True)], 1, 0.0)  # less than five
def test_scores_are_those_of_medians_over_the_window(
    steps: list[tuple[float, float, bool]], length: int, second: float
) -> None:
    """Scores equal those of numpy in float64, whatever is not finite or does not count."""
    priors = (0.5, 2.0)
    window = RobustWindow(2, prior=torch.tensor(priors), length=length, second=second)
    references = [Reference(prior, length, second) for prior in priors]
    for *row, counts in steps:
        expected = [one.score(value) for one, value in zip(references, row, strict=True)]
        torch.testing.assert_close(
            window.scores(torch.tensor(row)),
            torch.tensor(expected),
            equal_nan=True,
            rtol=1e-4,
            atol=1e-4,
        )
        window.add(torch.tensor(row), torch.tensor(counts))
        for one, value in zip(references, row, strict=True):
            if counts:
                one.add(value)


def scores_of(series: list[float], prior: float = 0.5, second: float = 0.0) -> list[float]:
    """Return the score of each value of a series, judged by the values before it."""
    window = RobustWindow(1, prior=prior, second=second)
    scores = []
    for value in series:
        scores.append(window.scores(torch.tensor([value])).item())
        window.add(torch.tensor([value]))
    return scores


def noise(number: int, seed: int = 0) -> Tensor:
    """Return normal noise of deviation 1."""
    return torch.randn(number, generator=torch.Generator().manual_seed(seed))


def test_the_first_value_has_no_score_and_the_second_one_has() -> None:
    """The prior deviation judges from the second value on."""
    scores = scores_of([1.0, 8.0])
    assert math.isnan(scores[0])
    assert scores[1] == pytest.approx(14.0)


def test_noise_has_scores_of_about_one_deviation() -> None:
    """The deviation is that of the noise, and noise stays within six of it."""
    scores = torch.tensor(scores_of((3 + 0.1 * noise(4000)).tolist(), prior=0.1)[100:])
    assert 0.9 < scores.std() < 1.25
    assert scores.abs().max() < 6


def test_a_falling_loss_does_not_hide_a_rise_to_an_earlier_value() -> None:
    """The expected value follows the series."""
    falling = [11 * 0.97**step for step in range(60)]
    scores = scores_of([*falling, falling[30]], prior=0.5)
    assert max(scores[1:-1]) < 1
    assert scores[-1] > 4


def test_outliers_change_neither_expectation_nor_deviation() -> None:
    """Three outliers among 64 values are almost as if they had not been."""
    quiet = (0.1 * noise(64)).tolist()
    with_outliers = list(quiet)
    for number in (10, 30, 50):
        with_outliers[number] = 1e6
    windows = [RobustWindow(1, prior=0.1) for _ in range(2)]
    for window, series in zip(windows, (quiet, with_outliers), strict=True):
        for value in series:
            window.add(torch.tensor([value]))
    assert abs(windows[0].expected - windows[1].expected) < 0.1
    assert 0.7 < windows[1].deviation / windows[0].deviation < 1.5


def test_a_series_with_many_outliers_is_judged_by_them() -> None:
    """The loss of a network that knows most of its data is zero, and now and then it is not."""
    series = [float(step % 10 == 0) for step in range(200)]
    assert max(scores_of(series, prior=0.15)[30:]) < 3


def test_a_second_jump_makes_jumps_ordinary() -> None:
    """One jump changes nothing; after two, a third one of this size is no outlier."""
    scores = scores_of([*[0.0] * 30, 10.0, *[0.0] * 10, 10.0, *[0.0] * 10, 10.0], second=0.3)
    assert scores[30] == scores[41] > 100
    assert scores[-1] < 4


def test_falls_do_not_make_rises_ordinary() -> None:
    """A series that has fallen twice may fall once more; that it rises is as far as before."""
    before = [0.0] * 30
    calm, fallen = (
        scores_of([*before, *falls, *[0.0] * 5, 5.0], second=0.3)[-1]
        for falls in ([0.0, 0.0], [-10.0, -10.0])
    )
    assert fallen == pytest.approx(calm, rel=0.1)
    assert scores_of([*before, -10.0, 0.0, -10.0, 0.0, -10.0], second=0.3)[-1] > -4


def test_what_is_forgotten_was_no_jump() -> None:
    """The deviation is that of a window without the distance; the value counts as before."""
    window, kept = (RobustWindow(1, prior=0.5, second=0.27) for _ in range(2))
    for value in (0.0, 0.1, -0.1, 5.0, 0.1, 5.0, 0.0):
        window.add(torch.tensor([value]))
        kept.add(torch.tensor([value]))
        if value == 5.0:
            window.forget()

    assert torch.equal(window.expected, kept.expected)
    assert int(window.num_distances) == int(kept.num_distances) - 2
    assert float(window.deviation) < float(kept.deviation) / 3


def test_a_value_that_was_not_included_has_nothing_to_forget() -> None:
    """What was usual before stays known."""
    window = RobustWindow(2, prior=0.5)
    for value in (0.0, 1.0, 2.0):
        window.add(torch.tensor([value, value]))
    window.add(torch.tensor([3.0, 3.0]), torch.zeros((), dtype=torch.bool))
    window.forget()
    assert window.num_distances.tolist() == [2, 2]
    window.add(torch.tensor([3.0, math.nan]))
    for _ in range(2):
        window.forget()
        assert window.num_distances.tolist() == [2, 2]


def test_the_first_series_may_keep_what_the_others_forget() -> None:
    """A series of all ranks stays the same on all of them."""
    window = RobustWindow(2, prior=0.5)
    for value in (0.0, 5.0):
        window.add(torch.tensor([value, value]))
    window.forget(1)
    assert window.num_distances.tolist() == [1, 0]


def test_a_new_level_is_expected_after_three_values() -> None:
    """A series that stays at a new level is no outlier for long."""
    scores = scores_of([0.0] * 30 + [9.0] * 4)
    assert min(scores[30:33]) > 10
    assert abs(scores[33]) < 1


def test_non_finite_values_and_values_that_do_not_count_leave_the_window_as_it_is() -> None:
    """Neither enters the window."""
    window = RobustWindow(2, prior=1.0)
    window.add(torch.tensor([1.0, 2.0]))
    before = [tensor.clone() for tensor in window.state_dict().values()]
    window.add(torch.tensor([math.nan, math.inf]))
    window.add(torch.tensor([5.0, 5.0]), torch.zeros((), dtype=torch.bool))
    window.add(torch.tensor([5.0, 5.0]), torch.tensor([False, False]))
    for now, then in zip(window.state_dict().values(), before, strict=True):
        torch.testing.assert_close(now, then, equal_nan=True)
    assert window.scores(torch.tensor([math.nan, math.inf])).isnan().all()


def test_a_loaded_window_continues_bitwise() -> None:
    """A state that went through JSON continues with the same scores."""
    series = noise(90).reshape(30, 3)
    one = RobustWindow(3, prior=0.5, length=8)
    for row in series[:20]:
        one.add(row)
    state = {name: json.loads(json.dumps(x.tolist())) for name, x in one.state_dict().items()}
    other = RobustWindow(3, prior=0.5, length=8)
    other.load_state_dict({name: torch.tensor(rows) for name, rows in state.items()})
    for row in series[20:]:
        assert torch.equal(one.scores(row), other.scores(row))
        one.add(row)
        other.add(row)
    assert torch.equal(one.deviation, other.deviation)


@pytest.mark.cuda
def test_deterministic_algorithms_can_be_asked_for_on_cuda() -> None:
    """A window on CUDA works where torch refuses operations that are not deterministic."""
    window = RobustWindow(2, prior=1.0, device="cuda")
    torch.use_deterministic_algorithms(True)  # noqa: FBT003  (torch's signature)
    try:
        for _ in range(3):
            window.add(torch.ones(2, device="cuda"))
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003  (torch's signature)
    assert window.expected.tolist() == [1.0, 1.0]
