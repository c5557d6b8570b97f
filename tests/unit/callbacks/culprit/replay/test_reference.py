"""A call of an earlier step tells whether the program computes something else now."""

import math

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.culprit.replay.reference import References
from support.host_reads import HostReads


class Block(nn.Module):
    """A residual block, whose code may lose the residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.keeps = nn.LayerNorm(8), nn.Linear(8, 8), 1.0

    def forward(self, inputs):
        return self.keeps * inputs + self.linear(self.norm(inputs)).tanh()


class Network(nn.Module):
    """Blocks behind an embedding; returns the loss, which may have a factor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(8, 32)
        self.factor, self.fails = 1.0, False

    def forward(self, tokens):
        if self.fails:
            raise ValueError
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.dropout(hidden))
        return self.factor * nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Training:
    """A training whose steps are recorded."""

    def __init__(self, rate: float = 1e-3, num_micro_batches: int = 2) -> None:
        self.network = Network().train()
        self.recorder = StepRecorder(self.network)
        self.references = References(self.recorder)
        self.num_micro_batches = num_micro_batches
        self._optimizer = torch.optim.AdamW(self.network.parameters(), lr=rate)
        self._dice = torch.Generator().manual_seed(1)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for _ in range(self.num_micro_batches):
                self.network(torch.randint(32, (4, 6), generator=self._dice)).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.recorder.end_step()


def test_a_program_that_is_as_before():
    """The outputs differ by the updates since then alone, and random numbers are those of then."""
    training = Training()
    training.run(12)
    random = torch.get_rng_state()
    found = training.references.change(1)

    assert found is not None
    assert (found.name, found.num_steps) == (None, 3)
    assert found.again == pytest.approx(found.then, rel=0.05)
    assert found.distance < 0.1
    assert torch.equal(torch.get_rng_state(), random)


def test_code_of_a_block_that_has_changed():
    """The block is named, and not what comes behind it."""
    training = Training()
    training.run(12)
    training.network.blocks[1].keeps = -1.0
    training.run(1)
    found = training.references.change(1)

    assert found is not None
    assert found.name == "blocks.1"
    assert found.distance > 1


def test_updates_that_have_made_another_weight():
    """An embedding gives other vectors for the same tokens, by no change of the program."""
    training = Training(rate=0.05)
    training.run(8)
    training.network.embedding.weight.data *= 0.01
    training.run(3)
    assert training.references.change(1).name is None


def test_a_module_whose_output_a_hook_changes():
    """The hook is part of the program."""
    training = Training()
    training.run(12)
    training.network.blocks[0].linear.register_forward_hook(lambda *_: torch.ones(4, 6, 8))
    training.run(1)
    assert training.references.change(1).name == "blocks.0.linear"


def test_a_factor_in_the_loss():
    """The outputs are as before, the loss is not."""
    training = Training()
    training.run(12)
    training.network.factor = 5.0
    training.run(1)
    found = training.references.change(1)

    assert found is not None
    assert found.name is None
    assert found.distance < 0.1
    assert found.again == pytest.approx(5 * found.then, rel=0.05)


@pytest.mark.parametrize(("num_bad", "age"), [(1, 2), (2, 2), (3, 10), (12, None)])
def test_the_call_is_older_than_the_fault(num_bad, age):
    """Of the steps 1, 9 and 17, the last two are kept."""
    training = Training()
    training.run(19)
    found = training.references.change(num_bad)
    assert (None if found is None else found.num_steps) == age


def test_what_is_unknown():
    """Before the first step, and if the call cannot be run again."""
    training = Training()
    assert training.references.change(1) is None
    training.run(3)
    training.network.fails = True
    assert training.references.change(1) is None


def test_an_evaluation_is_no_call_of_a_step():
    """It comes between two micro-batches, and is not kept in the place of the first one."""
    training = Training()
    network = training.network
    training.run(8)
    tokens = torch.randint(32, (4, 6))
    loss = network(tokens)
    network.eval()
    with torch.no_grad():
        network(torch.zeros(4, 6, dtype=torch.int64))
    network.train()
    loss.backward()
    training.recorder.end_step()
    training.run(1)
    found = training.references.change(1)

    assert found is not None
    assert (found.num_steps, found.then) == (1, loss.item())


def test_nothing_is_left_on_the_network():
    """No hooks stay on the modules between two references, nor any after the end."""
    training = Training()
    modules = list(training.network.modules())
    training.run(12)
    inner = modules[1:]
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in inner)
    training.references.close()
    training.recorder.close()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in modules)
    assert training.references.change(1) is None


def test_nothing_is_read_on_the_host():
    """A reference costs no wait for the device."""
    training = Training(num_micro_batches=1)
    tokens = torch.randint(32, (4, 6))
    with HostReads() as reads:
        training.network(tokens)
    assert reads.reads == []


def test_a_network_without_a_loss():
    """Its outputs are compared, and no loss."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).train()
    recorder = StepRecorder(network)
    references = References(recorder)
    for _ in range(2):
        network(torch.randn(2, 4)).sum().backward()
        recorder.end_step()
    found = references.change(1)

    assert found is not None
    assert math.isnan(found.then)
    assert math.isnan(found.again)
    assert found.distance == 0
