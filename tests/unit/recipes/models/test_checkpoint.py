"""A model folder with remote code, pickled weights or damaged files is refused in one line."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from mfwrap.recipes.models.checkpoint import (
    check_code,
    check_no_adapter,
    check_weights,
    model_type_of,
)
from support.recipe_texts import message, recipe_text


@pytest.fixture
def folder(tmp_path):
    """Make a model folder."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    return tmp_path


def check(folder) -> str:
    """Make all checks of a folder, and return its model type."""
    check_code("path", folder)
    check_weights("path", folder)
    return model_type_of("path", folder)


def test_a_whole_folder(folder):
    """A complete folder is accepted, with one file of weights or with several."""
    assert check(folder) == "bert"
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": {"a": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check(folder) == "bert"


def test_pickled_weights_are_refused(folder):
    """The error names the file, and the command that converts it; nothing is unpickled."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))

    with pytest.raises(
        ValueError, match=r"as safetensors, got pickled weights \(pytorch_model\.bin"
    ):
        check(folder)
    assert ".save_pretrained('converted')" in message(
        text=recipe_text(task="causal_lm", model={"config": None, "path": str(folder)})
    )


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused(folder, name, monkeypatch):
    """A folder with ``auto_map`` is refused without a prompt, unless the recipe trusts it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked the user"))
    (folder / name).write_text(json.dumps({"model_type": "bert", "auto_map": {"AutoModel": "m.M"}}))
    text = recipe_text(task="causal_lm", model={"config": None, "path": str(folder)})
    found = message(text=text)

    assert (
        f"model.path: must be a folder without remote code (auto_map in {folder / name})" in found
    )
    assert "model.trust_remote_code=true" in found


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", b"{", "a readable JSON object in"),
        ("config.json", b"\xff", "a readable JSON object in"),
        ("config.json", b"[" * 5_000, "a readable JSON object in"),
        ("config.json", b"[]", "must have a JSON object in"),
        ("config.json", b'{"model_type": "brt"}', "got 'brt'; did you mean"),
        ("config.json", b'{"model_type": [1]}', "a model type of transformers in"),
        ("model.safetensors", b"torn", "must have undamaged weights, got"),
        ("model.safetensors", None, "must have weights (model.safetensors or"),
    ],
)
def test_damaged_folders(folder, name, content, says):
    """The error for a damaged or missing file is one line that names the file."""
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match="`path` must") as error:
        check(folder)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "index", ['{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}']
)
def test_a_damaged_index(folder, index):
    """An index must list files of its own folder."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"weight_map|but lacks '\.\./x"):
        check_weights("path", folder)


def test_a_pointer_of_git_lfs(folder):
    """A clone without Git LFS is told so, and how to get the weights."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548105171\n"
    (folder / "model.safetensors").write_text(pointer)

    with pytest.raises(ValueError, match=r"is a pointer of Git LFS.*run `git lfs install` and"):
        check_weights("path", folder)


def test_an_adapter_is_no_model(folder):
    """The error for the folder of an adapter names the base model; a merged model is accepted."""
    config = {"base_model_name_or_path": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    check_no_adapter("path", folder)
    (folder / "config.json").unlink()

    with pytest.raises(ValueError, match=r"holds only an adapter; name the folder of 'org/base'"):
        check_no_adapter("path", folder)
    found = message(text=recipe_text(task="causal_lm", model={"config": None, "path": str(folder)}))
    assert "model.path: must be a model folder, got" in found
