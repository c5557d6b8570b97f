"""A built average is written as a model that transformers and PEFT load."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback
from mfwrap.callbacks.average.built_model import write_model
from mfwrap.callbacks.average.snapshots import build_average, weighted_sums
from support.averaged_shards import LENGTHS, train_shards
from support.resumed_training import PLAIN, new_trainer
from support.spoilt.gpt2 import tiny_gpt2


def trained(folder, model=None, **keywords):
    """Return the callback of a trained run with two averages and six snapshots."""
    callback = EMACallback(snapshot_every=2)
    average = {"ema": lambda network: ExponentialMovingAverage(network, sigma_rel=LENGTHS)}
    new_trainer(
        folder, PLAIN, callbacks=[callback], trainer_settings=average, model=model, **keywords
    ).train()
    return callback


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run that kept its last checkpoint only, and its callback."""
    folder = tmp_path_factory.mktemp("run")
    return folder, trained(folder, save_total_limit=1)


def test_a_model_for_from_pretrained(run, tmp_path):
    """The folder has the averages, the frozen weights and the configuration."""
    folder, callback = run
    built = build_average(folder, sigma_rel=0.10)
    write_model(built, folder, tmp_path / "model")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "model")

    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-12"]
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name, value in callback.ema.state_dict()["averages_1"].items():
        torch.testing.assert_close(model.get_parameter(name).data, value)


def test_an_earlier_update(run, tmp_path):
    """The average of an earlier update is that of its snapshot."""
    folder, _ = run
    write_model(build_average(folder, sigma_rel=0.05, at=6), folder, tmp_path / "model")
    [file] = (folder / "average_snapshots/checkpoint-6").glob("*.safetensors")
    stored = load_file(file)

    for name, value in load_file(tmp_path / "model" / "model.safetensors").items():
        torch.testing.assert_close(value, stored[f"averages/{name}"])


def test_the_model_has_its_own_dtype(run, tmp_path):
    """Weights are written in the dtypes of the run's model; integers are those of the newest."""
    folder, _ = run
    for step, number in ((3, 1), (4, 2)):
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        shutil.copytree(folder / "checkpoint-12" / "ema", checkpoint)
        weights = {"w": torch.full((2,), float(step), dtype=torch.bfloat16)}
        save_file(weights | {"n": torch.tensor(number)}, checkpoint / "model.safetensors")
        (checkpoint / "trainer_state.json").write_text("{}")
    write_model(build_average(tmp_path / "run", last=2), tmp_path / "run", tmp_path / "model")
    got = load_file(tmp_path / "model" / "model.safetensors")

    assert torch.equal(got["w"], torch.full((2,), 3.5, dtype=torch.bfloat16))
    assert int(got["n"]) == 2
    assert not (tmp_path / "model" / "trainer_state.json").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
@pytest.mark.parametrize(
    "parts",
    [
        {"target_modules": ["c_attn"]},
        {"target_modules": ["c_attn"], "modules_to_save": ["ln_f"]},
        {"target_modules": ["wpe"]},
    ],
)
def test_an_adapter(tmp_path, parts):
    """The averages of an adapter, and of modules that are trained whole, are an adapter."""
    settings = LoraConfig(r=2, fan_in_fan_out="c_attn" in parts["target_modules"], **parts)
    model = get_peft_model(tiny_gpt2(0.0, 0), settings)
    callback = trained(tmp_path / "run", model)
    write_model(build_average(tmp_path / "run", sigma_rel=0.05), tmp_path / "run", tmp_path / "out")
    loaded = PeftModel.from_pretrained(tiny_gpt2(0.0, 0), tmp_path / "out")

    averages = dict(callback.ema.named_averages())
    assert averages
    for name, value in averages.items():
        torch.testing.assert_close(loaded.get_parameter(name).data, value)


@pytest.mark.slow
def test_sharded_checkpoints(tmp_path, two_ranks):
    """From checkpoints of `save_sharded`, the network's weights are written, frozen ones too."""
    two_ranks.run(train_shards, tmp_path)
    run = tmp_path / "sharded"
    built = build_average(run, sigma_rel=0.07)
    write_model(built, run, tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")

    stored = built.parts[-1][0]
    like = {name: torch.zeros(one.size) for name, (_, one) in stored.tensors.items()}
    assert {"model.frozen.weight", "model.frozen.bias"} < set(got)
    for name, value in weighted_sums(built, like):
        assert torch.equal(got[name], value.float())


def test_what_cannot_be_written(run, tmp_path):
    """A run without a model, one with other names, and a damaged checkpoint are refused."""
    folder, _ = run
    shutil.copytree(folder, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-12"
    built = build_average(tmp_path / "run", sigma_rel=0.05, at=6)
    content = json.loads((checkpoint / "ema" / "config.json").read_text())
    (checkpoint / "ema" / "config.json").write_text(json.dumps(content | {"n_head": 1}))
    with pytest.raises(ValueError, match=r"12 is damaged: ema/config.json has \d+ bytes"):
        write_model(built, tmp_path / "run", tmp_path / "out")
    shutil.rmtree(checkpoint)
    with pytest.raises(ValueError, match="has no checkpoint with a model in safetensors files"):
        write_model(built, tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "model").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "run" / "model" / "model.safetensors")
    with pytest.raises(ValueError, match="must have the averaged weights under their names"):
        write_model(built, tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
