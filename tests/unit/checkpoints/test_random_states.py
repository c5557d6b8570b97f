"""The states of all random generators survive a round trip through JSON."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.checkpoints.random_states import (
    HostStates,
    random_states,
    restore_random_states,
)


def drawn():
    """Return uniform and normal numbers from every generator."""
    legacy = np.random  # the global generator, which collators use
    return [
        random.random(),  # noqa: S311  (test data, not cryptography)
        random.gauss(0, 1),
        legacy.rand(),
        legacy.randn(),
        legacy.randint(0, 2**31),
        *torch.rand(3).tolist(),
        torch.randn(()).item(),
        torch.initial_seed(),
    ]


def advance(num_draws):
    """Draw normal numbers from all generators.

    Generators compute normal numbers in pairs, so a state may contain the second number.
    """
    for _ in range(num_draws):
        random.gauss(0, 1)
        np.random.randn()  # noqa: NPY002  (the test saves the state of this generator)
        torch.randn(())


@given(seed=st.integers(0, 2**32 - 1), num_draws=st.integers(0, 700), others=st.integers(0, 700))
def test_round_trip(seed, num_draws, others):
    """Restored generators draw the same numbers as after saving."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (the test saves the state of this generator)
    torch.manual_seed(seed)
    advance(num_draws)
    saved = json.dumps(random_states())
    expected = [drawn() for _ in range(3)]
    torch.manual_seed(seed + 1)
    random.seed(seed + 1)
    np.random.seed(others)  # noqa: NPY002  (the test saves the state of this generator)
    advance(others)

    restore_random_states(json.loads(saved))

    assert [drawn() for _ in range(3)] == expected


def test_reading_changes_nothing():
    """Reading the states does not change the numbers that are drawn next."""
    states = random_states()
    expected = drawn()
    restore_random_states(states)
    random_states()

    assert drawn() == expected


def test_states_of_devices_that_are_not_there():
    """States of CUDA devices are ignored on a machine without CUDA devices."""
    states = random_states()
    states.setdefault("cuda", ["AAAA"] if not torch.cuda.is_available() else states["cuda"])
    expected = drawn()

    restore_random_states(states)

    assert drawn() == expected


@pytest.mark.cuda
def test_round_trip_on_cuda():
    """The state of every CUDA device is restored."""
    for device in range(torch.cuda.device_count()):
        torch.randn(device + 1, device=f"cuda:{device}")
    saved = json.loads(json.dumps(random_states()))
    expected = [torch.randn(5, device=f"cuda:{d}") for d in range(torch.cuda.device_count())]

    restore_random_states(saved)

    for device, numbers in enumerate(expected):
        assert torch.equal(torch.randn(5, device=f"cuda:{device}"), numbers)


def numpys(state):
    """Return a state of NumPy's generator with its words as bytes, so that it can be compared."""
    kind, words, *rest = state
    return (kind, words.tobytes(), *rest)


@given(
    draws=st.lists(
        st.sampled_from(["rand", "randn", "seed", "nothing", "restore", "waiting"]), max_size=8
    )
)
def test_numpys_state_is_the_present_one(draws):
    """The state is NumPy's own after any number of draws, also while a normal number is waiting."""
    legacy = np.random  # the global generator
    first = HostStates.now()
    for draw in draws:
        if draw == "seed":
            legacy.seed(5)
        elif draw == "restore":
            first.restore()
        elif draw == "waiting":
            # Drawing the number that is waiting takes nothing from the words of the generator.
            legacy.set_state((*legacy.get_state()[:3], 1, 0.5))
            legacy.rand()
            HostStates.now()
            legacy.randn()
        elif draw != "nothing":
            getattr(legacy, draw)()
        assert numpys(HostStates.now().numpy) == numpys(legacy.get_state())
    first.restore()


def test_another_generator_of_numpy_is_read_each_time():
    """Another bit generator in the global one's place has words of another form."""
    legacy = np.random  # the global generator
    usual = legacy.get_bit_generator()
    other = np.random.MT19937(3)
    legacy.set_bit_generator(other)
    try:
        found = HostStates.now().numpy
    finally:
        legacy.set_bit_generator(usual)

    assert found[1].tolist() == other.state["state"]["key"].tolist()
    assert numpys(HostStates.now().numpy) == numpys(legacy.get_state())
