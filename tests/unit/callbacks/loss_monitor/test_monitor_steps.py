"""The loss monitor with real training steps."""

import math

import pytest
import torch
from transformers import TrainingArguments

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell, StepOutput
from support.host_reads import HostReads
from support.monitored_loop import Loop, output, records, shown
from support.small_networks import Classifier, labelled_batches

NAN = math.nan


def real_cell(**settings) -> MFTrainOneStepCell:
    """Return a cell whose step does not synchronize with the device."""
    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
    scale = DynamicLossScaleUpdateCell(2.0**16, 2, 1000)
    return MFTrainOneStepCell(network, optimizer, scale_sense=scale, **settings)


def trainer_arguments() -> TrainingArguments:
    """Return Trainer arguments, which transformers' own callbacks need."""
    return TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], max_steps=4)


def test_a_report_instead_of_an_output(caplog):
    """A loop may pass only the report: the output is taken from it."""
    cell = real_cell()
    cell(*labelled_batches(1)[0])
    loop = Loop()
    loop.send("on_train_begin")
    loop.step(None, step_report=cell.last_report)
    loop.send("on_train_end")

    assert shown(caplog, r"loss:\[ *([^/]+)/") == [f"{cell.last_report.output.loss.item():.3f}"]


@pytest.mark.parametrize("local_norm", [False, True])
def test_real_steps(local_norm, caplog):
    """The printed values equal those of the outputs, also for a step that overflows."""
    cell = real_cell(use_clip_grad=True, local_norm=local_norm)
    loop, outputs = Loop(args=trainer_arguments(), max_steps=4, epochs=1), []
    loop.send("on_train_begin")
    for number, batch in enumerate(labelled_batches(4)):
        outputs.append(cell(*batch, NAN if number == 2 else 1.0))
        loop.step(outputs[-1], step_report=cell.last_report)
    loop.send("on_train_end")

    assert shown(caplog, r"loss:\[ *([^/]+)/") == [f"{o.loss.item():.3f}" for o in outputs]
    assert shown(caplog, r"overflow cond: (\w+)") == ["False", "False", "True", "False"]
    assert shown(caplog, r"loss_scale: (\S+),") == ["65536.0", "65536.0", "32768.0", "32768.0"]
    assert shown(caplog, r"lr: (\S+),") == ["0.01"] * 4
    assert shown(caplog, r"global_norm: (.*)") == [
        str(o.global_norm.reshape(1).numpy()) for o in outputs
    ]


def test_no_read_on_the_host():
    """Printing every step reads no tensor on the host."""
    cell = real_cell(use_clip_grad=True, local_norm=True)
    loop = Loop(max_steps=6, epochs=1)
    loop.send("on_train_begin")
    first, *others = labelled_batches(6)
    # The first step is not counted: it allocates the pinned host memory that all steps use.
    loop.step(cell(*first), step_report=cell.last_report)
    with HostReads() as reads:
        for batch in others:
            loop.step(cell(*batch), step_report=cell.last_report)
        loop.send("on_train_end")

    assert reads.reads == []


@pytest.mark.cuda
def test_no_wait_for_the_device(caplog):
    """`on_step_end` does not synchronize with the device."""
    device = torch.device("cuda")
    values = StepOutput(*(v.to(device) for v in output()))
    loop = Loop()
    loop.send("on_train_begin")
    loop.step(values)
    loop.send("on_log")
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(50_000_000)
        loop.step(values)
        values.loss.fill_(9.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(records(caplog)) == 1

    loop.send("on_train_end")
    assert shown(caplog, r"loss:\[ *([^/]+)/") == ["1.000", "1.000"]
