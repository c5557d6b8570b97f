"""Judge each new value of a series by the series' last values, on the device."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

_RECENT = 5
"""Number of values whose median is the expected next value."""

_TO_DEVIATION = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""

_HIGH = 0.95
_HIGH_TO_DEVIATION = 1 / 1.96
"""Quantile of the distances, and the ratio of a normal distribution's deviation to it."""

_PRIOR_STEPS = 3.0
"""Number of values after which half of the prior deviation is left."""

_LEAST = 0.15
"""Least share of the prior deviation that is left: a quiet series may yet move a little."""

_FEW = 4.0
"""The deviation of ``n`` values may be larger than it seems, by a variance of ``4 / n``."""


@final
class RobustWindow:
    """Scores of the values of `num_series` series by medians over a window of earlier values.

    The expected value is the median of a series' last five values, so that it follows a loss that
    falls. The deviation is the median distance (times 1.4826) of the window's values from what was
    expected of each, or their 95 % quantile (divided by 1.96), if this is larger. So three outliers
    among 64 values change it little, and a series with many of them is judged by them. A prior
    deviation fades with the number of values. A score is the distance from the expected value in
    deviations.

    With `second`, values above and below what is expected have deviations of their own: that a
    series falls, such as norms early in a training, does not make a rise ordinary.

    A NaN or an infinite value has no score and does not enter the window. Nothing synchronizes
    with the device. Give logarithms of quantities that vary by factors, such as norms.

    An update costs about forty operations on tensors of at most ``(num_series, length)`` elements,
    whatever the size of the network.

    Args:
        num_series: Number of series ``K``.
        prior: Deviation that is assumed before there are values, in units of the series: a number,
            or shape ``(K,)``.
        length: Number of values in the window.
        device: Device of the values.
        second: Share of the second largest distance in the same direction that is the least
            deviation. One outlier is none, but a series that has two jumps among its last values
            jumps by its nature.
    """

    def __init__(
        self,
        num_series: int,
        *,
        prior: float | Tensor,
        length: int = 64,
        device: torch.device | str = "cpu",
        second: float = 0.0,
    ) -> None:
        self._second = second
        self._distances = torch.full((num_series, length), torch.nan, device=device)
        self._values = torch.full((num_series, _RECENT), torch.nan, device=device)
        prior = torch.as_tensor(prior, dtype=torch.float32).to(device).expand(num_series)
        self._prior = prior
        self.expected = torch.full((num_series,), torch.nan, device=device)
        """Median of each series' last five values, shape ``(K,)``, float32; NaN without values."""
        self._deviations = prior[None].clone()  # above and below, or one for both
        self._has_new = torch.zeros(num_series, dtype=torch.bool, device=device)

    @property
    def deviation(self) -> Tensor:
        """Deviation of a next value above the expected one, shape ``(K,)``, float32."""
        return self._deviations[0]

    @property
    def num_distances(self) -> Tensor:
        """Number of values in the window with a known distance, shape ``(K,)``, int64."""
        return _is_finite(self._distances).sum(dim=1)

    def scores(self, values: Tensor) -> Tensor:
        """Return how many deviations each value is above the expected one.

        Args:
            values: The next value of each series, shape ``(K,)``.

        Returns:
            Shape ``(K,)``, float32; negative below the expected value, NaN where the value is not
            finite or nothing is expected yet.
        """
        distances = values.float() - self.expected
        deviations = self.deviation
        if self._second:
            deviations = torch.where(distances > 0, deviations, self._deviations[-1])
        scores = distances / deviations
        return torch.where(_is_finite(scores), scores, torch.nan)

    @torch.no_grad()
    def add(self, values: Tensor, counts: Tensor | None = None) -> None:
        """Include the next value of each series.

        Args:
            values: Shape ``(K,)``. Values that are not finite are ignored.
            counts: Whether the values count, bool, shape ``()`` or ``(K,)``; ``None`` means yes. A
                series whose value does not count stays as it is.
        """
        values = values.detach().float()
        enters = _is_finite(values) if counts is None else _is_finite(values) & counts
        distances = values - self.expected
        self._values = _shifted(self._values, values, enters)
        self._has_new = enters & _is_finite(distances)
        self._distances = _shifted(self._distances, distances, self._has_new)
        self._expect()

    @torch.no_grad()
    def forget(self, first: int = 0) -> None:
        """Forget how far the values were that the last call of `add` has included.

        Args:
            first: Number of the first series that forgets; those before it do not.
        """
        forgets = self._has_new.clone()
        forgets[:first] = False
        oldest = torch.full_like(self._distances[:, :1], torch.nan)
        shorter = torch.cat((oldest, self._distances[:, :-1]), dim=1)
        self._distances = torch.where(forgets[:, None], shorter, self._distances)
        self._has_new = self._has_new & ~forgets
        self._expect()

    def _expect(self) -> None:
        self.expected = _Sorted(self._values).quantile(0.5)
        distances = _Sorted(self._distances.abs())
        spread = torch.maximum(
            distances.quantile(0.5) * _TO_DEVIATION, distances.quantile(_HIGH) * _HIGH_TO_DEVIATION
        ).nan_to_num()
        number = distances.number.squeeze(1)
        if self._second:
            jumps = _Sorted(self._distances).second_of_each_end()
            spread = torch.maximum(spread, self._second * jumps)
        variance = spread.square() * (1 + _FEW / number.clamp(min=1))
        prior = self._prior * (_PRIOR_STEPS / (_PRIOR_STEPS + number)).clamp(min=_LEAST)
        self._deviations = torch.atleast_2d((prior.square() + variance).sqrt())

    def replaced(self) -> list[tuple[object, str]]:
        """Return the attributes that `add` sets to new tensors: owners and names."""
        return [(self, name) for name in ("_values", "_distances", "expected", "_deviations")]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the window: ``values``, shape ``(K, 5)``, and ``distances``, ``(K, length)``.

        The oldest is first; NaN stands for values that there have not been yet. The tensors do not
        change later. A distance is positive above the expected value.
        """
        return {"values": self._values, "distances": self._distances}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that `state_dict` of a window of the same shape returned."""
        self._values = state["values"].to(self._values)
        self._distances = state["distances"].to(self._distances)
        self._expect()


def _is_finite(values: Tensor) -> Tensor:
    """Return ``values.isfinite()``, in two operations on the device instead of four."""
    return values.abs() < torch.inf


class _Sorted:
    """The sorted values of each row of a window that are not NaN.

    Args:
        window: Shape ``(K, length)``.
    """

    def __init__(self, window: Tensor) -> None:
        # `nanmedian` raises under `torch.use_deterministic_algorithms` on CUDA: which of several
        # equal values it takes the index of is not determined there.
        self._values = window.sort(dim=1).values  # NaN comes behind all numbers
        self.number = (window == window).sum(dim=1, keepdim=True)  # noqa: PLR0124  (false for NaN)
        """Number of values of each row, shape ``(K, 1)``, int64."""

    def quantile(self, share: float) -> Tensor:
        """Return the value of each row below which `share` of the others are, shape ``(K,)``.

        Of two middle values, the lower one is the median. A row without values has NaN.
        """
        place = ((self.number - 1).clamp(min=0) * share).long()
        return self._values.gather(1, place).squeeze(1)

    def second_of_each_end(self) -> Tensor:
        """Return how far the second values from both ends of each row are from 0.

        Returns:
            How far the second largest one is above 0, and the second smallest one below it, shape
            ``(2, K)``; 0 for fewer than two values.
        """
        second = torch.full_like(self.number, min(1, self._values.shape[1] - 1))
        places = torch.cat([(self.number - 2).clamp(min=0), second], dim=1)
        largest, smallest = self._values.gather(1, places).T
        ends = torch.stack([largest, -smallest]).clamp(min=0)
        return torch.where(self.number.T > 1, ends, 0.0)


def _shifted(window: Tensor, newest: Tensor, enters: Tensor) -> Tensor:
    """Return a window with a newest value, where `enters` is true, in place of its oldest."""
    moved = torch.cat((window[:, 1:], newest[:, None]), dim=1)
    return torch.where(enters[:, None], moved, window)
