"""A manifest finds each damage of the files that it lists, and names the file and the tensor."""

import hashlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mfwrap.checkpoints.file_formats import DamagedFileError
from mfwrap.checkpoints.manifest import files_of, verify_by_manifest, write_manifest
from support.checkpoint_folders import MANIFEST, join_weights, split_weights, write_checkpoint

NAMES = ["model.safetensors", "optimizer.pt", "part/notes.txt", "trainer_state.json"]


@pytest.fixture
def folder(tmp_path):
    """Return a checkpoint with a manifest."""
    return write_checkpoint(tmp_path / "checkpoint-1")


def sha256(content):
    """Return the SHA-256 checksum of bytes."""
    return hashlib.sha256(content).hexdigest()


def refused(folder):
    """Return the file and the reason of the error; fail if there is no error."""
    with pytest.raises(DamagedFileError) as caught:
        verify_by_manifest(folder)
    return caught.value.path.relative_to(folder).as_posix(), caught.value.reason


def test_the_content(folder):
    """The manifest lists tensors with dtype, shape and checksum, and other files with their size.

    It does not list itself, nor temporary files.
    """
    (folder / f"{MANIFEST}.partial").write_text("left by a killed process")
    write_manifest(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    own = manifest.pop("checksum")
    files = {
        name: {
            "size": (folder / name).stat().st_size,
            "sha256": sha256((folder / name).read_bytes()),
        }
        for name in NAMES[1:]
    }
    tensors = {name: tensor.numpy().tobytes() for name, tensor in weights(folder).items()}

    assert manifest == {
        "format_version": 2,
        "files": files
        | {
            "model.safetensors": {
                "tensors": {
                    "bias": f"F32 [3] {sha256(tensors['bias'])}",
                    "weight": f"F32 [2, 3] {sha256(tensors['weight'])}",
                }
            }
        },
    }
    assert own == sha256(json.dumps(manifest).encode())
    assert files_of(folder) == NAMES


def weights(folder):
    """Return the weights in one file."""
    return load_file(folder / "model.safetensors")


def test_an_intact_checkpoint(folder):
    """An intact checkpoint passes, and may have additional files."""
    (folder / "later.bin").write_bytes(b"by a callback")

    verified = verify_by_manifest(folder)

    sizes = [(folder / name).stat().st_size for name in NAMES[1:]]
    assert verified[:3] == (4, sum(sizes) + 4 * (3 + 6), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, MANIFEST])
def test_many_flipped_bits(folder, name):
    """Every seventh bit, once flipped, is found, and the error names the file."""
    content = (folder / name).read_bytes()
    for bit in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(damaged)
        assert refused(folder)[0] == name, bit


@given(data=st.data())
def test_any_damage(tmp_path_factory, data):
    """A flipped bit, a truncation or a longer file is found, and the error names the file."""
    folder = write_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-1")
    name = data.draw(st.sampled_from([*NAMES, MANIFEST]))
    content = bytearray((folder / name).read_bytes())
    kind = data.draw(st.sampled_from(["bit", "cut", "longer"]))
    if kind == "bit":
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
    elif kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content += b"\0"
    (folder / name).write_bytes(content)

    assert refused(folder)[0] == name


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file(folder, name):
    """A missing file is found."""
    (folder / name).unlink()

    assert refused(folder) == (name, "is missing")


def test_the_damaged_tensor_is_named(folder):
    """The error names the tensor whose values have changed, and says what has changed."""
    changed = weights(folder)
    changed["weight"][1, 2] = 2
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})

    reason = "is damaged (checksum of tensor weight differs)"
    assert refused(folder) == ("model.safetensors", reason)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"bias": torch.arange(3.0)}, "tensor weight is missing"),
        ({"more": torch.ones(1)}, "tensor more was not saved"),
        ({"weight": torch.ones(3, 2)}, "tensor weight is F32 [3, 2] instead of F32 [2, 3]"),
        (
            {"weight": torch.ones(2, 3).half()},
            "tensor weight is F16 [2, 3] instead of F32 [2, 3]",
        ),
    ],
)
def test_other_tensors(folder, changed, reason):
    """A tensor that is missing, was not saved or has another shape or dtype is named."""
    kept = {} if reason.endswith("missing") else weights(folder)
    save_file(kept | changed, folder / "model.safetensors")

    assert refused(folder) == ("model.safetensors", f"is damaged ({reason})")


def test_weights_that_are_split_and_joined(folder):
    """A checkpoint stays intact if its weights are split into several files, and joined again."""
    split_weights(folder)
    assert verify_by_manifest(folder).caveat is None

    join_weights(folder)
    assert verify_by_manifest(folder).caveat is None


def test_weights_that_were_saved_in_several_files(folder):
    """Weights that were saved in several files have one entry, and may be joined."""
    split_weights(folder)
    write_manifest(folder)

    assert list(json.loads((folder / MANIFEST).read_text())["files"]) == NAMES
    assert verify_by_manifest(folder).num_files == len(NAMES)
    join_weights(folder)
    assert verify_by_manifest(folder).num_files == len(NAMES)


@pytest.mark.parametrize("saved_split", [False, True])
def test_damage_of_split_weights(folder, saved_split):
    """Damage of one of several files names this file and the tensor."""
    first, last = split_weights(folder)
    if saved_split:
        write_manifest(folder)
    tensors = load_file(last)
    content = last.read_bytes()
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, last)

    name = next(iter(tensors))
    assert refused(folder) == (last.name, f"is damaged (checksum of tensor {name} differs)")
    last.write_bytes(content)
    first.unlink()
    assert refused(folder) == (first.name, "is missing")
    (folder / "model.safetensors.index.json").unlink()
    assert refused(folder) == ("model.safetensors", "is missing")


def test_an_index_that_fits_no_files(folder):
    """Weights whose index is wrong when they are saved are listed file by file."""
    files = split_weights(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {}}')
    write_manifest(folder)

    listed = json.loads((folder / MANIFEST).read_text())["files"]
    assert {index.name, *(path.name for path in files)} < listed.keys()
    index.write_text('{"weight_map": []}')
    assert refused(folder) == (index.name, "is damaged (checksum differs)")


def test_unusual_metadata(folder):
    """Metadata that may change how a file is read are compared; torch's format may be left out."""
    path = folder / "part" / "shard.safetensors"
    save_file({"a": torch.ones(2)}, path, metadata={"offsets": "0"})
    write_manifest(folder)
    verify_by_manifest(folder)
    save_file({"a": torch.ones(2)}, path, metadata={"offsets": "1"})
    reason = "is damaged (the metadata in its header differ)"

    assert refused(folder) == ("part/shard.safetensors", reason)
    save_file({"a": torch.ones(2)}, path, metadata={"offsets": "0"})
    save_file(weights(folder), folder / "model.safetensors")
    verify_by_manifest(folder)
    save_file(weights(folder), folder / "model.safetensors", metadata={"format": "qt"})
    assert refused(folder) == ("model.safetensors", reason)


def test_a_damaged_file_gets_no_manifest(folder):
    """Weights that were not written completely are refused when the manifest is written."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(DamagedFileError, match=r"model\.safetensors is damaged"):
        write_manifest(folder)


@pytest.mark.parametrize("num_bytes", [100, -1])
def test_a_file_of_torch_that_was_not_written_to_its_end(folder, num_bytes):
    """A file of ``torch.save`` whose end is missing is refused when the manifest is written."""
    path = folder / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:num_bytes])

    with pytest.raises(DamagedFileError, match=r"optimizer\.pt was not written to its end"):
        write_manifest(folder)


@pytest.mark.parametrize(
    "content",
    ["[]", '{"files": {}}', "3", '{"format_version": 1, "files": {}}', '{"format_version": []}'],
)
def test_a_manifest_of_another_form(folder, content):
    """A manifest with unexpected JSON is refused."""
    (folder / MANIFEST).write_text(content)

    name, reason = refused(folder)
    assert name == MANIFEST
    assert reason.startswith("must list files, with format_version 2, got version ")
