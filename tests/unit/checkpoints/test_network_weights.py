"""Checkpoints of another network are refused."""

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from mfwrap.checkpoints.network_weights import (
    foreign_weights,
    is_in_original_format,
    load_original_format,
)
from mfwrap.checkpoints.verification import check_checkpoint
from support.checkpoint_folders import split_weights, write_checkpoint
from support.versions import needs


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
    check_checkpoint(folder, functools.partial(foreign_weights, network=Tied()))


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
        check_checkpoint(folder, functools.partial(foreign_weights, network=Tied()))


def test_weights_in_several_files(tmp_path):
    """Weights that were split into several files are compared, too."""
    folder = write_checkpoint(tmp_path / "checkpoint-1", weights=weights_of(Tied()))
    split_weights(folder)

    assert foreign_weights(folder, Tied()) is None
    assert "has no third.weight" in foreign_weights(folder, More())


class WithHook(nn.Module):
    """A layer whose hook gives the buffer `seen` the size that it has in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(0))
        self.register_load_state_dict_pre_hook(self._resize)

    @staticmethod
    def _resize(module, state, prefix, *_):
        if f"{prefix}seen" in state:
            module.seen = torch.empty_like(state[f"{prefix}seen"])


class WithMethod(WithHook):
    """The same, with a method instead of a hook."""

    def __init__(self) -> None:
        super().__init__()
        self._load_state_dict_pre_hooks.clear()

    def _load_from_state_dict(self, state, prefix, *rest):
        self._resize(self, state, prefix)
        super()._load_from_state_dict(state, prefix, *rest)


class Whole(nn.Module):
    """A network that loads its state in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), WithHook()
        self.second._load_state_dict_pre_hooks.clear()

    def load_state_dict(self, state_dict, *arguments, **keywords):
        """Resize the buffer, and load."""
        WithHook._resize(self.second, state_dict, "second.")
        return super().load_state_dict(state_dict, *arguments, **keywords)


def in_network(layer):
    """Return a network with a normalization and this layer."""
    return nn.ModuleDict({"first": nn.BatchNorm1d(3), "second": layer})


@pytest.mark.parametrize(
    "make",
    [lambda: in_network(WithHook()), lambda: in_network(WithMethod()), Whole],
    ids=["hook", "method", "whole network"],
)
def test_a_network_that_resizes_a_buffer_when_it_is_loaded(tmp_path, make):
    """A weight that a network's own code loads fits, whatever its shape, and can be loaded."""
    weights = make().state_dict() | {"second.seen": torch.arange(5.0)}
    folder = write_checkpoint(tmp_path / "checkpoint-1", weights=weights)

    assert foreign_weights(folder, make()) is None
    network = make()
    network.load_state_dict(load_file(folder / "model.safetensors"))
    assert torch.equal(network.get_buffer("second.seen"), torch.arange(5.0))


def test_a_shared_layer_that_resizes_a_buffer_when_it_is_loaded(tmp_path):
    """The weights of a layer with two names are loaded by its own code under both names."""
    network = in_network(WithHook())
    network["third"] = network["second"]
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    weights["third.seen"] = torch.arange(5.0)
    folder = write_checkpoint(tmp_path / "checkpoint-1", weights=weights)

    assert foreign_weights(folder, network) is None


@pytest.mark.parametrize("change", ["renamed", "missing"])
def test_names_that_a_network_changes_when_it_is_loaded(tmp_path, change):
    """A name that a network's own code loads may be unknown or missing; other names may not."""
    weights = in_network(WithHook()).state_dict()
    weight = weights.pop("second.weight")
    folder = write_checkpoint(
        tmp_path / "checkpoint-1",
        weights=weights | ({"second.old": weight} if change == "renamed" else {}),
    )
    without = write_checkpoint(
        tmp_path / "checkpoint-2",
        weights={name: value for name, value in weights.items() if name != "first.weight"},
    )

    assert foreign_weights(folder, in_network(WithHook())) is None
    assert "has no first.weight" in foreign_weights(without, in_network(WithHook()))


def test_code_of_torch_that_loads_weights_is_no_exception(tmp_path):
    """Weights of a module for which torch converts older formats are checked."""

    def network(first, second):
        normalized = nn.utils.parametrizations.weight_norm(nn.Linear(3, second))
        return nn.Sequential(nn.BatchNorm1d(first), normalized)

    folder = write_checkpoint(tmp_path / "checkpoint-1", weights=network(3, 3).state_dict())

    assert foreign_weights(folder, network(3, 3)) is None
    assert "has 0.bias with shape [3]" in foreign_weights(folder, network(4, 3))
    assert "has 1.bias with shape [3]" in foreign_weights(folder, network(3, 4))


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


RENAMES = needs("transformers", "5.0", "weights with other names in files")


def vision() -> nn.Module:
    """Return a network whose weights transformers renames."""
    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTForImageClassification(ViTConfig(**shape, **layers))


def experts(num_local_experts=2) -> nn.Module:
    """Return a network whose weights transformers joins."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(**shape, **layers, num_local_experts=num_local_experts))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(vision, marks=needs("transformers", "5.11", "other names for ViT in files")),
        pytest.param(experts, marks=RENAMES),
    ],
)
def test_the_original_format(tmp_path, make):
    """What a stock Trainer saves is recognized and loaded bit for bit; the own names are not it."""
    saved, network = make(), make()
    saved.save_pretrained(tmp_path / "original")
    saved.save_pretrained(tmp_path / "own", save_original_format=False)

    assert foreign_weights(tmp_path / "original", network) is not None
    assert is_in_original_format(tmp_path / "original", network)
    assert foreign_weights(tmp_path / "own", network) is None
    assert not is_in_original_format(tmp_path / "own", network)
    assert not is_in_original_format(tmp_path, network)

    load_original_format(tmp_path / "original", network)

    state = saved.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


def test_the_original_format_of_another_network(tmp_path):
    """Weights of other shapes, or too few of them, are refused."""
    experts(4).save_pretrained(tmp_path / "four")
    assert not is_in_original_format(tmp_path / "four", experts())
    assert not is_in_original_format(tmp_path / "four", Tied())

    network = vision()
    network.save_pretrained(tmp_path / "few")
    file = tmp_path / "few/model.safetensors"
    weights = load_file(file)
    del weights["vit.layernorm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.safetensors has no vit\.layernorm\.weight"):
        load_original_format(tmp_path / "few", network)


@RENAMES
def test_the_original_format_of_mixed_dtypes(tmp_path):
    """A weight in float32 beside others in bfloat16 is not rounded."""
    network = experts().bfloat16()
    gate = network.model.layers[0].mlp.gate
    gate.float()
    torch.nn.init.normal_(gate.weight)
    before = gate.weight.clone()
    network.save_pretrained(tmp_path)
    torch.nn.init.zeros_(gate.weight)

    load_original_format(tmp_path, network)

    assert torch.equal(gate.weight, before)
    assert network.model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("change", ["another head", "another layer", "another constructor"])
def test_the_original_format_of_a_changed_network(tmp_path, change):
    """What transformers could not load is not accepted, so that the resume is refused before."""

    class Own(ViTForImageClassification):
        def __init__(self, config, number):
            super().__init__(config)
            self.number = number

    network = vision() if change != "another constructor" else Own(vision().config, 2)
    if change == "another head":
        network.classifier = nn.Sequential(nn.Linear(16, 2))
    elif change == "another layer":
        network.extra = nn.Linear(2, 2)
    network.save_pretrained(tmp_path)

    assert not is_in_original_format(tmp_path, network)
