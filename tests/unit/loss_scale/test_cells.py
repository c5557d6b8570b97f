"""Loss-scale update cells agree with a reference implementation and with torch's GradScaler."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell
from support.host_reads import HostReads

FLOAT32_MAX = torch.finfo(torch.float32).max
# Powers of two, so that the float64 numbers of the reference are exact in float32, too.
SCALES = st.sampled_from([2.0**exponent for exponent in (0, 1, 4, 10, 16, 126, 127)])
FACTORS = st.sampled_from([1, 2, 4.0, 16.0])
FLOORS = st.sampled_from([2.0**exponent for exponent in (-3, 0, 2)])
OVERFLOWS = st.lists(st.booleans(), min_size=1, max_size=60)
MOSTLY_FINITE = st.lists(st.integers(0, 5).map(lambda n: n == 0), min_size=1, max_size=60)


class Reference:
    """A reference implementation of the rules, which counts consecutive finite steps."""

    def __init__(self, scale, factor, window, hysteresis=1, floor=1.0):
        self.scale, self.factor, self.window = scale, factor, window
        self.hysteresis, self.floor = hysteresis, floor
        self.finite_in_a_row = self.overflows_since_change = 0

    def step(self, overflow):
        if overflow:
            self.finite_in_a_row = 0
            self.overflows_since_change += 1
            if self.overflows_since_change == self.hysteresis:
                self.scale = max(self.scale / self.factor, self.floor)
                self.overflows_since_change = 0
            return self.scale
        self.finite_in_a_row += 1
        if self.finite_in_a_row == self.window:
            self.finite_in_a_row = 0
            if self.scale * self.factor <= FLOAT32_MAX:
                self.scale *= self.factor
                self.overflows_since_change = 0
        return self.scale


def flag(overflow):
    """Return an overflow flag as the step computes it."""
    return torch.full((), overflow, dtype=torch.bool)


def trace(cell, overflows, scale=None):
    """Return the scale after each step."""
    scale = torch.full((), cell.get_loss_scale()) if scale is None else scale
    scales = []
    for overflow in overflows:
        cell(scale, flag(overflow))
        scales.append(scale.item())
    return scales


def parsed(pattern):
    """Return overflow flags from a string: X is an overflow, a dot is a finite step."""
    return [character == "X" for character in pattern]


@given(SCALES, FACTORS, st.integers(1, 5), st.integers(1, 4), FLOORS, OVERFLOWS | MOSTLY_FINITE)
def test_dynamic_scale_follows_the_reference(scale, factor, window, hysteresis, floor, overflows):
    """The scale equals the reference exactly after every step."""
    cell = DynamicLossScaleUpdateCell(
        scale, factor, window, hysteresis=hysteresis, min_loss_scale=floor
    )
    reference = Reference(scale, factor, window, hysteresis, floor)

    assert trace(cell, overflows) == [reference.step(overflow) for overflow in overflows]


@given(
    st.sampled_from([1.5, 3.0, 2.0, 1.001]), st.integers(1, 4), st.lists(st.booleans(), max_size=40)
)
def test_dynamic_scale_agrees_with_torch(factor, window, overflows):
    """Above its floor the scale agrees with torch's ``_amp_update_scale_`` up to rounding.

    The tolerance of 5e-6 covers 40 products, each rounded by 6e-8 (half a float32 ulp) by torch
    and by the cell.
    """
    cell = DynamicLossScaleUpdateCell(65536.0, factor, window, min_loss_scale=1e-30)
    scale, tracker = torch.full((), 65536.0), torch.zeros((), dtype=torch.int32)
    expected = []
    for overflow in overflows:
        found_inf = torch.full((), float(overflow))
        torch._amp_update_scale_(scale, tracker, found_inf, factor, 1 / factor, window)
        expected.append(scale.item())

    assert trace(cell, overflows) == pytest.approx(expected, rel=5e-6)


def test_scale_grows_at_the_last_step_of_a_window():
    """With a window of three the scale grows at the third finite step."""
    cell = DynamicLossScaleUpdateCell(16.0, 2, 3)

    assert trace(cell, parsed("......")) == [16, 16, 32, 32, 32, 64]


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_scale_falls_at_the_overflow_that_hysteresis_names(hysteresis):
    """With a hysteresis of n, every n-th overflow lowers the scale."""
    cell = DynamicLossScaleUpdateCell(1024.0, 2, 1000, hysteresis=hysteresis)

    assert trace(cell, [True] * 6) == [1024 / 2 ** (n // hysteresis) for n in range(1, 7)]


def test_finite_steps_do_not_forgive_an_overflow():
    """Finite steps between overflows do not restart the count of overflows."""
    cell = DynamicLossScaleUpdateCell(1024.0, 2, 1000, hysteresis=2)

    assert trace(cell, parsed("X...X...X")) == [1024] * 4 + [512] * 5


def test_growth_forgives_overflows():
    """A growth of the scale restarts the count of overflows."""
    cell = DynamicLossScaleUpdateCell(1024.0, 2, 2, hysteresis=2)

    assert trace(cell, parsed("X..X.X")) == [1024, 1024, 2048, 2048, 2048, 1024]


def test_a_tolerated_overflow_restarts_the_window():
    """An overflow that does not lower the scale still restarts the window."""
    cell = DynamicLossScaleUpdateCell(16.0, 2, 3, hysteresis=2)

    assert trace(cell, parsed("..X..."))[3:] == [16, 16, 32]


@pytest.mark.parametrize("floor", [1.0, 8.0, 0.25])
def test_scale_never_falls_below_its_floor(floor):
    """The scale does not fall below its lower bound."""
    cell = DynamicLossScaleUpdateCell(24.0, 2, 1000, min_loss_scale=floor)

    assert trace(cell, [True] * 10)[-1] == floor


def test_growth_that_would_be_infinite_is_not_done():
    """A scale that cannot grow further stays finite, and falls at the next overflow."""
    cell = DynamicLossScaleUpdateCell(2.0**127, 2, 1)

    assert trace(cell, parsed("..X.")) == [2.0**127, 2.0**127, 2.0**126, 2.0**127]


@pytest.mark.parametrize(
    "cell", [DynamicLossScaleUpdateCell(8.0, 2, 1), FixedLossScaleUpdateCell(8.0)]
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_call_returns_overflow_and_works_in_place(cell, shape):
    """The flag is returned unchanged, and the scale keeps its memory and shape."""
    scale, overflow = torch.full(shape, 8.0), torch.ones(shape, dtype=torch.bool)
    address = scale.data_ptr()

    assert cell(scale, overflow) is overflow
    assert (scale.data_ptr(), scale.shape) == (address, shape)
    assert overflow.all()


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [(torch.tensor(value), 4.0) for value in (True, 1, 1.0, 3, math.nan, math.inf)]
    + [(torch.tensor(value), 16.0) for value in (False, 0, 0.0)]
    + [(torch.tensor([1], dtype=torch.int32), 4.0), (torch.tensor([False]), 16.0)],
)
def test_overflow_may_be_any_one_element(overflow, expected):
    """A flag may have any dtype and shape () or (1,); any value except 0 is an overflow."""
    scale = torch.full((), 8.0)
    DynamicLossScaleUpdateCell(8.0, 2, 1)(scale, overflow)

    assert scale == expected


@given(OVERFLOWS)
def test_fixed_scale_stays(overflows):
    """A fixed scale keeps its initial value whether or not steps overflow."""
    assert trace(FixedLossScaleUpdateCell(12.5), overflows) == [12.5] * len(overflows)


def test_get_loss_scale_returns_the_initial_scale():
    """`get_loss_scale` returns the initial scale even after updates change the live scale."""
    cell = DynamicLossScaleUpdateCell(16, 2, 1)
    trace(cell, [False, False])

    assert (cell.get_loss_scale(), FixedLossScaleUpdateCell(3).get_loss_scale()) == (16.0, 3.0)


def test_counters_are_mindspores():
    """The counters have MindSpore's values.

    ``cur_iter`` starts at 1 and counts calls. ``last_overflow_iter`` is the number of the last call
    with an overflow or a full window.
    """
    cell = DynamicLossScaleUpdateCell(16.0, 2, 3)
    found = []
    for overflow in parsed("....X.."):
        trace(cell, [overflow])
        found.append((cell.cur_iter.item(), cell.last_overflow_iter.item()))

    assert found == [(2, 0), (3, 0), (4, 3), (5, 3), (6, 5), (7, 5), (8, 5)]


def test_an_update_reads_nothing_on_the_host():
    """An update of either cell reads nothing on the host."""
    cells = [DynamicLossScaleUpdateCell(8.0, 2, 1, hysteresis=2), FixedLossScaleUpdateCell(8.0)]
    scale, overflow = torch.full((), 8.0), flag(overflow=True)
    with HostReads() as host:
        for cell in cells:
            cell(scale, overflow)

    assert host.reads == []


def test_counters_follow_the_loss_scale_to_its_device():
    """The counters of a cell move to the device of the loss scale."""
    cell = DynamicLossScaleUpdateCell(8.0, 2, 1)
    cell(torch.full((), 8.0, device="meta"), torch.ones((), device="meta"))

    assert {counter.device.type for counter in cell.state_dict().values()} == {"meta"}


@given(OVERFLOWS, OVERFLOWS)
def test_a_restored_cell_goes_on_as_the_saved_one(before, after):
    """A resumed run has the scales of an uninterrupted one."""
    saved, restored = (DynamicLossScaleUpdateCell(64.0, 2, 3, hysteresis=2) for _ in range(2))
    scale = torch.full((), 64.0)
    trace(saved, before, scale)
    restored.load_state_dict(saved.state_dict())

    assert trace(restored, after, scale.clone()) == trace(saved, after, scale.clone())


def test_state_is_a_copy():
    """A saved state and the cell do not share tensors."""
    cell = DynamicLossScaleUpdateCell(64.0, 2, 3)
    state = cell.state_dict()
    trace(cell, [True])
    assert state["cur_iter"] == 1

    state["cur_iter"].fill_(99)
    other = DynamicLossScaleUpdateCell(64.0, 2, 3)
    other.load_state_dict(state)
    trace(other, [True])
    assert state["cur_iter"] == 99


def test_a_fixed_cell_has_no_state():
    """The state of a fixed cell is empty."""
    cell = FixedLossScaleUpdateCell(8.0)
    cell.load_state_dict(cell.state_dict())

    assert cell.state_dict() == {}
    with pytest.raises(KeyError, match="must have the keys"):
        cell.load_state_dict({"cur_iter": torch.tensor(1)})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cur_iter": None}, KeyError),
        ({"list_index": torch.tensor(0)}, KeyError),
        ({"cur_iter": 3}, TypeError),
        ({"cur_iter": torch.tensor([3])}, ValueError),
        ({"cur_iter": torch.tensor(3.0)}, ValueError),
    ],
    ids=["missing", "unknown", "no tensor", "wrong shape", "wrong type"],
)
def test_a_foreign_state_is_refused_and_changes_nothing(change, error):
    """A missing or wrong counter is an error, and no counter is changed."""
    cell = DynamicLossScaleUpdateCell(64.0, 2, 3)
    before = cell.state_dict()
    state = {name: counter + 7 for name, counter in before.items()} | change
    state = {name: value for name, value in state.items() if value is not None}

    with pytest.raises(error, match="state_dict"):
        cell.load_state_dict(state)
    assert cell.state_dict() == before


GOOD = {"loss_scale_value": 64.0, "scale_factor": 2, "scale_window": 3}
NO_NUMBERS = ["64", None, True]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("loss_scale_value", 0.0, ValueError),
        ("loss_scale_value", -1.0, ValueError),
        ("loss_scale_value", math.inf, ValueError),
        ("loss_scale_value", math.nan, ValueError),
        ("scale_factor", 0.5, ValueError),
        ("scale_factor", math.inf, ValueError),
        ("scale_window", 0, ValueError),
        ("scale_window", 2.0, TypeError),
        ("hysteresis", 0, ValueError),
        ("hysteresis", 1.0, TypeError),
        ("min_loss_scale", 0.0, ValueError),
        ("min_loss_scale", math.inf, ValueError),
        *[(n, v, TypeError) for n in (*GOOD, "hysteresis", "min_loss_scale") for v in NO_NUMBERS],
    ],
)
def test_bad_arguments_are_refused_by_name(name, value, error):
    """Each argument that is out of range or of a wrong type is named in the message."""
    with pytest.raises(error, match=f"`{name}` must be"):
        DynamicLossScaleUpdateCell(**(GOOD | {name: value}))
    if name == "loss_scale_value":
        with pytest.raises(error, match=f"`{name}` must be"):
            FixedLossScaleUpdateCell(value)


@given(st.lists(st.booleans(), max_size=40))
def test_a_grad_scaler_is_taken_over_with_its_factors(overflows):
    """Scale, growth, backoff and interval are taken from the scaler."""
    # Start so high that 40 overflows do not reach the cell's floor of 1.0: torch has no floor.
    scale, tracker = torch.full((), 2.0**100), torch.zeros((), dtype=torch.int32)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**100, growth_factor=2.0, backoff_factor=0.25, growth_interval=3
    )
    expected = []
    for overflow in overflows:
        found_inf = torch.full((), float(overflow))
        torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.25, 3)
        expected.append(scale.item())

    assert trace(DynamicLossScaleUpdateCell.from_grad_scaler(scaler), overflows) == expected
