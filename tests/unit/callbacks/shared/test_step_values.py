"""The values of a step, packed on the device and read on the host."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap import LocalNormStepOutput, MFTrainOneStepCell, StepOutput
from mfwrap.callbacks.shared.step_values import (
    StepNumbers,
    StepValues,
    numbers_of,
    pack,
    skip_flag,
    values_of_logs,
)
from support.host_reads import HostReads
from support.monitored_loop import output
from support.small_networks import Classifier, labelled_batches

FLOAT32 = st.floats(width=32, allow_nan=False)


@given(
    loss=FLOAT32,
    overflow=st.booleans(),
    norm=st.none() | FLOAT32,
    skipped=st.none() | st.booleans(),
    count=st.none() | st.integers(0, 1000),
    scale=st.none() | FLOAT32,
)
def test_unpacking_gives_back_what_was_packed(loss, overflow, norm, skipped, count, scale):
    """Unpacked values equal the packed values: flags as bools, counts as ints, unknowns as None."""
    extras = {"skipped": skipped, "consecutive_skips": count, "scale_before": scale}
    tensors = {n: None if value is None else torch.tensor(value) for n, value in extras.items()}
    packed = pack(output(loss, overflow=overflow, norm=norm), **tensors)
    values = packed.unpack(packed.tensor.tolist())

    assert values == StepValues(
        loss=loss,
        overflow=overflow,
        loss_scale=131072.0,
        learning_rate=torch.tensor(0.1).item(),
        global_norm=norm,
        **extras,
    )
    for name, value in extras.items():
        assert type(getattr(values, name)) is type(value)


def test_packing_copies_without_reading():
    """Packing makes no host read, and later changes of the output do not change the copy."""
    step_output = output(2.0)
    with HostReads() as reads:
        packed = pack(step_output)
    step_output.loss.fill_(9.0)

    assert reads.reads == []
    assert packed.tensor.dtype == torch.float32
    assert packed.unpack(packed.tensor.tolist()).loss == 2.0


def test_a_loss_of_several_elements_is_averaged():
    """A tensor output is the loss: its elements are averaged, in any dtype and with gradient."""
    packed = pack(torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True))

    assert packed.names == ("loss",)
    assert packed.unpack(packed.tensor.tolist()) == StepValues(loss=1.5)


def test_local_norms_are_not_packed():
    """Only the fields of StepOutput are packed, also if the output has local norms."""
    norms = {"local_norm": torch.ones(3), "size": torch.ones(3, dtype=torch.int64)}
    packed = pack(LocalNormStepOutput(**output()._asdict(), **norms))

    assert packed.names == StepOutput._fields


@pytest.mark.parametrize(
    "wrong", [(1.0, False), {"loss": 1.0}, 1.0, None], ids=["tuple", "dict", "float", "none"]
)
def test_a_wrong_output(wrong):
    """An output that is neither a tensor nor a named tuple raises an error that names its type."""
    with pytest.raises(TypeError, match=rf"`step_output` must be .*, got {type(wrong).__name__}"):
        pack(wrong)


def test_skip_flag():
    """The skip flag comes from the report, else from the overflow; for a loss alone it is None."""
    network = Classifier()
    cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1))
    (batch,) = labelled_batches(1)
    step_output = cell(*batch, math.nan)

    assert skip_flag(step_output, cell.last_report) is cell.last_report.skipped
    assert skip_flag(step_output, None) is step_output.overflow
    assert step_output.overflow.item()
    assert skip_flag(step_output.loss, None) is None


def test_values_of_the_trainers_log():
    """An entry with a loss gives its numbers; an entry without a loss gives None."""
    logs = {"loss": 2, "learning_rate": 1e-3, "grad_norm": 0.5, "epoch": 1.0}

    assert values_of_logs(logs) == StepValues(loss=2.0, learning_rate=1e-3, global_norm=0.5)
    assert values_of_logs({"loss": 2.0, "grad_norm": "nan"}) == StepValues(loss=2.0)
    assert values_of_logs({"eval_loss": 2.0, "learning_rate": 1e-3}) is None


def test_record_of_known_values():
    """A record has the known values under their names in the step's output and report."""
    values = StepValues(loss=1.0, overflow=False, skipped=True, consecutive_skips=3)

    assert values.to_record() == {
        "loss": 1.0,
        "overflow": False,
        "skipped": True,
        "consecutive_skips": 3,
    }


def test_numbers_for_the_judgment():
    """The loss scale is that of the step or, if unknown, the scale after the previous step."""
    values = StepValues(
        loss=1.0,
        overflow=True,
        global_norm=2.0,
        skipped=True,
        consecutive_skips=3,
        scale_before=8.0,
    )
    expected = StepNumbers(
        step=5,
        loss=1.0,
        overflow=True,
        global_norm=2.0,
        loss_scale=8.0,
        skipped=True,
        consecutive_skips=3,
    )
    unknown = dataclasses.replace(values, scale_before=None)

    assert numbers_of(5, values, last_scale=4.0) == expected
    assert numbers_of(5, unknown, last_scale=4.0).loss_scale == 4.0
    assert numbers_of(5, unknown).loss_scale is None


def test_unknown_numbers_do_not_accuse():
    """If only the loss is known, the step counts as an applied update without overflow."""
    numbers = numbers_of(1, StepValues(loss=1.0))

    assert (numbers.overflow, numbers.skipped, numbers.consecutive_skips) == (False, False, 0)
