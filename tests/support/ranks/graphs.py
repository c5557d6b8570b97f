"""A program that counts the graphs of a compiled network under DistributedDataParallel."""

from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import TorchDynamoPlugin
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mfwrap import MFTrainOneStepCell
from mfwrap.accelerate import attach
from mfwrap.collectives import section_clock
from support.attached_runs import new_accelerator

__all__ = ["count_graphs"]


class _Network(nn.Module):
    """A layer, a buffer that replicas broadcast, and the mean of the squares of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.layer(inputs) * self.scale).square().mean()


class _Reader:
    """Somebody who reads the times of the sections."""


def count_graphs(rank: int, place: str) -> list[list[int]]:
    """Train without and with a reader of the sections; return the graphs and graph breaks of both.

    Args:
        rank: Rank of this process.
        place: What is compiled: ``"inside"``, the network in DistributedDataParallel, as one graph;
            ``"outside"``, DistributedDataParallel; ``"reducer"``, DistributedDataParallel with its
            reducer in Python, as one graph; ``"attached"``, DistributedDataParallel by accelerate.
    """
    del rank
    reader, found = _Reader(), []
    reducer = "python_reducer" if place == "reducer" else "ddp_optimizer"
    for is_read in (False, True):
        if is_read:
            section_clock.start_for(reader)
        with torch._dynamo.config.patch(optimize_ddp=reducer):
            step = _attached() if place == "attached" else _cell(place)
            # The first backward of an attached loop begins to time the model.
            step(torch.ones(2, 4))
            torch.compiler.reset()
            counters.clear()
            for _ in range(2):
                report = step(torch.ones(2, 4))
        assert (report.sections is not None) == is_read
        found.append([counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())])
    section_clock.stop_for(reader)
    # A reducer in Python lets torch compile more of DistributedDataParallel from then on.
    trace_rules.LEGACY_MOD_INLINELIST.discard("torch.nn.parallel.distributed")
    trace_rules.get_legacy_mod_inlinelist.cache_clear()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return found


def _cell(place: str) -> Any:
    network: Any = _Network()
    if place == "inside":
        network = DistributedDataParallel(torch.compile(network, backend="eager", fullgraph=True))
    else:
        network = torch.compile(
            DistributedDataParallel(network), backend="eager", fullgraph=place == "reducer"
        )
    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1))

    def step(inputs: Tensor) -> Any:
        cell(inputs)
        return cell.last_report

    return step


def _attached() -> Any:
    accelerator = new_accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    attached = attach(accelerator)
    network = _Network()
    model, optimizer = accelerator.prepare(network, SGD(network.parameters(), lr=0.1))

    def step(inputs: Tensor) -> Any:
        accelerator.backward(model(inputs))
        optimizer.step()
        optimizer.zero_grad()
        return attached.last_report

    return step
