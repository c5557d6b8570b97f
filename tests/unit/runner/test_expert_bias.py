"""The experts of a recipe's model are balanced by biases."""

import pytest
import torch
from safetensors.torch import load_file

from mfwrap.runner import RecipeError, run_recipe
from support.experts import SIZES
from support.recipe_texts import SMALL_LLAMA, parsed

GLM = {
    **SIZES,
    "model_type": "glm4_moe",
    "vocab_size": 300,
    "head_dim": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
RATE = 2.0**-10


def balanced(config, **sections):
    """Return a recipe that trains a language model on short texts."""
    model = {"config": config, "tokenizer": "bytes", **sections.pop("model", {})}
    data = {"type": "docstrings", "sequence_length": 32, "max_train_samples": 32}
    rate = {"moe_router_bias_update_rate": RATE} | sections
    return parsed(task="causal_lm", model=model, data=data, **rate)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("more", [{}, {"optimizer": {"type": "Muon"}}])
def test_a_recipe_balances_experts(tmp_path, more, dtype):
    """Biases move by the rate, are float32 in each precision, and are saved and resumed."""
    training = {"output_dir": str(tmp_path), "max_steps": 3, "save_strategy": "steps"}
    more = {**more, "training": training | {"save_steps": 1}, "model": {"dtype": dtype}}
    whole = run_recipe(balanced(GLM, **more)).metrics
    files = [tmp_path / f"checkpoint-{step}" / "model.safetensors" for step in (1, 3)]
    before, after = (load_file(file)[BIAS] for file in files)
    resumed = run_recipe(balanced(GLM, **more), resume=str(tmp_path / "checkpoint-1")).metrics

    assert before.dtype == after.dtype == torch.float32
    assert torch.equal((after / RATE).round(), after / RATE)
    assert (before / RATE).abs().max() == 1
    assert after.any()
    assert not torch.equal(before, after)
    assert torch.equal(load_file(files[1])[BIAS], after)
    assert resumed == whole


def test_models_and_values_that_are_refused(tmp_path):
    """The error names the key, when the recipe is read, or for a checkpoint when it is run."""
    with pytest.raises(RecipeError, match=r"rate: must be left out: .* got none in a LlamaForC"):
        balanced(SMALL_LLAMA)
    with pytest.raises(RecipeError, match="must be left out with a section peft"):
        balanced(GLM, peft={"type": "lora"})
    with pytest.raises(RecipeError, match="moe_router_bias_update_rate"):
        balanced(GLM, moe_router_bias_update_rate=0)
    assert parsed().balance is None
    assert balanced(GLM).balance.update_rate == RATE
    with pytest.raises(RecipeError, match=r"must be left out: .* got none in a Linear"):
        balanced(GLM).balance.begin(None, torch.nn.Linear(1, 1))
