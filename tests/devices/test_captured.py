"""Captured steps on a GPU do what plain steps do; a CPU runs the same steps without a graph."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap import DynamicLossScaleUpdateCell
from mfwrap.callbacks import TrainingStateMonitor
from support.captured_training import numbers, train, training
from support.devices import each_device, occupied, refused_waits
from support.paths import TESTS
from support.small_networks import Classifier, labelled_batches

NAN = float("nan")
FACTORS = [1.0, NAN, 1.0, 1.0, 1.0, NAN, 1.0, 50.0, 1.0, 1.0]
EVERYTHING = {
    "scale_sense": lambda: DynamicLossScaleUpdateCell(2.0**10, 2, 3),
    "use_clip_grad": True,
    "local_norm": True,
}


class WithDropout(Classifier):
    """A `Classifier` that drops a quarter of its hidden values."""

    def __init__(self):
        super().__init__()
        self.layers.insert(2, nn.Dropout(0.25))


def assert_captured(one, device):
    """Check that the steps of a captured cell are replays of a graph, on a GPU."""
    assert (one.cell._MFTrainOneStepCell__captured._graph is not None) == (device == "cuda")


def trained(device, *, capture, factors=FACTORS, **settings):
    """Return the numbers of a training that begins with the same random state each time."""
    one = training(capture=capture, device=device, **EVERYTHING | settings)
    torch.manual_seed(5)
    results = train(one, factors)
    if capture:
        assert_captured(one, device)
    return numbers(one, results)


@each_device
def test_dropout_draws_new_numbers(device):
    """Each replay draws other random numbers, the same as plain steps draw."""
    captured, plain = (
        trained(device, capture=capture, network=WithDropout) for capture in (True, False)
    )

    assert captured == pytest.approx(plain, rel=1e-5, abs=1e-7, nan_ok=True)


@each_device
def test_dropout_differs_from_step_to_step(device):
    """With a rate of 0 and one batch, the losses of replayed steps differ."""
    one = training(capture=True, device=device, network=WithDropout, make_schedule=None)
    one.optimizer.param_groups[0]["lr"] = 0.0
    [batch] = labelled_batches(1)
    inputs, labels = (tensor.to(device) for tensor in batch)
    losses = [one.cell(inputs, labels, torch.ones((), device=device)).loss for _ in range(12)]

    assert_captured(one, device)
    assert len({loss.item() for loss in losses}) > 6


@each_device
def test_autocast(device):
    """Captured steps under bfloat16 autocast are the plain steps under it."""
    with_autocast, dtypes = [], set()
    for capture in (True, False):
        one = training(capture=capture, device=device, **EVERYTHING)
        one.network.layers[0].register_forward_hook(lambda *call: dtypes.add(call[-1].dtype))
        results = []
        for number in range(8):
            with torch.autocast(device, torch.bfloat16):
                results += train(one, [1.0], seed=number)
        if capture:
            assert_captured(one, device)
        with_autocast.append(numbers(one, results))
    captured, plain = with_autocast

    assert dtypes == {torch.bfloat16}
    # A last bit of a float32 weight may decide how bfloat16 rounds it.
    assert captured == pytest.approx(plain, rel=5e-3, abs=1e-3)


@each_device
def test_a_state_that_is_loaded(device):
    """A captured training that goes back to an earlier state repeats its steps."""
    found = {}
    for capture in (True, False):
        one = training(capture=capture, device=device, **EVERYTHING)
        parts = (one.network, one.optimizer, one.schedule, one.cell)
        train(one, [1.0] * 5)
        one.cell.flush()
        states = [clone(part.state_dict()) for part in parts]
        first = numbers(one, train(one, FACTORS, seed=2))
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        again = numbers(one, train(one, FACTORS, seed=2))
        if capture:
            assert_captured(one, device)
        assert again == pytest.approx(first, rel=1e-5, abs=1e-7, nan_ok=True)
        found[capture] = again

    assert found[True] == pytest.approx(found[False], rel=1e-5, abs=1e-7, nan_ok=True)


def clone(value):
    """Copy the tensors of a state."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    return [clone(item) for item in value] if isinstance(value, list) else value


@each_device
def test_more_updates_than_rates_are_computed_ahead(device):
    """Rates of 300 updates, more than the table on the device holds, are those of plain steps."""

    def cycle(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 2.0 ** -(number % 7))

    factors = [NAN if number % 50 == 9 else 1.0 for number in range(300)]
    rates = []
    for capture in (True, False):
        one = training(capture=capture, device=device, make_schedule=cycle, **EVERYTHING)
        rates.append([])
        for number, factor in enumerate(factors):
            train(one, [factor], seed=number)
            rates[-1].append(one.cell.last_report.output.learning_rate)
        if capture:
            assert_captured(one, device)

    assert torch.equal(*(torch.stack(each) for each in rates))


@each_device
def test_a_monitor(device, tmp_path):
    """A monitor that replays steps finds a NaN in a captured step, and leaves its numbers."""
    one = training(capture=True, device=device, **EVERYTHING)
    monitor = TrainingStateMonitor(folder=tmp_path, replay=True)
    state, control = TrainerState(max_steps=len(FACTORS)), TrainerControl()
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    events = {"model": one.network, "optimizer": one.optimizer}
    monitor.on_train_begin(args, state, control, **events)
    results, bad = [], 7
    for number in range(12):
        monitor.on_step_begin(args, state, control, **events)
        results += train(one, [NAN if number == bad else 1.0], seed=number)
        state.global_step += 1
        report = one.cell.last_report
        monitor.on_step_end(
            args, state, control, **events, step_output=report.output, step_report=report
        )
    monitor.on_train_end(args, state, control, **events)
    assert_captured(one, device)
    plain = training(capture=False, device=device, **EVERYTHING)
    expected = []
    for number in range(12):
        expected += train(plain, [NAN if number == bad else 1.0], seed=number)
    lines = (tmp_path / "anomalies.jsonl").read_text(encoding="utf-8").splitlines()
    [record] = [json.loads(line) for line in lines]

    assert (record["step"], record["kind"]) == (bad + 1, "loss_not_finite")
    assert record["skipped"]
    assert numbers(one, results) == pytest.approx(
        numbers(plain, expected), rel=1e-5, abs=1e-7, nan_ok=True
    )


@pytest.mark.cuda
def test_a_replay_is_one_launch_that_waits_for_nothing():
    """A replayed step reads nothing, runs no Python of the network, and returns at once."""
    calls = []

    class Counted(Classifier):
        def forward(self, *arguments):
            calls.append(1)
            return super().forward(*arguments)

    one = training(capture=True, network=Counted, device="cuda", **EVERYTHING)
    train(one, [1.0] * 6)
    before = len(calls)
    [batch] = labelled_batches(1)
    inputs, labels = (tensor.cuda() for tensor in batch)
    factor = torch.ones((), device="cuda")
    with refused_waits("cuda"):
        for _ in range(4):
            one.cell(inputs, labels, factor)
    ahead = []
    for _ in range(3):
        done = occupied()
        one.cell(inputs, labels, factor)
        ahead.append(not done.query())

    assert (before, len(calls)) == (4, 4)
    assert any(ahead)


@pytest.mark.slow
@each_device
def test_a_network_that_reads_is_refused(device):
    """On a GPU, a network that reads its loss on the host is refused in one sentence."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run(
        [sys.executable, "-m", "support.failed_captures", device],
        env=os.environ | {"PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )

    assert (found.stdout != "") == (device == "cuda")
    if device == "cuda":
        assert "must not read a tensor on the host" in found.stdout
        assert len(found.stdout.splitlines()) == 1
