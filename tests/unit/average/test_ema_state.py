"""The state of an average resumes exactly, and a state that does not fit changes nothing."""

import copy
import io
import itertools

import pytest
import torch

from mfwrap.average.ema import ExponentialMovingAverage
from support.averages import (
    COPIED,
    Network,
    assert_same,
    averages,
    flat,
    train_with_skips,
    weights_of,
)


@pytest.mark.parametrize("update_every", [1, 2])
def test_resumed_run_equals_unbroken_one(update_every):
    """A run resumed from a torch.save file ends bitwise equal to the uninterrupted run."""
    unbroken = Network()
    ema = ExponentialMovingAverage(unbroken, 0.9, warmup=True, update_every=update_every)
    train_with_skips(unbroken, 5, ema, seed=0)
    file = io.BytesIO()
    torch.save({"network": unbroken.state_dict(), "ema": ema.state_dict()}, file)
    train_with_skips(unbroken, 4, ema, seed=1)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = Network()
    resumed.load_state_dict(saved["network"], strict=False)
    resumed.frozen.load_state_dict(unbroken.frozen.state_dict())
    resumed_ema = ExponentialMovingAverage(resumed, 0.9, warmup=True, update_every=update_every)
    resumed_ema.load_state_dict(saved["ema"])
    assert_same(flat(saved["ema"]), flat(resumed_ema.state_dict()))
    train_with_skips(resumed, 4, resumed_ema, seed=1)

    assert_same(unbroken.state_dict(), resumed.state_dict())
    assert_same(flat(ema.state_dict()), flat(resumed_ema.state_dict()))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_state_with_weights_that_were_trained_later_resumes(frozen):
    """A new average takes them from the state, even while they are frozen in its network."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.9)
    network.frozen.requires_grad_()
    train_with_skips(network, 3, ema, seed=0)

    again = Network()
    again_ema = ExponentialMovingAverage(again, 0.9)
    again.frozen.requires_grad_(requires_grad=not frozen)
    again_ema.load_state_dict(copy.deepcopy(ema.state_dict()))
    assert_same(flat(ema.state_dict()), flat(again_ema.state_dict()))
    again.load_state_dict(network.state_dict())
    again.frozen.requires_grad_()
    for each, average in ((network, ema), (again, again_ema)):
        train_with_skips(each, 2, average, seed=1)
    assert_same(averages(ema), averages(again_ema))


def test_state_within_a_swap_starts_no_average():
    """After the swap, all weights are what they were before."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.9)
    train_with_skips(network, 3, ema, seed=0)
    network.frozen.requires_grad_()
    before = [parameter.detach().clone() for parameter in network.parameters()]
    with ema.swap():
        ema.state_dict()
    assert all(map(torch.equal, before, network.parameters()))
    assert "frozen.weight" in ema.state_dict()["averages"]


def test_state_of_another_dtype_is_converted():
    """A loaded state is converted to the dtype of the average."""
    weights = weights_of((3,), (2, 2))
    state = ExponentialMovingAverage(weights, dtype=torch.float64).state_dict()
    ema = ExponentialMovingAverage(weights_of((3,), (2, 2)))
    ema.load_state_dict(state)

    assert_same({"0": weights[0], "1": weights[1]}, averages(ema))


def test_loaded_state_is_not_shared():
    """An average does not share tensors with the state that it loaded."""
    weight = torch.zeros(2)
    ema = ExponentialMovingAverage([weight], 0.5)
    state = copy.deepcopy(ema.state_dict())
    ema.load_state_dict(state)
    weight.fill_(1.0)
    ema.update()

    assert torch.equal(state["averages"]["0"], torch.zeros(2))
    assert state["counters"]["applied_updates"] == 0


def replaced(part: str, name: str, value: object):
    """Return a function that replaces an entry of a state."""

    def change(state: dict) -> None:
        state[part][name] = value

    return change


def removed(*path: str):
    """Return a function that removes an entry from a state."""

    def change(state: dict) -> None:
        *parts, name = path
        for part in parts:
            state = state[part]
        del state[name]

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (removed("averages"), KeyError, "`state` .*missing: .'averages'."),
        (removed("counters"), KeyError, "`state` .*missing: .'counters'."),
        (removed("averages", "norm.bias"), KeyError, "`averages` .*missing: .'norm.bias'."),
        (removed("buffers", COPIED[0]), KeyError, "`buffers` .*missing: .'norm.running_mean'."),
        (removed("counters", "num_calls"), KeyError, "`counters` .*missing: .'num_calls'."),
        (replaced("averages", "other", torch.ones(4)), KeyError, "`averages` .*unknown: .'other'."),
        (lambda state: state.update(decay=0.9), KeyError, "`state` .*unknown: .'decay'."),
        (lambda state: state.update(averages=[]), TypeError, "`averages` must be a mapping"),
        (replaced("averages", "norm.bias", torch.ones(5)), ValueError, "`averages` .*'norm.bias'"),
        (replaced("averages", "norm.bias", 1.0), TypeError, "`averages` .*tensor at 'norm.bias'"),
        (
            replaced("averages", "norm.bias", torch.ones(4, dtype=torch.int64)),
            ValueError,
            "`averages` .*'norm.bias', got torch.int64",
        ),
        (replaced("buffers", COPIED[2], torch.ones(())), ValueError, "`buffers` .*num_batches"),
        (replaced("counters", "num_calls", 3), TypeError, "`counters` .*'num_calls'"),
        (replaced("counters", "num_calls", torch.full((), -1)), ValueError, "`counters` .*>= 0"),
        (replaced("counters", "applied_updates", torch.full((), -1)), ValueError, ".*got -1 and"),
    ],
)
def test_foreign_state_changes_nothing(change, error, message):
    """Loading a state that does not fit raises an error that names the entry; nothing changes."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.9)
    train_with_skips(network, 2, ema, seed=0)
    before = flat(ema.state_dict())
    state = copy.deepcopy(ema.state_dict())
    for tensor in itertools.chain(state["averages"].values(), state["buffers"].values()):
        tensor.add_(1)
    change(state)
    with pytest.raises(error, match=message):
        ema.load_state_dict(state)

    assert_same(before, flat(ema.state_dict()))


def test_state_must_be_a_mapping():
    """Loading a state that is not a mapping raises a TypeError."""
    with pytest.raises(TypeError, match="`state` must be a mapping, got None"):
        ExponentialMovingAverage([torch.zeros(1)]).load_state_dict(None)
