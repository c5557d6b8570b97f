"""A step that is run again has the same fingerprints, and leaves everything as it was."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from mfwrap.callbacks.culprit.replay.module_calls import Value
from mfwrap.callbacks.culprit.replay.recompute import SHARD, WEIGHT, StepRepetition
from mfwrap.memory import host_memory
from mfwrap.tensors.fingerprints import bitwise_hashes
from support.one_rank import one_rank
from support.programs import Program


class Pair(nn.Module):
    """Two layers with an operation between them, which no module returns."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)

    def forward(self, inputs):
        return self.last(self.drop(self.first(inputs)) * 2).mean()


@pytest.fixture
def network():
    """Return a network after a seed."""
    torch.manual_seed(0)
    return Pair()


def step(network, repetition, times=2):
    """Run a step of two micro-batches, and run it again."""
    for number in range(2):
        network(torch.full((3, 4), 1.0 + number)).backward()
    before = [weight.grad for weight in network.parameters()], torch.get_rng_state()
    runs = repetition.repeat(times)
    after = [weight.grad for weight in network.parameters()], torch.get_rng_state()
    assert all(a is b for a, b in zip(before[0], after[0], strict=True))
    assert torch.equal(before[1], after[1])
    return runs


def test_values_are_in_the_order_of_the_step(network):
    """Each tensor has one fingerprint, in the order in which it was computed."""
    runs = step(network, StepRepetition(network))
    forward = [
        Value("input", ""),
        Value("output", "first"),
        Value("output", "drop"),
        Value("input", "last"),
        Value("output", "last"),
        Value("output", ""),
    ]
    names = [name for name, _ in network.named_parameters()]

    for values in runs.values:
        assert list(values[:6]) == forward
        backward = [value for value in values[6:] if value.what != WEIGHT]
        assert backward == [
            Value(f"gradient of {one.what}", one.name) for one in reversed(forward[1:])
        ]
        assert {value.name for value in values if value.what == WEIGHT} == set(names)


def test_all_runs_are_the_same_with_dropout(network):
    """Random states are those of the step; the micro-batches differ from each other."""
    runs = step(network, StepRepetition(network))

    assert runs.hashes.shape == (3, 2 * len(runs.values[0]))
    assert (runs.hashes == runs.hashes[0]).all()
    first, second = runs.hashes[0].chunk(2)
    assert (first != second).sum() > 5


def test_a_fingerprint_is_that_of_the_tensor(network):
    """The fingerprint of an output is the hash of its bits."""
    outputs = []
    network.first.register_forward_hook(lambda *given: outputs.append(given[2].detach().clone()))
    runs = step(network, StepRepetition(network), times=1)
    place = runs.values[0].index(Value("output", "first"))

    assert runs.hashes[0, place] == bitwise_hashes(outputs[:1])[0]
    assert len(outputs) == 4


def test_what_a_run_lacks_is_zero(network):
    """A module that a repetition does not call differs."""
    calls = []

    def forward(inputs):
        calls.append(None)
        hidden = network.first(inputs) if len(calls) < 3 else inputs
        return network.last(hidden).mean()

    network.forward = forward
    runs = step(network, StepRepetition(network), times=1)
    place = runs.values[0].index(Value("output", "first"))

    assert runs.hashes[0, place] != 0
    assert runs.hashes[1, place] == 0


GROWTH = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from mfwrap.callbacks.culprit.replay.recompute import StepRepetition
from mfwrap.memory import host_memory

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
    )
)
tokens = torch.arange(128).view(4, 1, 32)

def step():
    for batch in tokens:
        model(input_ids=batch, labels=batch).loss.backward()
    return host_memory().resident

before = step()
repetition = StepRepetition(model)
step()
repetition.repeat(3)
size = sum(weight.nbytes for weight in model.parameters())
print((host_memory().resident - before) / size)
"""


@pytest.mark.skipif(host_memory() is None, reason="needs the memory of a process")
def test_the_process_grows_by_one_more_set_of_gradients():
    """Fingerprints do not keep gradients out of the memory that others have left."""
    with Program(GROWTH) as program:
        growth = float(program.stdout.read())

    assert 0.5 < growth < 4, "in sets of gradients"


def test_the_shards_of_weights_are_compared(network):
    """The bits of sharded weights are compared: torch does not count their versions."""
    with one_rank():
        fully_shard(network)
        optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
        repetition = StepRepetition(network)
        network(torch.ones(3, 4)).backward()
        optimizer.step()
        runs = repetition.repeat(1)
    names = [name for name, _ in network.named_parameters()]
    differs = (runs.hashes[0] != runs.hashes[1]).tolist()

    assert runs.values[0][: len(names)] == [Value(SHARD, name) for name in names]
    assert all(differs[: len(names)])


def test_forwards_without_a_backward_do_not_count(network):
    """An evaluation within the step is no micro-batch."""
    repetition = StepRepetition(network)
    with torch.no_grad():
        network(torch.ones(3, 4))
    runs = step(network, repetition)

    assert len(runs.values) == 2
    assert (runs.hashes == runs.hashes[0]).all()


def test_a_step_that_begins_late_says_so(network):
    """If it is made within a forward of the step, that micro-batch is unknown."""
    made = []
    hook = network.register_forward_pre_hook(lambda *_: made.append(StepRepetition(network)))
    network(torch.ones(3, 4)).backward()
    hook.remove()

    assert made[0].has_begun_late
    made[0].close()
    assert not network.first._forward_hooks


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda _: None, "no forward pass was seen"),
        (lambda network: network(torch.ones(1, 4)), "must have a backward of its own"),
        (
            lambda network: (network(torch.ones(1, 4)) + network(torch.ones(1, 4))).backward(),
            "must have a backward of its own",
        ),
        (lambda network: network(torch.ones(1, 4)).backward(), ""),
    ],
    ids=["no call", "no backward", "one backward for two calls", "possible"],
)
def test_why_a_step_is_impossible(act, words, network):
    """The reason is a clause, empty if the step can be run again."""
    repetition = StepRepetition(network)
    act(network)
    reason = repetition.why_impossible()
    repetition.close()

    assert words in reason
    assert bool(reason) == bool(words)
