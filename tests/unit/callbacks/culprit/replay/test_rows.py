"""A search names the rows of a bad step that stand out, and no others."""

import itertools
import math
import re

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.replay.micro_batches import losses_of
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.culprit.replay.rows import find_rows
from support.small_llama import byte_batch, small_llama
from support.spoilt.rows import NETWORKS, Regression, planted, rows_of

FAULTS = [(network, kind) for network, kinds in NETWORKS.items() for kind in kinds]
FIFTY = [
    (network, kind, seed)
    for seed, (network, kind) in zip(range(54), itertools.cycle(FAULTS), strict=False)
]


def search(recorder, **known):
    """Search the last step of a recorder."""
    settings = {"loss": None, "is_finite": known.get("loss") is None, "is_exact": True}
    return find_rows(recorder, 1.0, **settings | known)


def places(found):
    """Return micro-batch and row of the rows that were found."""
    return [(each.micro_batch, each.row) for each in found.rows]


@pytest.mark.parametrize(
    ("network", "kind", "seed"),
    [*FIFTY[: len(FAULTS)], *(pytest.param(*c, marks=pytest.mark.slow) for c in FIFTY[9:])],
)
def test_a_spoilt_sample_is_named(network, kind, seed):
    """A wrong label, a large image or a NaN is named with its micro-batch, and nothing else is."""
    step = planted(network, kind, seed)
    found = search(step.recorder, loss=None if step.loss_is_finite else math.nan)

    assert places(found) == [(step.micro_batch, step.row)], found.detail


def test_a_row_is_run_with_its_share_of_the_step():
    """Loss and norm are those of the row alone, and nothing is left behind in the network."""
    step = planted("GroupNorm", "labels", 3)
    network, call = step.recorder.network, step.recorder.last_step[step.micro_batch]
    images, labels = (value[step.row : step.row + 1] for value in call.keywords.values())
    network.zero_grad()
    loss = network(images, labels)
    (loss / 16).backward()
    gradients = [weight.grad.clone() for weight in network.parameters()]
    generator = torch.get_rng_state()
    found = search(step.recorder)
    (row,) = found.rows

    assert row.loss == pytest.approx(loss.item())
    assert row.gradient_norm == pytest.approx(nn.utils.get_total_norm(gradients).item())
    assert found.is_exact
    assert torch.equal(torch.get_rng_state(), generator)
    for weight, gradient in zip(network.parameters(), gradients, strict=True):
        assert torch.equal(weight.grad, gradient)


def test_rows_that_do_not_have_the_loss_of_the_step():
    """With the weights that the step has left, they may be of another size; then none is named."""
    step = planted("GroupNorm", "labels", 3)
    found = search(step.recorder, loss=2.0, is_finite=True, is_exact=False)
    (row,) = found.rows
    later = search(step.recorder, loss=2 * row.loss, is_finite=True, is_exact=False)

    assert row.loss > 2.0
    assert later.rows == ()
    assert "with the weights that the step has left, none has its loss" in later.detail


def test_what_makes_a_search_inexact():
    """With later weights, or with dropout, the values of a row are not those of the step."""
    step = planted("GroupNorm", "labels", 0)
    assert not search(step.recorder, is_exact=False).is_exact
    assert search(planted("regression", "large", 0).recorder).is_exact is False


def test_many_rows_are_first_run_in_groups():
    """Of 600 rows, few are run: the row is found in the worst group."""
    step = planted("GroupNorm", "nan", 1, batch_size=300)
    calls = []
    step.recorder.network.register_forward_pre_hook(lambda *_: calls.append(1))
    found = search(step.recorder, loss=math.nan)

    assert places(found) == [(step.micro_batch, step.row)]
    assert "groups of rows were run first" in found.detail
    assert len(calls) < 120


def test_the_loss_of_a_row_is_not_its_share_of_the_step():
    """A Trainer divides the sum over a row's targets by the targets of all batches."""
    network, batches = small_llama(), [byte_batch([20, 40]), byte_batch([60, 20], start=60)]
    losses = [
        network(**{name: value[row : row + 1] for name, value in batch.items()}).loss.item()
        for batch in batches
        for row in range(2)
    ]
    num_targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    recorder = StepRecorder(network)
    for batch in batches:
        network(**batch, num_items_in_batch=num_targets).loss.backward()
    recorder.end_step()
    found = search(recorder)
    shown = re.search("with losses from (.*) to (.*)", found.detail)

    assert [float(loss) for loss in shown.groups()] == pytest.approx(
        [min(losses), max(losses)], rel=1e-3
    )


@pytest.mark.parametrize(
    ("draws", "is_exact", "how"),
    [
        (False, True, ""),
        (True, True, " with other random numbers"),
        (True, False, " with the weights after the update"),
    ],
)
def test_losses_that_are_not_those_of_the_step(draws, is_exact, how):
    """The loss of the step need not be among them, and the record says why."""
    step = planted("tokens", None, 0)
    if draws:
        step.recorder.network.register_forward_pre_hook(draw)
    found = search(step.recorder, is_finite=True, is_exact=is_exact)

    assert found.detail.startswith(f"rows were run one by one{how}: none of 16 stands alone")


def draw(*_):
    """Draw a random number."""
    torch.rand(())


def test_a_good_step_names_no_row():
    """If all rows are alike, none stands out; so too if all of them are non-finite."""
    step = planted("tokens", None, 0)
    rows, detail, is_exact, rows_losses, *_ = search(step.recorder)
    losses = re.fullmatch(
        r"rows were run one by one: none of 16 stands alone, with losses from (.*) to (.*)",
        detail,
    )
    assert (rows, is_exact) == ((), True)
    assert losses is not None
    assert 0 < float(losses[1]) < float(losses[2]) < 2 * float(losses[1])
    assert len(rows_losses) == 16
    assert min(loss for _, loss in rows_losses) == pytest.approx(float(losses[1]), rel=1e-3)
    with torch.no_grad():
        step.recorder.network.layers[1].weight.fill_(math.nan)
    step.recorder.network(**rows_of("tokens", 4))[0].backward()
    step.recorder.end_step()
    assert search(step.recorder, loss=math.nan).detail.endswith(
        "all of a micro-batch are non-finite"
    )


class Contrastive(nn.Module):
    """A loss that compares the rows of a batch with each other."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs, positives):
        """Return the cross entropy of finding each row's own positive."""
        scores = self.linear(inputs) @ positives.T
        return nn.functional.cross_entropy(scores, torch.arange(len(inputs)))


def test_rows_of_a_contrastive_loss_are_left_out():
    """A row alone has a loss of 0, so rows are left out; the record has the loss without it."""
    torch.manual_seed(0)
    network = Contrastive()
    recorder = StepRecorder(network)
    inputs = torch.randn(20, 4)
    positives = inputs.clone()
    positives[13] *= 1e3
    network(inputs, positives).backward()
    recorder.end_step()
    found = search(recorder)

    assert places(found) == [(0, 13)]
    assert "left out" in found.detail
    assert found.rows[0].loss is None
    assert found.rows[0].loss_without < 10


def test_rows_without_targets_are_not_run():
    """A row whose targets are all ignored has a NaN loss alone, but no part in the step."""
    step = planted("tokens", None, 1)
    batch = rows_of("tokens", 8)
    batch["labels"][2] = -100
    step.recorder.network(**batch)[0].backward()
    step.recorder.end_step()

    assert search(step.recorder).rows == ()


class _TwoTerms(nn.Module):
    """A mean over all targets, and a little of the mean of each row's mean over its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1, 5))

    def forward(self, inputs, labels):
        errors, is_target = (inputs * self.weight) ** 2, labels != -100
        of_rows = (errors * is_target).sum(1) / is_target.sum(1)
        return (errors[is_target].mean() + 1e-3 * of_rows.mean(),)


@pytest.mark.parametrize("bad", [(2,), (0, 3)])
def test_rows_without_targets_that_spoil_a_second_term(bad):
    """They are run with all others, because alone they have no loss in any network."""
    network = _TwoTerms()
    recorder = StepRecorder(network)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 5, generator=generator)
    labels = torch.full((6, 5), -100)
    for row in range(6):
        labels[row, : 0 if row in bad else 1 + row % 4] = 1
    network(inputs=inputs, labels=labels)[0].backward()
    recorder.end_step()
    found = search(recorder, loss=math.nan)

    assert places(found) == [(0, row) for row in bad], found.detail


def outside(network):
    """Run a step whose loss is computed in the loop."""
    network.layers(rows_of("regression", 4)["images"]).mean().backward()


def alone(network):
    """Run a step of one row."""
    network(**rows_of("regression", 1))["loss"].backward()


def broken(network):
    """Run a step whose network cannot be called again."""
    network(**rows_of("regression", 4))["loss"].backward()
    network.layers.register_forward_pre_hook(lambda *_: 1 / 0)


@pytest.mark.parametrize(
    ("step", "detail"),
    [
        (outside, "not searched: no call of the network in training mode was recorded"),
        (alone, "not searched: the step has only one row"),
        (broken, "the search failed: ZeroDivisionError: division by zero"),
    ],
)
def test_why_no_row_is_named(step, detail):
    """The reason why no row is named is said, and no error leaves the search."""
    network = Regression()
    recorder = StepRecorder(network)
    step(network)
    recorder.end_step()

    assert (search(recorder).rows, search(recorder).detail) == ((), detail)


@pytest.mark.parametrize(("added", "is_told"), [(0.0, False), (0.05, False), (1.0, True)])
def test_a_loss_that_the_loop_adds(added, is_told):
    """Rows are run with the network's loss; that they are alike says nothing of another loss."""
    recorder = planted("tokens", None, 0).recorder
    own = losses_of(recorder.last_step)
    found = search(recorder, loss=sum(own) / len(own) * (1 + added), is_finite=True)

    assert found.rows == ()
    assert found.detail.startswith("not told: rows can be run only with the loss ") is is_told
    assert bool(found.losses) is not is_told


class Redirected:
    """Compute a loss inside of a network's call, as some Trainers of TRL do."""

    def __init__(self, network):
        self.network, self.original = network, network.forward

    def __call__(self, batch):
        """Call the network with the arguments of the loss, in place of its own."""
        self.network.forward = self.forward
        return self.network(self.network, batch)

    def forward(self, *inputs):
        """Put the network's own forward back, and compute the loss."""
        self.network.forward = self.original
        return self.loss(*inputs)

    def loss(self, network, batch):
        """Return the sum of the rows' losses, divided by the number of all."""
        errors = (network[0](batch["images"]).squeeze(1) - batch["labels"]).square()
        return errors.sum() / batch["num_items_in_batch"]


def test_a_loss_that_takes_the_place_of_the_forward():
    """Rows are run through what the step has called; a row's loss compares with the step's."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 1))
    recorder, redirected = StepRecorder(network), Redirected(network)
    images, labels = torch.randn(8, 4), torch.randn(8)
    labels[5] += 30.0
    batch = {"images": images, "labels": labels, "num_items_in_batch": torch.tensor(8)}
    loss = redirected(batch)
    loss.backward()
    recorder.end_step()
    found = search(recorder, loss=loss.item(), is_finite=True, is_exact=False)

    assert places(found) == [(0, 5)], found.detail
    own = (network(images[5:6]) - labels[5]).square().item()
    assert found.rows[0].loss == pytest.approx(own)
    assert network.forward == redirected.original
