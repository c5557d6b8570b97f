"""QK-clip limits the attention logits of each head, and changes nothing else."""

import copy
import math

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD, AdamW, Muon
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from mfwrap import MFTrainOneStepCell
from mfwrap.accelerate import attach
from mfwrap.optimizers.chained import ChainedOptimizer
from mfwrap.optimizers.qk_clip import QKClip
from mfwrap.tensors.attention_logits import AttentionLogits
from support.attention import AttentionNetwork, logits_by_hand
from support.fsdp.optimizers import clip_on_ranks
from support.host_reads import HostReads


def batch(seed=0, size=4):
    """Return inputs of the network."""
    return torch.randn(size, 5, 12, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_keys", [1, 2, 4])
def test_the_first_layer_by_hand(num_keys, bias):
    """Rows are multiplied by the square roots; heads below the threshold keep their logits."""
    network = AttentionNetwork(num_keys, bias=bias)
    before = copy.deepcopy(network)
    largest, *_ = logits_by_hand(network, batch())
    threshold = largest.sort().values[1:3].mean().item()
    optimizer = SGD(network.parameters(), lr=0.0)
    QKClip(optimizer, network, threshold)
    network(batch()).backward()
    with HostReads() as reads:
        optimizer.step()
    assert reads.reads == []

    factors = (threshold / largest).clamp(max=1)
    keys = factors.view(num_keys, -1).amin(dim=1).sqrt()
    rows = {"k_proj": keys, "q_proj": factors / keys.repeat_interleave(4 // num_keys)}
    for name, of_heads in rows.items():
        layers = (getattr(each.layers[0], name).weight for each in (network, before))
        ours, expected = layers
        assert ours.allclose(expected * of_heads.repeat_interleave(3)[:, None])
    assert logits_by_hand(network, batch())[0].allclose(largest.clamp(max=threshold))
    assert torch.equal(network.layers[0].v_proj.weight, before.layers[0].v_proj.weight)


def test_a_cell_clips_after_each_applied_update():
    """The largest logit of all micro-batches counts; an overflow leaves the weights as they are."""
    network, other = AttentionNetwork(bias=False), AttentionNetwork(bias=False)
    optimizer, by_hand = (AdamW(each.parameters(), lr=0.1, fused=True) for each in (network, other))
    QKClip(optimizer, network, 0.05)
    cell = MFTrainOneStepCell(network, optimizer, gradient_accumulation_steps=2)
    cell(batch())
    largest = torch.cat(logits_by_hand(other, batch()))
    other(batch()).backward()
    by_hand.step()
    factors = (0.05 / largest).clamp(max=1).split(4)
    for layer, of_heads in zip(other.layers, factors, strict=True):
        keys = of_heads.view(2, 2).amin(dim=1).sqrt()
        queries = of_heads / keys.repeat_interleave(2)
        with torch.no_grad():
            for projection, rows in ((layer.q_proj, queries), (layer.k_proj, keys)):
                projection.weight *= rows.repeat_interleave(3)[:, None]
    for ours, expected in zip(network.parameters(), other.parameters(), strict=True):
        assert ours.allclose(expected, atol=1e-6)

    weights = [parameter.clone() for parameter in network.parameters()]
    output = cell(batch() * 1e30)
    assert output.overflow
    assert all(map(torch.equal, network.parameters(), weights))


def muon_and_adamw(network):
    """Return a chain that the host skips."""
    named = dict(network.named_parameters())
    matrices = [parameter for parameter in named.values() if parameter.ndim == 2]
    biases = [parameter for parameter in named.values() if parameter.ndim == 1]
    return ChainedOptimizer(Muon(matrices, lr=0.1), AdamW(biases, lr=0.1, fused=True))


def trained_by_cell(network, optimizer, batches):
    """Train with the cell, which skips batches that are not finite."""
    cell = MFTrainOneStepCell(network, optimizer, max_consecutive_skips=None)
    for each in batches:
        cell(each)


def trained_by_loop(network, optimizer, batches):
    """Train with an attached accelerate loop, which zeroes the gradients after the forward pass."""
    accelerator = Accelerator(cpu=True)
    attach(accelerator)
    network, optimizer = accelerator.prepare(network, optimizer)
    for each in batches:
        loss = network(each)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()


def trained_by_torch(network, optimizer, batches, clip):
    """Train with a loop that skips updates itself, and says so to the clip."""
    for each in batches:
        loss = network(each)
        loss.backward()
        if loss.isfinite():
            optimizer.step()
        else:
            clip.discard()
        optimizer.zero_grad()


@pytest.mark.parametrize("spoilt", [1e30, math.nan], ids=["overflow", "nan"])
@pytest.mark.parametrize("train", [trained_by_cell, trained_by_loop, trained_by_torch])
def test_the_logits_of_an_update_that_the_host_skips_are_discarded(train, spoilt):
    """The next update has the weights that it has without the skipped one."""
    weights = []
    for batches in ([batch()], [batch() * spoilt, batch()]):
        network = AttentionNetwork()
        optimizer = muon_and_adamw(network)
        clip = QKClip(optimizer, network, 0.05)
        more = (clip,) if train is trained_by_torch else ()
        train(network, optimizer, batches, *more)
        weights.append(list(network.parameters()))
    assert all(map(torch.equal, *weights))


def test_the_logits_of_a_call_that_raises_are_discarded():
    """The next call has the weights that it has without the call that raised."""
    weights = []
    for raises in (False, True):
        network = AttentionNetwork()
        optimizer = muon_and_adamw(network)
        QKClip(optimizer, network, 0.05)
        cell = MFTrainOneStepCell(network, optimizer)
        if raises:
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                cell.step([batch() * 100, torch.ones(4, 5, 7)])
        cell(batch())
        weights.append(list(network.parameters()))
    assert all(map(torch.equal, *weights))


def test_a_layer_is_clipped_while_it_is_trained():
    """A layer that is unfrozen later is clipped from then on, as if it had never been frozen."""
    network = AttentionNetwork(bias=False)
    network.layers[0].requires_grad_(requires_grad=False)
    before = copy.deepcopy(network)
    optimizer = SGD(network.parameters(), lr=0.0)
    QKClip(optimizer, network, 0.05)
    for is_trained in (False, True):
        network.layers[0].requires_grad_(is_trained)
        network(batch()).backward()
        optimizer.step()
        same = torch.equal(network.layers[0].q_proj.weight, before.layers[0].q_proj.weight)
        assert same != is_trained
    assert logits_by_hand(network, batch())[0].max() <= 0.05 * 1.00001
    for parameter in network.parameters():
        parameter.requires_grad_(requires_grad=False)
    weights = [parameter.clone() for parameter in network.parameters()]
    network(batch() * 100)
    optimizer.step()
    assert all(map(torch.equal, weights, network.parameters()))


def test_the_weights_of_two_ranks(two_ranks):
    """Ranks that hold shards clip by the largest logits of all ranks."""
    expected = clip_on_ranks(0, 1)
    for weights in two_ranks.run(clip_on_ranks, 2):
        for ours, whole in zip(weights, expected, strict=True):
            assert ours.allclose(whole, atol=1e-6)


@pytest.mark.parametrize("q_lora_rank", [None, 8])
def test_latent_attention(q_lora_rank):
    """The rotary part of the keys, which all heads share, and the values do not change."""
    config = DeepseekV3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=5,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    network = DeepseekV3ForCausalLM(config)
    optimizer = SGD(network.parameters(), lr=0.0)
    tokens = torch.arange(12).reshape(2, 6)
    logits = AttentionLogits(network)
    logits.begin()
    network(input_ids=tokens, labels=tokens)
    (largest,) = logits.end().values()
    threshold = largest.sort().values[1:3].mean().item()
    values = network.model.layers[0].self_attn.kv_b_proj.weight.view(4, 9, 8)[:, 4:].clone()
    clip = QKClip(optimizer, network, threshold)
    network(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    clip.remove()
    logits.begin()
    network(input_ids=tokens, labels=tokens)
    (clipped,) = logits.end().values()

    assert (largest > threshold).sum() == 2
    assert clipped.allclose(largest.clamp(max=threshold), rtol=1e-4)
    now = network.model.layers[0].self_attn.kv_b_proj.weight.view(4, 9, 8)[:, 4:]
    assert torch.equal(now, values)


def test_an_attention_that_cannot_be_clipped():
    """Without projections, with normalized queries, or with unseen logits there is an error."""
    network = AttentionNetwork()
    optimizer = SGD(network.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must have trainable attention modules with q_proj and"):
        QKClip(optimizer, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`threshold` must be"):
        QKClip(optimizer, network, 0.0)
    network.layers[1].q_norm = nn.LayerNorm(3)
    with pytest.raises(ValueError, match=r"must not normalize .* got layers.1.q_norm"):
        QKClip(optimizer, network)
    del network.layers[1].q_norm
    QKClip(optimizer, network)
    optimizer.step()
    network.layers = nn.ModuleList()
    network(batch())
    with pytest.raises(RuntimeError, match="QKClip has seen no attention logits"):
        optimizer.step()
