"""What the monitors measure and repeat on a device."""

import json

import pytest
import torch
from torch import nn

from mfwrap import MFTrainOneStepCell
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.callbacks.culprit.replay.recorder import RandomState, StepRecorder
from mfwrap.callbacks.culprit.replay.replay import Origin, replay_step
from mfwrap.callbacks.samples.undisturbed import undisturbed
from mfwrap.collectives import Section, section_clock
from support.device_runs import LossNetwork, Rows, everything, small_trainer, stacked
from support.devices import each_device
from support.small_networks import Classifier, labelled_batches


@each_device
def test_random_states(device):
    """The states of both generators are read, compared and restored."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    first = RandomState.now(place)
    drawn = torch.rand(5, device=device), torch.rand(3)
    second = RandomState.now(place)
    first.restore(place)

    assert (first.device is None) == (device == "cpu")
    assert second.differs_from(first)
    assert not RandomState.now(place).differs_from(first)
    assert torch.equal(torch.rand(5, device=device), drawn[0])
    assert torch.equal(torch.rand(3), drawn[1])


@pytest.mark.cuda
def test_a_number_that_only_the_device_draws_makes_states_differ():
    """A state on the device differs although that of the host is the same."""
    place = torch.device("cuda", 0)
    before = RandomState.now(place)
    torch.rand(5, device=place)
    after = RandomState.now(place)

    assert torch.equal(before.host, after.host)
    assert after.differs_from(before)


@each_device
def test_samples_leave_the_random_states(device):
    """What a sampled network draws on a device is not missing in the training."""
    network = nn.Linear(2, 2, device=device)
    torch.manual_seed(0)
    expected = torch.rand(5, device=device), torch.rand(3)
    torch.manual_seed(0)
    with undisturbed(network):
        torch.manual_seed(7)
        torch.rand(9, device=device)

    assert torch.equal(torch.rand(5, device=device), expected[0])
    assert torch.equal(torch.rand(3), expected[1])


class Unlucky(LossNetwork):
    """A `LossNetwork` that returns NaN in the call in which chance has dropped one hidden value.

    So a replay finds the NaN only if it draws the same mask.
    """

    def __init__(self):
        super().__init__()
        self.masks = []
        self.layers[2].register_forward_hook(self._note)
        self.bad = None

    def _note(self, _module, _inputs, output):
        self.masks.append((output == 0).detach().clone())
        if self.bad is None:
            return output
        same = torch.equal(self.masks[-1], self.masks[self.bad])
        return output * float("nan") if same else output


@each_device
def test_a_replay_draws_the_same_masks(device):
    """Dropout drops the same values in a replay, and the generators are as before."""
    network = Unlucky().to(device)
    recorder = StepRecorder(network)
    batch = {name: tensor.to(device) for name, tensor in stacked(list(Rows(8))).items()}
    for _ in range(3):
        network(**batch)["loss"].backward()
    recorder.end_step()
    torch.rand(77, device=device)
    state = RandomState.now(recorder.device)
    clean = replay_step(recorder, 1.0)
    after = RandomState.now(recorder.device)
    network.bad = 1
    found = replay_step(recorder, 1.0)

    assert recorder.device.type == device
    assert clean is None
    assert not after.differs_from(state)
    masks = network.masks
    assert all(torch.equal(masks[number], masks[number + 3]) for number in range(3))
    assert not torch.equal(masks[0], masks[1])
    assert found == Origin("activation", "layers.2", 1)


@each_device
def test_a_replay_repeats_autocast(device):
    """A call under bfloat16 autocast is replayed under it."""
    network, dtypes = LossNetwork().to(device), []
    network.layers[0].register_forward_hook(lambda *call: dtypes.append(call[-1].dtype))
    recorder = StepRecorder(network)
    batch = {name: tensor.to(device) for name, tensor in stacked(list(Rows(8))).items()}
    with torch.autocast(device, torch.bfloat16):
        network(**batch)
    recorder.end_step()

    assert replay_step(recorder, 1.0) is None
    assert dtypes == [torch.bfloat16] * 2


@pytest.mark.cuda
def test_the_times_of_sections_are_those_of_the_device():
    """Work of the forward counts as forward, although the host queues it at once."""
    network = Classifier().cuda()
    cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1, fused=True))
    [(inputs, labels)] = labelled_batches(1)
    inputs, labels = inputs.cuda(), labels.cuda()
    reader = nn.Module()
    section_clock.start_for(reader)
    try:
        for _ in range(3):
            cell(inputs, labels)
        network.layers[0].register_forward_hook(lambda *_: torch.cuda._sleep(200_000_000))
        cell(inputs, labels)
        sections = cell.last_report.sections
        early = sections.seconds()
        torch.cuda.synchronize()
        times = sections.seconds()
    finally:
        section_clock.stop_for(reader)

    assert early is None
    assert max(range(len(times)), key=times.__getitem__) == Section.FORWARD_BACKWARD
    # Other processes may use the GPU in the meantime.
    assert times[Section.FORWARD_BACKWARD] > 0.5 * sum(times)
    assert times[Section.UPDATE] > 0


@each_device
def test_fingerprints_name_the_device(device, tmp_path):
    """Two runs on one device have the same fingerprints, which name the device."""
    found = []
    for name in ("first", "second"):
        folder = tmp_path / name
        monitor = TrainingStateMonitor(folder=folder, fingerprints=True)
        small_trainer(folder, device, callbacks=[monitor], extras=everything(), max_steps=6).train()
        text = (folder / "fingerprints.jsonl").read_text(encoding="utf-8")
        found.append([json.loads(line) for line in text.splitlines()])
    [facts, *steps] = found[0]
    expected = torch.cuda.get_device_name() if device == "cuda" else "cpu"

    assert facts["run"]["device"] == expected
    assert len(steps) >= 6
    assert found[0] == found[1]
