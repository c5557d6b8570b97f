"""The weights of the training can be read while averages are in their place."""

import contextlib
import copy

import pytest
import torch

from mfwrap import ExponentialMovingAverage
from mfwrap.average.swap import training_weights
from support.averages import Network, assert_same, train_with_skips


@pytest.mark.parametrize("error", [None, ValueError])
def test_the_weights_of_the_training_inside_swap(error):
    """`training_weights` restores weights and buffers, and then the averages, bitwise."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.9)
    train_with_skips(network, 3, ema, seed=0)
    raw = copy.deepcopy(network.state_dict())
    with ema.swap():
        averaged = copy.deepcopy(network.state_dict())
        with contextlib.suppress(ValueError), training_weights(), training_weights():
            assert not ema.is_swapped
            assert_same(raw, network.state_dict())
            with ema.swap():
                assert_same(averaged, network.state_dict())
            if error is not None:
                raise error
        assert ema.is_swapped
        assert_same(averaged, network.state_dict())
    assert_same(raw, network.state_dict())
    with training_weights():
        assert_same(raw, network.state_dict())


def test_swaps_of_two_averages():
    """`training_weights` lifts the swaps in the opposite order."""
    network = Network()
    emas = [ExponentialMovingAverage(network, decay) for decay in (0.5, 0.9)]
    for _ in range(3):
        train_with_skips(network, 1, emas[0], seed=0)
        emas[1].update()
    raw = copy.deepcopy(network.state_dict())
    with emas[0].swap(), emas[1].swap():
        averaged = copy.deepcopy(network.state_dict())
        for _ in range(2):
            with training_weights():
                assert_same(raw, network.state_dict())
            assert_same(averaged, network.state_dict())
    assert_same(raw, network.state_dict())


def test_a_swap_that_ends_inside_training_weights():
    """The averages are not put back, and what was written stays."""
    weight = torch.zeros(2)
    ema = ExponentialMovingAverage([weight], 0.9)
    weight += 1
    with contextlib.ExitStack() as swap:
        swap.enter_context(ema.swap())
        with training_weights():
            weight += 1
        assert weight.tolist() == [0.0, 0.0]
        with training_weights():
            assert weight.tolist() == [2.0, 2.0]
            swap.close()
            weight += 1
    assert weight.tolist() == [3.0, 3.0]
    assert not ema.is_swapped


def test_a_swap_inside_a_swap():
    """It changes nothing, and the end of the outer block restores the values."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.9)
    train_with_skips(network, 3, ema, seed=0)
    raw = copy.deepcopy(network.state_dict())
    with ema.swap():
        averaged = copy.deepcopy(network.state_dict())
        with ema.swap():
            assert_same(averaged, network.state_dict())
            with training_weights():
                assert_same(raw, network.state_dict())
        assert_same(averaged, network.state_dict())
    assert_same(raw, network.state_dict())
    assert not ema.is_swapped
