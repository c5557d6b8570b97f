"""A window over series that have names, so that they may change and be saved."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from mfwrap.tensors.robust_window import RobustWindow

SECOND = 0.27
"""Share of the second largest distance that is the least deviation, see `RobustWindow`."""


@final
class NamedWindow:
    """A `RobustWindow` of named series.

    Args:
        second: Share of the second largest distance that is the least deviation.
    """

    def __init__(self, *, second: float = SECOND) -> None:
        self._second = second
        self.names: tuple[str, ...] = ()
        self._window = RobustWindow(0, prior=0.0)
        self._saved: Mapping[str, Any] | None = None

    def use(
        self, names: Sequence[str], priors: Sequence[float], device: torch.device | str
    ) -> RobustWindow:
        """Return the window of these series; a series that is already known keeps its values.

        Does not synchronize with the device.

        Args:
            names: Names of the series, without repetition.
            priors: Deviation of each series that is assumed before there are values.
            device: Device of the values.
        """
        if self.names == tuple(names):
            return self._window
        before = self._window.state_dict()
        known_names: Sequence[str] = self.names
        if self._saved is not None:
            known_names = self._saved["names"]
            before = {key: decoded(self._saved[key], len(known_names)) for key in before}
        rows = {name: row for row, name in enumerate(known_names)}
        known = [number for number, name in enumerate(names) if name in rows]
        self._window = RobustWindow(
            len(names), prior=torch.tensor(priors), device=device, second=self._second
        )
        state = self._window.state_dict()
        if known:
            taken = torch.tensor([rows[names[number]] for number in known])
            places = torch.tensor(known).to(device)
            for key, values in before.items():
                kept = values[taken.to(values.device)].to(device)
                state[key] = state[key].index_copy(0, places, kept)
            self._window.load_state_dict(state)
        self.names, self._saved = tuple(names), None
        return self._window

    def state_dict(self) -> dict[str, Any]:
        """Return names and windows, ready for JSON; synchronizes with the device."""
        if self._saved is not None:
            return dict(self._saved)
        state = self._window.state_dict()
        return {"names": list(self.names), **{key: encoded(one) for key, one in state.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: the next call of `use` takes its series by their names."""
        self._saved, self.names = state, ()


def encoded(tensor: Tensor) -> str:
    """Return the elements of a float32 tensor as base64, a fourth of the size of JSON's numbers."""
    return base64.b64encode(tensor.cpu().numpy().astype("<f4").tobytes()).decode("ascii")


def decoded(text: str, num_rows: int) -> Tensor:
    """Return the tensor that `encoded` has made text of, shape ``(num_rows, ...)``, float32."""
    values = np.frombuffer(base64.b64decode(text), dtype="<f4").copy()
    return torch.from_numpy(values).reshape(num_rows, -1)
