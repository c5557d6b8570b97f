"""The adaptive cell agrees with MindFormers' rules, lists of windows and a recorded trace."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap import AdaptiveLossScaleUpdateCell, DynamicLossScaleUpdateCell
from support.host_reads import HostReads

# Windows recorded from MindFormers. The keys are pairs of the largest and the smallest window.
WINDOWS = {
    (1000, 20): [20, 30, 40, 50, 100, 200, 500, 1000],
    (2000, 100): [100, 200, 500, 1000, 2000],
    (1000, 100): [100, 200, 500, 1000],
    (100, 20): [20, 30, 40, 50, 100],
    (50, 10): [10, 15, 20, 25, 30, 35, 40, 45, 50],
    (8, 2): [2, 3, 4, 5, 6, 7, 8],
    (6, 2): [2, 3, 4, 5, 6],
    (5, 4): [3, 5],
    (1024, 7): [4, 8, 11, 15, 18, 22, 25, 29, 32, 36, 39, 43, 46, 50, 100, 200, 500, 1024],
}
SHORT_WINDOWS = st.sampled_from([(4, 2), (8, 2), (6, 2), (5, 4), (3, 1)])
OVERFLOWS = st.integers(1, 12).flatmap(
    lambda rarity: st.lists(st.integers(0, rarity).map(lambda n: n == 0), max_size=120)
)
# Recorded from MindFormers with (1024, 2, 2, max_scale_window=4, min_scale_window=2).
RECORDED_OVERFLOWS = "." * 24 + "XXX" + "...." + "X" + "." * 16 + "XX.XXXX" + "." * 10
RECORDED_SCALES = [
    *(1024, 2048, 2048, 4096, 4096, 8192, 8192, 8192, 16384, 16384, 16384, 32768, 32768, 32768),
    *(65536, 65536, 65536, 65536, 131072, 131072, 131072, 131072, 262144, 262144),
    *(131072, 65536, 32768),
    *(65536, 131072, 262144, 262144),
    131072,
    *(131072, 262144, 262144, 524288, 524288, 1048576, 1048576, 1048576),
    *(2097152, 2097152, 2097152, 4194304, 4194304, 4194304, 8388608, 8388608),
    *(4194304, 2097152, 2097152, 1048576, 524288, 262144, 131072),
    *(262144, 524288, 1048576, 1048576, 2097152, 2097152, 4194304, 4194304, 8388608, 8388608),
]


class Reference:
    """A reference implementation of MindFormers' rules with plain numbers."""

    def __init__(self, scale, factor, window, windows):
        self.scale, self.factor, self.window, self.windows = scale, factor, window, windows
        self.index = windows.index(window)
        self.iteration, self.restarted = 1, 0
        self.growths = self.overflows = 0

    def step(self, overflow):
        full = self.iteration - self.restarted >= self.window
        grew = full and not overflow
        if overflow:
            self.scale = max(self.scale / self.factor, 1.0)
        elif full:
            self.scale *= self.factor
        if overflow or full:
            self.restarted = self.iteration
        self.iteration += 1
        if grew:
            self.growths, self.overflows = (self.growths + 1) % 4, 0
        if self.growths == 3 and self.index != len(self.windows) - 1:
            self.index, self.growths = self.index + 1, 0
            self.window = self.windows[self.index]
        if overflow:
            self.overflows = (self.overflows + 1) % 4
        if overflow and self.overflows == 3 and self.index not in (-1, 0):
            self.window, self.index, self.growths, self.overflows = 1, -1, 0, 0
        return self.scale, self.window


def trace(cell, overflows, scale=None):
    """Return scale and window after each step."""
    scale = torch.full((), cell.get_loss_scale()) if scale is None else scale
    steps = []
    for overflow in overflows:
        cell(scale, torch.full((), overflow, dtype=torch.bool))
        steps.append((scale.item(), cell.scale_window.item()))
    return steps


def cell_of(scale=1024.0, window=2, largest=4, smallest=2):
    """Return a cell with short windows."""
    return AdaptiveLossScaleUpdateCell(scale, 2, window, largest, smallest)


@pytest.mark.parametrize(("limits", "windows"), WINDOWS.items())
def test_windows_are_mindformers(limits, windows):
    """The list of windows follows MindFormers' rule."""
    cell = AdaptiveLossScaleUpdateCell(1024.0, 2, windows[0], *limits)

    assert list(cell.window_list) == windows


def test_a_smallest_window_of_one_gives_windows_twice():
    """If the smallest window is 1, short windows are listed twice, as in MindFormers."""
    windows = list(AdaptiveLossScaleUpdateCell(1024.0, 2, 1, 300, 1).window_list)

    assert windows == [w for w in range(1, 50) for _ in range(2)] + [50, 100, 300]


def test_the_trace_is_mindformers():
    """Every scale of a recorded run with growth, collapse and recovery is reproduced."""
    scales = [scale for scale, _ in trace(cell_of(), [c == "X" for c in RECORDED_OVERFLOWS])]

    assert scales == RECORDED_SCALES


@given(SHORT_WINDOWS, st.sampled_from([1, 2, 4]), st.sampled_from([1.0, 64.0, 2.0**30]), OVERFLOWS)
def test_scale_and_window_follow_the_reference(limits, factor, scale, overflows):
    """Scale and window equal MindFormers' exactly after every step."""
    cell = AdaptiveLossScaleUpdateCell(scale, factor, *_first_window(limits), *limits)
    reference = Reference(scale, factor, cell.scale_window.item(), list(cell.window_list))
    # Compare only the steps before MindFormers' scale may become infinite. mfwrap's scale stays
    # finite; see the test below.
    expected = [reference.step(overflow) for overflow in overflows]
    finite = next((i for i, (s, _) in enumerate(expected) if s > 2.0**127), len(expected))

    assert trace(cell, overflows[:finite]) == expected[:finite]


def _first_window(limits):
    _, smallest = limits
    return [3] if limits == (5, 4) else [smallest]


def test_three_growths_lengthen_the_window():
    """Every third growth selects the next window of the list, until the last window."""
    windows = [window for _, window in trace(cell_of(), [False] * 40)]

    # Three windows of 2 steps, three of 3 steps, then only windows of 4 steps.
    assert windows == [2] * 5 + [3] * 9 + [4] * 26


def test_three_overflows_without_a_growth_collapse_the_window():
    """Three overflows collapse the window to 1; a growth between them restarts the count."""
    cell = cell_of(window=4)

    assert trace(cell, [c == "X" for c in "X.X.X"])[-1][1] == 1
    assert trace(cell_of(window=4), [c == "X" for c in "X.X....X.X"])[-1][1] == 4


def test_the_smallest_window_does_not_collapse():
    """With the shortest window, overflows do not change the window."""
    assert {window for _, window in trace(cell_of(window=2), [True] * 8)} == {2}


def test_a_collapsed_window_recovers_at_the_head_of_the_list():
    """Three growths at window 1 lead to the shortest window of the list."""
    steps = trace(cell_of(window=4), [c == "X" for c in "XXX..."])

    assert [window for _, window in steps] == [4, 4, 1, 1, 1, 2]


def test_growth_that_would_be_infinite_is_not_done_and_does_not_count():
    """A scale that cannot grow further stays finite, and its window does not change."""
    steps = trace(cell_of(scale=2.0**127), [False] * 20)

    assert steps == [(2.0**127, 2)] * 20


def test_scale_never_falls_below_one():
    """The scale never falls below 1, as in MindFormers."""
    assert trace(cell_of(scale=4.0), [True] * 5)[-1][0] == 1.0


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_call_returns_overflow_and_works_in_place(shape):
    """The flag is returned unchanged, and the scale keeps its memory and shape."""
    scale, overflow = torch.full(shape, 8.0), torch.ones(shape, dtype=torch.bool)
    address = scale.data_ptr()

    assert cell_of()(scale, overflow) is overflow
    assert (scale.data_ptr(), scale.shape, scale.item()) == (address, shape, 4.0)


def test_an_update_reads_nothing_on_the_host():
    """An update reads nothing on the host, whether scale and window grow or shrink."""
    cell, scale = cell_of(), torch.full((), 1024.0)
    flags = [torch.full((), c == "X") for c in RECORDED_OVERFLOWS]
    with HostReads() as host:
        for overflow in flags:
            cell(scale, overflow)

    assert host.reads == []


def test_counters_follow_the_loss_scale_to_its_device():
    """The counters of a cell move to the device of the loss scale."""
    cell = cell_of()
    cell(torch.full((), 8.0, device="meta"), torch.ones((), device="meta"))

    assert {counter.device.type for counter in cell.state_dict().values()} == {"meta"}


@given(OVERFLOWS, OVERFLOWS)
def test_a_restored_cell_goes_on_as_the_saved_one(before, after):
    """A resumed run has the scales and windows of an uninterrupted one."""
    saved, restored = cell_of(), cell_of()
    scale = torch.full((), 1024.0)
    trace(saved, before, scale)
    restored.load_state_dict(saved.state_dict())

    assert trace(restored, after, scale.clone()) == trace(saved, after, scale.clone())


def test_a_foreign_state_is_refused_and_changes_nothing():
    """The state of another cell, a number instead of a tensor, and a wrong shape are errors."""
    cell = cell_of()
    before = cell.state_dict()

    with pytest.raises(KeyError, match="must have the keys"):
        cell.load_state_dict(DynamicLossScaleUpdateCell(8.0, 2, 1).state_dict())
    with pytest.raises(TypeError, match="state_dict"):
        cell.load_state_dict(
            {name: value + 1 for name, value in before.items()} | {"list_index": 1}
        )
    with pytest.raises(ValueError, match="shape"):
        cell.load_state_dict({name: counter.reshape(1) for name, counter in before.items()})
    assert cell.state_dict() == before


def test_a_state_of_more_windows_is_refused_and_changes_nothing():
    """The state of a cell with a longer list of windows is an error."""
    saved = AdaptiveLossScaleUpdateCell(2.0, 2, 200, max_scale_window=200)
    cell = AdaptiveLossScaleUpdateCell(2.0, 2, 100, max_scale_window=100)
    before = cell.state_dict()

    with pytest.raises(ValueError, match=r"`state_dict\['list_index'\]` must be .* got 5"):
        cell.load_state_dict(saved.state_dict())

    assert cell.state_dict() == before
    saved.load_state_dict(before)


def test_a_window_that_is_not_listed_is_replaced_with_a_warning():
    """A window that is not listed is replaced by the shortest one, with a warning."""
    with pytest.warns(UserWarning, match=r"`scale_window` 25 is not .*; 20 is used") as seen:
        cell = AdaptiveLossScaleUpdateCell(1024.0, 2, 25)

    assert cell.scale_window == 20
    assert seen[0].filename == __file__


def test_a_listed_window_is_used_without_a_warning():
    """A `scale_window` that is in the list is used without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AdaptiveLossScaleUpdateCell(1024.0, 2, 200).scale_window == 200


GOOD = {"loss_scale_value": 64.0, "scale_factor": 2, "scale_window": 20}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"loss_scale_value": 0.0}, ValueError),
        ({"loss_scale_value": math.inf}, ValueError),
        ({"loss_scale_value": "64"}, TypeError),
        ({"scale_factor": 0.5}, ValueError),
        ({"scale_factor": None}, TypeError),
        ({"scale_window": 0}, ValueError),
        ({"scale_window": 20.0}, TypeError),
        ({"min_scale_window": 0}, ValueError),
        ({"max_scale_window": -1}, ValueError),
        ({"max_scale_window": 20}, ValueError),
        ({"min_scale_window": 1000}, ValueError),
        ({"max_scale_window": 1000.0}, TypeError),
        ({"min_scale_window": 20.0}, TypeError),
        # As in MindFormers, the limits are compared before their types are checked.
        ({"min_scale_window": 20.0, "max_scale_window": 10.0}, ValueError),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(change, error):
    """Each argument that is out of range or of a wrong type is named in the message."""
    with pytest.raises(error, match=f"`{next(iter(change))}`"):
        AdaptiveLossScaleUpdateCell(**(GOOD | change))
