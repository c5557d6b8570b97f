"""The section ``peft``: adapters whose layers share the matrix A are those of one fused layer."""

import copy

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, GlmConfig

from mfwrap.runner import run_recipe
from mfwrap.runner.adapters import AdapterChoice, AdapterSection
from mfwrap.runner.run import build_trainer
from support.recipe_texts import SMALL_LLAMA, message, parsed, recipe_text

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning:transformers"
)
"""PEFT reads the former name of a property of transformers' models."""

QKV = ["q_proj", "k_proj", "v_proj"]
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}


def glm():
    """Return a small GLM with biases of queries, keys and values."""
    torch.manual_seed(0)
    config = GlmConfig(
        vocab_size=50,
        intermediate_size=32,
        num_hidden_layers=2,
        attention_bias=True,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        **SIZES,
    )
    network = AutoModelForCausalLM.from_config(config).double()
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return network


def adapted(dropout=0.0, b_std=0.1, **section):
    """Return the GLM with adapters of queries, keys and values that share A."""
    config = peft.LoraConfig(
        r=3, lora_alpha=6, lora_dropout=dropout, target_modules=QKV, task_type="CAUSAL_LM"
    )
    section = AdapterSection(**{"shared_a": [QKV], "b_std": b_std} | section)
    return AdapterChoice(config, section).applied(glm()).double()


class FusedLora(nn.Module):
    """One layer for queries, keys and values with MindFormers' ``LoRADense``."""

    def __init__(self, layers) -> None:
        super().__init__()
        self.weight = torch.cat([layer.base_layer.weight for layer in layers]).detach()
        self.bias = torch.cat([layer.base_layer.bias for layer in layers]).detach()
        self.a = nn.Parameter(layers[0].lora_A["default"].weight.detach().clone())
        b = [layer.lora_B["default"].weight.detach() for layer in layers]
        self.b = nn.Parameter(torch.cat(b))
        self.sizes = [len(rows) for rows in b]

    def forward(self, x):
        dense = linear(x, self.weight, self.bias)
        return (dense + linear(linear(x, self.a), self.b) * (6 / 3)).split(self.sizes, dim=-1)


class Part(nn.Module):
    """Part of a fused layer's result; the layer is called once, by the first part."""

    def __init__(self, fused, number, results) -> None:
        super().__init__()
        self.fused = fused
        self.number = number
        self.results = results

    def forward(self, x):
        if self.number == 0:
            self.results[:] = self.fused(x)
        return self.results[self.number]


def fused_copy(model):
    """Return the model with one LoRA layer for queries, keys and values of each layer."""
    network = copy.deepcopy(model).get_base_model()
    for layer in network.model.layers:
        attention = layer.self_attn
        fused = FusedLora([getattr(attention, name) for name in QKV])
        results: list = []
        for number, name in enumerate(QKV):
            setattr(attention, name, Part(fused, number, results))
    return network


IDS = torch.arange(24).reshape(2, 12) % 50


def test_three_updates_of_a_fused_layer():
    """Losses, A and the rows of B stay those of one adapter of the fused layer."""
    model = adapted()
    fused = fused_copy(model)
    ours = [each for each in model.parameters() if each.requires_grad]
    theirs = [p for name, p in fused.named_parameters() if name.endswith((".a", ".b"))]
    assert (len(ours), len(theirs)) == (2 * 4, 2 * 2)
    optimizers = [torch.optim.AdamW(each, lr=0.01, weight_decay=0.1) for each in (ours, theirs)]
    for _ in range(3):
        losses = []
        for network, optimizer in zip((model, fused), optimizers, strict=True):
            loss = network(input_ids=IDS, labels=IDS).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    layer = model.get_base_model().model.layers[1].self_attn
    result = fused.model.layers[1].self_attn.q_proj.fused

    torch.testing.assert_close(layer.v_proj.lora_A["default"].weight, result.a)
    rows = torch.cat([getattr(layer, name).lora_B["default"].weight for name in QKV])
    torch.testing.assert_close(rows, result.b)


def deltas(model, x):
    """Return what the adapters add in the first layer, with B and A chosen to pass the input."""
    attention = model.get_base_model().model.layers[0].self_attn
    return [
        getattr(attention, name)(x) - linear(x, layer.weight, layer.bias)
        for name in QKV
        for layer in [getattr(attention, name).base_layer]
    ]


def test_one_dropout_mask():
    """The layers drop the same inputs, in each call others, and none in evaluation."""
    model = adapted(dropout=0.5)
    attention = model.get_base_model().model.layers[0].self_attn
    for name in QKV:
        layer = getattr(attention, name)
        nn.init.eye_(layer.lora_A["default"].weight)
        nn.init.eye_(layer.lora_B["default"].weight)
    x = torch.ones(1, 400, 16, dtype=torch.float64)
    calls = [[delta[..., :3] for delta in deltas(model.train(), x)] for _ in range(2)]
    for query, key, value in calls:
        assert torch.equal(query, key)
        assert torch.equal(query, value)
        assert set(query.unique().tolist()) == {0.0, 2 * 6 / 3}
        assert query.ne(0).double().mean().item() == pytest.approx(0.5, abs=0.1)
    assert not torch.equal(calls[0][0], calls[1][0])
    for delta in deltas(model.eval(), x):
        torch.testing.assert_close(delta[..., :3], torch.full_like(x[..., :3], 6 / 3))


def test_recomputed_activations_have_the_same_mask():
    """Activation checkpointing does not change the gradients."""
    gradients = []
    for recomputes in (False, True):
        model = adapted(dropout=0.3).train()
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        torch.manual_seed(4)
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(*gradients)


def test_another_order_of_calls():
    """A layer that is called before the first one has no mask."""
    attention = adapted(dropout=0.5).train().get_base_model().model.layers[0].self_attn
    with pytest.raises(RuntimeError, match=r"in the order of `peft\.shared_a`"):
        attention.k_proj(torch.ones(1, 2, 16, dtype=torch.float64))


def test_initial_values():
    """A and B are drawn with their standard deviations, and by PEFT without them."""
    model = adapted(a_std=0.5, b_std=0.25)
    for matrix, std in (("lora_A", 0.5), ("lora_B", 0.25)):
        drawn = [each.flatten() for name, each in model.named_parameters() if matrix in name]
        assert torch.cat(drawn).std().item() == pytest.approx(std, rel=0.3)
    plain = adapted(b_std=None).get_base_model().model.layers[0].self_attn.q_proj
    assert plain.lora_B["default"].weight.eq(0).all()
    assert plain.lora_A["default"].weight.abs().max().item() <= 16**-0.5


LORA = {"type": "lora", "r": 2, "target_modules": QKV, "shared_a": [QKV], "a_std": 0.1}
LLAMA = {
    "model": {"config": SMALL_LLAMA},
    "data": {"type": "docstrings", "max_train_samples": 16, "max_eval_samples": 4},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["causal_lm", "supervised_tuning"])
def test_a_run_and_its_checkpoints(tmp_path, task):
    """A run trains one A for three layers, and resumes; its checkpoint is an adapter of PEFT."""
    training = {"output_dir": str(tmp_path), "max_steps": 3, "save_strategy": "steps"}
    training |= {"save_steps": 1, "report_to": "none"}
    recipe = parsed(task=task, peft=LORA, training=training, **LLAMA)
    trainer, _ = build_trainer(recipe)
    trained = [name for name, each in trainer.model.named_parameters() if each.requires_grad]
    assert len(trained) == 4

    run_recipe(recipe)
    second, third = (matrices(tmp_path / f"checkpoint-{step}") for step in (2, 3))
    assert len(third) == 3
    assert all(torch.equal(third[0], each) for each in third)
    assert not torch.equal(second[0], third[0])
    run_recipe(recipe, resume=str(tmp_path / "checkpoint-2"))
    assert torch.equal(matrices(tmp_path / "checkpoint-3")[0], third[0])


def matrices(folder):
    """Return all A of a checkpoint."""
    saved = load_file(folder / "adapter_model.safetensors")
    return [value for name, value in saved.items() if "lora_A" in name]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shared_a": [["q_proj"]]}, "peft.shared_a: must have lists of two or more"),
        ({"a_std": -1}, "peft.a_std: must be"),
        ({"type": "loha"}, "peft.shared_a: unknown key"),
        ({"shared_a": [QKV[:2], QKV[1:]]}, "peft.shared_a: must name each layer once"),
        ({"init_lora_weights": "olora"}, "peft.init_lora_weights: must be left out with a_std"),
    ],
)
def test_wrong_sections(changes, says):
    """An error names the key."""
    text = recipe_text(task="causal_lm", peft=LORA | changes, **LLAMA)
    assert says in message(text=text)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["q_proj", "w_proj"], "which no module has with adapters"),
        (["q_proj", "o_proj"], "layers with adapters for one input"),
    ],
)
def test_layers_that_cannot_share(names, says):
    """The error names the layers, and what they lack."""
    recipe = parsed(task="causal_lm", peft=LORA | {"shared_a": [names]}, **LLAMA)
    with pytest.raises(ValueError, match=says):
        build_trainer(recipe)
