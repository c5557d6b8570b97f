"""Let another library save small stand-ins for weights, and write the weights in their place later.

What the library writes says which weights it saves, in which files, and by which names.
"""

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from torch import Tensor

from mfwrap.checkpoints.file_formats import SAFETENSORS
from mfwrap.checkpoints.hashed_files import may_hold
from mfwrap.checkpoints.host_copies import is_plain


@final
class StandIns:
    """Stand-ins for the tensors of a state.

    Args:
        weights: Tensors by name, for which `fit_in_one_file` is true. Tied ones have one stand-in,
            so that the library finds that they are tied.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        token = secrets.randbits(62)
        places = {name: _place(name, tensor) for name, tensor in weights.items()}
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places.values()))}
        tensors = {place: torch.tensor([token, number]) for place, number in numbers.items()}
        self.state: dict[str, Tensor] = {name: tensors[place] for name, place in places.items()}
        """What the library saves."""
        self._weights = {(token, numbers[places[name]]): each for name, each in weights.items()}

    def files(self, folder: Path) -> Iterator[tuple[dict[str, Tensor], Path, dict[str, str]]]:
        """Yield tensors, path and metadata of each safetensors file that has stand-ins.

        Args:
            folder: Folder in which the library has saved them.
        """
        for path in sorted(folder.glob(f"*{SAFETENSORS}")):
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
                saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (the file is no mapping)
            named = {
                name: self._weights.get(tuple(value.tolist()), value)
                if value.shape == (2,)
                else value
                for name, value in saved.items()
            }
            if any(named[name] is not value for name, value in saved.items()):
                yield named, path, metadata


def fit_in_one_file(state: Mapping[str, Any], *, may_be_tied: bool, largest: int) -> bool:
    """Return whether the library would write a state as it is, into one safetensors file.

    Args:
        state: State of a network.
        may_be_tied: Whether the library saves one of two tied tensors. If not, it refuses them.
        largest: Bytes from which it splits the state into several files.
    """
    sizes: dict[Any, int] = {}
    of_storage: dict[int, Any] = {}
    for name, tensor in state.items():
        if not (isinstance(tensor, Tensor) and is_plain(tensor) and may_hold(tensor)):
            return False
        # If tensors overlap and are not the same, the library decides what becomes of them.
        place, storage = _place(name, tensor), tensor.untyped_storage().data_ptr()
        if tensor.numel() and of_storage.setdefault(storage, place) != place:
            return False
        sizes[place] = tensor.numel() * tensor.element_size()
    return (may_be_tied or len(sizes) == len(state)) and sum(sizes.values()) < largest


def _place(name: str, tensor: Tensor) -> Any:
    """Return what tied tensors have in common."""
    if not tensor.numel():
        return name
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
