"""What is recorded about data, gradients and weights agrees with the tensors themselves."""

import re

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from mfwrap import MFTrainOneStepCell, Model, TrainOneStepCell, WithLossCell
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.callbacks.training_state.fingerprints import FingerprintRecorder
from mfwrap.records.fingerprints import Fingerprint, read_fingerprints
from mfwrap.records.json_lines import read_json_lines
from mfwrap.tensors.fingerprints import bitwise_hashes, fingerprints
from support.compared_runs import Plan, train_recorded
from support.host_reads import HostReads


class Network(nn.Module):
    """A network with tensors in nested arguments, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, inputs, more=None, *, scale=1.0):
        """Return a loss."""
        return (inputs @ self.used).sum() * scale + more["x"][0].sum()


def recorder_of(folder, model, *, is_compiled):
    """Return a recorder of all steps."""
    return FingerprintRecorder(
        None, folder, model, global_step=0, first_step=0, interval=1, is_compiled=is_compiled
    )


@pytest.fixture
def recorded(tmp_path):
    """Record two steps of `Network`; return it, its inputs and the records."""
    network = Network()
    inputs, extra = torch.randn(4, 3), torch.randn(4)
    recorder = recorder_of(tmp_path, network, is_compiled=False)
    for step in (1, 2):
        recorder.begin_step(step)
        network(inputs, {"x": [extra]}).backward()
        with torch.no_grad():
            network(inputs * 2, {"x": [extra]})  # an evaluation
        recorder.end_forward()
        network(inputs * 3, {"x": [extra]})  # a replay
        recorder.flush()
        recorder.before_update(step, network)
        with torch.no_grad():
            network.used -= 1
        recorder.end_step(step, network, None, None)
    recorder.flush()
    recorder.close()
    records = read_json_lines(tmp_path / "fingerprints.jsonl")
    return network, inputs, extra, read_fingerprints(records, "f.jsonl")


def of(tensor):
    """Return the fingerprint of a tensor."""
    return Fingerprint.from_values(fingerprints([tensor])[0].tolist())


def test_tensors(recorded):
    """Weights are recorded before the first and after each update; no gradient counts as zeros."""
    network, _, _, found = recorded
    steps = found.steps

    assert found.starts[0] == {"used": of(torch.ones(3)), "unused": of(torch.ones(2))}
    assert steps[1].weights["used"] == of(torch.zeros(3))
    assert steps[2].weights["used"] == of(-torch.ones(3))
    assert steps[2].gradients["used"] == of(network.used.grad)
    assert steps[2].gradients["unused"] == of(torch.zeros(2))


def test_inputs(recorded):
    """Only calls in training before the update are recorded, with the names of the inputs."""
    _, inputs, extra, found = recorded
    [micro_batch] = found.steps[1].micro_batches

    assert list(micro_batch.inputs) == ["inputs", "more.x.0"]
    assert [text.partition(" ")[2] for text in micro_batch.inputs.values()] == ["[4, 3]", "[4]"]
    assert len(set(micro_batch.rows)) == 4
    rows = bitwise_hashes(list(inputs))
    whole = bitwise_hashes([rows]).item() % 2**64
    assert micro_batch.inputs["inputs"].startswith(f"{whole:016x}")
    assert extra.shape == (4,)


def test_no_synchronization(tmp_path):
    """Recording a step reads only tensors that are on the host."""
    network = nn.Linear(2, 2)
    recorder = recorder_of(tmp_path, network, is_compiled=False)
    inputs = torch.ones(3, 2)
    with HostReads() as reads:
        recorder.begin_step(1)
        network(inputs).sum().backward()
        recorder.before_update(1, network)
        recorder.end_step(1, network, None, None)
    recorder.close()

    # Of the random state, and of the new host memory for the copies.
    assert reads.names == ["numpy", "numpy"]


def test_interval(tmp_path):
    """Only every n-th step is recorded, and a loop that sends no gradients records the rest."""
    folder = train_recorded(tmp_path, Plan(interval=3))
    found = read_fingerprints(read_json_lines(folder / "fingerprints.jsonl"), "f")

    assert list(found.steps) == [3, 6]
    assert found.steps[3].numbers["learning_rate"] == pytest.approx(0.1)
    assert list(found.steps[6].numbers["local_norm"]) == list(found.shares)


def test_no_folder():
    """Fingerprints need a run folder."""
    monitor = TrainingStateMonitor(fingerprints=True, origin_epochs=1, dataset_size=4)
    message = "`folder` must be given for `fingerprints` in a loop of your own, got None"

    with pytest.raises(ValueError, match=re.escape(message)):
        monitor.on_train_begin(None, TrainerState(), TrainerControl(), model=nn.Linear(1, 1))


def test_without_a_network(tmp_path, caplog):
    """Without a network or with a compiled one, a warning says that inputs are not recorded."""
    for model, reason in ((None, "the loop passes no `model`"), (nn.Linear(1, 1), "is compiled")):
        recorder = recorder_of(tmp_path / str(model), model, is_compiled=model is not None)
        recorder.begin_step(1)
        recorder.end_step(1, None, None, None)
        recorder.close()

        assert reason in caplog.messages[-1]


def cell_loop(folder, *, fused, scale=8.0, loss=None, num_steps=2, **settings):
    """Train with the cell in a loop that sends no event before the update.

    Returns:
        The records, and the scaled gradients of the first step, computed by autograd.
    """
    torch.manual_seed(0)
    network = WithLossCell(nn.Linear(3, 2), nn.MSELoss() if loss is None else loss)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=fused)
    cell = MFTrainOneStepCell(network, optimizer, scale_sense=scale, **settings)
    monitor = TrainingStateMonitor(
        fingerprints=True, folder=folder, origin_epochs=1, dataset_size=8, global_batch_size=4
    )
    state, control = TrainerState(), TrainerControl()
    known = {"model": network, "optimizer": optimizer}
    batch = torch.randn(4, 3), torch.randn(4, 2)
    scaled = torch.autograd.grad(network(*batch) * scale, list(network.parameters()))
    monitor.on_train_begin(None, state, control, **known)
    for _ in range(num_steps):
        monitor.on_step_begin(None, state, control, **known)
        output = cell(*batch)
        state.global_step += 1
        report = {"step_output": output, "step_report": cell.last_report}
        monitor.on_step_end(None, state, control, **report, **known)
    monitor.on_train_end(None, state, control)
    assert not optimizer._optimizer_step_pre_hooks
    records = read_json_lines(folder / "fingerprints.jsonl")
    return read_fingerprints(records, "f").steps, scaled


def test_gradients_of_the_cell(tmp_path):
    """A fused optimizer gets the scaled gradients, before clipping: these are recorded."""
    steps, scaled = cell_loop(tmp_path, fused=True, use_clip_grad=True, max_grad_norm=0.1)

    assert list(steps[1].gradients.values()) == [of(gradient) for gradient in scaled]
    assert not steps[1].are_unscaled
    assert len(steps[1].micro_batches) == 1
    assert steps[2].gradients != steps[1].gradients


def test_gradients_of_an_optimizer_without_a_fused_kernel(tmp_path):
    """The gradients are recorded as the optimizer gets them, and the record says so."""
    steps, scaled = cell_loop(tmp_path, fused=False, use_clip_grad=True, max_grad_norm=0.1)

    assert sum(each.square for each in steps[1].gradients.values()) == pytest.approx(
        0.1**2, rel=1e-4
    )
    assert sum(gradient.square().sum() for gradient in scaled) > 1
    assert steps[1].are_unscaled


def test_gradients_of_skipped_updates(tmp_path):
    """A skipped update has gradients in the record if the kernel skips it, and otherwise none."""

    def infinite(outputs, _labels):
        return (outputs * torch.inf).sum()

    fused, _ = cell_loop(tmp_path / "a", fused=True, loss=infinite)
    other, _ = cell_loop(tmp_path / "b", fused=False, loss=infinite)

    assert [len(each.gradients) for each in fused.values()] == [2, 2]
    assert [each.gradients for each in other.values()] == [None, None]
    assert [each.numbers["skipped"] for each in other.values()] == [True, True]


def test_gradients_are_recorded_once(tmp_path):
    """The gradients that the loop sends are those before its clipping, and they are kept."""
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    recorder = recorder_of(tmp_path, network, is_compiled=False)
    recorder.begin_step(1, optimizer)
    recorder.before_update(1, network)  # no gradients yet: nothing to record
    network(torch.ones(1, 2)).sum().backward()
    expected = of(network.weight.grad)
    recorder.before_update(1, network)
    network.weight.grad.mul_(0.5)
    optimizer.step()
    recorder.end_step(1, network, None, None)
    recorder.flush()
    recorder.close()
    found = read_fingerprints(read_json_lines(tmp_path / "fingerprints.jsonl"), "f").steps[1]

    assert found.gradients["weight"] == expected
    assert not found.are_unscaled


def test_gradients_of_model(tmp_path):
    """`Model` trains with gradients in the record, by MindSpore's cells and by mfwrap's."""
    for name in ("plain", "mfwrap"):
        torch.manual_seed(0)
        network = WithLossCell(nn.Linear(3, 2), nn.MSELoss())
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, fused=True)
        kind = MFTrainOneStepCell if name == "mfwrap" else TrainOneStepCell
        monitor = TrainingStateMonitor(fingerprints=True, folder=tmp_path / name)
        batch = torch.randn(4, 3), torch.randn(4, 2)
        gradients = torch.autograd.grad(network(*batch), list(network.parameters()))
        Model(kind(network, optimizer)).train(1, [batch, batch], [monitor])
        records = read_json_lines(tmp_path / name / "fingerprints.jsonl")
        steps = read_fingerprints(records, "f").steps

        assert list(steps) == [1, 2]
        assert list(steps[1].gradients.values()) == [of(each) for each in gradients]
