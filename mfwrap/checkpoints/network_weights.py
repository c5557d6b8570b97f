"""Check that the weights in a checkpoint belong to a network."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from mfwrap.checkpoints.file_formats import INDEX, stored_weights

_WEIGHTS = "model.safetensors"


def foreign_weights(folder: Path, network: nn.Module) -> str | None:
    """Return why a checkpoint's weights do not belong to a network; ``None`` if they do.

    A stock Trainer would load the weights that fit and ignore the others. Reads only the headers of
    ``model.safetensors``, or of the files that its index lists; adapters are not checked.

    Raises:
        DamagedFileError: If a header is damaged.
        OSError: If a file cannot be read.
    """
    path = folder / _WEIGHTS
    if not path.is_file() and not path.with_name(_WEIGHTS + INDEX).is_file():
        return None
    stored = stored_weights(path).tensors
    expected = network.state_dict(keep_vars=True)
    for name, tensor in stored.items():
        if name not in expected:
            return f"{_WEIGHTS} has {name}, which is not in the network"
        shape = tuple(expected[name].shape)
        if tensor.shape != shape:
            return (
                f"{_WEIGHTS} has {name} with shape {list(tensor.shape)}, but the network has it "
                f"with shape {list(shape)}"
            )
    # Only one name of a tied weight is stored. The other names have the same address, so a name is
    # missing only if its address is missing, too.
    present = {expected[name].data_ptr() for name in stored}
    ignored = set(getattr(network, "_keys_to_ignore_on_save", None) or ())
    for name, parameter in _saved(expected, ignored).items():
        if name not in stored and parameter.data_ptr() not in present:
            return f"{_WEIGHTS} has no {name}"
    return None


def _saved(state: Mapping[str, nn.Parameter], ignored: set[str]) -> dict[str, nn.Parameter]:
    return {
        name: tensor for name, tensor in state.items() if name not in ignored and tensor.numel()
    }
