"""A fault in one run is told from a program that is not deterministic."""

import platform

import pytest
import torch

from mfwrap.callbacks.culprit.anomaly_log import Anomaly
from mfwrap.callbacks.culprit.notes import Note
from mfwrap.callbacks.culprit.recomputed import RecomputeJudge, device_name
from mfwrap.callbacks.culprit.replay.module_calls import Value
from mfwrap.callbacks.culprit.replay.recompute import SHARD, WEIGHT, StepRuns

FIRST, LAST = Value("output", "layers.0"), Value("output", "layers.1")
BACK, OF_WEIGHT = Value("gradient of output", "layers.0"), Value(WEIGHT, "layers.0.weight")
BEHIND = Value("gradient of input", "layers.0")
VALUES = (FIRST, LAST, BACK, OF_WEIGHT, BEHIND)
MEASURED = 6


def runs(micro_batch=0, number=MEASURED, **columns):
    """Return the runs of two micro-batches; the columns of one micro-batch have other hashes."""
    names = ("first", "last", "back", "weight", "behind")
    equal = [[7] * number for _ in names]
    other = [columns.get(name, [7] * number) for name in names]
    halves = [equal, equal]
    halves[micro_batch] = other
    return StepRuns([VALUES, VALUES], torch.tensor([*halves[0], *halves[1]]).T)


def judged(*steps):
    """Return what a judge on rank 3 finds in steps, the numbers of which begin with 1."""
    judge = RecomputeJudge(3, "cuda:1")
    found = [one for number, each in enumerate(steps, 1) for one in judge.add(number, each)]
    return [*found, *judge.end()]


def odd(place, number=MEASURED):
    """Return hashes of which one is another."""
    return [8 if run == place else 7 for run in range(number)]


SAME = None
CLEAN = (SAME, SAME)


def test_steps_that_are_the_same():
    """Nothing is found where nothing differs."""
    assert judged(*CLEAN, SAME, SAME) == []


@pytest.mark.parametrize(
    ("columns", "where", "name", "layer", "number"),
    [
        ({"first": [1, 2], "last": [1, 2]}, "activation", "layers.0", "layers.0", 2),
        ({"last": [1, 2]}, "activation", "layers.1", "layers.1", 1),
        ({"back": [1, 2], "weight": [1, 2]}, "gradient", "layers.0", "layers.0", 2),
        ({"weight": [1, 2]}, "gradient", "layers.0.weight", "layers.0", 1),
        ({"behind": [1, 2]}, "gradient", "layers.0", "layers.0", 1),
    ],
)
def test_the_first_tensor_is_named(columns, where, name, layer, number):
    """The first tensor in the order of the step has the record, with all that names the device."""
    (found,) = judged(*CLEAN, runs(1, 2, **columns))

    assert isinstance(found, Anomaly)
    assert (found.where, found.name, found.layer, found.num_groups) == (where, name, layer, number)
    assert (found.step, found.micro_batch, found.ranks, found.device) == (3, 1, (3,), "cuda:1")
    assert found.fingerprints == ("0000000000000001", "0000000000000002")
    assert "it is unknown which of them is right" in found.explanation
    assert found.suggestion.startswith("take cuda:1 of rank 3 out and test it, and resume from")


@pytest.mark.parametrize(
    ("hashes", "words"),
    [
        ([1, 2, 2], "the step itself and its update are wrong"),
        ([2, 1, 2], "its update is right"),
        ([1, 2, 3], "it is unknown which of them is right"),
        ([1, 1, 2, 2], "it is unknown which of them is right"),
    ],
)
def test_most_runs_decide(hashes, words):
    """More than half of the runs tell which one was wrong."""
    (found,) = judged(*CLEAN, runs(0, len(hashes), first=hashes))

    assert found.explanation.endswith(words)
    assert ("resume" in found.suggestion) == ("is right" not in words or "unknown" in words)


def test_what_differs_in_both_measured_steps_is_not_deterministic():
    """It is noted once, with what it makes differ, and never accused."""
    noise = runs(0, first=odd(4), last=odd(4))
    (note,) = judged(noise, noise, runs(0, 2, first=[1, 2]), runs(1, 2, first=[1, 2], back=[1, 2]))

    assert isinstance(note, Note)
    assert (note.step, note.rank, note.cause.name) == (1, 3, "not_deterministic")
    assert note.cause.explanation.startswith(
        "the output of layers.0 differs when a step is run again from the same state, with 1 of"
    )


def test_what_differs_in_several_runs_is_not_deterministic():
    """Two odd runs in one measured step are enough."""
    (note,) = judged(runs(0, weight=[7, 7, 8, 9, 7, 7]), SAME, runs(0, 2, weight=[1, 2]))

    assert note.cause.explanation.startswith("the gradient of layers.0.weight differs when")


def test_a_fault_in_a_measured_step_is_a_fault():
    """One odd run in one of the two measured steps is named when both are known."""
    for steps in ((runs(0, first=odd(0)), SAME), (SAME, runs(0, first=odd(5), last=odd(5)))):
        (found,) = judged(*steps)
        assert isinstance(found, Anomaly)
        assert found.name == "layers.0"


def test_one_measured_step_accuses_nothing():
    """A training that ends after it cannot tell the two apart."""
    (note,) = judged(runs(0, first=odd(0)))

    assert isinstance(note, Note)


def test_nothing_is_computed_from_the_gradient_of_a_weight():
    """What follows it is judged; what follows another value that is not deterministic is not."""
    of_weight, of_output = (runs(0, **{name: odd(1)}) for name in ("weight", "back"))
    fault = {"behind": [1, 2]}
    note, found = judged(of_weight, of_weight, runs(0, 2, weight=[1, 2], **fault))
    only_note = judged(of_output, of_output, runs(0, 2, back=[1, 2], **fault))
    before = judged(of_output, of_output, runs(0, 2, first=[1, 2], back=[1, 2]))

    assert (type(note), found.name) == (Note, "layers.0")
    assert [type(one) for one in only_note] == [Note]
    assert [type(one) for one in before] == [Note, Anomaly]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Value("input", "", 1), "the input of the network"),
        (Value(SHARD, "layers.0.weight"), "the weight layers.0.weight"),
    ],
)
def test_what_the_program_provides_is_no_evidence(value, name):
    """If it differs first, a note says so once, and the rest of the step is not judged."""
    values = [value, *VALUES]
    hashes = torch.tensor([[1, 1, 1, 1, 1, 1], [2, 2, 1, 1, 1, 1]])
    step = StepRuns([values], hashes)
    (note,) = judged(*CLEAN, step, step)

    assert isinstance(note, Note)
    assert (note.step, note.cause.name) == (3, "changed_in_step")
    assert note.cause.explanation.startswith(f"{name} was changed between")


def test_a_device_has_its_host():
    """A CPU is named by its host; that of a GPU also has its model and UUID."""
    assert device_name(torch.device("cpu")) == f"cpu on {platform.node()}"


@pytest.mark.cuda
def test_a_gpu_has_its_uuid():
    """The UUID is the one that torch knows."""
    facts = torch.cuda.get_device_properties(0)

    assert f"({facts.name}, UUID {facts.uuid})" in device_name(torch.device("cuda", 0))
