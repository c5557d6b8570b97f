"""An update from several micro-batches equals the update from all their data at once."""

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from mfwrap import MFTrainOneStepCell
from mfwrap.schedules import BatchGrowth
from support.host_reads import HostReads
from support.small_llama import byte_batch, small_llama
from support.small_networks import (
    IGNORED,
    Classifier,
    LinearProbe,
    TokenClassifier,
    labelled_batches,
)

NUM_STEPS = 3
# The cell and the reference add up at most 100 tokens in different orders. The sums differ by a few
# units in the last place, and the difference passes through three updates.
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def build(network: nn.Module, **settings) -> MFTrainOneStepCell:
    """Return a cell around a copy of `network`, with SGD.

    SGD's updates are proportional to the gradients, so a wrongly scaled gradient shows.
    """
    network = copy.deepcopy(network)
    optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)
    settings = {"use_clip_grad": True, "max_grad_norm": float("inf")} | settings
    return MFTrainOneStepCell(network, optimizer, **settings)


class SeparateLosses(nn.Module):
    """A network with the loss of its language model, its router and, in some batches, its MTP."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch; a batch of more than one row has an MTP loss."""
        product = (self.weight * inputs).mean()
        losses = {"lm_loss": product, "load_balancing_loss": product.square() / 8}
        if len(inputs) > 1:
            losses["mtp_loss"] = product.sin().reshape(1)
        return losses


def test_separate_losses_are_added_up_and_reported():
    """The sum is trained; the report has the mean of each loss over its micro-batches."""
    network = SeparateLosses()
    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1, fused=True))
    batches = [torch.full((rows, 2), float(rows)) for rows in (1, 2, 3)]
    outputs = [network(batch) for batch in batches]
    total = sum(sum(each.reshape(()) for each in output.values()) for output in outputs) / 3
    [gradient] = torch.autograd.grad(total, [network.weight])
    expected = {
        name: torch.stack([o[name].reshape(()) for o in outputs if name in o]).mean()
        for name in ("lm_loss", "load_balancing_loss", "mtp_loss")
    }

    with HostReads() as reads:
        output = cell.step(batches)

    assert reads.names == []
    torch.testing.assert_close(output.loss, total.detach())
    torch.testing.assert_close(dict(cell.last_report.losses), expected)
    assert not any(each.requires_grad for each in cell.last_report.losses.values())
    torch.testing.assert_close(network.weight.detach(), torch.ones(2) - 0.1 * gradient)
    cell.step(batches[:1])
    assert cell.last_report.losses.keys() == {"lm_loss", "load_balancing_loss"}


class SeparateNumerators(nn.Module):
    """A network that returns the sums of two losses over its rows, and the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> tuple[dict[str, Tensor], int]:
        products = self.weight * inputs
        return {"lm_loss": products.sum(), "mtp_loss": products.square().sum()}, len(inputs)


def test_separate_numerators_are_divided_by_the_number_of_targets():
    """With a loss per token, each named loss is the mean over the targets of all micro-batches."""
    network = SeparateNumerators()
    cell = MFTrainOneStepCell(
        network, SGD(network.parameters(), lr=1.0), calculate_per_token_loss=True
    )
    inputs = torch.tensor([1.0, 2.0, 3.0, 6.0])

    output = cell.step([inputs[:1], inputs[1:]])

    losses = {name: loss.item() for name, loss in cell.last_report.losses.items()}
    assert losses == {"lm_loss": 3.0, "mtp_loss": 12.5}
    assert output.loss.item() == 15.5
    assert network.weight.item() == 1 - 3 - 2 * 12.5


def uneven_batch(seed: int) -> tuple[Tensor, Tensor]:
    """Return 12 inputs and labels; successive groups of four have 1, 3 and 0 targets."""
    [(inputs, labels)] = labelled_batches(1, size=12, seed=seed)
    labels[[0, 1, 2, 4, 8, 9, 10, 11]] = IGNORED
    return inputs, labels


def plain_steps(network: nn.Module, batches: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Train with plain torch, one backward per whole batch; return losses and final weights."""
    network = copy.deepcopy(network)
    optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)
    losses = []
    for batch in batches:
        loss = network(**batch).loss if isinstance(batch, dict) else network(*batch)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [weight.detach() for weight in network.parameters()]


def assert_agrees(
    cell: MFTrainOneStepCell, losses: list[Tensor], expected: tuple[list[Tensor], list[Tensor]]
) -> None:
    """Fail unless losses and weights are near the expected ones."""
    torch.testing.assert_close(losses, expected[0], **NEAR)
    weights = [weight.detach() for weight in cell.network.parameters()]
    torch.testing.assert_close(weights, expected[1], **NEAR)


each_scale = pytest.mark.parametrize("scale", [1.0, 2.0**16], ids=["scale 1", "scale 2**16"])


@each_scale
@pytest.mark.parametrize("num_micro_batches", [2, 4])
def test_equal_micro_batches_are_plain_torchs_accumulation_to_the_last_bit(
    num_micro_batches, scale
):
    """Updates equal plain torch bitwise, with each loss divided by the number of micro-batches."""
    network = Classifier()
    cell = build(network, gradient_accumulation_steps=num_micro_batches, scale_sense=scale)
    optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)

    for inputs, labels in labelled_batches(NUM_STEPS):
        output = cell(inputs, labels)
        losses = [
            network(*part)
            for part in zip(
                inputs.chunk(num_micro_batches), labels.chunk(num_micro_batches), strict=True
            )
        ]
        for loss in losses:
            (loss / num_micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(output.loss, torch.stack(losses).mean().detach())

    for ours, theirs in zip(cell.network.parameters(), network.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scale", [1.0, 2.0**16], ids=["scale 1", "scale 2**16"])
def test_the_number_of_micro_batches_may_change_with_each_update(scale):
    """A batch that grows: each loss is divided by the number of its own update, bit by bit."""
    network = Classifier()
    cell = build(network, scale_sense=scale)
    optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)
    growth, batches = BatchGrowth([1, 1, 12], 4), iter(labelled_batches(40))

    for update in range(12):
        of_update = list(itertools.islice(batches, growth.size(update)))
        output = cell.step(of_update)
        losses = [network(*batch) for batch in of_update]
        for loss in losses:
            (loss / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(output.loss, torch.stack(losses).mean().detach())

    assert len(of_update) == 4
    for ours, theirs in zip(cell.network.parameters(), network.parameters(), strict=True):
        assert torch.equal(ours, theirs) if scale == 1 else torch.allclose(ours, theirs)


def test_a_call_that_splits_is_a_step_with_the_parts():
    """``cell(batch)`` and ``cell.step(parts)`` give bitwise the same update."""
    network = Classifier()
    splitting, stepping = (build(network, gradient_accumulation_steps=2) for _ in range(2))

    for inputs, labels in labelled_batches(NUM_STEPS):
        splitting(inputs, labels)
        stepping.step(list(zip(inputs.chunk(2), labels.chunk(2), strict=True)))

    for ours, theirs in zip(
        splitting.network.parameters(), stepping.network.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


class WeightedClasses(nn.Module):
    """A classifier whose loss weighs the classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(inputs), labels, weights)


@pytest.mark.parametrize("not_split", [["weights"], [2]])
def test_what_is_not_split_goes_to_each_micro_batch_whole(not_split):
    """Three class weights beside three rows give torch's own accumulation over the rows."""
    network = WeightedClasses()
    inputs, labels = torch.randn(3, 4), torch.tensor([0, 2, 1])
    weights = torch.tensor([1.0, 5.0, 2.0])
    cell = build(network, gradient_accumulation_steps=3, not_split=not_split)
    if not_split == [2]:
        cell(inputs, labels, weights)
    else:
        cell(inputs, labels=labels, weights=weights)

    optimizer = SGD(network.parameters(), lr=0.1)
    for row, label in zip(inputs.split(1), labels.split(1), strict=True):
        (network(row, label, weights) / 3).backward()
    optimizer.step()
    for ours, theirs in zip(cell.network.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **NEAR)


def test_without_tokens_each_micro_batch_weighs_the_same():
    """The default loss is the mean over micro-batches, whatever their sizes are."""
    cell = build(LinearProbe())

    cell.step([torch.tensor([[2.0, 4.0]]), torch.tensor([[0.0, 1.0], [0.0, 3.0], [3.0, 2.0]])])

    # Each micro-batch's gradient is the mean of its rows: [2, 4] and [1, 2]. The update is the mean
    # of these gradients, times the rate of 0.1.
    torch.testing.assert_close(cell.network.weight.detach(), torch.tensor([-0.15, -0.3]))


@each_scale
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_splitting_by_tokens_is_one_big_batch(num_micro_batches, scale):
    """Micro-batches with unequal numbers of targets give the mean over all targets."""
    network = TokenClassifier()
    batches = [uneven_batch(seed) for seed in range(NUM_STEPS)]
    cell = build(
        network,
        gradient_accumulation_steps=num_micro_batches,
        calculate_per_token_loss=True,
        scale_sense=scale,
    )
    reference = Classifier()
    reference.load_state_dict(network.state_dict())

    losses = [cell(*batch).loss for batch in batches]

    assert_agrees(cell, losses, plain_steps(reference, batches))


@each_scale
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
def test_any_micro_batches_by_tokens_are_one_big_batch(scale, sizes, data):
    """Loss, norm and update equal those of one big batch, for any sizes and any targets."""
    num_rows = sum(sizes)
    [(inputs, labels)] = labelled_batches(1, size=num_rows)
    ignored = data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    ignored[-1] = False
    labels = labels.masked_fill(torch.tensor(ignored), IGNORED)
    reference = Classifier()
    network = TokenClassifier()
    network.load_state_dict(reference.state_dict())
    cell = build(network, calculate_per_token_loss=True, scale_sense=scale)

    output = cell.step(list(zip(inputs.split(sizes), labels.split(sizes), strict=True)))

    assert_agrees(cell, [output.loss], plain_steps(reference, [(inputs, labels)]))
    reference(inputs, labels).backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in reference.parameters()])
    torch.testing.assert_close(output.global_norm, norm, **NEAR)


@each_scale
def test_a_language_model_that_splits_by_tokens_is_one_big_batch(scale):
    """Training a Hugging Face model on padded micro-batches agrees with one whole batch."""
    network = small_llama()
    batches = [byte_batch([40, 30, 11, 3], start=70 * step) for step in range(NUM_STEPS)]
    cell = build(
        network, gradient_accumulation_steps=2, calculate_per_token_loss=True, scale_sense=scale
    )

    losses = [cell(**batch).loss for batch in batches]

    assert_agrees(cell, losses, plain_steps(network, batches))


@each_scale
def test_a_language_model_with_unequal_micro_batches_is_one_big_batch(scale):
    """Training on micro-batches of unequal sizes and lengths agrees with one whole batch."""
    network = small_llama()
    lengths = [[40, 3], [17], [5, 9, 2]]
    cell = build(network, calculate_per_token_loss=True, scale_sense=scale)
    whole, losses = [], []
    for step in range(NUM_STEPS):
        starts = [70 * step, 70 * step + 43, 70 * step + 60]
        parts = [byte_batch(part, start=at) for part, at in zip(lengths, starts, strict=True)]
        losses.append(cell.step(parts).loss)
        whole.append(byte_batch([40, 3, 17, 5, 9, 2], start=70 * step))

    assert_agrees(cell, losses, plain_steps(network, whole))


def test_mean_and_per_token_are_told_apart_by_these_batches():
    """In these tests, the mean over micro-batches clearly differs from the mean over targets."""
    network = small_llama()
    batch = byte_batch([40, 30, 11, 3])
    expected, _ = plain_steps(network, [batch])

    mean_of_means = build(network, gradient_accumulation_steps=2)(**batch).loss

    assert (mean_of_means - expected[0]).abs() > 1e-3


class Recorder(LinearProbe):
    """A network that records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple, dict]] = []

    def forward(self, *arguments, **keywords) -> Tensor:
        self.calls.append((arguments, keywords))
        return self.weight.sum()


def test_what_has_no_first_dimension_goes_to_every_micro_batch():
    """Nested tensors are split by rows; every micro-batch gets other values unchanged."""
    network = Recorder()
    cell = MFTrainOneStepCell(network, AdamW(network.parameters()), gradient_accumulation_steps=2)
    rows, scalar = torch.arange(4.0), torch.tensor(7.0)

    cell(rows, scalar, "word", nested={"a": [rows, 3], "b": (scalar,)}, nothing=None)

    for (arguments, keywords), part in zip(network.calls, rows.chunk(2), strict=True):
        assert torch.equal(arguments[0], part)
        assert arguments[1] is scalar
        assert arguments[2] == "word"
        assert torch.equal(keywords["nested"]["a"][0], part)
        assert keywords["nested"]["a"][1] == 3
        assert keywords["nested"]["b"][0] is scalar
        assert keywords["nothing"] is None


def test_a_micro_batch_is_passed_as_its_type_says():
    """A dict is passed as keywords, a tuple as several arguments, a list as one argument."""
    network = Recorder()
    cell = MFTrainOneStepCell(network, AdamW(network.parameters()))

    cell.step([{"a": 1}, (1, 2), [1, 2], 3])

    assert network.calls == [((), {"a": 1}), ((1, 2), {}), (([1, 2],), {}), ((3,), {})]
