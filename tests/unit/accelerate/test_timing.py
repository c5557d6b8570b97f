"""The clock follows the forward, backward and update of an attached loop."""

import time

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import SGD

from mfwrap.accelerate import attach
from mfwrap.accelerate.timing import LoopSections
from mfwrap.collectives import Section, section_clock
from support.attached_runs import new_accelerator


class Slow(nn.Module):
    """A network whose forward takes a second of the given clock."""

    def __init__(self, clock) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.clock = clock

    def forward(self, inputs):
        """Return the loss."""
        self.clock.seconds += 1
        return self.layer(inputs).square().mean()


class Clock:
    """Time that advances when it is told to."""

    seconds = 0

    def __call__(self) -> int:
        return self.seconds * 10**9


@pytest.fixture
def clock(monkeypatch):
    """Let the sections of this process be measured with the returned clock."""
    clock = Clock()
    monkeypatch.setattr(section_clock, "_now", clock)
    section_clock.start_for(clock)
    yield clock
    section_clock.stop_for(clock)


def test_sections_of_a_loop(clock):
    """Loading, forward and backward, and the update are told apart; an evaluation is not a step."""
    accelerator = new_accelerator(gradient_accumulation_steps=2)
    attached = attach(accelerator)
    network = Slow(clock)
    optimizer = SGD(network.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: setattr(clock, "seconds", clock.seconds + 4))
    model, optimizer = accelerator.prepare(network, optimizer)
    network.layer.weight.register_post_accumulate_grad_hook(
        lambda _: setattr(clock, "seconds", clock.seconds + 2)
    )
    found = []
    for _ in range(3):
        for _ in range(2):
            clock.seconds += 8
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(3, 2)))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        found.append(attached.last_report.sections.seconds())
        model.eval()
        model(torch.ones(3, 2))
        model.train()

    # The hooks that find the forward are registered in the first backward.
    assert found[0] == [17, 5, 0, 4, 0]
    assert found[1:] == [[17, 6, 0, 4, 0]] * 2
    attached.detach()
    assert not network._forward_pre_hooks


def test_a_loop_without_a_reader_has_no_sections():
    """If nobody reads the times, the model has no hooks and the report no sections."""
    accelerator = new_accelerator()
    attached = attach(accelerator)
    network = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(network, SGD(network.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(3, 2)).mean())
    optimizer.step()

    assert attached.last_report.sections is None
    assert not network._forward_pre_hooks
    assert section_clock.switch(Section.UPDATE) is Section.DATA
    assert section_clock._now is time.perf_counter_ns


# torch.compile of torch 2.14 reads it, and hides the warning only if it is no error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_model_that_is_prepared_again_gets_no_second_hook(clock):
    """A second `prepare` adds no hook, and a second attached step no second `TimedForward`."""
    accelerator = new_accelerator()
    attach(accelerator)
    network, compiled = nn.Linear(2, 1), nn.Linear(1, 1)
    compiled.compile(backend="eager")
    calls = []
    for _ in range(3):
        model, last = accelerator.prepare(network, compiled)
        accelerator.backward(last(model(torch.ones(3, 2))).mean())
        calls.append(compiled._compiled_call_impl)
    of_second_step = LoopSections()
    of_second_step.see_model(compiled)
    of_second_step.follow(torch.ones(()))

    assert len(network._forward_pre_hooks) == 1
    assert not compiled._forward_pre_hooks
    assert calls == [compiled._compiled_call_impl] * 3


class Mean(nn.Module):
    """A network of one layer that returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, inputs):
        """Return the loss."""
        return self.layer(inputs).square().mean()


def trained_compiled(clock, place):
    """Train a compiled model; return the sections of its last step.

    On the clock, data takes 8 seconds, and the forward 1.
    """
    torch.compiler.reset()
    counters.clear()
    plugin = TorchDynamoPlugin(backend="eager", fullgraph=True) if place == "plugin" else None
    accelerator = new_accelerator(dynamo_plugin=plugin)
    attached = attach(accelerator)
    network = Mean()
    if place == "in place":
        network.compile(backend="eager", fullgraph=True)
    model, optimizer = accelerator.prepare(network, SGD(network.parameters(), lr=0.1))
    called = torch.compile(model, backend="eager", fullgraph=True) if place == "loop" else model
    for _ in range(3):
        clock.seconds += 8
        loss = called(torch.ones(3, 2))
        clock.seconds += 1
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return attached.last_report.sections.seconds()


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("plugin", [8, 1, 0, 0, 0]),
        ("in place", [8, 1, 0, 0, 0]),
        ("loop", [9, 0, 0, 0, 0]),
    ],
)
def test_a_compiled_model_stays_one_graph(clock, place, expected):
    """A model is timed outside of its graph, unless the loop compiles it around the hook."""
    assert trained_compiled(clock, place) == expected
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
