"""What is recorded about data, gradients and weights agrees with the tensors themselves."""

import re

import pytest
import torch
from torch import nn

from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.callbacks.training_state.fingerprints import FingerprintRecorder
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
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
    settings = TrainingStateSettings(fingerprints=True)
    return FingerprintRecorder(settings, None, folder, (0, 0), model, is_compiled)


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
    from transformers import TrainerControl, TrainerState  # noqa: PLC0415  (only here)

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
