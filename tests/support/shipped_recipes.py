"""What some shipped recipes need besides the package: models of other recipes, and kernels."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from mfwrap.recipes.models.quantization import why_no_kernels
from mfwrap.recipes.models.settings import ModelSettings, make_text_model
from support.recipe_texts import SMALL_LLAMA

__all__ = ["provide"]

_FIRST = {"continue_pretraining": "causal_lm", "distillation": "supervised_tuning"}
"""Recipe whose model a recipe begins with."""


def provide(name: str, folder: Path) -> None:
    """Write the model of another recipe that a recipe needs; skip a test without its kernels.

    Args:
        name: Name of the shipped recipe.
        folder: Folder in which the recipe will run.
    """
    if name == "qlora" and (reason := why_no_kernels({"load_in_4bit": True})):
        pytest.skip(reason)
    if name == "embedding":
        pytest.importorskip("sentence_transformers")
    if name in _FIRST:
        model = ModelSettings(config=SMALL_LLAMA, tokenizer="bytes")
        tokenizer = model.make_tokenizer()
        place = folder / "runs" / _FIRST[name] / "model"
        network: Any = make_text_model(model, AutoModelForCausalLM, tokenizer)
        network.save_pretrained(place)
        tokenizer.save_pretrained(place)
