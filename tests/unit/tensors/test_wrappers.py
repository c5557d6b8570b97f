"""Networks and optimizers are found inside what training wraps around them."""

import functools

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mfwrap.tensors.wrappers import (
    tensor_norms,
    trainable,
    unwrapped_network,
    unwrapped_optimizer,
)

# Nothing is compiled before a first call.
compiled = functools.partial(torch.compile, backend="eager")


@pytest.fixture
def _one_rank(tmp_path):
    """Be the only rank of a process group."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


def test_a_bare_network_is_itself():
    """Without a wrapper there is nothing to take off, whatever its parts are."""
    network = nn.Sequential(compiled(nn.Linear(2, 2)))

    assert unwrapped_network(network) is network


def test_a_network_is_found_inside_torch_compile():
    """Compiled from outside or in place."""
    network = nn.Linear(2, 2)
    assert unwrapped_network(compiled(network)) is network

    network.compile(backend="eager")
    assert unwrapped_network(network) is network


@pytest.mark.usefixtures("_one_rank")
def test_a_network_is_found_inside_distributed_data_parallel():
    """Compiled within, around, or not at all."""
    network = nn.Linear(2, 2)
    parallel = DistributedDataParallel(network)

    assert unwrapped_network(parallel) is network
    assert unwrapped_network(compiled(parallel)) is network
    assert unwrapped_network(DistributedDataParallel(compiled(network))) is network


def test_an_optimizer_is_found_inside_accelerates_wrapper():
    """Prepared by accelerate or not, once or twice, it is the optimizer itself."""
    Accelerator(cpu=True)
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    wrapped = AcceleratedOptimizer(optimizer)

    assert unwrapped_optimizer(optimizer) is optimizer
    assert unwrapped_optimizer(wrapped) is optimizer
    assert unwrapped_optimizer(AcceleratedOptimizer(wrapped)) is optimizer


@pytest.mark.parametrize("optimizer", [None, "SGD", SGD, nn.Linear(1, 1), 0.1], ids=repr)
def test_what_is_no_optimizer_is_refused(optimizer):
    """The class itself and a module are no optimizer."""
    with pytest.raises(TypeError, match=r"`optimizer` must be a torch.optim.Optimizer, got"):
        unwrapped_optimizer(optimizer)


def test_norms_of_tensors_of_many_kinds():
    """Each norm is torch's own in float64, in the order of the tensors, as float32."""
    tensors = [
        torch.randn(3, 4),
        torch.randn(5).bfloat16(),
        torch.randn(()),
        torch.randn(2, 2).double(),
        torch.randn(7).bfloat16(),
    ]
    expected = [tensor.double().norm().item() for tensor in tensors]

    assert tensor_norms(tensors).tolist() == pytest.approx(expected, rel=1e-6)
    assert tensor_norms(tensors).dtype == torch.float32


def test_names_of_trainable_parameters():
    """Frozen parameters are left out, and the names are those of the uncompiled network."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model[1].requires_grad_(requires_grad=False)
    expected = ["0.weight", "0.bias", "2.weight", "2.bias"]

    assert list(trainable(model)) == expected
    assert list(trainable(compiled(model))) == expected
