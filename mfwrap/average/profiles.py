"""Power-function averages: their profiles, and how to combine stored ones to any other length.

The profile of an average after ``t`` updates is the share that each update's weights have in it.
That of a power-function average is ``(gamma + 1) * tau**gamma / t**(gamma + 1)`` for updates
``tau <= t``. Its standard deviation, divided by ``t``, is ``sigma_rel``, the relative length.

Source: Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", CVPR
2024, section 3 and appendix C.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mfwrap.arguments import check_real

LARGEST_SIGMA = 0.2886
"""Just below ``12**-0.5``, the relative length of the mean over all updates (``gamma`` is 0)."""


class Combination(NamedTuple):
    """Stored averages combined to another one."""

    shares: list[float]
    """Share of each stored average; their sum is 1."""

    response_error: float
    """L2 norm of the difference of the profiles, divided by that of the wanted profile."""


def gamma_of(sigma_rel: float) -> float:
    """Return the exponent of the profile of a relative length.

    Args:
        sigma_rel: Standard deviation of the profile divided by the number of updates, in
            (0, 0.2886].

    Raises:
        TypeError: If `sigma_rel` is not a number.
        ValueError: If it is out of range.
    """
    check_real("sigma_rel", sigma_rel)
    if not 0 < sigma_rel <= LARGEST_SIGMA:
        msg = f"`sigma_rel` must be in (0, {LARGEST_SIGMA}], got {sigma_rel}"
        raise ValueError(msg)
    inverse = float(sigma_rel) ** -2
    # sigma_rel**2 = (gamma + 1) / ((gamma + 2)**2 * (gamma + 3)), multiplied out
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])
    return float(roots.real.max())


def combine(
    sigmas: Sequence[float], updates: Sequence[int], sigma_rel: float, at: int
) -> Combination:
    """Fit the profile of a wanted average by those of stored averages, by least squares.

    The shares sum to 1, so that a weight that does not change is reproduced exactly.

    Args:
        sigmas: Relative length of each stored average.
        updates: Number of updates of each stored average, at most `at`.
        sigma_rel: Relative length of the wanted average.
        at: Number of updates of the wanted average.

    Raises:
        ValueError: If a relative length is out of range.
    """
    gammas = np.array([gamma_of(sigma) for sigma in (*sigmas, sigma_rel)])
    times = np.array([*updates, at], dtype=np.float64)
    products = _inner_products(gammas, times)
    among, wanted, norm = products[:-1, :-1], products[:-1, -1], products[-1, -1]
    number = len(among)
    # The last row and column are those of a Lagrange multiplier for the sum of the shares.
    system = np.ones((number + 1, number + 1))
    system[:number, :number], system[number, number] = among, 0
    shares = np.linalg.lstsq(system, np.append(wanted, 1), rcond=None)[0][:number]
    squared_error = shares @ among @ shares - 2 * shares @ wanted + norm
    return Combination(shares.tolist(), float(np.sqrt(max(squared_error, 0) / norm)))


def _inner_products(gammas: npt.NDArray[Any], times: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the integrals of the products of all pairs of profiles, of shape ``(n, n)``."""
    earlier = np.minimum(times[:, None], times)
    later = np.maximum(times[:, None], times)
    # The exponent of the profile that ends later: it alone is cut off.
    exponent = np.where(times[:, None] > times, gammas[:, None], gammas)
    scale = (gammas[:, None] + 1) * (gammas + 1) / (gammas[:, None] + gammas + 1)
    products: npt.NDArray[Any] = scale * (earlier / later) ** exponent / later
    return products
