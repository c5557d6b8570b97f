"""The average checks its parameters and placement and can restart."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from mfwrap import ExponentialMovingAverage
from mfwrap.accelerate import attach


def followed(**settings):
    """Return a network with a buffer, and the network's average after two updates."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    ema = ExponentialMovingAverage(network, decay=0.5, **settings)
    for _ in range(2):
        changed(network)
        ema.update()
    return network, ema


def changed(network):
    """Add 1 to all weights and running means, as an update would."""
    with torch.no_grad():
        for tensor in [*network.parameters(), network[1].running_mean]:
            tensor.add_(1.0)


def test_it_follows_the_parameters_that_it_was_made_of():
    """`follows` is true if at least one of the parameters is averaged."""
    network, ema = followed()
    stranger = nn.Parameter(torch.zeros(2))

    assert ema.follows(network.parameters())
    assert ema.follows([stranger, network[0].weight])
    assert ema.follows(iter([network[0].bias]))


def test_it_follows_no_equal_parameter_of_another_network():
    """`follows` compares parameters by identity and not by value."""
    _, ema = followed()
    twin, _ = followed()

    assert not ema.follows(twin.parameters())
    assert not ema.follows([])


def test_it_follows_a_frozen_parameter_once_it_is_trainable():
    """`follows` is true for parameters that were frozen when the average was built."""
    network = nn.Linear(2, 3)
    network.bias.requires_grad_(requires_grad=False)

    assert ExponentialMovingAverage(network).follows([network.bias])


PLACEMENTS = {
    "as the weights": {},
    "in another dtype": {"dtype": torch.float64},
    "on the CPU": {"device": "cpu"},
}


@pytest.mark.parametrize("settings", PLACEMENTS.values(), ids=PLACEMENTS)
def test_an_average_is_where_it_was_asked_to_be(settings):
    """`check_placement` accepts an average with its own dtype or device."""
    _, ema = followed(**settings)

    ema.check_placement()


def test_an_average_of_half_precision_weights_is_in_float32():
    """`check_placement` accepts the default float32 average of bfloat16 weights."""
    ExponentialMovingAverage(nn.Linear(2, 3).bfloat16()).check_placement()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_converted_since_are_noticed(dtype):
    """`check_placement` raises if the weights were converted after the average was built."""
    network, ema = followed()
    network.to(dtype)

    with pytest.raises(RuntimeError, match=rf"on cpu in {dtype}, got averages on cpu .*; build"):
        ema.check_placement()


def test_weights_converted_in_part_are_noticed():
    """`check_placement` raises if only a later layer was converted."""
    network, ema = followed()
    network[1].double()

    with pytest.raises(RuntimeError, match=r"`ema` must match the network's weights"):
        ema.check_placement()


@pytest.mark.cuda
def test_weights_moved_since_are_noticed():
    """`check_placement` raises if the weights moved to CUDA after the average was built."""
    network, ema = followed()
    network.cuda()

    with pytest.raises(RuntimeError, match=r"on cuda:0 in torch\.float32, got averages on cpu"):
        ema.check_placement()


def test_a_restart_begins_from_the_weights_as_they_are():
    """A restarted average is bitwise equal to a newly built average."""
    network, ema = followed(warmup=True, update_every=2)
    changed(network)
    fresh = ExponentialMovingAverage(network, decay=0.5, warmup=True, update_every=2)

    ema.restart()

    for _ in range(5):
        expected, actual = fresh.state_dict(), ema.state_dict()
        for part, tensors in expected.items():
            assert sorted(actual[part]) == sorted(tensors)
            for name, tensor in tensors.items():
                assert torch.equal(actual[part][name], tensor)
        changed(network)
        fresh.update()
        ema.update()


def test_a_restart_leaves_the_weights():
    """A restart copies the weights into the average, without changing or sharing them."""
    network, ema = followed()
    before = [weight.detach().clone() for weight in network.parameters()]

    ema.restart()

    for weight, old in zip(network.parameters(), before, strict=True):
        assert torch.equal(weight, old)
    changed(network)
    for (_, average), old in zip(ema.named_averages(), before, strict=True):
        assert torch.equal(average, old)


def test_inside_a_swap_there_is_no_restart():
    """A restart inside a swap raises an error, because the weights are averages."""
    network, ema = followed()
    before = [average.clone() for _, average in ema.named_averages()]

    with ema.swap(), pytest.raises(RuntimeError, match="`restart` must not be called inside"):
        ema.restart()

    for (_, average), old in zip(ema.named_averages(), before, strict=True):
        assert torch.equal(average, old)
    assert not torch.equal(network[0].weight, before[0])


def test_a_step_inside_a_swap_changes_nothing():
    """It is refused before the update, also if the gradients were clipped before the block."""
    accelerator, network = Accelerator(cpu=True), nn.Linear(2, 1)
    ema = ExponentialMovingAverage(network, 0.5)
    attach(accelerator, ema=ema)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
    network, optimizer = accelerator.prepare(network, optimizer)
    accelerator.backward(network(torch.ones(3, 2)).sum())
    accelerator.clip_grad_norm_(network.parameters(), 1.0)

    with ema.swap():
        before = [each.detach().clone() for each in network.parameters()]
        with pytest.raises(RuntimeError, match=r"`optimizer.step` must not be called inside"):
            optimizer.step()
        assert all(map(torch.equal, before, network.parameters()))
    optimizer.step()
    assert not any(map(torch.equal, before, network.parameters()))
