"""Profiles have the relative length that they are named by, and are fitted by least squares."""

import numpy as np
import pytest

from mfwrap.average.profiles import combine, gamma_of


def profile(sigma_rel, updates, grid):
    """Return the profile of an average on a grid of times, from its definition."""
    gamma = gamma_of(sigma_rel)
    inside = (gamma + 1) * grid**gamma / updates ** (gamma + 1)
    return np.where(grid <= updates, inside, 0.0)


@pytest.mark.parametrize("sigma_rel", [0.001, 0.01, 0.05, 0.1, 0.2, 0.2886])
def test_the_standard_deviation(sigma_rel):
    """The standard deviation of the profile, integrated numerically, is the relative length."""
    grid = (np.arange(200_000) + 0.5) / 200_000
    shares = profile(sigma_rel, 1, grid) / len(grid)
    mean = shares @ grid

    assert shares.sum() == pytest.approx(1, abs=1e-4)
    assert np.sqrt(shares @ (grid - mean) ** 2) == pytest.approx(sigma_rel, rel=1e-3)


def test_the_published_exponents():
    """The paper gives gamma = 16.97 for a relative length of 0.05, and 6.94 for 0.10."""
    assert round(gamma_of(0.05), 2) == 16.97
    assert round(gamma_of(0.10), 2) == 6.94


@pytest.mark.parametrize("sigma_rel", [0.03, 0.07, 0.15, 0.25])
def test_the_fit(sigma_rel):
    """Shares and error are those of a least-squares fit on a fine grid."""
    sigmas, updates = [0.05, 0.10] * 4, [5, 5, 10, 10, 15, 15, 20, 20]
    grid = (np.arange(100_000) + 0.5) * 20 / 100_000
    among = np.stack([profile(*each, grid) for each in zip(sigmas, updates, strict=True)], axis=1)
    wanted = profile(sigma_rel, 20, grid)
    # Shares that sum to 1: fit the differences to the last profile.
    differences = among[:, :-1] - among[:, -1:]
    first = np.linalg.lstsq(differences, wanted - among[:, -1], rcond=None)[0]
    expected = [*first, 1 - first.sum()]
    error = np.linalg.norm(among @ expected - wanted) / np.linalg.norm(wanted)

    shares, response_error = combine(sigmas, updates, sigma_rel, 20)

    assert shares == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert sum(shares) == pytest.approx(1)
    assert response_error == pytest.approx(error, rel=1e-3)


def test_a_stored_average_is_taken_as_it_is():
    """A wanted average that is stored has a share of 1, also among hundreds of others."""
    updates = [number for number in range(4000, 1_000_001, 4000) for _ in range(2)]
    shares, error = combine([0.05, 0.10] * 250, updates, 0.10, 1_000_000)

    assert shares[-1] == pytest.approx(1, abs=1e-5)
    assert np.abs(shares[:-1]).max() < 1e-5
    assert error < 1e-5


@pytest.mark.parametrize("sigma_rel", [0, -0.1, 0.2887, float("nan")])
def test_a_length_out_of_range(sigma_rel):
    """The error says the range."""
    with pytest.raises(ValueError, match=r"`sigma_rel` must be in \(0, 0.2886\], got"):
        gamma_of(sigma_rel)
