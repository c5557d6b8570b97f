"""Power-function averages follow the applied updates with the decays of the paper."""

import copy

import numpy as np
import pytest
import torch

from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.average.profiles import gamma_of
from support.averages import (
    FLAGS,
    Network,
    assert_same,
    averages,
    flat,
    train,
    train_with_skips,
    weights_of,
)

LENGTHS = (0.05, 0.10)


@pytest.mark.parametrize("sigma_rel", [0.05, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_update_has_its_share(sigma_rel, dtype):
    """The average is the sum of all weights, each with its part of the profile.

    Between ``t - 1`` and ``t``, the integral of the profile is the share of update ``t``. Skipped
    updates have no number and no share.
    """
    [weight] = weights_of((3, 5), dtype=dtype)
    ema = ExponentialMovingAverage([weight], sigma_rel=sigma_rel)
    seen = []
    for step in range(60):
        if applied := step % 4 != 1:
            train([weight])
            seen.append(weight.double().numpy().copy())
        ema.update(FLAGS[applied])
    ends = (np.arange(len(seen) + 1) / len(seen)) ** (gamma_of(sigma_rel) + 1)
    expected = np.tensordot(np.diff(ends), np.stack(seen), 1)

    got = averages(ema)["0"].double().numpy()
    assert np.abs(got - expected).max() < 20 * torch.finfo(dtype).eps * np.abs(seen).max()


@pytest.mark.parametrize("update_every", [2, 5])
def test_update_every_keeps_the_length(update_every):
    """The weights that are averaged take the shares of the updates between them, too.

    A call for a skipped update averages nothing; the next one has the shares of both intervals.
    """
    [weight] = weights_of((3, 5), dtype=torch.float64)
    ema = ExponentialMovingAverage([weight], sigma_rel=0.1, update_every=update_every)
    num_applied, seen, ends = 0, [], [0]
    for step in range(60):
        if applied := step % 4 != 1:
            train([weight])
            num_applied += 1
        if applied and (step + 1) % update_every == 0:
            seen.append(weight.numpy().copy())
            ends.append(num_applied)
        ema.update(FLAGS[applied])
    shares = np.diff((np.array(ends) / ends[-1]) ** (gamma_of(0.1) + 1))
    expected = np.tensordot(shares, np.stack(seen), 1)

    assert np.abs(averages(ema)["0"].numpy() - expected).max() < 1e-14 * np.abs(seen).max()
    assert int(ema.state_dict()["counters"]["averaged_updates"]) == ends[-1]


def test_averages_of_several_lengths():
    """Several lengths are bitwise the averages that are kept alone; the first one is swapped in."""
    network = Network()
    alone, other = copy.deepcopy(network), copy.deepcopy(network)
    both = ExponentialMovingAverage(network, sigma_rel=LENGTHS)
    first = ExponentialMovingAverage(alone, sigma_rel=LENGTHS[0])
    second = ExponentialMovingAverage(other, sigma_rel=[LENGTHS[1]])
    for each, ema in ((network, both), (alone, first), (other, second)):
        train_with_skips(each, 5, ema, seed=0)
        each.frozen.requires_grad_()  # is averaged from now on
        train_with_skips(each, 4, ema, seed=1)
    state = both.state_dict()

    assert both.sigma_rel == LENGTHS
    assert_same(averages(first), averages(both))
    assert_same(averages(second), state["averages_1"])
    assert "frozen.weight" in state["averages_1"]
    with both.swap():
        assert torch.equal(network.norm.weight, averages(first)["norm.weight"])


@pytest.mark.parametrize("update_every", [1, 3])
def test_resumed_run_equals_unbroken_one(update_every):
    """A resumed run continues all averages bitwise."""
    network = Network()
    ema = ExponentialMovingAverage(network, sigma_rel=LENGTHS, update_every=update_every)
    train_with_skips(network, 5, ema, seed=0)
    again, saved = copy.deepcopy((network, ema.state_dict()))
    train_with_skips(network, 4, ema, seed=1)

    resumed = ExponentialMovingAverage(again, sigma_rel=LENGTHS, update_every=update_every)
    resumed.load_state_dict(saved)
    train_with_skips(again, 4, resumed, seed=1)
    assert_same(flat(ema.state_dict()), flat(resumed.state_dict()))

    resumed.restart()
    for part in ("averages", "averages_1"):
        for name, average in resumed.state_dict()[part].items():
            assert torch.equal(average, again.get_parameter(name))


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"sigma_rel": (0.05, 0.2)}, ValueError, r"`sigma_rel` must be \[0.05, 0.2\], as given"),
        ({"sigma_rel": 0.05}, KeyError, r"unknown: \['averages_1'\]"),
        ({}, KeyError, r"unknown: \['averages_1'\]"),
    ],
)
def test_a_state_of_other_lengths(settings, kind, message):
    """A state of other lengths is refused and changes nothing."""
    [weight] = weights_of((3,))
    saved = ExponentialMovingAverage([weight], sigma_rel=LENGTHS).state_dict()
    ema = ExponentialMovingAverage([weight.clone()], **settings)
    before = copy.deepcopy(ema.state_dict())
    with pytest.raises(kind, match=message):
        ema.load_state_dict(saved)
    assert_same(flat(before), flat(ema.state_dict()))


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"sigma_rel": 0.3}, ValueError, r"must be in \(0, 0.2886\]"),
        ({"sigma_rel": "0.1"}, TypeError, "`sigma_rel` must be"),
        ({"sigma_rel": ()}, ValueError, "one or several different numbers"),
        ({"sigma_rel": (0.1, 0.1)}, ValueError, "one or several different numbers"),
        ({"sigma_rel": 0.1, "decay": 0.9}, ValueError, "without `decay`"),
        ({"sigma_rel": 0.1, "warmup": True}, ValueError, "without `decay`"),
    ],
)
def test_wrong_settings(settings, kind, message):
    """A length out of range, and one beside settings of an exponential average, are refused."""
    with pytest.raises(kind, match=message):
        ExponentialMovingAverage(weights_of((3,)), **settings)
