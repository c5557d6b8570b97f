"""What follows backward, on a CPU and on a GPU: large weights, kernels, memory and determinism."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.profiler import ProfilerActivity, profile

from mfwrap import (
    AdamWeightDecay,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    Model,
)
from mfwrap.step.losses import Accumulated
from mfwrap.step.skipping import SkippableOptimizer
from support.devices import each_device, skip_if_refused
from support.small_networks import LinearProbe, labelled_batches

NAN = float("nan")
OPTIMIZERS = {
    "Adam": lambda weights: Adam(weights, lr=1e-2, amsgrad=True, fused=True),
    "AdamW": lambda weights: AdamW(weights, lr=1e-2, fused=True),
    "SGD": lambda weights: SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "plain SGD": lambda weights: SGD(weights, lr=0.1, fused=True),
    "Adagrad": lambda weights: Adagrad(weights, lr=1e-2, fused=True),
    "AdamWeightDecay": lambda weights: AdamWeightDecay(weights, lr=1e-2),
}


def large_weights(device):
    """Return weights, of which the first fills several launches of a fused kernel."""
    size = 3 * 2**24 + 5 if device == "cuda" else 2**18 + 5
    generator = torch.Generator(device).manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, device=device, generator=generator))
        for shape in (size, 7, 1000)
    ]


@each_device
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_large_weights_are_skipped_and_divided(make_optimizer, device):
    """A skip changes no bit of large weights and their state; an update divides their gradients."""
    skip_if_refused(make_optimizer, device)
    weights, others = large_weights(device), large_weights(device)
    gradients = [torch.randn_like(weight) for weight in weights]
    optimizer, reference = make_optimizer(weights), make_optimizer(others)
    skippable = SkippableOptimizer(optimizer)
    divisor = torch.full((), 2.0**10, device=device)
    for skip in (True, False, True, False):
        for weight, other, gradient in zip(weights, others, gradients, strict=True):
            weight.grad, other.grad = gradient * 2.0**10, gradient.clone()
        before = [weight.detach().clone() for weight in weights]
        state = copy.deepcopy(optimizer.state_dict()["state"])
        skippable.step(divisor, torch.tensor(skip, device=device))
        if not skip:
            reference.step()
            continue
        assert all(map(torch.equal, before, weights))
        for index, values in state.items():
            for name, value in values.items():
                assert torch.equal(optimizer.state_dict()["state"][index][name], value), name

    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-7)


class ManyWeights(nn.Module):
    """A network of many small weights.

    Args:
        number: Number of weights.
        size: Size of each of them.
    """

    def __init__(self, number, size=64):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(size)) for _ in range(number))

    def forward(self):
        return torch.stack([part.sum() for part in self.parts]).square().mean()


def kernels_of_an_update(number, dtype, *, averages):
    """Return the kernels of everything after backward, by name."""
    network = ManyWeights(number).to("cuda", dtype)
    cell = MFTrainOneStepCell(
        network,
        AdamW(network.parameters(), 1e-3, fused=True),
        use_clip_grad=True,
        scale_sense=2.0**4,
        local_norm=True,
        ema=ExponentialMovingAverage(network, 0.9) if averages else None,
    )
    for _ in range(2):
        cell()
    (network() * 2.0**4).backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        cell._MFTrainOneStepCell__update(Accumulated(torch.zeros((), device="cuda"), None))
        torch.cuda.synchronize()
    on_device = [
        event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return [event.name for event in on_device if not event.name.startswith(("Mem", "cuda"))]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_kernels_does_not_follow_the_number_of_weights(dtype):
    """512 weights need far fewer kernels than there are weights, their averages included.

    torch's foreach functions take dozens of weights into each launch.
    """
    without = kernels_of_an_update(512, dtype, averages=False)
    with_averages = kernels_of_an_update(512, dtype, averages=True)

    assert 0 < len(without) < 256
    assert 0 < len(with_averages) - len(without) < 64


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_of_memory(dtype):
    """An update with clipping and norms needs no copy of the gradients, in any dtype."""
    network = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
    network = network.to("cuda", dtype)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, inputs):
            return self.network(inputs).float().square().mean()

    loss = Loss()
    cell = MFTrainOneStepCell(
        loss,
        AdamW(network.parameters(), 1e-4, fused=True),
        use_clip_grad=True,
        local_norm=True,
        scale_sense=2.0**4,
    )
    inputs = torch.randn(4, 2048, device="cuda", dtype=dtype)
    for _ in range(3):
        cell(inputs)
    cell.flush()
    torch.cuda.synchronize()
    gradients = sum(p.numel() * p.element_size() for p in network.parameters())
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cell(inputs)
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - held - gradients

    # A copy of one weight's gradient in float32 is an eighth or a sixteenth of all gradients.
    assert beyond < gradients / 4
    assert torch.cuda.memory_allocated() <= held + 2**20


@each_device
def test_deterministic_algorithms_can_be_asked_for(device):
    """With everything on, a step works where torch refuses what differs from run to run."""
    torch.use_deterministic_algorithms(True)  # noqa: FBT003  (torch's signature)
    try:
        network = LinearProbe(8).to(device)
        optimizer = AdamW(network.parameters(), 1e-2, fused=True)
        cell = MFTrainOneStepCell(
            network,
            optimizer,
            use_clip_grad=True,
            local_norm=True,
            local_norm_groups="layer",
            spike_policy="clip",
            ema=ExponentialMovingAverage(network, 0.9, warmup=True),
            gradient_accumulation_steps=2,
        )
        outputs = [cell(inputs.to(device)) for inputs, _ in labelled_batches(20)]
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003  (torch's signature)

    assert all(output.loss.isfinite() for output in outputs)


LEVELS = {"O0": torch.float32, "O1": torch.float16, "O2": torch.float16, "O3": torch.float16}


@each_device
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_levels_of_precision(level, device):
    """`Model` trains with each level, in the dtype that it stands for on the device."""
    if device == "cpu":
        Accelerator(cpu=True)
    automatic = torch.float32 if device == "cpu" else torch.bfloat16
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    dtypes = []
    network[0].register_forward_hook(lambda *call: dtypes.append(call[-1].dtype))
    optimizer = AdamW(network.parameters(), 1e-2, fused=True)
    model = Model(network, nn.CrossEntropyLoss(), optimizer, amp_level=level, metrics={"loss"})
    data = labelled_batches(10)
    before = model.eval(data)["loss"]
    dtypes.clear()
    model.train(3, data)

    assert set(dtypes) == {LEVELS.get(level, automatic)}
    assert all(parameter.device.type == device for parameter in network.parameters())
    assert model.eval(data)["loss"] < 0.9 * before
