"""The metrics of a step agree with sums in float64."""

import math

import pytest
import torch
from torch import nn

from mfwrap import MFTrainOneStepCell
from mfwrap.callbacks.training_state import TrainingStateSettings
from mfwrap.callbacks.training_state.forward_watches import ForwardNumbers
from mfwrap.callbacks.training_state.metrics import PackedMetrics, StateMetrics
from support.host_reads import HostReads
from support.small_networks import Classifier, labelled_batches


@pytest.fixture
def step():
    """Return a cell with local norms after two updates, and its optimizer."""
    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, local_norm=True)
    for batch in labelled_batches(2):
        cell(*batch)
    return network, optimizer, cell.last_report


def of_step(step, *, number=1, forward=None, **settings) -> PackedMetrics:
    """Return the metrics of the fixture's step."""
    network, optimizer, report = step
    metrics = StateMetrics(TrainingStateSettings(**settings))
    names = report.local_norm_names
    return metrics.of_step(number, report.output, names, network, optimizer, forward)


def by_tag(packed: PackedMetrics) -> dict[str, float]:
    """Return the values by tag."""
    if packed.values is None:
        return {}
    return dict(zip([m.tag for m in packed.metrics], packed.values.tolist(), strict=True))


def norm(tensor) -> float:
    """Return the L2 norm of a tensor, computed in float64."""
    return tensor.detach().double().norm().item()


def test_nothing_is_computed_without_a_format(step):
    """By default a step has no metrics."""
    assert of_step(step) == PackedMetrics((), None)


def test_local_norms_and_losses(step):
    """Norms and losses equal those of the output; the device norm covers all groups."""
    report = step[2]
    found = of_step(
        step,
        local_norm_format="log",
        device_local_norm_format="log",
        local_loss_format="log",
        device_local_loss_format="log",
    )
    norms = report.output.local_norm.tolist()
    expected = {
        f"local_norm/{name}": value
        for name, value in zip(report.local_norm_names, norms, strict=True)
    }
    expected["device_local_norm"] = math.sqrt(sum(value**2 for value in norms))
    expected["local_loss"] = expected["device_accum_local_loss"] = report.output.loss.item()

    assert by_tag(found) == pytest.approx(expected, rel=1e-6)


def test_moments_and_weights(step):
    """Adam's moments have one norm per parameter; the weights have one norm together."""
    network, optimizer, _ = step
    found = of_step(step, optimizer_state_format="log", weight_state_format="log")
    expected = {}
    for tag, key in (("adam_m_norm", "exp_avg"), ("adam_v_norm", "exp_avg_sq")):
        for name, parameter in network.named_parameters():
            expected[f"{tag}/{name}"] = norm(optimizer.state[parameter][key])
    squares = [norm(parameter) ** 2 for parameter in network.parameters()]
    expected["weight_norm"] = math.sqrt(sum(squares))

    assert by_tag(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("invert", [False, True])
def test_target_selects_parameters(step, invert):
    """`target` selects the parameters whose name it matches; `invert` selects all others."""
    first, *others = step[2].local_norm_names
    found = of_step(
        step,
        target=[rf"^{first}$"],
        invert=invert,
        local_norm_format="log",
        optimizer_state_format="log",
    )
    shown = others if invert else [first]

    assert {m.tag for m in found.metrics} == {
        f"{tag}/{name}" for tag in ("local_norm", "adam_m_norm", "adam_v_norm") for name in shown
    }
    norms = dict(zip(step[2].local_norm_names, step[2].output.local_norm.tolist(), strict=True))
    for name in shown:
        assert by_tag(found)[f"local_norm/{name}"] == norms[name]


def test_each_metric_has_its_own_formats(step):
    """Each metric has the formats of its own setting."""
    found = of_step(step, local_loss_format=["jsonl", "log"], weight_state_format="trackers")

    assert found.metrics == (("local_loss", ("jsonl", "log")), ("weight_norm", ("trackers",)))


def test_intervals(step):
    """Metrics follow `step_interval`; stable ranks follow their own interval."""
    settings = {
        "step_interval": 3,
        "weight_state_format": "log",
        "stable_rank_config": {"format": "log", "step_interval": 2, "target": ["weight"]},
    }
    kinds = [
        {tag.split("/")[0] for tag in by_tag(of_step(step, number=number, **settings))}
        for number in (1, 2, 3, 6)
    ]
    ranks = {"weight_stable_rank", "weight_eigenvalue"}

    assert kinds == [set(), ranks, {"weight_norm"}, ranks | {"weight_norm"}]


def test_forward_passes(step):
    """Logits have a mean and a maximum; shares have an imbalance and a drop rate."""
    forward = ForwardNumbers(
        {"attention": torch.tensor([1.0, 3.0])},
        {"experts": torch.tensor([0.75, 0.25])},
        {"experts": torch.tensor(0.5)},
    )
    found = of_step(
        step,
        forward=forward,
        max_attention_logit_format="log",
        expert_load_format="log",
        expert_capacity_factor=1.25,
    )

    assert by_tag(found) == {
        "max_attention_logit/attention/head_0": 1.0,
        "max_attention_logit/attention/head_1": 3.0,
        "max_attention_logit/attention/mean": 2.0,
        "max_attention_logit/attention/max": 3.0,
        "expert_load/experts/expert_0": 0.75,
        "expert_load/experts/expert_1": 0.25,
        "expert_imbalance/experts": 1.5,
        # Each of the two experts has a capacity of 1.25 / 2 of the tokens. The first expert's load
        # of 0.75 exceeds this capacity by 0.125.
        "drop_rate/experts": 0.125,
        "expert_bias_spread/experts": 0.5,
    }


def test_a_loop_that_knows_little():
    """Metrics that need a missing output, optimizer state or network are left out."""
    settings = TrainingStateSettings(
        local_norm_format="log", optimizer_state_format="log", weight_state_format="log"
    )
    metrics = StateMetrics(settings)
    network = nn.Linear(2, 2)
    fresh = torch.optim.AdamW(network.parameters())

    assert by_tag(metrics.of_step(1, None, (), None, None)) == {}
    assert list(by_tag(metrics.of_step(1, None, (), network, None))) == ["weight_norm"]
    assert list(by_tag(metrics.of_step(1, None, (), network, fresh))) == ["weight_norm"]


def test_values_are_copies_and_nothing_is_read(step):
    """Metrics are copied without a host read; later changes of the output do not affect them."""
    report = step[2]
    before = report.output.local_norm.tolist()
    with HostReads() as reads:
        found = of_step(step, local_norm_format="log")
    report.output.local_norm.zero_()

    assert reads.reads == []
    assert found.values.tolist() == before
