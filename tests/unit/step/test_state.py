"""All objects of a step are restored, or none is."""

import pytest
import torch
from torch import nn

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.counts import UpdateCounts
from mfwrap.step.state import StepState
from support.training_state import assert_same_state

CPU = torch.device("cpu")


class Parts:
    """A loss scale, two counts of updates and an average, whose states can be restored."""

    def __init__(self, *, num_updates: int, weight: float) -> None:
        self.loss_scale = LossScale(DynamicLossScaleUpdateCell(8.0, 2, 2), CPU)
        self.counts = [UpdateCounts(CPU, None) for _ in range(2)]
        network = nn.Linear(1, 1, bias=False)
        nn.init.constant_(network.weight, weight)
        self.ema = ExponentialMovingAverage(network)
        for _ in range(num_updates):
            self.loss_scale.update(torch.tensor(False))  # noqa: FBT003  (torch has no keyword)
            for each in self.counts:
                each.count(torch.tensor(True), torch.tensor(False))  # noqa: FBT003  (torch has no keyword)

    def states(self) -> list[dict]:
        """Return the states of loss scale, both counts and the average."""
        owners = [self.loss_scale, *self.counts, self.ema]
        return [owner.state_dict() for owner in owners]

    def flat(self) -> dict:
        """Return all tensors of all states by name."""
        return dict(_flat("", dict(enumerate(self.states()))))

    def restore(self, states: list[dict]) -> None:
        """Restore each object from its state, in the order of `states`."""
        scale, first, second, average = states
        counts = list(zip(self.counts, [first, second], strict=True))
        step = StepState(self.loss_scale, self.ema)
        step.load_state_dict({"loss_scale": scale, "ema": average}, counts)


def _flat(name, value):
    if not isinstance(value, dict):
        yield name, value.clone()
        return
    for key, item in value.items():
        yield from _flat(f"{name}/{key}", item)


def test_all_parts_are_restored():
    """Each object gets its own state."""
    saved, parts = Parts(num_updates=5, weight=1.0), Parts(num_updates=1, weight=2.0)

    parts.restore(saved.states())

    assert_same_state(saved.flat(), parts.flat())
    assert parts.loss_scale.value == 32


def test_a_step_without_average_is_restored_without():
    """A state without an average restores a step without an average."""
    saved, parts = Parts(num_updates=5, weight=1.0), Parts(num_updates=1, weight=2.0)
    scale, first, _, _ = saved.states()

    step = StepState(parts.loss_scale, None)
    step.load_state_dict({"loss_scale": scale}, [(parts.counts[0], first)])

    assert parts.counts[0].applied_updates == 5
    assert parts.counts[1].applied_updates == 1


@pytest.mark.parametrize("part", range(4), ids=["scale", "first counts", "second counts", "ema"])
def test_if_one_part_does_not_fit_none_is_restored(part):
    """If one state is invalid, no object is changed."""
    saved, parts = Parts(num_updates=5, weight=1.0), Parts(num_updates=1, weight=2.0)
    states = saved.states()
    states[part].popitem()
    before = parts.flat()

    with pytest.raises(KeyError):
        parts.restore(states)

    assert_same_state(before, parts.flat())


def test_inside_a_swap_nothing_is_restored():
    """Loading inside a swap raises an error and changes nothing."""
    saved, parts = Parts(num_updates=5, weight=1.0), Parts(num_updates=1, weight=2.0)
    before = parts.flat()

    with parts.ema.swap(), pytest.raises(RuntimeError, match="inside `swap`"):
        parts.restore(saved.states())

    assert_same_state(before, parts.flat())
