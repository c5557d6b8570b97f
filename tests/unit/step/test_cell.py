"""The values that the cell returns and reports."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import (
    DynamicLossScaleUpdateCell,
    LocalNormStepOutput,
    MFTrainOneStepCell,
    StepConfig,
    StepOutput,
    StepReport,
)
from support.small_networks import Classifier, TokenClassifier, labelled_batches

NAMES = ("layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias")


def build(network: nn.Module | None = None, **settings) -> MFTrainOneStepCell:
    """Return a cell with fused AdamW around `network`, by default a classifier."""
    network = Classifier() if network is None else network
    return MFTrainOneStepCell(network, AdamW(network.parameters(), fused=True), **settings)


def test_the_output_is_mindformers_5_tuple():
    """The output has MindFormers' five values, in its order and with its names."""
    output = build(use_clip_grad=True)(*labelled_batches(1)[0])

    loss, overflow, loss_scale, learning_rate, global_norm = output
    assert type(output) is StepOutput
    assert output._fields == ("loss", "overflow", "loss_scale", "learning_rate", "global_norm")
    assert output == (loss, overflow, loss_scale, learning_rate, global_norm)


def test_settings_have_the_defaults_of_the_config():
    """Each setting of `StepConfig` is an argument of the cell with the same default."""
    assert build().config == StepConfig()


def test_with_local_norms_the_output_is_mindformers_7_tuple():
    """With local norms, the sixth and seventh values are the norms and the sizes of the groups."""
    output = build(use_clip_grad=True, local_norm=True)(*labelled_batches(1)[0])

    *_, local_norm, size = output
    assert type(output) is LocalNormStepOutput
    assert output._fields[:5] == StepOutput._fields
    assert output.local_norm is local_norm
    assert output.size is size


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_every_value_is_a_detached_tensor_of_its_type(scale, per_token):
    """Each value has its documented dtype and shape, for all settings."""
    cell = build(
        TokenClassifier() if per_token else Classifier(),
        use_clip_grad=True,
        local_norm=True,
        scale_sense=scale,
        calculate_per_token_loss=per_token,
    )

    output = cell(*labelled_batches(1)[0])

    expected = {
        "loss": (torch.float32, ()),
        "overflow": (torch.bool, ()),
        "loss_scale": (torch.float32, ()),
        "learning_rate": (torch.float32, ()),
        "global_norm": (torch.float32, ()),
        "local_norm": (torch.float32, (4,)),
        "size": (torch.int64, (4,)),
    }
    values = output._asdict()
    assert {n: (v.dtype, tuple(v.shape)) for n, v in values.items()} == expected
    assert all(type(value) is Tensor and not value.requires_grad for value in values.values())
    assert all(value.device == cell.network.layers[0].weight.device for value in values.values())


@pytest.mark.cuda
def test_every_value_is_on_the_training_device():
    """On CUDA all tensors of output and report are on the device."""
    network = Classifier().cuda()
    cell = build(network, use_clip_grad=True, local_norm=True)
    [(inputs, labels)] = labelled_batches(1)

    output = cell(inputs.cuda(), labels.cuda())

    report = cell.last_report
    counters = (report.skipped, report.applied_updates, report.learning_rates)
    assert all(value.is_cuda for value in (*output, *counters))


def test_old_outputs_and_reports_keep_their_values():
    """Later steps do not change outputs and reports that were returned earlier."""
    cell = build(
        use_clip_grad=True,
        local_norm=True,
        scale_sense=DynamicLossScaleUpdateCell(4.0, 2, 1),
    )
    cell.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    batches = labelled_batches(4)
    returned, copies = [], []
    for batch in batches:
        output = cell(*batch)
        report = cell.last_report
        values = [
            *output,
            report.skipped,
            report.applied_updates,
            report.skipped_updates,
            report.consecutive_skips,
            report.learning_rates,
        ]
        returned.append(values)
        copies.append([value.clone() for value in values])
        cell.optimizer.param_groups[0]["lr"].mul_(0.5)
    cell.set_sense_scale(torch.tensor(1024.0))

    assert all(
        torch.equal(now, then)
        for values, clones in zip(returned, copies, strict=True)
        for now, then in zip(values, clones, strict=True)
    )
    assert [values[2].item() for values in returned] == [8.0, 16.0, 32.0, 64.0]


def test_the_loss_is_the_unscaled_one():
    """The reported loss is the loss that the network returns, at any loss scale."""
    network, [batch] = Classifier(), labelled_batches(1)
    expected = network(*batch).detach()

    assert torch.equal(build(network, scale_sense=2.0**16)(*batch).loss, expected)


def test_there_is_no_report_before_the_first_update():
    """``last_report`` is ``None`` before the first update."""
    assert build().last_report is None


def test_the_report_holds_output_and_counters():
    """The report is frozen and holds the output and the counters of the last update."""
    cell = build(use_clip_grad=True, local_norm=True)

    output = cell(*labelled_batches(1)[0])

    report = cell.last_report
    assert type(report) is StepReport
    assert report.output is output
    assert report.local_norm_names == NAMES
    assert report.skipped.item() is False
    assert report.skipped.dtype == torch.bool
    counters = (report.applied_updates, report.skipped_updates, report.consecutive_skips)
    assert [counter.item() for counter in counters] == [1, 0, 0]
    assert {(counter.dtype, counter.shape) for counter in counters} == {(torch.int64, ())}
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.output = None


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["numbers", "tensors"])
def test_rates_are_those_this_update_used(kind):
    """Output and report hold the rates that this update used, not the schedule's next rates."""
    network = Classifier()
    groups = [
        {"params": list(network.layers[0].parameters()), "lr": kind(0.5)},
        {"params": list(network.layers[2].parameters()), "lr": kind(0.25)},
    ]
    optimizer = AdamW(groups, fused=True)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    cell = MFTrainOneStepCell(network, optimizer, lr_scheduler=schedule)

    rates = []
    for batch in labelled_batches(2):
        output = cell(*batch)
        rates.append((output.learning_rate.item(), *cell.last_report.learning_rates.tolist()))

    assert rates == [(0.5, 0.5, 0.25), (0.25, 0.25, 0.125)]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_train_and_eval_mode_stay(training):
    """A step leaves every module in the mode, train or eval, that the user set."""
    network = Classifier().train(training)
    network.layers[1].train(not training)
    before = [module.training for module in network.modules()]

    build(network)(*labelled_batches(1)[0])

    assert [module.training for module in network.modules()] == before


def test_the_cell_is_no_module():
    """The cell is not a Module, so a network that stores the cell gets no parameters from it."""
    cell = build()

    assert not isinstance(cell, nn.Module)
    assert copy.copy(cell).network is cell.network


OUTPUTS = {
    "scalar": lambda loss: loss,
    "one element": lambda loss: loss.reshape(1),
    "tuple": lambda loss: (loss, "logits"),
    "list": lambda loss: [loss, None],
    "dict": lambda loss: {"logits": None, "loss": loss},
}


@pytest.mark.parametrize("wrap", OUTPUTS.values(), ids=OUTPUTS)
def test_the_loss_is_found_in_what_the_network_returns(wrap):
    """A network may return its loss alone, first in a tuple or list, or as a dict's ``loss``."""

    class Wrapped(Classifier):
        def forward(self, *arguments):
            return wrap(super().forward(*arguments))

    network, [batch] = Wrapped(), labelled_batches(1)
    expected = Classifier.forward(network, *batch).detach()

    output = build(network)(*batch)

    assert torch.equal(output.loss, expected)
    assert output.loss.shape == ()
