"""Damaged checkpoints, and checkpoints of another network, are refused."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from mfwrap.checkpoints.manifest import (
    check_checkpoint,
    foreign_weights,
    newest_whole_checkpoint,
    write_manifest,
)

MANIFEST = "mfwrap_manifest.json"


def checkpoint(folder, *, listed=True, weights=None):
    """Write a small checkpoint, and return its folder."""
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    save_file(weights or {"weight": torch.ones(2, 3)}, folder / "model.safetensors")
    torch.save({"step": torch.ones(4)}, folder / "optimizer.pt")
    (folder / "part").mkdir()
    (folder / "part" / "notes.txt").write_text("text")
    if listed:
        write_manifest(folder)
    return folder


def test_manifest(tmp_path):
    """The manifest lists each file with its size, also in subfolders, but not itself."""
    folder = checkpoint(tmp_path / "checkpoint-1")
    # Write the manifest a second time: it must not list the first manifest.
    write_manifest(folder)
    manifest = json.loads((folder / MANIFEST).read_text())

    names = ["model.safetensors", "optimizer.pt", "part/notes.txt", "trainer_state.json"]
    assert manifest == {
        "format_version": 1,
        "files": {name: (folder / name).stat().st_size for name in names},
    }


@pytest.mark.parametrize("listed", [True, False], ids=["ours", "stock"])
def test_whole(tmp_path, listed):
    """An intact checkpoint passes with or without a manifest, and may have additional files."""
    folder = checkpoint(tmp_path / "checkpoint-1", listed=listed)
    (folder / "later.bin").write_bytes(b"by a callback")

    check_checkpoint(folder)
    assert newest_whole_checkpoint(tmp_path) == folder


@given(data=st.data())
def test_any_truncation(tmp_path_factory, data):
    """A checkpoint with a truncated file is refused with an error that names the file."""
    folder = checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-3")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(paths))
    content = path.read_bytes()
    # A manifest that lacks only its final newline is still valid.
    most = len(content) - (2 if path.name == MANIFEST else 1)
    path.write_bytes(content[: data.draw(st.integers(0, most))])

    with pytest.raises(ValueError, match=f"checkpoint-3: .*{path.name}.*; there is no intact"):
        check_checkpoint(folder)


@given(data=st.data())
def test_any_truncation_of_a_stock_checkpoint(tmp_path_factory, data):
    """Without a manifest, a truncated file is recognized by its content."""
    folder = checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-3", listed=False)
    name = data.draw(st.sampled_from(["trainer_state.json", "model.safetensors", "optimizer.pt"]))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])

    with pytest.raises(ValueError, match=f"checkpoint-3: {name} is "):
        check_checkpoint(folder)


@pytest.mark.parametrize("listed", [True, False], ids=["ours", "stock"])
@pytest.mark.parametrize("length", [0, 3, 8, 50])
def test_safetensors_that_are_cut_in_their_header(tmp_path, listed, length):
    """A safetensors file that ends inside its header is refused."""
    folder = checkpoint(tmp_path / "checkpoint-1", listed=listed)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(ValueError, match=r"model\.safetensors "):
        check_checkpoint(folder)


def test_safetensors_that_are_too_long(tmp_path):
    """A safetensors file with bytes after its tensors is refused."""
    folder = checkpoint(tmp_path / "checkpoint-1", listed=False)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")

    with pytest.raises(ValueError, match=r"model\.safetensors "):
        check_checkpoint(folder)


@pytest.mark.parametrize("content", ["[]", '{"files": {}}', "3", '{"format_version": 2}'])
def test_a_manifest_of_another_form(tmp_path, content):
    """A manifest with unexpected JSON is refused with an error that names the manifest."""
    folder = checkpoint(tmp_path / "checkpoint-1")
    (folder / MANIFEST).write_text(content)

    with pytest.raises(ValueError, match=rf"checkpoint-1: {MANIFEST} "):
        check_checkpoint(folder)


@pytest.mark.parametrize("kind", ["none", "file"])
def test_no_folder(tmp_path, kind):
    """A missing folder is refused, and so is a file with the name of the checkpoint."""
    if kind == "file":
        (tmp_path / "checkpoint-1").write_text("a file")

    with pytest.raises(ValueError, match="checkpoint-1: there is no such folder"):
        check_checkpoint(tmp_path / "checkpoint-1")


def test_an_empty_folder(tmp_path):
    """A folder without the Trainer's state is refused."""
    (tmp_path / "checkpoint-1").mkdir()

    with pytest.raises(ValueError, match=r"checkpoint-1: trainer_state\.json is missing"):
        check_checkpoint(tmp_path / "checkpoint-1")


def test_the_newest_intact_checkpoint(tmp_path):
    """The newest intact checkpoint is found; damaged checkpoints and other folders are skipped."""
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "checkpoint-12", "checkpoint-x"):
        checkpoint(tmp_path / name)
    for name in ("checkpoint-11", "checkpoint-12"):
        (tmp_path / name / "optimizer.pt").unlink()
    (tmp_path / "checkpoint-13").write_text("a file")
    checkpoint(tmp_path / "other-checkpoint-99")

    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    before = tmp_path / "checkpoint-10"
    assert newest_whole_checkpoint(tmp_path, before=before) == tmp_path / "checkpoint-9"
    assert newest_whole_checkpoint(tmp_path, before=tmp_path / "checkpoint-9") is None
    assert newest_whole_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match=rf"checkpoint before it: {tmp_path / 'checkpoint-10'}$"):
        check_checkpoint(tmp_path / "checkpoint-12")


def test_a_checkpoint_under_another_name(tmp_path):
    """If the name of a damaged checkpoint has no step, the error offers the newest intact one."""
    checkpoint(tmp_path / "checkpoint-4")
    folder = checkpoint(tmp_path / "kept")
    check_checkpoint(folder)
    (folder / "optimizer.pt").unlink()

    with pytest.raises(ValueError, match=rf"kept: optimizer\.pt is .*{tmp_path / 'checkpoint-4'}$"):
        check_checkpoint(folder)


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
    """A checkpoint fits if only copies of tied weights and unsaved weights are missing."""
    folder = checkpoint(tmp_path / "checkpoint-1", weights=weights_of(Tied()))

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
    folder = checkpoint(tmp_path / "checkpoint-1", weights=weights)

    assert foreign_weights(folder, Tied()) == f"model.safetensors {reason}"
    with pytest.raises(ValueError, match=r"checkpoint-1: model\.safetensors has "):
        check_checkpoint(folder, Tied())


def test_weights_in_other_files(tmp_path):
    """Sharded weights and adapters are not checked."""
    folder = checkpoint(tmp_path / "checkpoint-1")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")

    assert foreign_weights(folder, Tied()) is None
