"""Whole steps of a Llama in bfloat16 with torch.compile, measured as in the section `steps`."""

from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from device.recording import Recording
from device.sections.steps import LEFT_OUT, PAIRS, SMALL, Size, compare
from device.setup import Setup

COMPILED_LEFT_OUT = 6
"""First steps of a run, which are not timed; the first one compiles."""
SIZE = Size(768, 6, 32_000, 8, 1024, 26, 1)


def measure(recording: Recording, setup: Setup) -> None:
    """Compare a plain loop with mfwrap's cell, and count the graphs of each."""
    transformers_logging.set_verbosity_error()
    # On a CPU, the default backend needs a compiler of C++, and minutes.
    backend = "inductor" if setup.on_cuda else "aot_eager"
    counters: Any = torch._dynamo.utils.counters

    def compiled(network: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        counters.clear()
        return torch.compile(network, backend=backend)  # type: ignore[return-value]  # (a module, for a module)

    def count(name: str) -> None:
        recording.row(
            "torch.compile",
            {
                "training step": name,
                "backend": backend,
                # More than graph breaks explain are recompilations.
                "graphs": counters["stats"]["unique_graphs"],
                "graph breaks": sum(counters["graph_break"].values()),
            },
        )

    compare(
        recording,
        setup,
        setup.size(SIZE, SMALL._replace(rounds=1)),
        PAIRS[2:],
        kind="compiled ",
        changed=compiled,
        left_out=setup.size(COMPILED_LEFT_OUT, LEFT_OUT),
        done=count,
    )
