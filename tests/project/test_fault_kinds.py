"""Check what the kinds of planted faults do that other tests do not see in the series of a run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from support.faults.architecture import LENGTH, Architecture, Rows, collated
from support.faults.faults import NETWORK_PARTS, Course, Fault, How, Kind, Moment, What, Where
from support.faults.judged_networks import JUDGED_NETWORKS
from support.faults.networks import new_network, target_weights, weight_groups
from support.faults.parts import plant_in_part
from support.faults.planting import plant_in_batch
from support.faults.training import NUM_MICRO_BATCHES, Case, Training
from support.faults.updates import KeptGradients, PlantedUpdates

# peft uses `is_gradient_checkpointing`, which transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

PARTS = [
    (name, what)
    for name, architecture in JUDGED_NETWORKS.items()
    for what, part in NETWORK_PARTS.items()
    if part in architecture.parts
]
HOWS = {
    What.ATTENTION_MASK: How.MISSING,
    What.POSITIONS: How.CONSTANT,
    What.RESIDUAL: How.MISSING,
    What.TIED_WEIGHT: How.STALE,
    What.ROUTING: How.CONSTANT,
    What.NORM: How.MISSING,
    What.LAYER: How.REPEATED,
}


def _fault(what: What, how: How, **fields: Any) -> Fault:
    return Fault(**{"kind": Kind(what, how, Course.LASTING), "step": 4} | fields)


def _batch(architecture: Architecture) -> dict[str, Tensor]:
    rows = Rows(architecture, 4)
    batch = collated([rows[number] for number in range(4)])
    return {name: entry for name, entry in batch.items() if name not in {"marks", "indices"}}


@pytest.mark.parametrize(("name", "what"), PARTS)
@pytest.mark.fast_sample(8)
def test_a_part_is_changed_until_its_fault_is_removed(name: str, what: What):
    """Each fault in a part of a network changes its loss, and leaves nothing behind."""
    architecture = JUDGED_NETWORKS[name]
    network = new_network(architecture).eval()
    batch = _batch(architecture)
    healthy = network(**batch).loss
    fault = _fault(what, HOWS.get(what, How.RAISED), size=1e4, where=Where.ALL)

    undo = plant_in_part(network, architecture, fault)
    if what is What.TIED_WEIGHT:
        # The head keeps its copy of the weight when the embedding is trained.
        network.get_parameter(f"{architecture.head}.weight").data *= 2
    planted = network(**batch).loss.item()
    for each in undo:
        each()

    assert planted != pytest.approx(network(**batch).loss.item())
    if what is not What.TIED_WEIGHT:
        assert network(**batch).loss.equal(healthy)


@pytest.mark.parametrize("name", JUDGED_NETWORKS)
@pytest.mark.parametrize("where", [Where.TENSOR, Where.LAYER])
@pytest.mark.fast_sample(4)
def test_swapped_weights_have_the_same_shape(name: str, where: Where):
    """Weights are swapped in pairs of two that differ."""
    architecture = JUDGED_NETWORKS[name]
    network = new_network(architecture)

    fault = Fault(kind=Kind(What.WEIGHT, How.SWAPPED, Course.BRIEF), step=4, where=where, pick=5)
    weights = list(target_weights(network, architecture, fault).values())

    assert len(weights) >= 2
    for one, other in zip(weights[::2], weights[1::2], strict=True):
        assert one is not other
        assert one.shape == other.shape


@pytest.mark.parametrize("name", JUDGED_NETWORKS)
@pytest.mark.fast_sample(3)
def test_each_weight_is_in_one_group(name: str):
    """The groups of an optimizer have each trainable weight once."""
    architecture = JUDGED_NETWORKS[name]
    network = new_network(architecture)
    groups = weight_groups(network, architecture)

    assert len(groups) == len(architecture.layers) + 1
    assert all(groups)
    grouped = [id(weight) for group in groups for weight in group.values()]
    trainable = [weight for weight in network.parameters() if weight.requires_grad]
    assert sorted(grouped) == sorted(map(id, trainable))


def _step(weight: nn.Parameter, optimizer: SGD, *gradients: float) -> None:
    for gradient in gradients:
        (gradient * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("how", "size", "expected"),
    [(How.MISSING, 1.0, [-1.0, -1.0]), (How.REPEATED, 3.0, [-4.0, -4.0])],
)
def test_updates_are_left_out_or_repeated(how: How, size: float, expected: list[float]):
    """The first step is whole, the second has the fault, and gradients are as they were."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], 1.0)
    updates = PlantedUpdates(optimizer, [weight], _fault(What.UPDATE, how, size=size))

    _step(weight, optimizer, 1.0)
    updates.is_on = True
    weight.sum().backward()
    optimizer.step()

    assert weight.tolist() == expected
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]


def test_gradients_are_kept_once_for_each_step():
    """The sum of the step before is added to the first of the micro-batches."""
    network = nn.Linear(1, 1, bias=False)
    weight = network.weight
    nn.init.zeros_(weight)
    optimizer = SGD([weight], 1.0)
    gradients = KeptGradients(network, optimizer)

    values = []
    for is_on in (False, True, True, False):
        gradients.begin_step(is_on=is_on)
        before = weight.item()
        _step(weight, optimizer, 1.0, 2.0)
        values.append(before - weight.item())

    assert values == [3.0, 6.0, 9.0, 3.0]


def test_a_replay_has_no_kept_gradients():
    """Between the steps, a backward pass has its own gradients alone."""
    network = nn.Linear(1, 1, bias=False)
    optimizer = SGD(network.parameters(), 1.0)
    gradients = KeptGradients(network, optimizer)
    for is_on in (False, True):
        gradients.begin_step(is_on=is_on)
        _step(network.weight, optimizer, 1.0)

    network.weight.sum().backward()

    assert network.weight.grad is not None
    assert network.weight.grad.item() == 1.0


def test_a_vocabulary_is_permuted_for_inputs_and_targets():
    """Inputs and targets are tokens of the same other vocabulary, and differ from the old ones."""
    architecture = JUDGED_NETWORKS["decoder"]
    rows = Rows(architecture, 4)
    batch = collated([rows[number] for number in range(4)])
    before = batch["input_ids"].clone()

    plant_in_batch(batch, _fault(What.VOCABULARY, How.PERMUTED), architecture, 4, dict)

    assert batch["input_ids"].equal(batch["labels"])
    assert not batch["input_ids"].equal(before)
    assert len(batch["input_ids"].unique()) == len(before.unique())


def test_targets_are_shifted_within_their_row():
    """Tokens move by one place, and classes are counted from another one."""
    sequences, classes = JUDGED_NETWORKS["decoder"], JUDGED_NETWORKS["mixer"]
    for architecture in (sequences, classes):
        rows = Rows(architecture, 4)
        batch = collated([rows[number] for number in range(4)])
        before = batch["labels"].clone()

        plant_in_batch(batch, _fault(What.TARGETS, How.SHIFTED), architecture, 4, dict)

        expected = before.roll(1, 1) if before.dim() > 1 else (before + 1) % 4
        assert batch["labels"].equal(expected)


def test_the_second_half_of_the_targets_does_not_count():
    """The first half of the targets is as it was."""
    architecture = JUDGED_NETWORKS["temporal"]
    rows = Rows(architecture, 4)
    batch = collated([rows[number] for number in range(4)])
    before, half = batch["labels"].clone(), LENGTH // 2

    plant_in_batch(batch, _fault(What.TARGETS, How.TRUNCATED), architecture, 4, dict)

    assert batch["labels"][:, :half].equal(before[:, :half])
    assert (batch["labels"][:, half:] == -100).all()
    assert batch["input_ids"].equal(before)


@pytest.mark.parametrize(
    ("how", "expected"),
    [(How.REPEATED, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]), (How.TRUNCATED, [0, 1, 2, 3, 4] + 5 * [0])],
)
def test_a_sequence_is_another_one_for_inputs_and_targets(how: How, expected: list[int]):
    """Each token is there twice, or padding takes the place of the second half."""
    tokens = torch.arange(LENGTH)[None]
    batch = {"input_ids": tokens.clone(), "labels": tokens.clone()}

    plant_in_batch(batch, _fault(What.SEQUENCE, how), JUDGED_NETWORKS["temporal"], 4, dict)

    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [expected]


@pytest.mark.parametrize("what", [What.GRADIENT, What.OPTIMIZER_STATE])
def test_what_belongs_to_weights_is_swapped(what: What):
    """A weight gets the gradient or the state of another one of its shape."""
    fault = _fault(what, How.SWAPPED, num_steps=100, where=Where.ALL, moment=Moment.BETWEEN)
    fault = replace(fault, kind=replace(fault.kind, course=Course.BRIEF))
    training = Training(Case(architecture="flow", way="cell", optimizer="sgd", fault=fault), None)
    one, other = (training.network.get_parameter(f"blocks.{each}.up.bias") for each in (0, 1))

    for step in range(1, 5):
        training.begin_step(step)
        for weight in training.network.parameters():
            weight.grad = torch.zeros_like(weight)
        assert one.grad is not None
        one.grad += 1.0
        training.optimizer.step()

    momentum = [
        training.optimizer.state[each]["momentum_buffer"][0].item() for each in (one, other)
    ]
    decay = 0.9
    kept = 1 + decay + decay**2
    if what is What.GRADIENT:
        assert momentum == pytest.approx([decay * kept, 1.0], rel=1e-2)
    else:
        assert momentum == pytest.approx([1.0, decay * kept], rel=1e-2)


def test_a_kept_loss_is_added_up():
    """From the first step of the fault on, the loop adds the losses of all micro-batches before."""
    fault = _fault(What.OUTER_LOSS, How.KEPT, num_steps=100, where=Where.ALL)
    training = Training(Case(architecture="flow", way="plain loop", fault=fault), None)

    losses = [
        training.outer_loss(torch.tensor(1.0), step, micro_batch).item()
        for step in (3, 4, 5)
        for micro_batch in range(2)
    ]

    assert losses == [1.0, 1.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("how", [How.REPEATED, How.SORTED])
def test_a_loader_takes_other_rows(how: How):
    """A stuck loader has the rows of its first step, and a sorted one those of one class."""
    fault = _fault(What.BATCH, how, num_steps=100, where=Where.ALL)
    case = Case(architecture="mixer", way="cell", num_steps=12, fault=fault)
    training = Training(case, None)
    batches = [training.micro_batches(step) for step in range(1, 13)]

    assert len({int(batch["indices"][0]) for step in batches[:4] for batch in step}) == (
        4 * NUM_MICRO_BATCHES
    )
    for step in batches[3:]:
        for batch, first in zip(step, batches[3], strict=True):
            if how is How.REPEATED:
                assert batch["indices"].equal(first["indices"])
            else:
                assert len(batch["labels"].unique()) == 1
