"""Several optimizers share one loss scale and one average."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage
from mfwrap.accelerate.loop_step import SharedAverage, SharedLossScale
from mfwrap.loss_scale.live import LossScale

YES, NO = torch.tensor(True), torch.tensor(False)  # noqa: FBT003  (torch has no keyword)


class Scale:
    """A shared dynamic scale with a flag for unused gradients of other optimizers."""

    def __init__(self, *, window: int = 100) -> None:
        self.others_wait = False
        self.loss_scale = LossScale(DynamicLossScaleUpdateCell(8.0, 2, window), torch.device("cpu"))
        self.shared = SharedLossScale(self.loss_scale, lambda _: not self.others_wait)
        self.optimizer = SGD([nn.Parameter(torch.zeros(()))])

    def update(self, overflow, *, others_wait: bool) -> float:
        """Report an update to the shared scale and return the new scale."""
        self.others_wait = others_wait
        self.shared.gather(self.optimizer, overflow)
        return self.loss_scale.value.item()


def test_the_scale_waits_until_all_gradients_are_used():
    """The scale changes only when no other optimizer has unused gradients."""
    scale = Scale()

    values = [scale.update(YES, others_wait=True), scale.update(NO, others_wait=False)]

    assert values == [8, 4]


@pytest.mark.parametrize("flags", [(YES, YES), (YES, NO), (NO, YES)], ids=str)
def test_an_overflow_of_any_lowers_it_once(flags):
    """Overflows of one or both optimizers in a round of updates lower the scale once."""
    first, second = flags
    scale = Scale()

    scale.update(first, others_wait=True)
    scale.update(second, others_wait=False)

    assert scale.loss_scale.value == 4


def test_updates_of_several_count_as_one_towards_growth():
    """One update by every optimizer counts as one step towards growth of the scale."""
    scale = Scale(window=2)

    for _ in range(2):
        scale.update(NO, others_wait=True)
        value = scale.update(NO, others_wait=False)

    assert value == 16


def test_what_waited_is_settled_when_it_can_be():
    """`settle` applies a pending overflow once, when no other optimizer has unused gradients."""
    scale = Scale()
    scale.update(YES, others_wait=True)
    scale.shared.settle()
    waiting = scale.loss_scale.value.item()

    scale.others_wait = False
    scale.shared.settle()
    scale.shared.settle()

    assert (waiting, scale.loss_scale.value.item()) == (8, 4)


def test_what_has_gathered_can_be_discarded():
    """`discard` removes a pending overflow."""
    scale = Scale()
    scale.update(YES, others_wait=True)

    scale.shared.discard()
    scale.update(NO, others_wait=False)

    assert scale.loss_scale.value == 8


class Average:
    """An average with decay 0.5 of one weight that several optimizers update."""

    def __init__(self, num_parts: int) -> None:
        self.weight = nn.Parameter(torch.zeros(()))
        self.ema = ExponentialMovingAverage([self.weight], decay=0.5)
        self.shared = SharedAverage(self.ema)
        self.parts = [self.shared.part() for _ in range(num_parts)]

    def update(self, part: int, applied=YES) -> float:
        """Add 1 to the weight, report the update, and return the average."""
        with torch.no_grad():
            self.weight.add_(1)
        self.parts[part].update(applied)
        return self.value

    @property
    def value(self) -> float:
        """The current average."""
        [(_, average)] = self.ema.named_averages()
        return average.item()


def test_the_average_of_one_optimizer_follows_each_update():
    """The average of a single optimizer is updated after each update."""
    average = Average(1)

    assert [average.update(0) for _ in range(3)] == [0.5, 1.25, 2.125]


def test_the_average_follows_when_all_have_done_their_update():
    """The average is updated once both optimizers have done their updates, in any order."""
    average = Average(2)

    values = [average.update(part) for part in (0, 1, 1, 0)]

    assert values == [0, 1, 1, 2.5]
    assert average.ema.state_dict()["counters"]["num_calls"] == 2


def test_an_optimizer_that_comes_again_ends_the_round():
    """A second update of the same optimizer ends the round and updates the average."""
    average = Average(2)

    values = [average.update(part) for part in (0, 0, 0, 1)]

    # The second update of optimizer 0 ends the first round, and its third update ends the second
    # round. The update of optimizer 1 completes the third round.
    assert values == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("flags", "expected"), [((NO, NO), 0), ((YES, NO), 1), ((NO, YES), 1)], ids=str
)
def test_the_average_follows_if_any_was_applied(flags, expected):
    """The average is updated if at least one optimizer's update was applied."""
    average = Average(2)

    values = [average.update(part, applied) for part, applied in enumerate(flags)]

    assert values == [0, expected]
    assert average.ema.state_dict()["counters"]["applied_updates"] == expected


def test_a_round_that_has_begun_can_be_discarded():
    """`discard` drops an unfinished round, and the next update begins a new round."""
    average = Average(2)
    average.update(0)

    average.shared.discard()

    assert [average.update(1), average.update(0)] == [0, 1.5]


def test_an_average_that_nobody_updates_is_known():
    """`has_parts` is false if no optimizer updates the average."""
    assert not Average(0).shared.has_parts
    assert Average(1).shared.has_parts


def test_inside_a_swap_updates_are_refused():
    """Inside a swap, `begin_update` of a part of the shared average raises."""
    average = Average(1)

    with (
        average.ema.swap(),
        pytest.raises(RuntimeError, match="`update` must not be called inside `swap`"),
    ):
        average.parts[0].begin_update()
