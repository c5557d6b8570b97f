"""A step reads nothing on the host if the optimizer can skip on the device."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import (
    AdaptiveLossScaleUpdateCell,
    ChainedOptimizer,
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    TrainOneStepWithLossScaleCell,
)
from mfwrap.optimizers import Muon
from support.devices import skip_if_refused
from support.host_reads import HostReads
from support.small_networks import Classifier, TokenClassifier, labelled_batches

NAN, SPIKE = float("nan"), 1e4
FACTORS = {
    "applied first": (1.0, NAN, 1.0, SPIKE, 1.0, 1.0),
    "overflow first": (NAN, 1.0, 1.0, SPIKE, NAN, 1.0),
    "spike first": (SPIKE, NAN, 1.0, 1.0, 1.0, SPIKE),
}
"""Factors that the losses of successive steps are multiplied by."""


def muon_with_adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Muon for matrices and fused AdamW for all other parameters, as one optimizer."""
    held = list(parameters)
    return ChainedOptimizer(
        Muon([parameter for parameter in held if parameter.ndim == 2]),
        AdamW([parameter for parameter in held if parameter.ndim != 2], fused=True),
    )


FUSED = {
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-2, fused=True),
    "Adam": lambda parameters: Adam(parameters, lr=1e-2, fused=True),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "SGD": lambda parameters: SGD(parameters, lr=0.1, fused=True),
    "Adagrad": lambda parameters: Adagrad(parameters, lr=1e-2, fused=True),
    "Muon with AdamW": muon_with_adamw,
}
NOT_FUSED = {
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-2, foreach=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}
LOSS_SCALES = {
    "dynamic": lambda: DynamicLossScaleUpdateCell(2.0**16, 2, 2),
    "adaptive": lambda: AdaptiveLossScaleUpdateCell(2.0**16, 2, 20),
    "fixed": lambda: 2.0**10,
}


class Training(NamedTuple):
    cell: MFTrainOneStepCell
    batches: list[tuple[Tensor, Tensor, Tensor]]


def whole_step(
    make_optimizer: Callable[..., Optimizer],
    factors: tuple[float, ...],
    *,
    loss_scale="dynamic",
    groups=None,
    device="cpu",
    spike_policy="record",
) -> Training:
    """Return a cell with every feature of a step, and batches on its device."""
    network = TokenClassifier().to(device)
    optimizer = make_optimizer(network.parameters())
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        max_grad_norm=0.5,
        scale_sense=LOSS_SCALES[loss_scale](),
        local_norm=True,
        gradient_accumulation_steps=2,
        lr_scheduler=LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        ema=ExponentialMovingAverage(network, decay=0.99, warmup=True),
        calculate_per_token_loss=True,
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=1e3,
        spike_policy=spike_policy,
        local_norm_groups=groups,
    )
    batches = [
        (inputs.to(device), labels.to(device), torch.full((), factor, device=device))
        for (inputs, labels), factor in zip(labelled_batches(len(factors)), factors, strict=True)
    ]
    return Training(cell, batches)


def count_reads(training: Training) -> Iterator[tuple[bool, HostReads]]:
    """Run all steps; for each step, yield whether the step was skipped, and the host reads."""
    for batch in training.batches:
        with HostReads() as counted:
            training.cell(*batch)
        yield training.cell.last_report.skipped.item(), counted


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("make_optimizer", FUSED.values(), ids=FUSED)
def test_a_step_with_a_fused_optimizer_reads_nothing(make_optimizer, factors):
    """No step reads on the host, including the first, overflows and spikes."""
    steps = list(count_reads(whole_step(make_optimizer, factors)))

    assert [counted.reads for _, counted in steps] == [[]] * len(factors)
    assert [skipped for skipped, _ in steps] == [factor != 1 for factor in factors]


@pytest.mark.parametrize("groups", [None, "layer", [r"weight", r"bias"]], ids=str)
@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
def test_no_loss_scale_and_no_grouping_reads(loss_scale, groups):
    """A step reads nothing on the host, for every loss scale and every grouping of norms."""
    training = whole_step(
        FUSED["AdamW"], FACTORS["applied first"], loss_scale=loss_scale, groups=groups
    )

    assert [counted.reads for _, counted in count_reads(training)] == [[]] * 6


@pytest.mark.parametrize("spike_policy", ["skip", "clip"])
def test_no_policy_for_spikes_reads(spike_policy):
    """A step reads nothing on the host, whether it skips or clips spikes."""
    training = whole_step(FUSED["AdamW"], FACTORS["applied first"], spike_policy=spike_policy)

    assert [counted.reads for _, counted in count_reads(training)] == [[]] * 6


def test_a_sequence_of_micro_batches_reads_nothing():
    """``cell.step`` reads nothing on the host."""
    cell, batches = whole_step(FUSED["AdamW"], FACTORS["applied first"])

    with HostReads() as counted:
        cell.step(batches[:2])
        cell.step(batches[2:5])

    assert counted.reads == []


def test_set_sense_scale_reads_nothing():
    """Setting a new loss scale reads nothing on the host."""
    cell, batches = whole_step(FUSED["AdamW"], FACTORS["applied first"], loss_scale="fixed")
    scale = torch.full((), 8.0)

    with HostReads() as counted:
        cell.set_sense_scale(scale)
        cell(*batches[0])

    assert counted.reads == []
    assert cell.scale_sense.item() == 8.0


def reads_of_plain_steps(make_optimizer: Callable[..., Optimizer], num_steps: int) -> list[int]:
    """Return the number of host reads by the optimizer itself in each step."""
    network = TokenClassifier()
    optimizer = make_optimizer(network.parameters())
    reads = []
    for inputs, labels in labelled_batches(num_steps):
        network(inputs, labels)[0].backward()
        with HostReads() as counted:
            optimizer.step()
        reads.append(len(counted.reads))
    return reads


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("make_optimizer", NOT_FUSED.values(), ids=NOT_FUSED)
def test_a_step_with_any_other_optimizer_reads_once(make_optimizer, factors):
    """Each step, applied or skipped, adds one host read to the optimizer's own reads."""
    own_reads = iter(reads_of_plain_steps(make_optimizer, len(factors)))

    for skipped, counted in count_reads(whole_step(make_optimizer, factors)):
        expected = 1 if skipped else 1 + next(own_reads)
        assert len(counted.reads) == expected


def test_fused_sgd_with_dampening_reads_until_its_first_applied_update():
    """Fused SGD with dampening reads once per step until its first applied update."""
    training = whole_step(
        lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
        FACTORS["overflow first"],
    )

    assert [len(counted.reads) for _, counted in count_reads(training)] == [1, 1, 0, 0, 0, 0]


def test_a_step_that_accelerate_has_prepared_reads_nothing():
    """A step with objects that accelerate prepared reads nothing on the host."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    network = TokenClassifier()
    optimizer = FUSED["AdamW"](network.parameters())
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        scale_sense=DynamicLossScaleUpdateCell(2.0**16, 2, 2),
        calculate_per_token_loss=True,
        lr_scheduler=schedule,
        accelerator=accelerator,
    )
    batches = labelled_batches(3)

    with HostReads() as counted:
        for inputs, labels in batches:
            cell(inputs, labels)

    assert counted.reads == []


def test_mindspores_cell_with_a_loss_scale_reads_nothing():
    """``TrainOneStepWithLossScaleCell`` reads nothing on the host.

    Without a schedule it does not copy anything to the host, either.
    """
    network = Classifier()
    optimizer = FUSED["AdamW"](network.parameters())
    cell = TrainOneStepWithLossScaleCell(
        network, optimizer, DynamicLossScaleUpdateCell(2.0**16, 2, 2)
    )
    batches = labelled_batches(3)

    with HostReads() as counted:
        for inputs, labels in batches:
            cell(inputs, labels)

    assert counted.reads == []
    assert len(cell._TrainOneStepWithLossScaleCell__update.counts._reads) == 0


@pytest.fixture
def _default_sync_debug_mode() -> Iterator[None]:
    """Reset CUDA's synchronization debug mode after the test."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.usefixtures("_default_sync_debug_mode")
@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("make_optimizer", FUSED.values(), ids=FUSED)
def test_a_step_on_cuda_waits_for_nothing(make_optimizer, factors):
    """No step of a fused optimizer synchronizes with the device, also if it judges norms."""
    skip_if_refused(make_optimizer, "cuda")
    cell, batches = whole_step(
        make_optimizer, factors, groups="layer", device="cuda", spike_policy="clip"
    )

    torch.cuda.set_sync_debug_mode("error")
    reports = []
    for batch in batches:
        cell(*batch)
        reports.append(cell.last_report)
    torch.cuda.set_sync_debug_mode("default")

    assert [report.skipped.item() for report in reports] == [factor != 1 for factor in factors]


@pytest.mark.cuda
@pytest.mark.usefixtures("_default_sync_debug_mode")
def test_cuda_refuses_a_read_in_this_mode():
    """A host read raises an error in the debug mode that the test above uses."""
    scalar = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")

    with pytest.raises(RuntimeError, match="synchroniz"):
        scalar.item()
