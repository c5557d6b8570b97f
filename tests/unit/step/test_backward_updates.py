"""Optimizers that change their weights during backward are refused."""

import sys
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import SGD
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from mfwrap import MFTrainOneStepCell, TrainOneStepCell
from mfwrap.accelerate import attach
from support.attached_runs import new_accelerator
from support.small_networks import Classifier

# torch's own module of optimizers in backward uses a deprecated function of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")


def layer_wise(network):
    """Return what transformers uses for layer-wise GaLore and APOLLO."""
    return LayerWiseDummyOptimizer({p: SGD([p], lr=0.1) for p in network.parameters()})


def lomo(network):
    """Return LOMO, whose hooks are registered at construction."""
    return pytest.importorskip("lomo_optim").Lomo(network)


def adalomo(network):
    """Return AdaLomo, whose constructor needs a CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return pytest.importorskip("lomo_optim").AdaLomo(network)


def in_backward(network):
    """Return SGD for weights that torch already updates during backward."""
    from torch.distributed.optim.apply_optimizer_in_backward import (  # noqa: PLC0415  (warns)
        _apply_optimizer_in_backward,
    )

    _apply_optimizer_in_backward(torch.optim.Adam, network.parameters(), {"lr": 0.1})
    return SGD(network.parameters(), lr=0.1)


MADE = {
    "LayerWiseDummyOptimizer": layer_wise,
    "Lomo": lomo,
    "AdaLomo": adalomo,
    "SGD with parameters of an in-backward Adam": in_backward,
}


def attached(network, optimizer):
    """Prepare an optimizer with an attached accelerator."""
    accelerator = new_accelerator()
    attach(accelerator)
    accelerator.prepare(network, optimizer)


def wrapped(network, optimizer):
    """Give the cell an optimizer that another accelerator has prepared."""
    Accelerator(cpu=True)
    MFTrainOneStepCell(network, AcceleratedOptimizer(optimizer))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("use", [MFTrainOneStepCell, TrainOneStepCell, wrapped, attached])
def test_an_optimizer_that_updates_in_backward_is_refused(use, name):
    """The cells and `prepare` raise one sentence that names the optimizer and the reason."""
    network = Classifier()
    optimizer = MADE[name](network)
    message = (
        f"`optimizer` must change its weights after backward, got {name}, which changes them "
        "during backward, before the step can know of an overflow"
    )

    with pytest.raises(TypeError) as refusal:
        use(network, optimizer)
    assert str(refusal.value) == message


def test_weights_really_change_during_backward():
    """With an in-backward optimizer, backward itself changes the weights and releases gradients."""
    network = Classifier()
    in_backward(network)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    sum(parameter.square().sum() for parameter in network.parameters()).backward()

    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(
        torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True)
    )


def test_another_module_of_the_same_name(monkeypatch):
    """A module that has the name of LOMO's, but not its classes, changes nothing."""
    monkeypatch.setitem(sys.modules, "lomo_optim", types.ModuleType("lomo_optim"))
    network = Classifier()

    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1))

    assert cell.local_norm_names
