"""Find updates that grow relative to the weights, long before the loss diverges."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

_LENGTH = 64
"""Number of updates over which growth is looked for."""

_LEAST_RATIO = 0.02
"""Smallest ratio of the updates to the weights that is too large; 0.001 is usual."""

_LEAST_GROWTH = math.log(4.0)
"""Smallest logarithm of the growth that is an anomaly."""

_MOST_RATE_RISE = 1.5
"""Largest ratio of the learning rate to the lowest one of these updates; in a warm-up it is
larger."""

_LEAST_FIT = 0.9
"""Smallest share of the variance of the logarithms that a line explains."""


class Growth(NamedTuple):
    """Growth of the updates relative to the weights."""

    before: float
    """Ratio of the middle weight's update to the weight, where the growth begins."""

    now: float
    num_steps: int
    """Number of updates in which it has grown."""


def line_growth(values: Tensor, least_fit: float) -> Tensor:
    """Return the growth of the line that fits each row, shape ``(K,)``; 0 if the fit is poor.

    Args:
        values: Shape ``(K, n)``; a row with a NaN has no growth.
        least_fit: Smallest share of the variance that the line must explain.
    """
    number = values.shape[1]
    places = torch.arange(number, device=values.device, dtype=values.dtype) - (number - 1) / 2
    slopes = values @ places / places.square().sum()
    total = (values - values.mean(dim=1, keepdim=True)).square().sum(dim=1)
    explained = slopes.square() * places.square().sum()
    is_line = explained > least_fit * total
    return torch.where(is_line, slopes * (number - 1), 0.0)


@final
class UpdateGrowth:
    """Follow the ratio of the updates to the weights, on the host.

    An anomaly is a line that fits the logarithms of the last 64 ratios: fourfold growth, to a ratio
    of at least 0.02, at a learning rate that has not risen by half. Growth of updates precedes
    divergence, see Wortsman et al., "Small-scale proxies for large-scale Transformer training
    instabilities", 2023.
    """

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=_LENGTH)

    def add(self, ratio: float, rate: float) -> Growth | None:
        """Include an update, and return the growth if it is an anomaly.

        Args:
            ratio: Ratio of the middle weight's update to the weight; NaN is ignored.
            rate: Learning rate; NaN if unknown.
        """
        if not 0 < ratio < math.inf:
            return None
        self._values.append((math.log(ratio), rate))
        if len(self._values) < _LENGTH or ratio < _LEAST_RATIO:
            return None
        rates = [each for _, each in self._values if each > 0]
        if rates and not rate <= _MOST_RATE_RISE * min(rates):
            return None
        logs = torch.tensor([log for log, _ in self._values], dtype=torch.float64, device="cpu")
        growth, mean = line_growth(logs[None], _LEAST_FIT).item(), logs.mean().item()
        if growth < _LEAST_GROWTH:
            return None
        return Growth(math.exp(mean - growth / 2), math.exp(mean + growth / 2), _LENGTH)

    def state_dict(self) -> dict[str, Any]:
        """Return the last ratios and rates, ready for JSON; a rate that is unknown is ``None``."""
        known = [(value, None if math.isnan(rate) else rate) for value, rate in self._values]
        return {"values": [list(each) for each in known]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._values.clear()
        self._values += [(v, math.nan if rate is None else rate) for v, rate in state["values"]]
