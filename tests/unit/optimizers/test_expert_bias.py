"""Biases of experts move as DeepSeek-V3's rule says, after applied updates only."""

import copy
import math
import operator

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD, AdamW, Muon

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from mfwrap.accelerate import attach
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.optimizers import ChainedOptimizer, ExpertBias
from support.experts import (
    WITH_BIAS,
    bias_by_hand,
    deepseek,
    mixtral,
    small_experts,
    tokens,
)
from support.host_reads import HostReads
from support.ranks.expert_biases import (
    NUM_UPDATES,
    RATE,
    balance_deepseek,
    balance_sharded,
    balance_with_idle_rank,
)
from support.resumed_training import PLAIN, end_of, resume, trained
from support.versions import needs

pytestmark = needs("transformers", "5.0", "a module with the experts of a layer")

BIAS = WITH_BIAS["Glm4Moe"]
EXPERTS = {"Lfm2Moe": "model.layers.1.feed_forward.experts"}


def bias_of(network):
    """Return a copy of the only bias of a small GLM-4 MoE or DeepSeek."""
    return network.state_dict()[BIAS].clone()


def updated(network, *, batches, cell=None, **settings):
    """Train a network, and return its bias after each update."""
    if cell is None:
        optimizer = AdamW(network.parameters(), lr=0.01, fused=True)
        ExpertBias(optimizer, network, RATE)
        cell = MFTrainOneStepCell(network, optimizer, **settings)
    biases = []
    for batch in batches:
        cell(input_ids=batch, labels=batch)
        biases.append(bias_of(network))
    return biases


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_twenty_updates_of_two_ranks(two_ranks, layout):
    """The counts are those of all micro-batches of both ranks; in float64 from the logits."""
    (first, ours), (second, others) = two_ranks.run(balance_deepseek, layout)
    names = list(first)
    expected = {name: torch.zeros(8, dtype=torch.float64) for name in names}
    for update in range(NUM_UPDATES):
        for number, name in enumerate(names):
            calls = slice(2 * update, 2 * update + 2)
            logits = torch.cat([*first[name][calls], *second[name][calls]])
            assert logits.shape == (2 * 4 * 6, 8)
            expected[name] = bias_by_hand(expected[name], logits, RATE)
            bias = ours[update][number]
            assert torch.equal(bias, others[update][number])
            assert bias.dtype == torch.float32
            assert torch.allclose(bias.double(), expected[name], rtol=0, atol=1e-7)
    assert all(bias.unique().numel() > 3 for bias in expected.values())


@pytest.mark.parametrize("architecture", ["Afmoe", "Ernie4_5_Moe"])
def test_biases_that_are_sharded_parameters(two_ranks, architecture):
    """A bias that FSDP2 shards becomes what it becomes with DistributedDataParallel."""
    whole, _ = two_ranks.run(balance_sharded, "ddp", architecture)
    for sharded in two_ranks.run(balance_sharded, "fsdp", architecture):
        assert all(map(torch.equal, sharded, whole))
        assert all(bias.count_nonzero() for bias in sharded)


def test_a_rank_without_tokens(two_ranks):
    """A rank that calls no network takes part in the sum of the counts."""
    network = small_experts("Glm4Moe")
    optimizer = SGD(network.parameters(), lr=0.0)
    ExpertBias(optimizer, network, RATE)
    network(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    optimizer.step()
    for [bias] in two_ranks.run(balance_with_idle_rank):
        assert torch.equal(bias, bias_of(network))


@pytest.mark.parametrize("architecture", WITH_BIAS)
def test_architectures(architecture):
    """The bias of each architecture moves against the load that its experts see."""
    network = small_experts(architecture)
    optimizer = SGD(network.parameters(), lr=0.0)
    ExpertBias(optimizer, network, RATE)
    chosen = []
    experts = network.get_submodule(EXPERTS.get(architecture, "model.layers.1.mlp.experts"))
    experts.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1]))
    network(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    with HostReads() as reads:
        optimizer.step()

    assert reads.reads == []
    counts = torch.bincount(chosen[0].flatten(), minlength=8).double()
    bias = network.state_dict()[WITH_BIAS[architecture]]
    assert torch.equal(bias.flatten(), ((counts.mean() - counts).sign() * RATE).float())
    assert bias.count_nonzero()


def muon_and_adamw(network):
    """Return a chain that the host skips."""
    named = dict(network.named_parameters())
    matrices = [parameter for parameter in named.values() if parameter.ndim == 2]
    others = [parameter for parameter in named.values() if parameter.ndim != 2]
    return ChainedOptimizer(Muon(matrices, lr=0.1), AdamW(others, lr=0.1, fused=True))


def fused_adamw(network):
    """Return an optimizer that skips on the device."""
    return AdamW(network.parameters(), lr=0.1, fused=True)


def trained_by_cell(network, optimizer, batches):
    """Train with the cell, which skips updates whose gradients are not finite."""
    cell = MFTrainOneStepCell(network, optimizer, max_consecutive_skips=None)
    for ids, factor in batches:
        with scaled_head(network, factor):
            cell(input_ids=ids, labels=ids)


def trained_by_loop(network, optimizer, batches):
    """Train with an attached accelerate loop."""
    accelerator = Accelerator(cpu=True)
    attach(accelerator)
    network, optimizer = accelerator.prepare(network, optimizer)
    for ids, factor in batches:
        loss = network(input_ids=ids, labels=ids).loss * factor
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def trained_by_torch(network, optimizer, batches, balance):
    """Train with a loop that skips updates itself, and says so."""
    for ids, factor in batches:
        loss = network(input_ids=ids, labels=ids).loss * factor
        loss.backward()
        if loss.isfinite():
            optimizer.step()
        else:
            balance.discard()
        optimizer.zero_grad()


class scaled_head:  # noqa: N801  (a context manager that reads like a function)
    """Multiply the logits of a network within the block."""

    def __init__(self, network, factor):
        self._hook = network.lm_head.register_forward_hook(lambda *given: given[-1] * factor)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._hook.remove()


@pytest.mark.parametrize("spoilt", [math.inf, math.nan])
@pytest.mark.parametrize("make", [fused_adamw, muon_and_adamw])
@pytest.mark.parametrize("train", [trained_by_cell, trained_by_loop, trained_by_torch])
def test_a_skipped_update(train, make, spoilt):
    """No bias moves, and the next update counts only its own tokens."""
    found = []
    bad, good = (tokens(1), spoilt), (tokens(0), 1.0)
    for batches in ([], [bad], [good], [bad, good]):
        network = small_experts("Glm4Moe")
        optimizer = make(network)
        balance = ExpertBias(optimizer, network, RATE)
        more = (balance,) if train is trained_by_torch else ()
        train(network, optimizer, batches, *more)
        found.append(bias_of(network))
    before, skipped, applied, both = found
    assert torch.equal(skipped, before)
    assert torch.equal(both, applied)
    assert not torch.equal(applied, before)


def test_a_spike():
    """An update that is skipped because of its norm moves no bias."""
    network = small_experts("Glm4Moe")
    biases = updated(
        network,
        batches=[tokens(0)],
        use_clip_grad=True,
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=1e-9,
    )
    assert not biases[0].any()


def test_a_call_that_raises():
    """The next call has the biases that it has without the call that raised."""
    found = []
    for raises in (False, True):
        network = small_experts("Glm4Moe")
        optimizer = fused_adamw(network)
        ExpertBias(optimizer, network, RATE)
        cell = MFTrainOneStepCell(network, optimizer)
        if raises:
            wrong = {"input_ids": torch.full((1, 3), 99)}
            with pytest.raises(IndexError):
                cell.step([{"input_ids": tokens(1), "labels": tokens(1)}, wrong])
        found += updated(network, cell=cell, batches=[tokens(0)])
    assert torch.equal(*found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    """A forward pass that the backward pass repeats does not count a second time.

    In an update, the first of two forward passes has a backward pass. If its tokens counted twice,
    the biases would be others.
    """
    found = []
    for checkpoints, num_passes in ((False, 1), (True, 1), (False, 2)):
        network = small_experts("Glm4Moe")
        if checkpoints:
            renamed = getattr(network, "activation_checkpointing_enable", None)
            (renamed or network.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})
        optimizer = SGD(network.parameters(), lr=0.0)
        ExpertBias(optimizer, network, RATE)
        for _ in range(num_passes):
            network(input_ids=tokens(0), labels=tokens(0)).loss.backward()
        network(input_ids=tokens(1), labels=tokens(1))
        optimizer.step()
        found.append(bias_of(network))
    once, ours, twice = found
    assert torch.equal(ours, once)
    assert not torch.equal(twice, once)


def test_what_is_no_training():
    """Evaluations, passes without gradients, and replays of the culprit finder do not count."""
    network = small_experts("Glm4Moe")
    optimizer = SGD(network.parameters(), lr=0.0)
    ExpertBias(optimizer, network, RATE)
    recorder = StepRecorder(network)
    network(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    recorder.end_step()
    optimizer.step()
    after_one = bias_of(network)
    recorder.last_step[0].run(recorder)
    with torch.no_grad():
        network(input_ids=tokens(1))
    network.eval()
    network(input_ids=tokens(2), labels=tokens(2)).loss.backward()
    network.train()
    optimizer.step()

    assert after_one.any()
    assert torch.equal(bias_of(network), after_one)


def test_the_average():
    """The average of the weights has the biases of the last applied update, not their average."""
    network = small_experts("Glm4Moe")
    optimizer = fused_adamw(network)
    ExpertBias(optimizer, network, RATE)
    ema = ExponentialMovingAverage(network, decay=0.9)
    cell = MFTrainOneStepCell(network, optimizer, ema=ema)
    *_, last = updated(network, cell=cell, batches=[tokens(0), tokens(1)])
    with ema.swap():
        assert torch.equal(bias_of(network), last)


def balanced_trainer(make, *arguments, **keywords):
    """Return a trainer of a small DeepSeek whose experts are balanced."""
    seed = keywords.pop("model_seed", 0)
    network = deepseek(vocab_size=256)
    torch.manual_seed(seed)
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.1)
    optimizer = AdamW(network.parameters(), lr=0.01, fused=True)
    ExpertBias(optimizer, network, RATE)
    return make(
        *arguments,
        PLAIN,
        model=network,
        remove_unused_columns=False,
        trainer_settings={"optimizers": (optimizer, None)},
        **keywords,
    )


def test_a_resumed_training(tmp_path):
    """Biases are saved with the network, so a resumed training is bitwise equal to a whole one."""
    whole = balanced_trainer(trained, tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-5"
    resumed = balanced_trainer(resume, checkpoint, tmp_path / "resumed", model_seed=1)
    expected, ours = end_of(whole), end_of(resumed)

    assert expected.keys() == ours.keys()
    for name, value in expected.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        assert equal(ours[name], value), name
    assert bias_of(whole.model).unique().numel() > 1
    assert torch.equal(bias_of(resumed.model), bias_of(whole.model))


def test_the_end():
    """After `remove`, and in a copy, no bias moves, and the network is free of hooks."""
    network = small_experts("Glm4Moe")
    optimizer = SGD(network.parameters(), lr=0.0)
    balance = ExpertBias(optimizer, network, RATE)
    hooked = copy.deepcopy(network)
    balance.remove()
    for each in (hooked, network):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in each.modules())
    network(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    optimizer.step()
    assert not bias_of(network).any()


def test_a_compiled_network():
    """A network may be compiled after its `ExpertBias` is built; before, there is an error."""
    batch = {"input_ids": tokens(0), "labels": tokens(0)}
    biases = []
    for compiles in (False, True):
        network = small_experts("Glm4Moe")
        optimizer = SGD(network.parameters(), lr=0.0)
        ExpertBias(optimizer, network, RATE)
        called = torch.compile(network, backend="eager") if compiles else network
        for _ in range(2):
            called(**batch).loss.backward()
            optimizer.step()
        biases.append(bias_of(network))
    assert torch.equal(*biases)

    torch._dynamo.reset()
    network = small_experts("Glm4Moe")
    optimizer = SGD(network.parameters(), lr=0.0)
    called = torch.compile(network, backend="eager")
    called(**batch)
    ExpertBias(optimizer, network, RATE)
    called(**batch).loss.backward()
    with pytest.raises(RuntimeError, match="has seen no call of experts"):
        optimizer.step()


def test_what_cannot_be_balanced():
    """Each network whose biases cannot be moved is refused in one sentence."""
    network = small_experts("Glm4Moe")
    optimizer = SGD(network.parameters(), lr=0.0)
    with pytest.raises(ValueError, match=r"must have biases .* got none in a MixtralForCausalLM"):
        ExpertBias(optimizer, mixtral())
    with pytest.raises(ValueError, match=r"for model.layers.0.mlp.router.\S+ alone, .* got none"):
        ExpertBias(optimizer, small_experts("LongcatFlash"))
    with pytest.raises(ValueError, match="`update_rate` must be"):
        ExpertBias(optimizer, network, 0.0)
    with pytest.raises(ValueError, match=f"in float32, got {BIAS} in torch.bfloat16"):
        ExpertBias(optimizer, copy.deepcopy(network).bfloat16())
    network.model.layers[1].mlp.experts.num_experts = 4
    with pytest.raises(ValueError, match=r"with 8 for the 4 experts of model\.layers\.1\.mlp"):
        ExpertBias(optimizer, network)


def test_an_optimizer_that_accelerate_has_prepared():
    """The optimizer inside the wrapper is the one that steps."""
    network = deepseek()
    accelerator = Accelerator(cpu=True)
    attach(accelerator)
    network, optimizer = accelerator.prepare(network, AdamW(network.parameters(), lr=0.01))
    ExpertBias(optimizer, network, RATE)
    before = bias_of(network)
    accelerator.backward(network(input_ids=tokens(0), labels=tokens(0)).loss)
    optimizer.step()

    assert (bias_of(network) - before).abs().max().item() == pytest.approx(RATE)
