"""Saving, loading and checking the cell's state, and flushing a pending update."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import (
    AdaptiveLossScaleUpdateCell,
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
)
from support.small_networks import Classifier, labelled_batches
from support.training_state import assert_same_state, training_state

NAN = float("nan")
FACTORS = (1.0, NAN, 1.0, 1.0, NAN, NAN, 1.0, 1.0, NAN, 1.0)
"""Factors that the losses of successive steps are multiplied by."""

LOSS_SCALES = {
    "fixed": lambda: 2.0**10,
    "dynamic": lambda: DynamicLossScaleUpdateCell(2.0**10, 2, 2, hysteresis=2),
    "adaptive": lambda: AdaptiveLossScaleUpdateCell(2.0**10, 2, 20),
}


class Training:
    """The objects of a run, which can be trained, saved and loaded together."""

    def __init__(self, *, loss_scale: str = "dynamic", ema: bool = True, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.network = Classifier()
        self.optimizer = AdamW(self.network.parameters(), lr=1e-2, fused=True)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.ema = ExponentialMovingAverage(self.network, decay=0.9, warmup=True) if ema else None
        self.cell = MFTrainOneStepCell(
            self.network,
            self.optimizer,
            use_clip_grad=True,
            scale_sense=LOSS_SCALES[loss_scale](),
            lr_scheduler=self.schedule,
            ema=self.ema,
        )

    def train(self, first: int, last: int) -> list[Tensor]:
        values = []
        for index, (inputs, labels) in enumerate(labelled_batches(len(FACTORS))):
            if first <= index < last:
                output = self.cell(inputs, labels, FACTORS[index])
                report = self.cell.last_report
                counters = (report.applied_updates, report.skipped_updates)
                values += [*output, *counters, report.consecutive_skips]
        return values

    def parts(self) -> dict[str, Any]:
        return {
            "cell": self.cell,
            "network": self.network,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    def save(self) -> bytes:
        file = io.BytesIO()
        # Save the cell first, because its flush steps the schedule.
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(states[name])


@pytest.mark.parametrize("stop", [1, 2, 5, 6])
@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
def test_a_resumed_run_is_the_unbroken_run(loss_scale, stop):
    """A run resumed after an applied or a skipped step is bitwise like an uninterrupted run."""
    unbroken = Training(loss_scale=loss_scale)
    expected = unbroken.train(0, 10)[8 * stop :]
    stopped = Training(loss_scale=loss_scale)
    stopped.train(0, stop)
    saved = stopped.save()

    resumed = Training(loss_scale=loss_scale, seed=1)
    resumed.load(saved)
    actual = resumed.train(stop, 10)

    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    for training in (unbroken, resumed):
        training.cell.flush()
    assert_same_state(
        training_state(unbroken.network, unbroken.optimizer, unbroken.schedule, unbroken.cell),
        training_state(resumed.network, resumed.optimizer, resumed.schedule, resumed.cell),
    )


def test_what_is_saved_does_not_change_with_further_training():
    """Further training does not change the scale and counters in a saved state."""
    training = Training(ema=False)
    training.train(0, 3)
    state = training.cell.state_dict()
    before = copy.deepcopy(state)

    training.train(3, 7)

    assert torch.equal(state["loss_scale"]["value"], before["loss_scale"]["value"])
    for name in ("applied_updates", "skipped_updates", "consecutive_skips"):
        assert torch.equal(state[name], before[name])


def test_loading_drops_what_was_pending():
    """An update that is pending when a state is loaded does not step the loaded schedule."""
    training = Training()
    saved = training.save()
    training.train(0, 1)

    training.load(saved)
    training.cell.flush()

    assert training.schedule.last_epoch == 0
    assert training.cell.state_dict()["applied_updates"].item() == 0


def test_loading_changes_the_live_scale():
    """The next step uses the loaded scale, even if the cell's scale was 1."""
    network = Classifier()
    unscaled = MFTrainOneStepCell(network, SGD(network.parameters(), lr=1.0, fused=True))
    scaled = MFTrainOneStepCell(
        network, SGD(network.parameters(), lr=1.0, fused=True), scale_sense=8.0
    )
    reference = copy.deepcopy(network)
    [batch] = labelled_batches(1)

    unscaled.load_state_dict(scaled.state_dict())
    output = unscaled(*batch)

    reference(*batch).backward()
    assert output.loss_scale.item() == 8.0
    for ours, theirs in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - theirs.grad, rtol=0, atol=1e-7)


def at(*path: str, put: Any = None) -> Callable[[dict], None]:
    """Return a function that changes the value at a path in a state.

    Args:
        path: Keys from the outermost to the innermost mapping.
        put: New value; ``None`` removes the key.
    """

    def change(state: dict) -> None:
        *outer, last = path
        for key in outer:
            state = state[key]
        if put is None:
            del state[last]
        else:
            state[last] = put

    return change


AVERAGE = ("ema", "averages", "layers.0.weight")
COUNTER = ("loss_scale", "update_cell", "cur_iter")
BAD_STATES = {
    "no loss scale": (KeyError, "loss_scale", at("loss_scale")),
    "no counter": (KeyError, "skipped_updates", at("skipped_updates")),
    "unknown key": (KeyError, "epoch", at("epoch", put=3)),
    "counter is a number": (TypeError, "applied_updates", at("applied_updates", put=3)),
    "counter of a shape": (
        ValueError,
        "applied_updates",
        at("applied_updates", put=torch.zeros(1, dtype=torch.int64)),
    ),
    "counter of floats": (ValueError, "skipped_updates", at("skipped_updates", put=torch.ones(()))),
    "scale is a number": (TypeError, "value", at("loss_scale", "value", put=2.0)),
    "scale of a shape": (ValueError, "value", at("loss_scale", "value", put=torch.ones(2))),
    "scale is nan": (ValueError, "value", at("loss_scale", "value", put=torch.tensor(NAN))),
    "scale is zero": (ValueError, "value", at("loss_scale", "value", put=torch.tensor(0.0))),
    "no scale": (KeyError, "value", at("loss_scale", "value")),
    "no counters of the update cell": (
        KeyError,
        "cur_iter",
        at("loss_scale", "update_cell", put={}),
    ),
    "no counter of the update cell": (KeyError, "cur_iter", at(*COUNTER)),
    "counter of the update cell of a shape": (
        ValueError,
        "cur_iter",
        at(*COUNTER, put=torch.zeros(2, dtype=torch.int64)),
    ),
    "loss scale is a number": (TypeError, "must be a mapping", at("loss_scale", put=1.0)),
    "update cell is a number": (
        TypeError,
        "must be a mapping",
        at("loss_scale", "update_cell", put=1),
    ),
    "no averages": (KeyError, "averages", at("ema", "averages")),
    "an average is missing": (KeyError, "layers.0.weight", at(*AVERAGE)),
    "an average of a shape": (ValueError, "layers.0.weight", at(*AVERAGE, put=torch.zeros(3))),
    "an average is a number": (TypeError, "layers.0.weight", at(*AVERAGE, put=1.0)),
    "average is a list": (TypeError, "must be a mapping", at("ema", put=[1])),
}


@pytest.mark.parametrize(("error", "message", "change"), BAD_STATES.values(), ids=BAD_STATES)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(error, message, change):
    """An invalid state raises an error that names the entry, and leaves the cell unchanged."""
    donor, training = Training(), Training()
    donor.train(0, 6)
    training.train(0, 2)
    state = copy.deepcopy(donor.cell.state_dict())
    change(state)
    before = training_state(training.network, training.optimizer, training.cell)

    with pytest.raises(error, match=message):
        training.cell.load_state_dict(state)

    assert_same_state(before, training_state(training.network, training.optimizer, training.cell))


FOREIGN = {
    "of a fixed scale": {"loss_scale": "fixed"},
    "of an adaptive scale": {"loss_scale": "adaptive"},
    "of a cell without average": {"ema": False},
}


@pytest.mark.parametrize("settings", FOREIGN.values(), ids=FOREIGN)
def test_the_state_of_another_kind_of_cell_is_refused(settings):
    """A cell with a dynamic scale and an average rejects the states of other kinds of cells."""
    training = Training()
    before = training_state(training.network, training.optimizer, training.cell)

    with pytest.raises(KeyError, match="state_dict"):
        training.cell.load_state_dict(Training(**settings).cell.state_dict())

    assert_same_state(before, training_state(training.network, training.optimizer, training.cell))


@pytest.mark.parametrize("loss_scale", ["fixed", "adaptive"])
def test_no_other_kind_of_cell_takes_the_state_of_a_dynamic_one(loss_scale):
    """A cell with a fixed or adaptive scale rejects the state of a cell with a dynamic scale."""
    with pytest.raises(KeyError, match="state_dict"):
        Training(loss_scale=loss_scale).cell.load_state_dict(Training().cell.state_dict())


@pytest.mark.parametrize("state", [None, [], "state", 3], ids=repr)
def test_a_state_must_be_a_mapping(state):
    """A state that is not a mapping raises a TypeError."""
    with pytest.raises(TypeError, match="`state_dict` of this cell must be a mapping"):
        Training().cell.load_state_dict(state)


def test_the_schedule_is_one_step_behind_until_a_flush():
    """After an update, the schedule is one step behind until a flush or the next update."""
    training = Training()

    training.train(0, 1)
    behind = training.schedule.last_epoch
    training.cell.flush()
    flushed = training.schedule.last_epoch
    training.cell.flush()

    assert (behind, flushed, training.schedule.last_epoch) == (0, 1, 1)


def test_a_flush_after_a_skipped_update_leaves_the_schedule():
    """A flush after a skipped update does not step the schedule."""
    training = Training()

    training.train(0, 2)
    training.cell.flush()

    assert training.schedule.last_epoch == 1


def test_a_state_settles_what_is_pending():
    """Saving flushes the pending update, which steps the schedule."""
    training = Training()
    training.train(0, 1)

    training.cell.state_dict()

    assert training.schedule.last_epoch == 1


class Raises(SGD):
    """An optimizer whose step raises."""

    @torch.no_grad()
    def step(self, closure=None):
        raise ArithmeticError


def test_an_update_that_raises_leaves_the_scale():
    """A step whose update raises leaves loss scale and counters unchanged."""
    network = Classifier()
    scale = DynamicLossScaleUpdateCell(4.0, 2, 1)
    optimizer = Raises(network.parameters(), lr=0.1)
    cell = MFTrainOneStepCell(network, optimizer, scale_sense=scale)
    before = training_state(network, optimizer, cell)

    with pytest.raises(ArithmeticError):
        cell(*labelled_batches(1)[0])

    assert_same_state(before, training_state(network, optimizer, cell))
