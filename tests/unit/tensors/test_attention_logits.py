"""The largest attention logits, compared with the full matrix of logits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from mfwrap.tensors import attention_logits
from mfwrap.tensors.attention_logits import AttentionLogits, largest_logits


def plain_logits(query, key, mask, scale, *, is_causal) -> torch.Tensor:
    """Compute the largest logit of each head in float64, one query at a time."""
    heads, length = query.shape[1], query.shape[2]
    found = torch.full((heads,), -math.inf, dtype=torch.float64)
    for b in range(len(query)):
        for h in range(heads):
            of_key = key[b, h * key.shape[1] // heads].double()
            for i in range(length):
                row = of_key @ query[b, h, i].double() * scale
                if is_causal:
                    row[i + 1 :] = -math.inf
                if mask is not None:
                    allowed = mask.expand(len(query), heads, length, len(row))[b, h, i]
                    row = row.masked_fill(~allowed, -math.inf)
                found[h] = max(found[h], row.max())
    return found


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 5),
    kind=st.sampled_from(["none", "causal", "bool", "added", "one row"]),
    seed=st.integers(0, 99),
)
def test_against_every_product(sizes, kind, seed):
    """The largest logits are right for any mask and key heads, also if computed in pieces."""
    torch.manual_seed(seed)
    batch, key_heads, length, keys, width = sizes
    query = torch.randn(batch, 2 * key_heads, length, width)
    key = torch.randn(batch, key_heads, keys, width)
    mask = None
    if kind in {"bool", "added"}:
        mask = torch.rand(batch, 1, length, keys) < 0.6
    if kind == "one row":
        mask = torch.rand(batch, 1, 1, keys) < 0.6
    given_mask = mask
    if kind == "added":
        given_mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    causal = kind == "causal"
    expected = plain_logits(query, key, mask, 0.7, is_causal=causal)
    for most in (1, 2**24):
        attention_logits._MOST_LOGITS, before = most, attention_logits._MOST_LOGITS
        found = largest_logits(query, key, given_mask, is_causal=causal, scale=0.7)
        attention_logits._MOST_LOGITS = before

        assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6)


class Attending(nn.Module):
    """One attention head, by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs):
        """Attend to all inputs."""
        query = self.inner(inputs)
        return functional.scaled_dot_product_attention(query, inputs, inputs)


def test_one_head_and_no_batch():
    """A query of two dimensions is one head; forward passes after the watch are ignored."""
    torch.manual_seed(0)
    network, inputs = Attending(), torch.randn(5, 4)
    watch = AttentionLogits(network)
    watch.begin()
    network(inputs)
    network(3 * inputs)
    network(2 * inputs)
    found = watch.end()
    network(10 * inputs)
    expected = (network.inner(3 * inputs) @ (3 * inputs).t()).max() / 2

    assert list(found) == [""]
    assert found[""].tolist() == pytest.approx([expected.item()], rel=1e-5)
    assert watch.end() == {}


class Normalizing(nn.Module):
    """Softmaxes of which only the last one has the form of an attention."""

    def forward(self, inputs):
        """Normalize channels, classes of a batch of sequences, and keys."""
        torch.softmax(inputs, dim=1)
        functional.softmax(inputs[0], dim=-1)
        return (inputs / 2).softmax(-1)


def test_other_softmaxes_are_ignored():
    """A softmax over another dimension, or of a tensor of three dimensions, has no logits."""
    inputs = torch.randn(2, 3, 4, 5)
    watch = AttentionLogits(Normalizing())
    watch.begin()
    watch._network(inputs)

    assert torch.equal(watch.end()[""], inputs.amax(dim=(0, 2, 3)) / 2)


def llama(implementation: str) -> LlamaForCausalLM:
    """Return a small Llama without dropout, with two key heads for four."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation)


def test_a_network_of_transformers():
    """Eager and sdpa attention show the same logits by layer; evaluation is ignored."""
    tokens = torch.randint(32, (2, 7))
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    found = []
    for implementation in ("sdpa", "eager"):
        model = llama(implementation).train()
        # Enlarge the logits, which are close to zero with initial weights.
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= 50
        watch = AttentionLogits(model)
        watch.begin()
        model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= 3
        with torch.no_grad():
            model(input_ids=tokens)
        model.eval()(input_ids=tokens)
        found.append(watch.end())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    names = [f"model.layers.{number}.self_attn" for number in range(2)]
    assert [list(each) for each in found] == [names, names]
    for name in names:
        assert found[0][name].shape == (4,)
        assert 0.5 < found[0][name].max() < 1.5
        assert torch.allclose(found[0][name], found[1][name], rtol=1e-5)


def test_an_error_within_leaves_nothing_behind():
    """After a forward pass that raises, the next forward pass is watched as usual."""
    model = llama("sdpa").train()
    tokens = torch.randint(32, (1, 7))
    watch = AttentionLogits(model)
    watch.begin()
    with pytest.raises(IndexError):
        model(input_ids=tokens + 40)
    model(input_ids=tokens)

    assert list(watch.end()) == [f"model.layers.{number}.self_attn" for number in range(2)]
    assert torch._C._len_torch_function_stack() == 0
