"""Weights of 4 and 8 bits: the settings, the refusals, and an adapter on top of them."""

import json
import math
import sys
import types

import pytest
import torch
from safetensors import safe_open

from mfwrap.recipes.models.quantization import quantization_config, why_no_kernels
from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.runner import RecipeError
from mfwrap.runner.run import run_recipe
from support.recipe_data import LANGUAGE, recipe_of
from support.recipe_texts import SMALL_LLAMA

# Ignore the warnings that TRL, bitsandbytes and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DATA = {"type": "docstrings", "max_train_samples": 8, "max_eval_samples": 4}
PEFT = "peft={type: lora, r: 2, target_modules: [q_proj]}"
reason = why_no_kernels(FOUR)
with_kernels = pytest.mark.skipif(reason is not None, reason=str(reason))


def test_the_computation_has_the_dtype_of_the_model():
    """The default of the compute dtype is that of the model, and a recipe may set another one."""
    assert quantization_config(FOUR, "bfloat16").bnb_4bit_compute_dtype == torch.bfloat16
    given = FOUR | {"bnb_4bit_compute_dtype": "float16"}
    assert quantization_config(given, "bfloat16").bnb_4bit_compute_dtype == torch.float16


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"load_in_4bits": True},
            "`quantization.load_in_4bits` is not a key of BitsAndBytesConfig",
        ),
        ({}, "`quantization` must have `load_in_4bit: true` or `load_in_8bit: true`, got {}"),
        ({"load_in_4bit": [1]}, "`quantization` must have `load_in_4bit: true` or"),
        (FOUR | {"bnb_4bit_quant_type": "nf5"}, "bnb_4bit_quant_type` must be 'nf4' or 'fp4', got"),
        (FOUR | {"load_in_8bit": True}, "`quantization` is refused by BitsAndBytesConfig: load_in"),
        (
            FOUR | {"bnb_4bit_compute_dtype": "bf16"},
            "`quantization` is refused by BitsAndBytesConf",
        ),
    ],
)
def test_settings_that_are_refused(settings, says):
    """An unknown key or a wrong value is one sentence."""
    with pytest.raises(ValueError, match=r"^`quantization") as error:
        ModelSettings(**LANGUAGE, quantization=settings)
    assert says in str(error.value)


def test_without_bitsandbytes(monkeypatch):
    """The error names the key, and what to install."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = LANGUAGE | {"quantization": FOUR}

    with pytest.raises(RecipeError, match=r"^r:\d+: model\.quantization: cannot be used here: b"):
        recipe_of("supervised_tuning", DATA, PEFT, model=model)


def test_without_kernels(monkeypatch):
    """The error has the release, the device, and what bitsandbytes says."""

    def quantize_4bit(numbers):
        msg = "no library\nfor this device"
        raise RuntimeError(msg)

    library = types.ModuleType("bitsandbytes")
    library.__version__ = "9.9"
    library.functional = types.SimpleNamespace(quantize_4bit=quantize_4bit, dequantize_4bit=print)
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)

    found = why_no_kernels(FOUR)
    assert found.startswith("bitsandbytes 9.9 fails on ")
    assert found.endswith(": RuntimeError: no library for this device")


@with_kernels
def test_quantized_weights_need_an_adapter():
    """Without an adapter, or in a task that TRL does not train, they are refused."""
    model = LANGUAGE | {"quantization": FOUR}
    for task, peft in (("supervised_tuning", ()), ("causal_lm", (PEFT,))):
        with pytest.raises(RecipeError, match=r"model\.quantization: needs one of the tasks \["):
            recipe_of(task, DATA, *peft, model=model)


@with_kernels
@pytest.mark.parametrize("settings", [FOUR, {"load_in_8bit": True}], ids=["4 bits", "8 bits"])
def test_an_adapter_on_quantized_weights(tmp_path, settings):
    """A run trains and saves the adapter alone, and resumes."""
    config = SMALL_LLAMA | {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1}
    model = {"config": config, "tokenizer": "bytes", "quantization": settings}
    training = {"max_steps": 4, "max_length": 128, "save_strategy": "steps", "save_steps": 2}
    recipe = recipe_of(
        "supervised_tuning",
        DATA,
        PEFT,
        model=model,
        output_dir=str(tmp_path / "run"),
        gradient_checkpointing=False,
        **training,
    )
    metrics = run_recipe(recipe).metrics
    again = run_recipe(recipe, resume=str(tmp_path / "run" / "checkpoint-2")).metrics

    assert math.isfinite(metrics["eval_loss"])
    assert again["eval_loss"] == metrics["eval_loss"]
    with safe_open(tmp_path / "run" / "model" / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118  (not a mapping)
    saved = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert not saved["base_model_name_or_path"]
