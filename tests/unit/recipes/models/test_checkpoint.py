"""A model folder with remote code, pickled weights or damaged files is refused in one line."""

import json
import os
import pickle
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.recipes.models.checkpoint import (
    check_code,
    check_no_adapter,
    check_tokenizer,
    check_weights,
    model_type_of,
)
from mfwrap.recipes.models.settings import ModelSettings
from support.recipe_texts import SMALL_LLAMA, message, recipe_text


@pytest.fixture
def folder(tmp_path):
    """Make a model folder."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    return tmp_path


def check(folder) -> str:
    """Make all checks of a folder, and return its model type."""
    check_code("path", folder)
    check_tokenizer("path", folder)
    check_weights("path", folder)
    return model_type_of("path", folder)


def test_a_whole_folder(folder):
    """A complete folder is accepted, with one file of weights or with several."""
    assert check(folder) == "bert"
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": {"a": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check(folder) == "bert"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.safetensors", "weights that may be read, got"),
        ("config.json", "a readable JSON object in"),
        ("vocab.txt", "an undamaged tokenizer, got"),
    ],
)
def test_a_file_that_may_not_be_read(folder, name, wanted):
    """A file without permission to read is not called damaged."""
    (folder / "vocab.txt").write_text("a")
    (folder / name).chmod(0)

    with pytest.raises(ValueError, match=rf"must have {wanted} .*{name}: it may not be") as error:
        check(folder)
    assert str(error.value).endswith("read (Permission denied); change its permissions, or copy it")


def test_pickled_weights_are_refused(folder):
    """The error names the file; nothing is unpickled. Only known files have a command."""
    (folder / "model.safetensors").unlink()
    (folder / "other.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match=r"\(other\.bin\) in .*; save the model with `save_pretr"):
        check(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(
        ValueError, match=r"as safetensors, got pickled weights \(pytorch_model\.bin\) in "
    ):
        check(folder)


def test_files_of_a_trainer_are_no_weights(folder):
    """A folder that has lost its weights lacks them, whatever a Trainer has left beside them."""
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").touch()
    (folder / "rng_state_0.pth").touch()

    with pytest.raises(ValueError, match=r"must have weights \(model.safetensors or"):
        check(folder)


@pytest.mark.parametrize("name", ["pickled", "my pickled model"])
def test_the_command_that_converts_pickled_weights(tmp_path, name):
    """As printed, it keeps every weight bit for bit, also those of an untied head and of shards."""
    folder = tmp_path / name
    network = LlamaForCausalLM(LlamaConfig(**SMALL_LLAMA, vocab_size=261))
    network.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    head = {"lm_head.weight": network.lm_head.weight.detach()}
    others = {key: each for key, each in network.state_dict().items() if key not in head}
    torch.save(others, folder / "pytorch_model-00001-of-00002.bin")
    torch.save(head, folder / "pytorch_model-00002-of-00002.bin")
    text = recipe_text(
        task="causal_lm", model={"config": None, "path": str(folder)}, data={"type": "docstrings"}
    )
    command = message(text=text).partition("runs no code of them: ")[2]
    program, *words = shlex.split(command)

    assert program == "python"
    subprocess.run([sys.executable, *words], check=True)
    model = ModelSettings(path=str(folder))
    found = model.make_model(AutoModelForCausalLM).state_dict()
    assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert found.keys() == network.state_dict().keys()
    assert all(torch.equal(each, found[key]) for key, each in network.state_dict().items())
    assert len(model.make_tokenizer()) == 261


def test_the_command_runs_no_code(tmp_path, folder):
    """A pickle that would run code is refused when it is converted."""

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "trapped"), "w"))

    (folder / "model.safetensors").unlink()
    torch.save({"a": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="which runs no code of them") as error:
        check(folder)
    _, *words = shlex.split(str(error.value).partition("runs no code of them: ")[2])
    done = subprocess.run([sys.executable, *words], check=False, capture_output=True)

    assert done.returncode == 1
    assert b"Weights only load failed" in done.stderr
    assert not (tmp_path / "trapped").exists()


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
        (
            "model.safetensors",
            b"torn",
            "it is cut off or damaged (Error while deserializing header",
        ),
        (
            "model.safetensors",
            b"",
            "model.safetensors: it is empty; download or copy the file again",
        ),
        ("config.json", b"", "config.json: it is empty; download or copy the file again"),
        ("model.safetensors", None, "must have weights (model.safetensors or"),
        ("model.safetensors", None, "; download or copy the folder again"),
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


def test_weights_that_are_cut_off(folder):
    """A copy that was interrupted is found by its length."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(ValueError, match=r"it is cut off or damaged \(.*\); download or copy the "):
        check_weights("path", folder)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "vocab.txt"]
)
def test_a_pointer_of_git_lfs(folder, name):
    """A clone without Git LFS is told so, and how to get the files."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548105171\n"
    (folder / name).write_text(pointer)

    with pytest.raises(ValueError, match=rf"{name}: it is a pointer of Git LFS.*run `git lfs inst"):
        check(folder)


def test_a_damaged_tokenizer(folder):
    """Its file is named with the key, unless the recipe has another tokenizer."""
    byte_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:100])
    model = {"config": None, "path": str(folder)}
    says = f"model.path: must have a readable JSON object in {file}: it is cut off or damaged ("

    assert says in message(text=recipe_text(task="causal_lm", model=model))
    assert ModelSettings(path=str(folder), tokenizer="bytes")
    with pytest.raises(ValueError, match=r"^`tokenizer` must have a readable JSON object in"):
        ModelSettings(path=str(folder), tokenizer=str(folder))


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
