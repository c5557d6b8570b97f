"""A step's outputs have the names, order, shapes and dtypes in docs/contract.md."""

import dataclasses

import pytest
import torch
from torch import nn

from mfwrap import (
    DynamicLossScaleUpdateCell,
    LocalNormStepOutput,
    MFTrainOneStepCell,
    StepOutput,
    StepReport,
    WithLossCell,
)
from mfwrap.outputs import LossScaleStepOutput, named_output

FIVE = ("loss", "overflow", "loss_scale", "learning_rate", "global_norm")
SEVEN = (*FIVE, "local_norm", "size")
FLOAT, FLAG, COUNT = ((), torch.float32), ((), torch.bool), ((), torch.int64)
KINDS = {
    "loss": FLOAT,
    "overflow": FLAG,
    "loss_scale": FLOAT,
    "learning_rate": FLOAT,
    "global_norm": FLOAT,
    "local_norm": ((2,), torch.float32),
    "size": ((2,), torch.int64),
}


def cell_of(**settings):
    """Return a cell on a linear network with two parameters, one optimizer group each."""
    network = WithLossCell(nn.Linear(3, 1), nn.MSELoss())
    weight, bias = network.parameters()
    groups = [{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.2}]
    settings.setdefault("scale_sense", 4.0)
    return MFTrainOneStepCell(network, torch.optim.SGD(groups), **settings)


def batch():
    """Return inputs and labels of four samples."""
    return torch.randn(4, 3), torch.randn(4, 1)


@pytest.mark.parametrize(
    ("kind", "names"),
    [(StepOutput, FIVE), (LocalNormStepOutput, SEVEN), (LossScaleStepOutput, FIVE[:3])],
)
def test_tuples_have_the_fields_in_mindformers_order(kind, names):
    """Outputs unpack like MindFormers' tuples of 5 and 7 values and MindSpore's tuple of 3."""
    assert kind._fields == names
    assert tuple(kind(*names)) == names


@pytest.mark.parametrize(("local_norm", "kind"), [(False, StepOutput), (True, LocalNormStepOutput)])
def test_the_kind_of_tuple_tells_whether_there_are_local_norms(local_norm, kind):
    """The output is a `LocalNormStepOutput` with local norms, and a `StepOutput` without."""
    assert type(cell_of(local_norm=local_norm)(*batch())) is kind


def test_values_have_the_contracts_shapes_and_types_and_no_graph():
    """Every value is a detached tensor with the shape and dtype in docs/contract.md."""
    output = cell_of(local_norm=True, use_clip_grad=True)(*batch())

    found = {name: (tuple(v.shape), v.dtype) for name, v in output._asdict().items()}
    assert found == KINDS
    assert not any(value.requires_grad for value in output)


def test_global_norm_is_none_without_clipping():
    """Without clipping the global norm is None, as in MindFormers."""
    assert cell_of()(*batch()).global_norm is None


def test_the_returned_scale_is_a_copy():
    """Later changes of the live scale do not change the loss scale in an output."""
    cell = cell_of(scale_sense=DynamicLossScaleUpdateCell(4.0, 2, 1))
    output = cell(*batch())
    cell(*batch())

    assert output.loss_scale == 8
    assert cell.scale_sense == 16


def test_a_report_holds_tensors_and_the_output_itself():
    """A report's values have the expected shapes and dtypes; ``output`` is the cell's output."""
    cell = cell_of(local_norm=True)
    output = cell(*batch())
    report = cell.last_report

    assert report.output is output
    for name, kind in {
        "skipped": FLAG,
        "applied_updates": COUNT,
        "skipped_updates": COUNT,
        "consecutive_skips": COUNT,
        "learning_rates": ((2,), torch.float32),
    }.items():
        value = getattr(report, name)
        assert (tuple(value.shape), value.dtype) == kind, name
    assert torch.equal(report.learning_rates, torch.tensor([0.1, 0.2]))
    assert report.local_norm_names == ("backbone.weight", "backbone.bias")


def test_a_report_keeps_its_counters():
    """The counters of an earlier report do not change with later steps."""
    cell = cell_of()
    cell(*batch())
    first = cell.last_report
    cell(*batch())

    assert (first.applied_updates, cell.last_report.applied_updates) == (1, 2)


def test_a_report_is_frozen_and_built_by_keyword():
    """A report cannot be changed, and its constructor takes only keywords."""
    cell = cell_of()
    cell(*batch())

    with pytest.raises(dataclasses.FrozenInstanceError):
        cell.last_report.skipped = None
    with pytest.raises(TypeError, match="positional"):
        StepReport(None)


LOSS, FLAG_SET, SCALE = torch.tensor([2.0, 4.0]), torch.tensor([True]), torch.tensor([8.0])


@pytest.mark.parametrize("size", [3, 4, 5, 7])
def test_a_plain_tuple_is_named_as_mindformers_reads_it(size):
    """A cell's plain tuple gets names by its length; each value except the loss has shape ()."""
    values = (LOSS, FLAG_SET, SCALE, 0.5, torch.tensor([3.0]), (torch.ones(2),), (2, 2))[:size]
    named = named_output(values)

    assert isinstance(named, LossScaleStepOutput if size == 3 else StepOutput)
    assert named.loss is LOSS
    expected = dict(zip(FIVE[1:], (True, 8.0, 0.5, 3.0), strict=True))
    known = {name: v for name, v in named._asdict().items() if name != "loss" and v is not None}
    assert {name: value.item() for name, value in known.items()} == dict(
        list(expected.items())[: size - 1]
    )
    assert all(value.shape == () for value in known.values())


def test_numbers_in_a_plain_tuple():
    """A bool and numbers become tensors; values that are not one number become None."""
    named = named_output((LOSS, False, 8, (0.1, 0.2), None))

    assert (named.overflow.dtype, named.overflow.item()) == (torch.bool, False)
    assert (named.loss_scale.dtype, named.loss_scale.item()) == (torch.float32, 8.0)
    assert (named.learning_rate, named.global_norm) == (None, None)


@pytest.mark.parametrize(
    "outputs",
    [
        LOSS,
        None,
        (),
        (LOSS, FLAG_SET),
        (LOSS, FLAG_SET, SCALE, SCALE, SCALE, SCALE),
        (LOSS, torch.ones(4, 3), torch.ones(4)),
        (LOSS, torch.tensor(0.5), torch.tensor(0.25)),
        (LOSS, FLAG_SET, torch.ones(4, 3)),
        (2.0, True, 8.0),
        LossScaleStepOutput(LOSS, FLAG_SET, SCALE),
    ],
)
def test_what_is_no_steps_plain_tuple_stays_what_it_is(outputs):
    """Outputs that are not the plain tuple of a training cell are returned unchanged."""
    assert named_output(outputs) is outputs
