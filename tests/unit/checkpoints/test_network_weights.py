"""Checkpoints of another network are refused."""

import pytest
import torch
from torch import nn

from mfwrap.checkpoints.network_weights import foreign_weights
from mfwrap.checkpoints.verification import check_checkpoint
from support.checkpoint_folders import split_weights, write_checkpoint


class Tied(nn.Module):
    """A network with a tied weight, a saved buffer, and buffers that are not saved."""

    def __init__(self, width=3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("unsaved", torch.zeros(width), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("left_out", torch.zeros(1))
        self._keys_to_ignore_on_save = ["left_out"]


def weights_of(network, *left_out):
    """Return the weights that a Trainer saves, each tied weight once, without `left_out`."""
    left_out = {"left_out", "empty", "second.weight", *left_out}
    return {name: value for name, value in network.state_dict().items() if name not in left_out}


def test_weights_of_this_network(tmp_path):
    """A checkpoint fits if it lacks only copies of tied weights, and buffers that are not saved."""
    folder = write_checkpoint(tmp_path / "checkpoint-1", weights=weights_of(Tied()))

    assert foreign_weights(folder, Tied()) is None
    check_checkpoint(folder, Tied())


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (weights_of(Tied(), "mean"), "has no mean"),
        (weights_of(Tied(), "first.weight"), "has no first.weight"),
        (weights_of(Tied()) | {"third": torch.ones(1)}, "has third, which is not in the network"),
        (
            weights_of(Tied()) | {"mean": torch.zeros(1, 3)},
            "has mean with shape [1, 3], but the network has it with shape [3]",
        ),
    ],
    ids=["buffer", "tied weight", "unknown", "shape"],
)
def test_weights_of_another_network(tmp_path, weights, reason):
    """The error names the first weight that does not fit the network."""
    folder = write_checkpoint(tmp_path / "checkpoint-1", weights=weights)

    assert foreign_weights(folder, Tied()) == f"model.safetensors {reason}"
    with pytest.raises(ValueError, match=r"checkpoint-1: model\.safetensors has "):
        check_checkpoint(folder, Tied())


def test_weights_in_several_files(tmp_path):
    """Weights that were split into several files are compared, too."""
    folder = write_checkpoint(tmp_path / "checkpoint-1", weights=weights_of(Tied()))
    split_weights(folder)

    assert foreign_weights(folder, Tied()) is None
    assert "has no third.weight" in foreign_weights(folder, More())


class More(Tied):
    """The network with another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(3, 3)


def test_adapters(tmp_path):
    """Adapters are not checked."""
    folder = write_checkpoint(tmp_path / "checkpoint-1", listed=False)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")

    assert foreign_weights(folder, Tied()) is None
