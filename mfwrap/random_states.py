"""The states of all random generators, as JSON can hold them."""

import base64
import random
from typing import Any

import numpy as np
import torch

__all__ = ["random_states", "restore_random_states"]


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  (the one that collators use)
    states = {
        "python": [version, list(words), gauss],
        "numpy": [kind, _encoded(np.asarray(keys).tobytes()), position, has_gauss, cached],
        "cpu": _encoded(torch.random.get_rng_state().numpy().tobytes()),
    }
    if torch.cuda.is_available():
        cuda = torch.cuda.random.get_rng_state_all()
        states["cuda"] = [_encoded(state.numpy().tobytes()) for state in cuda]
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the generators to what `random_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    words_of_numpy = np.frombuffer(base64.b64decode(keys), dtype=np.uint32)
    np.random.set_state((kind, words_of_numpy, position, has_gauss, cached))  # noqa: NPY002
    torch.random.set_rng_state(_state(states["cpu"]))
    if torch.cuda.is_available() and "cuda" in states:
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.random.set_rng_state(_state(state), device)


def _encoded(state: bytes) -> str:
    return base64.b64encode(state).decode("ascii")


def _state(encoded: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
