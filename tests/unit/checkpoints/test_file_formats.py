"""Damaged files are recognized by their formats, and the tensors of safetensors files are found."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mfwrap.checkpoints.file_formats import DamagedFileError, check_format, stored_weights
from support.checkpoint_folders import split_weights, write_checkpoint

TENSORS = {
    "bias": torch.arange(3.0),
    "empty": torch.zeros(0, 4),
    "number": torch.tensor(7),
    "weight": torch.ones(2, 3, dtype=torch.bfloat16),
}


@pytest.fixture
def path(tmp_path):
    """Return a file with `TENSORS`."""
    save_file(TENSORS, tmp_path / "some.safetensors", metadata={"format": "pt", "more": "x"})
    return tmp_path / "some.safetensors"


def assert_places(weights, files):
    """Assert that each tensor is found with dtype and shape, and at the place of its bytes."""
    assert set(weights.files) == set(files)
    forms = {name: (each.dtype, each.shape) for name, each in weights.tensors.items()}
    assert forms == {
        "bias": ("F32", (3,)),
        "empty": ("F32", (0, 4)),
        "number": ("I64", ()),
        "weight": ("BF16", (2, 3)),
    }
    for name, tensor in TENSORS.items():
        file, start, size = weights.tensors[name].extent
        content = file.read_bytes()[start : start + size]
        assert content == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_weights_in_one_file(path):
    """All tensors are found, and the metadata."""
    weights = stored_weights(path)

    assert_places(weights, [path])
    assert weights.metadata == ({"format": "pt", "more": "x"},)


def test_weights_in_several_files(path):
    """All tensors are found in the files that the index lists."""
    files = split_weights(path.parent, path.name)

    assert_places(stored_weights(path), [*files, path.with_name("some.safetensors.index.json")])


def test_one_file_comes_before_an_index(path):
    """If the single file exists, an index is ignored, as libraries that load weights ignore it."""
    content = path.read_bytes()
    split_weights(path.parent, path.name)
    path.write_bytes(content)

    assert_places(stored_weights(path), [path])


INDEXES = [
    "",
    "[]",
    "{}",
    '{"weight_map": {}}',
    '{"weight_map": 3}',
    '{"weight_map": {"a": 3}}',
    '{"weight_map": {"a": ["b"]}}',
    '{"weight_map": {"a": "../some"}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("content", INDEXES, ids=range(len(INDEXES)))
def test_no_index(path, content):
    """An index that does not list files of its own folder is refused; the error names the index."""
    path.unlink()
    index = path.with_name("some.safetensors.index.json")
    index.write_text(content)

    with pytest.raises(DamagedFileError) as caught:
        stored_weights(path)

    assert caught.value.path == index
    assert caught.value.reason == "is damaged (not an index of safetensors files)"


def test_an_index_that_does_not_fit(path):
    """An index that lists another tensor, or lists a tensor in another file, is refused."""
    split_weights(path.parent, path.name)
    index = path.with_name("some.safetensors.index.json")
    content = json.loads(index.read_text())
    weight_map = content["weight_map"]
    for wrong in (
        weight_map | {"other": weight_map["bias"]},
        weight_map | {"bias": weight_map["weight"], "weight": weight_map["bias"]},
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(DamagedFileError, match=r"index\.json is damaged \(it differs"):
            stored_weights(path)


@pytest.mark.parametrize("name", ["some.safetensors", "some-00002-of-00004.safetensors"])
def test_a_missing_file(path, name):
    """A missing file is named, also if an index lists it."""
    if name != path.name:
        split_weights(path.parent, path.name)
    path.with_name(name).unlink()

    with pytest.raises(DamagedFileError, match=rf"{name} is missing"):
        stored_weights(path)


@given(data=st.data())
def test_any_truncation(tmp_path_factory, data):
    """A truncated file is recognized by its content."""
    folder = write_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-3", listed=False)
    name = data.draw(st.sampled_from(["trainer_state.json", "model.safetensors", "optimizer.pt"]))
    path = folder / name
    check_format(path)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])

    with pytest.raises(DamagedFileError, match=rf"{name} is "):
        check_format(path)


@pytest.mark.parametrize("name", ["state.pth", "optimizer.bin", "random_states_0.pkl"])
def test_a_flipped_bit_in_a_file_of_torch(tmp_path, name):
    """The archive's own checksums find a flipped bit of a tensor."""
    torch.save({"step": torch.ones(4)}, tmp_path / name)
    content = bytearray((tmp_path / name).read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes()) + 5] ^= 1
    (tmp_path / name).write_bytes(content)

    with pytest.raises(DamagedFileError, match=r"checksum of .*data/0 in it differs"):
        check_format(tmp_path / name)


@pytest.mark.parametrize("name", ["stats.pkl", "notes.txt", "array.npz"])
def test_other_formats(tmp_path, name):
    """Files of unknown formats are not checked."""
    (tmp_path / name).write_bytes(b"\x80\x04K\x01.")

    check_format(tmp_path / name)


@pytest.mark.slow
def test_many_flipped_bits(tmp_path):
    """No flipped bit leads to another error than `DamagedFileError`."""
    folder = write_checkpoint(tmp_path / "checkpoint-3", listed=False)
    for name in ("trainer_state.json", "model.safetensors", "optimizer.pt"):
        path = folder / name
        content = path.read_bytes()
        num_found = 0
        for bit in range(0, 8 * len(content), 7):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            try:
                check_format(path)
            except DamagedFileError:
                num_found += 1
        path.write_bytes(content)
        assert num_found > 0
