"""Stand-ins for weights say where a library has put them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from mfwrap.checkpoints.stand_ins import StandIns, fit_in_one_file


def weights():
    """Return weights of which two are tied, and one is a pair of integers like a stand-in."""
    a = torch.randn(3, 2)
    return {"a": a, "tied": a.detach(), "pair": torch.arange(2), "none": torch.empty(0)}


def test_files(tmp_path):
    """Each file that has stand-ins is found, with new names and its metadata; others are not."""
    state = weights()
    stand_ins = StandIns(state)
    assert stand_ins.state["a"].data_ptr() == stand_ins.state["tied"].data_ptr()
    assert all(tensor.numel() == 2 for tensor in stand_ins.state.values())

    renamed = {f"model.{name}": stand_ins.state[name] for name in ("a", "pair")}
    own = torch.tensor([1, 2])
    save_file(renamed | {"own": own}, tmp_path / "1.safetensors", {"format": "pt"})
    save_file({"none": stand_ins.state["none"]}, tmp_path / "2.safetensors")
    save_file({"own": own}, tmp_path / "3.safetensors")
    first, second = stand_ins.files(tmp_path)

    tensors, path, metadata = first
    assert path == tmp_path / "1.safetensors"
    assert metadata == {"format": "pt"}
    assert tensors["model.a"].data_ptr() == state["a"].data_ptr()
    assert tensors["model.pair"] is state["pair"]
    assert torch.equal(tensors["own"], own)
    assert second[0].keys() == {"none"}
    assert load_file(tmp_path / "3.safetensors").keys() == {"own"}


@pytest.mark.parametrize(
    ("state", "fits"),
    [
        (weights(), True),
        ({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex128)}, False),
        ({"a": "a string"}, False),
        ({"a": torch.ones(2).to_sparse()}, False),
        ({"a": (base := torch.ones(4)), "b": base[:2]}, False),
        ({"a": torch.ones(100)}, False),
    ],
)
def test_what_fits_in_one_file(state, fits):
    """Overlapping weights, others than plain tensors, and too many bytes do not."""
    assert fit_in_one_file(state, may_be_tied=True, largest=100) is fits


def test_tied_weights():
    """A library that refuses tied weights does so with the weights themselves."""
    assert not fit_in_one_file(weights(), may_be_tied=False, largest=100)
