"""The counts of each expert, compared with the choices of the routers, and the biases."""

import copy

import pytest
import torch
from torch import nn

from mfwrap.tensors.experts import ExpertCounts, expert_biases, expert_modules
from support.experts import WITH_BIAS, deepseek, gpt_oss, mixtral, small_experts, tokens
from support.versions import needs

pytestmark = needs("transformers", "5.0", "a module with the experts of a layer")


def chosen_by_routers(model, batches) -> dict[str, torch.Tensor]:
    """Return the tokens of each expert, counted from the inputs of the expert modules."""
    counts = {}

    def note(name):
        def hook(module, inputs):
            for expert in range(module.num_experts):
                counts.setdefault(name, [0] * module.num_experts)
                counts[name][expert] += (inputs[1] == expert).sum().item()

        return hook

    handles = [
        module.register_forward_pre_hook(note(name))
        for name, module in model.named_modules()
        if name.endswith("experts") and "shared" not in name
    ]
    for batch in batches:
        model(input_ids=batch)
    for handle in handles:
        handle.remove()
    return {name: torch.tensor(each) for name, each in counts.items()}


@pytest.mark.parametrize("make", [mixtral, gpt_oss, deepseek])
def test_counts(make):
    """Each layer's counts cover all micro-batches, but no evaluation and no later forward."""
    model = make()
    batches = [torch.randint(32, (2, 6)), torch.randint(32, (1, 5))]
    counts = ExpertCounts(model)
    counts.begin()
    for batch in batches:
        model(input_ids=batch)
    model.eval()
    model(input_ids=batches[0])
    found = counts.end()
    model.train()
    expected = chosen_by_routers(model, batches)

    assert list(found) == list(expected)
    assert len(found) == (1 if make is deepseek else 2)
    for name, each in found.items():
        assert torch.equal(each, expected[name])
        assert each.unique().numel() > 1
    assert counts.end() == {}
    model(input_ids=batches[0])
    assert counts.end() == {}


def test_against_the_logits_of_the_router():
    """Mixtral's counts agree with the two highest router logits of each token."""
    model, tokens = mixtral(), torch.randint(32, (3, 6))
    counts = ExpertCounts(model)
    counts.begin()
    logits = model(input_ids=tokens, output_router_logits=True).router_logits
    found = counts.end()

    assert len(logits) == len(found) == 2
    for each, count in zip(logits, found.values(), strict=True):
        assert torch.equal(count, torch.bincount(each.topk(2).indices.reshape(-1), minlength=4))


def test_a_forward_that_is_repeated_in_the_backward():
    """Gradient checkpointing does not change the counts."""
    found = []
    for checkpointing in (False, True):
        model = mixtral()
        if checkpointing:
            renamed = getattr(model, "activation_checkpointing_enable", None)
            (renamed or model.gradient_checkpointing_enable)()
        counts = ExpertCounts(model)
        counts.begin()
        model(input_ids=tokens(1), labels=tokens(1)).loss.backward()
        found.append(counts.end())

    assert found[0].keys() == found[1].keys()
    for name, each in found[0].items():
        assert torch.equal(each, found[1][name])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_loss_that_calls_parts_of_the_network(checkpointing):
    """A loss may call the layers and the head by itself, also with gradient checkpointing."""
    model = mixtral()
    if checkpointing:
        renamed = getattr(model, "activation_checkpointing_enable", None)
        (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})
    counts = ExpertCounts(model)
    counts.begin()
    hidden = model.model(input_ids=tokens(1)).last_hidden_state
    model.lm_head(hidden).logsumexp(-1).mean().backward()
    with torch.no_grad():
        model.model(input_ids=tokens(2))
    found = counts.end()

    expected = chosen_by_routers(model, [tokens(1)])
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert torch.equal(each, expected[name])


def test_take_and_close():
    """`take` begins again at zero; a forward pass that raises does not disturb the next one."""
    model = mixtral()
    counts = ExpertCounts(model)
    counts.begin()
    model(input_ids=tokens(0))
    first = counts.take()
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 2), 99))
    with torch.no_grad():
        for experts in counts.experts.values():
            experts(torch.ones(2, 16), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))
    assert counts.take() == {}
    model(input_ids=tokens(0))
    assert all(torch.equal(each, first[name]) for name, each in counts.take().items())
    copied = copy.deepcopy(model)
    model(input_ids=tokens(0))
    counts.close()
    assert counts.end() == {}
    for each in (model, copied):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in each.modules())


@pytest.mark.parametrize(("architecture", "name"), WITH_BIAS.items())
def test_biases(architecture, name):
    """The bias of each architecture is found, and belongs to the experts of its layer."""
    model = small_experts(architecture)
    places = expert_biases(model)
    layer = "model.layers.1."
    [(owner, place)] = [each for each in places.items() if each[0].startswith(layer)]

    assert place.name == name
    assert place.num_experts == expert_modules(model)[owner].num_experts == 8
    assert place.tensor().data_ptr() == model.state_dict()[name].data_ptr()


class Experts(nn.Module):
    """Experts that get the indices of the chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4

    def forward(self, hidden_states, top_k_index):
        """Return the input."""
        del top_k_index
        return hidden_states


def test_biases_that_belong_to_no_experts_of_their_own():
    """Two experts for one bias, or two biases for the same experts, are an error that names it."""
    layer = nn.ModuleDict({"a": Experts(), "b": Experts(), "gate": nn.Module()})
    layer["gate"].e_score_correction_bias = nn.Buffer(torch.zeros(4))
    network = nn.ModuleDict({"layer": layer})
    with pytest.raises(ValueError, match=r"for layer.gate.e_score_corr.* \['layer.a', 'layer.b'\]"):
        expert_biases(network)
    del layer["b"]
    assert [place.name for place in expert_biases(network).values()] == [
        "layer.gate.e_score_correction_bias"
    ]
    layer["gate"].expert_bias = nn.Buffer(torch.zeros(4))
    with pytest.raises(ValueError, match=r"experts for layer.gate.expert_bias alone"):
        expert_biases(network)
    assert expert_biases(mixtral()) == {}
