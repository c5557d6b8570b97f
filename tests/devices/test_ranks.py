"""DistributedDataParallel and FSDP2 on one rank: NCCL on a GPU, gloo on a CPU.

Several ranks on CPUs are tested elsewhere. What only NCCL shows is that its collectives run on
streams of their own, and that nothing waits for them on the host.
"""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, MFTrainOneStepCell
from support.devices import each_device, occupied, refused_waits
from support.float32_gradients import Products
from support.one_rank import one_rank
from support.small_networks import Classifier, labelled_batches
from support.versions import needs

NAN = float("nan")


@pytest.fixture
def _rank_of_device(device):
    """Be the only rank of a process group."""
    # Without a device, torch guesses it at the first collective, and warns.
    on_cuda = {"backend": "nccl", "device_id": torch.device("cuda", 0)}
    with one_rank(**(on_cuda if device == "cuda" else {})):
        yield


def whole(network, device):
    """Return a network on a device."""
    return network.to(device)


def replicated(network, device):
    """Return a network under DistributedDataParallel."""
    return DistributedDataParallel(network.to(device))


def compressed(network, device):
    """Return a network whose gradients are reduced in float16 by a communication hook."""
    wrapped = replicated(network, device)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def sharded(network, device):
    """Return a network whose layers are sharded."""
    mesh = init_device_mesh(device, (1,))
    network = network.to(device)
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


LAYOUTS = {"DDP": replicated, "DDP with a hook": compressed, "FSDP2": sharded}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


class Loop:
    """A cell with everything on, over a network in a layout.

    Args:
        device: Training device.
        layout: Distributes the network.
    """

    def __init__(self, device, layout):
        torch.manual_seed(0)
        self.network = layout(Classifier(), device)
        optimizer = torch.optim.AdamW(self.network.parameters(), 1e-2, fused=True)
        self.cell = MFTrainOneStepCell(
            self.network,
            optimizer,
            use_clip_grad=True,
            max_grad_norm=0.5,
            scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 3),
            local_norm=True,
            gradient_accumulation_steps=2,
            lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
            ema=ExponentialMovingAverage(self.network, 0.9, warmup=True),
        )
        self.batches = [
            (inputs.to(device), labels.to(device)) for inputs, labels in labelled_batches(4)
        ]
        self.factors = {x: torch.full((), x, device=device) for x in (1.0, NAN)}

    def step(self, number, factor=1.0):
        return self.cell(*self.batches[number % 4], self.factors[factor])

    def weights(self):
        self.cell.flush()
        found = [*self.network.parameters(), *(each for _, each in self.cell.ema.named_averages())]
        with torch.no_grad():
            return [getattr(each, "full_tensor", lambda each=each: each)() for each in found]


@each_device
@each_layout
@pytest.mark.usefixtures("_rank_of_device")
def test_a_training_is_that_of_one_process(layout, device):
    """Losses, norms, weights and averages are those of the network that is not distributed."""
    factors = [1.0, NAN, 1.0, 1.0, 1.0, 1.0]
    outputs, weights = [], []
    for each in (whole, layout):
        loop = Loop(device, each)
        outputs.append([loop.step(number, factor) for number, factor in enumerate(factors)])
        weights.append(loop.weights())
    expected, found = outputs
    relative = 1e-2 if layout is compressed else 1e-5

    for one, other in zip(expected, found, strict=True):
        assert other.overflow.item() == one.overflow.item()
        assert other.loss_scale.item() == one.loss_scale.item()
        for name in ("loss", "global_norm", "local_norm"):
            values = getattr(other, name).tolist(), getattr(one, name).tolist()
            assert values[0] == pytest.approx(values[1], rel=relative, nan_ok=True), name
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(other, one, rtol=relative, atol=relative)


@each_device
@each_layout
@pytest.mark.usefixtures("_rank_of_device", "_late_results")
def test_a_step_reads_nothing(layout, device):
    """No step reads on the host, whether it is applied or skipped."""
    loop = Loop(device, layout)
    for number in range(3):
        loop.step(number)
    with refused_waits(device):
        outputs = [loop.step(number, x) for number, x in enumerate((1.0, NAN, 1.0))]

    assert [output.overflow.item() for output in outputs] == [False, True, False]


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"])
@each_layout
@pytest.mark.usefixtures("_rank_of_device")
def test_a_step_returns_while_the_device_is_busy(layout, device):
    """The host queues a step with its collectives and goes on, before the device begins with it."""
    loop = Loop(device, layout)
    # In its first ten iterations, DistributedDataParallel waits for the times of the last one.
    for number in range(12):
        loop.step(number)
    ahead = []
    for number in range(3):
        done = occupied()
        loop.step(number)
        ahead.append(not done.query())

    assert any(ahead)


@needs("torch", "2.10", "Tensor.grad_dtype")
@each_device
@pytest.mark.parametrize("layout", [whole, replicated, sharded])
@pytest.mark.usefixtures("_rank_of_device")
def test_small_gradients_are_not_lost(layout, device):
    """1024 + 64 x 1 over 65 micro-batches is 16.738, of which bfloat16 keeps 15.75."""
    large, small = (torch.full((6,), value, device=device).bfloat16() for value in (1024.0, 1.0))
    network = layout(Products(), device)
    cell = MFTrainOneStepCell(
        network,
        torch.optim.SGD(network.parameters(), lr=1.0),
        use_clip_grad=True,
        max_grad_norm=float("inf"),
        accumulate_allreduce_grads_in_fp32=True,
    )
    norm = cell.step([(large, large), *[(small, small)] * 64]).global_norm

    assert norm.item() / 12**0.5 == pytest.approx(1088 / 65, rel=1e-6)
