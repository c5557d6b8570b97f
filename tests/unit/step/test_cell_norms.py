"""The norms that the cell reports, and the effect of clipping on the update."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from mfwrap import MFTrainOneStepCell
from support.small_networks import Classifier, LinearProbe, labelled_batches

NAMES = ("layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias")


def build(network: nn.Module | None = None, **settings) -> MFTrainOneStepCell:
    """Return a cell with fused AdamW around `network`, by default a classifier."""
    network = Classifier() if network is None else network
    return MFTrainOneStepCell(network, AdamW(network.parameters(), fused=True), **settings)


def float64_norms(network: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the norm of each gradient of the mean loss, by name, in float64."""
    reference = Classifier().double()
    reference.load_state_dict(network.state_dict())
    reference(inputs.double(), labels).backward()
    return {name: weight.grad.norm().item() for name, weight in reference.named_parameters()}


def test_the_global_norm_is_none_without_clipping():
    """The global norm is None without ``use_clip_grad``, as in MindFormers."""
    output = build()(*labelled_batches(1)[0])

    assert output.global_norm is None


def test_an_infinite_limit_reports_the_norm_and_does_not_clip():
    """With ``max_grad_norm=inf``, the norm is reported and the update is not clipped."""
    network = LinearProbe()
    cell = MFTrainOneStepCell(
        network,
        SGD(network.parameters(), lr=1.0, fused=True),
        use_clip_grad=True,
        max_grad_norm=math.inf,
    )

    output = cell(torch.tensor([[30.0, 40.0]]))

    assert output.global_norm.item() == 50.0
    assert network.weight.tolist() == [-30.0, -40.0]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_the_norm_is_taken_before_clipping_and_the_update_after(scale, fused):
    """A gradient of norm 50 is reported as 50, and the update is clipped to the limit of 5."""
    network = LinearProbe()
    cell = MFTrainOneStepCell(
        network,
        SGD(network.parameters(), lr=1.0, fused=fused),
        use_clip_grad=True,
        max_grad_norm=5.0,
        scale_sense=scale,
    )

    output = cell(torch.tensor([[30.0, 40.0]]))

    coefficient = 5.0 / (50.0 + 1e-6)
    assert output.global_norm.item() == 50.0
    assert network.weight.tolist() == pytest.approx(
        [-30.0 * coefficient, -40.0 * coefficient], rel=3e-7
    )


def test_a_gradient_below_the_limit_is_not_touched():
    """Clipping does not change a gradient whose norm is below the limit."""
    network = LinearProbe()
    optimizer = SGD(network.parameters(), lr=1.0, fused=True)
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, max_grad_norm=5.1)

    cell(torch.tensor([[3.0, 4.0]]))

    assert network.weight.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1.0, math.inf])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_local_norms_are_those_of_the_loss(num_micro_batches, scale, max_grad_norm):
    """Local norms agree with float64 for every scale, limit and number of micro-batches."""
    network, [batch] = Classifier(), labelled_batches(1)
    expected = float64_norms(network, *batch)
    cell = build(
        network,
        use_clip_grad=True,
        max_grad_norm=max_grad_norm,
        scale_sense=scale,
        local_norm=True,
        gradient_accumulation_steps=num_micro_batches,
    )

    output = cell(*batch)

    assert cell.local_norm_names == NAMES == tuple(expected)
    assert output.local_norm.tolist() == pytest.approx(list(expected.values()), rel=2e-6)
    assert output.size.tolist() == [128, 16, 64, 4]
    total = math.hypot(*expected.values())
    assert output.global_norm.item() == pytest.approx(total, rel=2e-6)


GROUPS = {
    "layer": ("layer", {"layers.0": (0, 1), "layers.2": (2, 3)}),
    "patterns": ([r"weight", r"^layers\.0"], {"weight": (0, 2), r"^layers\.0": (1,)}),
    "callable": (lambda name: name[-6:] if "2" in name else None, {"weight": (2,), "2.bias": (3,)}),
}


@pytest.mark.parametrize(("groups", "members"), GROUPS.values(), ids=GROUPS)
def test_local_norms_by_group(groups, members):
    """A group's norm agrees with the float64 norm of all gradients in the group."""
    network, [batch] = Classifier(), labelled_batches(1)
    norms = list(float64_norms(network, *batch).values())
    sizes = [weight.numel() for weight in network.parameters()]
    cell = build(network, local_norm=True, local_norm_groups=groups, scale_sense=2.0**16)

    output = cell(*batch)

    assert cell.local_norm_names == tuple(members)
    assert cell.last_report.local_norm_names == tuple(members)
    assert output.local_norm.tolist() == pytest.approx(
        [math.hypot(*(norms[i] for i in rows)) for rows in members.values()], rel=2e-6
    )
    assert output.size.tolist() == [sum(sizes[i] for i in rows) for rows in members.values()]


def test_a_bad_group_does_not_spoil_the_others():
    """A NaN makes only the norm of its own group non-finite."""
    network, [batch] = Classifier(), labelled_batches(1)
    network.layers[0].weight.register_hook(lambda gradient: gradient * float("nan"))

    output = build(network, local_norm=True, local_norm_groups="layer")(*batch)

    assert output.local_norm.isfinite().tolist() == [False, True]
