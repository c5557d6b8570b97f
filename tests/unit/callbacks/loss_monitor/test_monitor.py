"""The loss monitor in a hand-written loop that sends transformers' events."""

import logging
import math
import re

import pytest
import torch

from mfwrap import MFTrainOneStepCell
from mfwrap.callbacks.loss_monitor import monitor
from support.monitored_loop import Loop, output, records, shown
from support.small_networks import Classifier, labelled_batches

NAN = math.nan


def test_record_of_mindformers(caplog):
    """The monitor prints the same text as MindFormers did for the same numbers."""
    loop = Loop()
    loop.send("on_train_begin")
    loop.send("on_epoch_begin")
    loop.step(output(11.0))
    loop.step(output(10.5), seconds=4 / 52.1085)
    loop.send("on_train_end")
    last_two = [(r.name, r.levelname, r.getMessage()) for r in caplog.records[-2:]]

    assert last_two == [
        (
            "mfwrap.callbacks.loss_monitor",
            "INFO",
            (
                "{ Epoch:[  1/  2], step:[    2/    3], loss:[10.500/10.750], "
                "per_step_time: 76ms, lr: 0.1, overflow cond: False, loss_scale: 131072.0, "
                "global_norm: [3.]"
            ),
        ),
        (
            "mfwrap.callbacks.loss_monitor",
            "INFO",
            (
                "  33.3% |████████████████                                  | "
                "52.10850 samples/s/p  0:00:00 }"
            ),
        ),
    ]


def test_a_record_that_the_level_hides_is_not_formatted(caplog, monkeypatch):
    """With a level above INFO nothing is formatted; from then on, records are printed again."""
    formatted = []
    monkeypatch.setattr(
        monitor, "record_lines", lambda record: formatted.append(record) or ("a line",)
    )
    loop = Loop()
    loop.send("on_train_begin")
    with caplog.at_level(logging.WARNING, logger="mfwrap.callbacks"):
        for _ in range(3):
            loop.step(output())
    hidden = len(formatted)
    loop.send("on_train_end")

    assert (hidden, len(formatted)) == (0, 1)


def test_a_step_is_printed_at_the_end_of_the_next(caplog):
    """A step is printed at the end of the next step."""
    loop = Loop()
    loop.send("on_train_begin")
    counts = []
    for _ in range(3):
        loop.step(output())
        counts.append(len(records(caplog)))
    loop.send("on_train_end")

    assert [*counts, len(records(caplog))] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "event", ["on_log", "on_evaluate", "on_save", "on_epoch_end", "on_train_end"]
)
def test_events_that_flush(event, caplog):
    """Each event that synchronizes anyway prints the pending step, once."""
    loop = Loop()
    loop.send("on_train_begin")
    loop.step(output(2.5))
    loop.send(event, logs={"loss": 7.0})
    loop.send("on_train_end")

    assert shown(caplog, r"loss:\[ *([^/]+)/") == ["2.500"]


def test_a_record_is_of_its_own_step(caplog):
    """A record has the numbers, position and time of its own step, although it is printed later."""
    loop = Loop(max_steps=4)
    loop.send("on_train_begin")
    for number in range(1, 5):
        loop.step(
            output(float(number), overflow=number == 2, rate=number / 10, norm=number * 2.0),
            seconds=number / 4,
        )
    loop.send("on_train_end")

    assert shown(caplog, r"Epoch:(.*?), loss") == [
        "[  1/  2], step:[    1/    2]",
        "[  1/  2], step:[    2/    2]",
        "[  2/  2], step:[    1/    2]",
        "[  2/  2], step:[    2/    2]",
    ]
    assert shown(caplog, r"per_step_time: (\d+)ms") == ["250", "500", "750", "1000"]
    assert shown(caplog, r"lr: (\S+),") == ["0.1", "0.2", "0.3", "0.4"]
    assert shown(caplog, r"overflow cond: (\w+)") == ["False", "True", "False", "False"]
    assert shown(caplog, r"global_norm: (.*)") == ["[2.]", "[4.]", "[6.]", "[8.]"]


def test_values_are_those_of_the_step_end(caplog):
    """Tensors that change after the step do not change its record."""
    loop, values = Loop(), output(2.0)
    loop.send("on_train_begin")
    loop.step(values)
    values.loss.fill_(9.0)
    loop.send("on_train_end")

    assert shown(caplog, r"loss:\[ *([^/]+)/") == ["2.000"]


@pytest.mark.parametrize("epoch_events", [True, False])
def test_mean_over_the_steps_of_the_epoch(epoch_events, caplog):
    """The mean covers the steps of the epoch, with or without epoch events."""
    loop = Loop()
    loop.send("on_train_begin")
    for number, loss in enumerate((1.0, 2.0, 6.0, 10.0, 20.0, 60.0)):
        if epoch_events and number % 3 == 0:
            loop.send("on_epoch_begin")
        loop.step(output(loss))
    loop.send("on_train_end")

    assert shown(caplog, r"loss:\[[^/]+/(\S+)\]") == [
        *("1.000", "1.500", "3.000"),
        *("10.000", "15.000", "30.000"),
    ]


def test_a_pass_over_the_data_begins_a_mean(caplog):
    """If the length of an epoch is unknown, a new pass over the data begins a new mean."""
    loop = Loop(max_steps=6, epochs=1)
    loop.send("on_train_begin")
    for loss in (1.0, 2.0, 3.0):
        loop.send("on_epoch_begin")
        loop.step(output(loss))
    loop.send("on_train_end")

    assert shown(caplog, r"loss:\[[^/]+/(\S+)\]") == ["1.000", "2.000", "3.000"]


def test_losses_that_are_not_finite(caplog):
    """Non-finite losses are shown and counted, and left out of the mean."""
    loop = Loop(epochs=1)
    loop.send("on_train_begin")
    for loss in (NAN, 2.0, math.inf, 4.0):
        loop.step(output(loss))
    loop.send("on_train_end")

    assert shown(caplog, r"loss:\[ *(.*?)\],") == [
        *("nan/  nan", "2.000/2.000", "inf/2.000", "4.000/3.000")
    ]
    assert loop.monitor.num_losses_not_finite == 2


def test_a_second_run_begins_anew(caplog):
    """A second run starts with an empty mean."""
    loop = Loop()
    for loss in (100.0, 1.0):
        loop.state.global_step = 0
        loop.send("on_train_begin")
        loop.step(output(loss))
    loop.send("on_train_end")

    assert shown(caplog, r"loss:\[ *(.*?)\]") == ["1.000/1.000"]


def test_only_the_main_process_prints(caplog):
    """Other processes read, log and write nothing."""
    loop = Loop()
    loop.state.is_world_process_zero = False
    for event in ("on_train_begin", "on_epoch_begin"):
        loop.send(event)
    loop.step(output())
    for event in ("on_log", "on_save", "on_evaluate", "on_epoch_end", "on_train_end"):
        loop.send(event, logs={"loss": 1.0})

    assert records(caplog) == []
    assert loop.monitor.state()["attributes"] == {"saved_mean": None}


def test_no_norm_without_clipping(caplog):
    """A step without a norm is shown with the norm None."""
    loop = Loop()
    loop.send("on_train_begin")
    loop.step(output(norm=None))
    loop.send("on_train_end")

    assert shown(caplog, r"global_norm: (.*)") == ["None"]


def test_a_loss_alone(caplog):
    """If the output is a loss alone, its mean is shown; other values are unavailable."""
    loop = Loop()
    loop.send("on_train_begin")
    loop.step(torch.tensor([1.0, 2.0], requires_grad=True))
    loop.send("on_train_end")

    assert records(caplog) == [
        (
            "{ Epoch:[  1/  2], step:[    1/    3], loss:[1.500/1.500], per_step_time: 1000ms, "
            "overflow cond: unavailable, loss_scale: unavailable, global_norm: None"
        )
    ]


def test_learning_rates_of_several_groups(caplog):
    """Each named group of the optimizer has its own line, as in MindFormers."""
    network = Classifier()
    rates = {"default": (0.5, network.layers[0]), "layers.2": (0.25, network.layers[2])}
    groups = [
        {"name": name, "params": [parameter], "lr": rate}
        for name, (rate, layer) in rates.items()
        for parameter in layer.parameters()
    ]
    cell = MFTrainOneStepCell(network, torch.optim.SGD(groups))
    loop = Loop()
    loop.send("on_train_begin")
    for batch in labelled_batches(2):
        loop.step(cell(*batch), step_report=cell.last_report)
    loop.send("on_train_end")
    lines = [record.getMessage() for record in caplog.records if "_lr: " in record.getMessage()]

    assert shown(caplog, r"lr: ([\d.]+)") == ["0.5", "0.5"]
    assert lines == 2 * [
        "default_lr: 5.000000e-01, equal to `lr:` above.",
        "group_0_lr: 2.500000e-01, group_0_params: layers.2",
    ]


@pytest.mark.parametrize(
    "wrong", [(1.0, False), {"loss": 1.0}, 1.0], ids=["tuple", "dict", "float"]
)
def test_a_wrong_output(wrong):
    """An output of another type raises a TypeError, even a tuple that starts with a loss."""
    loop = Loop()
    with pytest.raises(TypeError, match="`step_output` must be a StepOutput"):
        loop.step(wrong)


def test_a_batch_that_grows(caplog):
    """Throughput and FLOPs are those of the updates since the last record; epochs are not shown."""
    loop = Loop(batch_size=8, flops_per_step=8e12, peak_tflops=16.0, per_print_times=2)
    loop.monitor.take_samples([0, 2, 4, 8, 16, 24, 32].__getitem__)
    loop.send("on_train_begin")
    for _ in range(6):
        loop.step(output(), seconds=2.0)
    loop.send("on_train_end")

    rates = [re.search(r"([\d.]+) samples/s/p", r.getMessage()) for r in caplog.records]
    # Two updates have 4, 12 and 16 samples, in 4 seconds.
    assert [float(found.group(1)) for found in rates if found] == [1.0, 3.0, 4.0]
    # 8e12 FLOPs are those of 8 samples.
    assert shown(caplog, r"train_throughput_per_npu: ([\d.]+)T") == ["1.000", "3.000", "4.000"]
    assert shown(caplog, r"(Epoch:\[.*\], step:\[.*?\])") == [
        f"Epoch:[  1/  1], step:[{step:5d}/    6]" for step in (2, 4, 6)
    ]


def test_counted_flops_of_a_batch_that_grows(caplog):
    """The FLOPs of the first update are those of its samples."""
    loop = Loop(batch_size=8, count_flops=True)
    loop.monitor.take_samples([0, 2, 4, 12, 20, 28, 36].__getitem__)
    loop.send("on_train_begin")
    for _ in range(3):
        loop.send("on_step_begin")
        torch.ones(1000, 1000) @ torch.ones(1000, 500)
        loop.clock.now += 1.0
        loop.state.global_step += 1
        loop.send("on_step_end", step_output=output())
    loop.send("on_train_end")

    # A product of these matrices is 2 * 1000 * 1000 * 500 operations: 0.001 TFLOP.
    assert shown(caplog, r"train_throughput_per_npu: ([\d.]+)T") == ["0.001", "0.001", "0.004"]
