"""Networks and optimizers are found inside their wrappers."""

import functools

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from mfwrap.tensors.wrappers import (
    is_instance_of,
    trainable,
    unwrapped_network,
    unwrapped_optimizer,
)

# torch.compile compiles at the first call. These tests call no network, so nothing is compiled.
compiled = functools.partial(torch.compile, backend="eager")


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("torch.nn", "Linear", True),
        ("torch.nn", "Module", True),
        ("torch.nn", "Conv2d", False),
        ("torch.nn", "NoSuchClass", False),
        ("no_such_module", "Linear", False),
    ],
)
def test_a_class_is_known_by_its_name(module, name, expected):
    """A value has the class or a subclass; nothing has one of a module that is not imported."""
    assert is_instance_of(nn.Linear(1, 1), module, name) is expected


def test_a_bare_network_is_itself():
    """A network without a wrapper is returned, even if a part of it is compiled."""
    network = nn.Sequential(compiled(nn.Linear(2, 2)))

    assert unwrapped_network(network) is network


def test_a_network_is_found_inside_torch_compile():
    """A network that was compiled by a wrapper or in place is returned without wrapper."""
    network = nn.Linear(2, 2)
    assert unwrapped_network(compiled(network)) is network

    network.compile(backend="eager")
    assert unwrapped_network(network) is network


@pytest.mark.usefixtures("_one_rank")
def test_a_network_is_found_inside_distributed_data_parallel():
    """A network in DistributedDataParallel is found, compiled or not."""
    network = nn.Linear(2, 2)
    parallel = DistributedDataParallel(network)

    assert unwrapped_network(parallel) is network
    assert unwrapped_network(compiled(parallel)) is network
    assert unwrapped_network(DistributedDataParallel(compiled(network))) is network


def test_an_optimizer_is_found_inside_accelerates_wrapper():
    """An optimizer is found inside any number of accelerate's wrappers."""
    Accelerator(cpu=True)
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    wrapped = AcceleratedOptimizer(optimizer)

    assert unwrapped_optimizer(optimizer) is optimizer
    assert unwrapped_optimizer(wrapped) is optimizer
    assert unwrapped_optimizer(AcceleratedOptimizer(wrapped)) is optimizer


class Lookahead(Optimizer):
    """An optimizer that keeps another optimizer and smooths its steps."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_an_optimizer_that_keeps_another_one_is_itself():
    """An optimizer that keeps another optimizer is returned itself."""
    Accelerator(cpu=True)
    optimizer = Lookahead(SGD(nn.Linear(2, 2).parameters(), lr=0.1))

    assert unwrapped_optimizer(optimizer) is optimizer
    assert unwrapped_optimizer(AcceleratedOptimizer(optimizer)) is optimizer


@pytest.mark.parametrize("value", [None, "SGD", nn.Linear(1, 1), 0.1], ids=repr)
def test_what_is_no_optimizer_is_returned(value):
    """A value that is not an optimizer is returned unchanged."""
    assert unwrapped_optimizer(value) is value


def test_trainable_parameters_by_plain_name():
    """Frozen and empty parameters are left out, and torch.compile adds no prefix to names."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(requires_grad=False)
    model[2].bias = nn.Parameter(torch.empty(0))
    expected = ["0.weight", "0.bias", "2.weight"]

    assert list(trainable(model)) == expected
    assert list(trainable(compiled(model))) == expected


@pytest.mark.usefixtures("_one_rank")
def test_trainable_parameters_inside_several_wrappers():
    """Names have no prefix inside DistributedDataParallel, compiled or not."""
    network = nn.Linear(2, 2)
    parallel = DistributedDataParallel(network)

    assert list(trainable(parallel)) == ["weight", "bias"]
    assert list(trainable(compiled(parallel))) == ["weight", "bias"]
