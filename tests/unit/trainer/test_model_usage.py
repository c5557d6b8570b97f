"""The code that loads a model fits the model's kind, library and place."""

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from mfwrap.recipes.models.perceptron import Perceptron, PerceptronConfig
from mfwrap.trainer.model_usage import library_of, task_of, usage
from support.trainer_runs import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT

VIT = ViTConfig(
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    intermediate_size=8,
    image_size=4,
    patch_size=2,
    num_channels=1,
)


def adapter(base: str | None):
    """Return a Llama with an adapter, which belongs to the checkpoint `base`."""
    config = LoraConfig(r=1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config)
    model.active_peft_config.base_model_name_or_path = base
    return model


@pytest.mark.parametrize(
    ("make", "library", "task"),
    [
        (tiny_llama, "transformers", "text-generation"),
        (lambda: ViTForImageClassification(VIT), "transformers", "image-classification"),
        (lambda: ViTModel(VIT), "transformers", None),
        (lambda: Perceptron(PerceptronConfig(3)), "mfwrap", "tabular-regression"),
        (lambda: adapter("org/name"), "peft", "text-generation"),
        (lambda: nn.Linear(2, 2), "pytorch", None),
    ],
)
def test_library_and_task(make, library, task):
    """The library and the hub's task of a model are those of its class."""
    model = make()

    assert (library_of(model), task_of(model)) == (library, task)


def test_the_place_of_a_model():
    """A model is loaded from its repository and folder there, or from its own folder."""
    in_repository = usage(tiny_llama(), None, "user/name", "model_ema")
    assert 'from_pretrained("user/name", subfolder="model_ema")' in in_repository
    assert "in the folder of the model" not in in_repository

    on_disk = usage(tiny_llama(), None, None, "model_ema")
    assert 'from_pretrained(".")' in on_disk
    assert "in the folder of the model" in on_disk


def test_a_chat_has_messages():
    """A model that was trained on conversations is asked with messages."""
    tokenizer = object()

    assert '"role": "user"' in usage(tiny_llama(), tokenizer, None, "", is_chat=True)
    assert '"role"' not in usage(tiny_llama(), tokenizer, None, "")


def test_adapters():
    """An adapter is loaded by PEFT; without its base model there is no code."""
    code = usage(adapter("org/name"), None, None, "")
    assert "from peft import AutoPeftModelForCausalLM" in code

    assert "```" not in usage(adapter(None), None, None, "")


def test_classes_without_a_task(tmp_path, monkeypatch):
    """A model of transformers without a task, and a plain module, are loaded by code that runs."""
    ViTModel(VIT).save_pretrained(tmp_path)
    weights = {"weight": torch.ones(2)}
    monkeypatch.chdir(tmp_path)
    for model, name, expected in (
        (ViTModel(VIT), "model", ViTModel),
        (nn.Linear(2, 2), "weights", dict),
    ):
        if expected is dict:
            safetensors.torch.save_file(weights, "model.safetensors")
        code = usage(model, None, None, "").split("```")[1].removeprefix("python")
        found: dict = {}
        exec(compile(code, "README.md", "exec"), found)  # noqa: S102  (just written)
        assert isinstance(found[name], expected)
