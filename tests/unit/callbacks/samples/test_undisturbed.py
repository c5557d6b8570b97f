"""A network that is called between two steps is bitwise as before."""

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn

from mfwrap.callbacks.samples.undisturbed import undisturbed
from mfwrap.tensors.training_forwards import is_training_forward
from support.attached_runs import new_accelerator


class Counted(nn.Module):
    """A network that draws random numbers and changes a buffer in each call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.frozen = nn.Dropout(0.5).eval()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen = (self.training, torch.is_grad_enabled(), is_training_forward(self))
        return self.layer(x) + torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002, S311  (the global generators)


def drawn():
    """Return the next random number of each generator."""
    return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002, S311  (the global generators)


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_restored(fails):
    """Random states, buffers and modes are restored, also after an error."""
    network = Counted()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  (the global generator)
    torch.manual_seed(1)
    expected = drawn()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  (the global generator)
    torch.manual_seed(1)
    with contextlib.suppress(RuntimeError), undisturbed(network):
        network(torch.ones(2))
        torch.manual_seed(5)
        network(torch.ones(3 if fails else 2))

    assert network.seen == (False, False, False)
    assert drawn() == expected
    assert network.calls == 0
    assert (network.training, network.layer.training, network.frozen.training) == (
        True,
        True,
        False,
    )
    assert torch.is_grad_enabled()


class Twice(nn.Module):
    """A network of its own code, which torch compiles."""

    def forward(self, x):
        return 2 * x


def test_nothing_is_compiled():
    """A compiled network is called as it is, and what was compiled is used again afterwards."""
    network, counts = Twice(), []

    def backend(graph, _):
        counts.append(1)
        return graph.forward

    network.compile(backend=backend)
    network(torch.ones(1, 2))
    with undisturbed(network):
        for length in range(1, 20):
            network(torch.ones(length, 2))
    network(torch.ones(1, 2))

    assert len(counts) == 1


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_precision_of_an_evaluation(precision):
    """Modules inside compute in the autocast that accelerate has put around the whole network."""
    accelerator = new_accelerator(precision)
    network = accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))
    with undisturbed(network):
        inside = network[0](torch.ones(1, 2)).dtype

    assert inside == {"no": torch.float32, "bf16": torch.bfloat16}[precision]
