"""Judge each new value of a series by the series' last values, on the device."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

_RECENT = 5
"""Number of values whose median is the expected next value."""

_TO_DEVIATION = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""

_PRIOR_STEPS = 4.0
"""Number of values that the prior deviation counts as."""


@final
class RobustWindow:
    """Scores of the values of `num_series` series by medians over a window of earlier values.

    The expected value is the median of a series' last five values, so that it follows a loss that
    falls. The deviation is the median distance (times 1.4826) of the window's values from what was
    expected of each, so a few outliers change neither. Before the window has many values, a prior
    deviation counts as four of them. A score is the distance from the expected value in deviations.

    A NaN or an infinite value has no score and does not enter the window. Nothing synchronizes
    with the device. Give logarithms of quantities that vary by factors, such as norms.

    An update costs about thirty operations on tensors of at most ``(num_series, length)`` elements,
    whatever the size of the network.

    Args:
        num_series: Number of series ``K``.
        prior: Deviation that is assumed before there are values, in units of the series: a number,
            or shape ``(K,)``.
        length: Number of values in the window.
        device: Device of the values.
    """

    def __init__(
        self,
        num_series: int,
        *,
        prior: float | Tensor,
        length: int = 64,
        device: torch.device | str = "cpu",
    ) -> None:
        empty = torch.full((num_series, length), torch.nan, device=device)
        self._distances = empty
        self._values = empty[:, :_RECENT].clone()
        prior = torch.as_tensor(prior, dtype=torch.float32).to(device).expand(num_series)
        self._prior = _PRIOR_STEPS * prior.square()
        self.expected = empty[:, 0].clone()
        """Median of each series' last five values, shape ``(K,)``, float32; NaN without values."""
        self.deviation = prior.clone()
        """Deviation of the next value from the expected one, shape ``(K,)``, float32."""

    def scores(self, values: Tensor) -> Tensor:
        """Return how many deviations each value is above the expected one.

        Args:
            values: The next value of each series, shape ``(K,)``.

        Returns:
            Shape ``(K,)``, float32; negative below the expected value, NaN where the value is not
            finite or nothing is expected yet.
        """
        distances = (values.float() - self.expected) / self.deviation
        return torch.where(_is_finite(distances), distances, torch.nan)

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
        distances = (values - self.expected).abs()
        self._values = _shifted(self._values, values, enters)
        self._distances = _shifted(self._distances, distances, enters & _is_finite(distances))
        self._expect()

    def _expect(self) -> None:
        self.expected, _ = _median(self._values)
        median, number = _median(self._distances)
        spread = median.nan_to_num() * _TO_DEVIATION
        variance = (self._prior + number * spread.square()) / (number + _PRIOR_STEPS)
        self.deviation = variance.sqrt()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the window: ``values``, shape ``(K, 5)``, and ``distances``, ``(K, length)``.

        The oldest is first; NaN stands for values that there have not been yet. The tensors do not
        change later.
        """
        return {"values": self._values, "distances": self._distances}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ValueError: If the state is of another number of series or another length.
        """
        for name, own in self.state_dict().items():
            if state[name].shape != own.shape:
                msg = (
                    f"`{name}` of the state must have shape {tuple(own.shape)}, got "
                    f"{tuple(state[name].shape)}"
                )
                raise ValueError(msg)
        self._values = state["values"].to(self._values)
        self._distances = state["distances"].to(self._distances)
        self._expect()


def _is_finite(values: Tensor) -> Tensor:
    """Return ``values.isfinite()``, in two operations on the device instead of four."""
    return values.abs() < torch.inf


def _median(window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower median of each row's values that are not NaN, and their number.

    The median of a row without values is NaN.
    """
    # `nanmedian` raises under `torch.use_deterministic_algorithms` on CUDA: which of several equal
    # values it takes the index of is not determined there.
    number = (window == window).sum(dim=1, keepdim=True)  # noqa: PLR0124  (false for NaN)
    middle = (number - 1).div(2, rounding_mode="trunc")
    median = window.sort(dim=1).values.gather(1, middle)  # sorts NaN behind all numbers
    return median.squeeze(1), number.squeeze(1)


def _shifted(window: Tensor, newest: Tensor, enters: Tensor) -> Tensor:
    """Return a window with a newest value, where `enters` is true, in place of its oldest."""
    moved = torch.cat((window[:, 1:], newest[:, None]), dim=1)
    return torch.where(enters[:, None], moved, window)
