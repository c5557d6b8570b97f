"""Files that are hashed while they are written have the bytes that the libraries write."""

import hashlib
import shutil

import pytest
import torch
from safetensors.torch import save_file

from mfwrap.checkpoints import checksums, hashed_files
from mfwrap.checkpoints.checksums import checksum
from mfwrap.checkpoints.hashed_files import save_object, save_tensors
from mfwrap.checkpoints.manifest import MANIFEST, write_manifest
from support.device import needs_backends, run


def many_tensors():
    """Return tensors of all dtypes, some without elements, dimensions or contiguous memory."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2, (5, 3), generator=generator)
    tensors = {f"{dtype} ä": values.to(dtype) for dtype in hashed_files._DTYPES}
    tensors |= {"a": torch.randn(400_000, generator=generator), "z": torch.randn(3, 2)}
    return tensors | {"empty": torch.empty(0, 2), "scalar": torch.tensor(3.0)}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "pt", "note": 'ü "\n'}])
def test_tensors(tmp_path, metadata):
    """The file is that of safetensors byte for byte, and the checksums are those of its bytes."""
    if metadata is not None and len(metadata) > 1:
        metadata = {"note": metadata["note"]}  # the library writes several in no fixed order
    tensors = many_tensors()
    found = save_tensors(tensors, tmp_path / "own.safetensors", metadata)
    save_file(tensors, tmp_path / "library.safetensors", metadata)

    own = (tmp_path / "own.safetensors").read_bytes()
    assert own == (tmp_path / "library.safetensors").read_bytes()
    assert found == {extent: checksum(extent) for extent in found}
    assert sum(extent.num_bytes for extent in found) == sum(
        tensor.numel() * tensor.element_size() for tensor in tensors.values()
    )


def test_tensors_that_are_not_contiguous(tmp_path):
    """A transposed tensor is written as its contiguous copy, and shared memory is written twice."""
    weight = torch.arange(6.0).reshape(2, 3)
    save_tensors({"a": weight.t(), "b": weight}, tmp_path / "own.safetensors")
    save_file({"a": weight.t().contiguous(), "b": weight}, tmp_path / "library.safetensors")
    own = (tmp_path / "own.safetensors").read_bytes()
    assert own == (tmp_path / "library.safetensors").read_bytes()


@needs_backends
def test_tensors_on_a_device():
    """They are copied to the host, one at a time."""
    assert run("support.device.saves:as_on_the_cpu")


def test_no_tensors(tmp_path):
    """A file without tensors has a header."""
    assert save_tensors({}, tmp_path / "own.safetensors") == {}
    save_file({}, tmp_path / "library.safetensors")
    own = (tmp_path / "own.safetensors").read_bytes()
    assert own == (tmp_path / "library.safetensors").read_bytes()


def test_a_dtype_without_a_name(tmp_path):
    """A dtype that safetensors has no name for is refused."""
    tensors = {"a": torch.ones(2, dtype=torch.complex128)}
    with pytest.raises(ValueError, match=r"cannot hold torch.complex128, got it in tensor 'a'"):
        save_tensors(tensors, tmp_path / "own.safetensors")


def test_an_object(tmp_path):
    """``torch.save`` writes from start to end, so the checksum is that of the file."""
    value = {"state": {0: {"exp_avg": torch.randn(500_000)}}, "param_groups": [{"lr": 0.1}]}
    ((extent, found),) = save_object(value, tmp_path / "optimizer.pt").items()
    content = (tmp_path / "optimizer.pt").read_bytes()
    assert found == hashlib.sha256(content).hexdigest()
    assert extent == (tmp_path / "optimizer.pt", 0, len(content))
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert torch.equal(loaded["state"][0]["exp_avg"], value["state"][0]["exp_avg"])
    assert loaded["param_groups"] == value["param_groups"]


def test_the_manifest_without_reading(tmp_path, monkeypatch):
    """With known checksums, the manifest is the same, and only the other files are read."""
    folder = tmp_path / "known"
    folder.mkdir()
    known = save_tensors(many_tensors(), folder / "model.safetensors", {"format": "pt"})
    known |= save_object({"state": torch.randn(1000)}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{}")
    shutil.copytree(folder, tmp_path / "read")
    write_manifest(tmp_path / "read")

    read = []
    real = checksums.checksum
    monkeypatch.setattr(
        checksums, "checksum", lambda extent: (read.append(extent.path.name), real(extent))[1]
    )
    write_manifest(folder, known=known)
    assert read == ["trainer_state.json"]
    assert (folder / MANIFEST).read_bytes() == (tmp_path / "read" / MANIFEST).read_bytes()


def test_a_file_that_was_changed_is_read(tmp_path):
    """A file that has another size than was written is read, as another program has changed it."""
    known = save_object([1], tmp_path / "optimizer.pt")
    torch.save([1, 2, 3], tmp_path / "optimizer.pt")
    assert known.keys() != {checksums.whole_extent(tmp_path / "optimizer.pt")}
