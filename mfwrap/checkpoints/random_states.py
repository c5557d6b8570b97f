"""Save and restore the states of all random number generators, as JSON."""

import base64
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class HostStates(NamedTuple):
    """States of the generators on the host. Reading them takes some 30 microseconds."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: Tensor

    @classmethod
    def now(cls) -> "HostStates":
        """Read the states of Python's, NumPy's and torch's global generators."""
        numpys: Any = np.random.get_state()  # noqa: NPY002  (the global generator)
        return cls(random.getstate(), numpys, torch.random.get_rng_state())

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002  (the global generator)
        torch.random.set_rng_state(self.cpu)

    def encoded(self) -> dict[str, Any]:
        """Return the states as plain values that JSON can represent."""
        version, words, gauss = self.python
        kind, keys, position, has_gauss, cached = self.numpy
        return {
            "python": [version, list(words), gauss],
            "numpy": [kind, _encoded(np.asarray(keys).tobytes()), position, has_gauss, cached],
            "cpu": _encoded(self.cpu.numpy().tobytes()),
        }

    @classmethod
    def decoded(cls, states: dict[str, Any]) -> "HostStates":
        """Build the states from the plain values that `encoded` returned.

        Raises:
            KeyError: If a state is missing.
            TypeError: If a state has another type.
            ValueError: If a state does not fit its generator.
        """
        version, words, gauss = states["python"]
        kind, keys, position, has_gauss, cached = states["numpy"]
        words_of_numpy = np.frombuffer(base64.b64decode(keys), dtype=np.uint32)
        found = cls(
            (version, tuple(words), gauss),
            (kind, words_of_numpy, position, has_gauss, cached),
            _state(states["cpu"]),
        )
        found._check()
        return found

    def _check(self) -> None:
        """Raise an error if a generator does not take its state."""
        try:
            random.Random().setstate(self.python)  # noqa: S311  (not for cryptography)
            np.random.RandomState().set_state(self.numpy)
            torch.Generator().set_state(self.cpu)
        except (OverflowError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        # NumPy does not check its position.
        position, num_words = self.numpy[2], len(self.numpy[1])
        if type(position) is not int or not 0 <= position <= num_words:
            msg = f"expected a position from 0 to {num_words}, got {position!r:.80}"
            raise ValueError(msg)


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators, including CUDA's.

    Returns:
        Plain values that JSON can represent.
    """
    states = HostStates.now().encoded()
    if torch.cuda.is_available():
        cuda = torch.cuda.random.get_rng_state_all()
        states["cuda"] = [_encoded(state.numpy().tobytes()) for state in cuda]
    return states


def check_random_states(states: dict[str, Any]) -> None:
    """Check states that `random_states` returned, without restoring them.

    Raises:
        KeyError: If a state is missing.
        TypeError: If a state has another type.
        ValueError: If a state does not fit its generator.
    """
    HostStates.decoded(states)
    for state in states.get("cuda", []):
        _state(state)


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the generators to states that `random_states` returned.

    States of CUDA devices that this machine does not have are ignored.
    """
    HostStates.decoded(states).restore()
    if torch.cuda.is_available() and "cuda" in states:
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.random.set_rng_state(_state(state), device)


def _encoded(state: bytes) -> str:
    return base64.b64encode(state).decode("ascii")


def _state(encoded: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
