"""Change the loss scale with a window that adapts to overflows, as MindFormers does."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from mfwrap.arguments import check_int
from mfwrap.loss_scale.cells import WindowedCell, as_flag
from mfwrap.tensors.shards import on_device


@final
class AdaptiveLossScaleUpdateCell(WindowedCell):
    """Change the loss scale like `DynamicLossScaleUpdateCell`, with a window that adapts.

    The window is the number of consecutive steps without overflow before the scale grows. Windows
    are taken from a list of lengths between `min_scale_window` and `max_scale_window`. After the
    scale has grown three times, the next longer window is used. After three overflows without
    growth in between, the window becomes 1 step, unless the shortest window of the list was in use.
    After the scale has grown three times with the window of 1 step, the shortest window of the list
    is used.

    Source: MindFormers, ``wrapper.AdaptiveLossScaleUpdateCell``.

    Args:
        loss_scale_value: Initial loss scale, > 0 and finite.
        scale_factor: Factor by which the scale grows, >= 1. On overflow the scale is multiplied by
            the reciprocal, but does not fall below 1.
        scale_window: First window, in steps. If it is not in the list of windows, a warning is
            given and the shortest window of the list is used.
        max_scale_window: Longest window, in steps, > `min_scale_window`.
        min_scale_window: Shortest window, in steps, > 0.

    Raises:
        TypeError: If an argument is not a number (a window: not an integer).
        ValueError: If a value is out of range.
    """

    def __init__(
        self,
        loss_scale_value: float,
        scale_factor: float,
        scale_window: int,
        max_scale_window: int = 1000,
        min_scale_window: int = 20,
    ) -> None:
        _check_windows(max_scale_window, min_scale_window)
        check_int("scale_window", scale_window)
        self.max_scale_window = max_scale_window
        self.min_scale_window = min_scale_window
        self.window_list = tuple(_window_list(max_scale_window, min_scale_window))
        index = _first_index(self.window_list, scale_window)
        super().__init__(
            loss_scale_value,
            scale_factor,
            scale_window=self.window_list[index],
            list_index=index,
            window_up_count=0,
            window_down_count=0,
        )
        self._windows = torch.tensor(self.window_list, dtype=torch.int64, device="cpu")

    @property
    def scale_window(self) -> Tensor:
        """Window of the next call, in steps: shape ``()``, int64."""
        return self._counters["scale_window"]

    def __call__(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        self.to(loss_scale.device)
        flag = as_flag(overflow)
        grew = self._change(loss_scale, flag, falls=flag, window=self.scale_window, lowest=1.0)
        self._adapt_window(flag, grew=grew)
        return overflow

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().check_state_dict(state_dict)
        index, last = int(state_dict["list_index"]), len(self.window_list) - 1
        if not -1 <= index <= last:
            msg = (
                f"`state_dict['list_index']` must be in [-1, {last}] for the {last + 1} windows "
                f"{self.window_list}, got {index}; build the cell with the window settings that "
                "the state was saved with"
            )
            raise ValueError(msg)

    def _adapt_window(self, overflow: Tensor, *, grew: Tensor) -> None:
        window, index = self._counters["scale_window"], self._counters["list_index"]
        up, down = self._counters["window_up_count"], self._counters["window_down_count"]
        up.add_(grew).remainder_(4)
        down.masked_fill_(grew, 0)
        longer = (up == 3) & (index != len(self.window_list) - 1)
        index.add_(longer)
        up.masked_fill_(longer, 0)
        # `take` keeps the index on the device; `windows[index]` would read it on the host.
        window.copy_(torch.where(longer, self._windows.take(index.clamp(min=0)), window))
        down.add_(overflow).remainder_(4)
        collapses = overflow & (down == 3) & (index > 0)
        window.masked_fill_(collapses, 1)
        index.masked_fill_(collapses, -1)
        up.masked_fill_(collapses, 0)
        down.masked_fill_(collapses, 0)

    def to(self, device: torch.device) -> None:
        super().to(device)
        self._windows = on_device(self._windows, device)


def _check_windows(largest: int, smallest: int) -> None:
    # Compare before checking types, as MindFormers does: floats in the wrong order then raise
    # ValueError instead of TypeError.
    if largest <= 0 or smallest <= 0 or largest <= smallest:
        msg = (
            "`max_scale_window` must be > `min_scale_window` and both must be > 0, "
            f"got {largest} and {smallest}"
        )
        raise ValueError(msg)
    check_int("max_scale_window", largest)
    check_int("min_scale_window", smallest)


def _first_index(window_list: Sequence[int], scale_window: int) -> int:
    if scale_window in window_list:
        return window_list.index(scale_window)
    warnings.warn(
        f"`scale_window` {scale_window} is not one of {list(window_list)}; "
        f"{window_list[0]} is used instead",
        stacklevel=3,
    )
    return 0


def _window_list(largest: int, smallest: int) -> list[int]:
    """Return MindFormers' list of windows, shortest first."""
    windows, window = [largest], float(largest)
    while window > smallest:
        if window > 100:
            window = int(window / 2 / 100) * 100
        elif window == 100:
            window /= 2
        else:
            window -= smallest / 2
        windows.append(int(window))
    return windows[::-1]
