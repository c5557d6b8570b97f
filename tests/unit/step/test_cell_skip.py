"""A skipped update leaves the training state unchanged, in every precision."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from support.small_networks import Classifier, labelled_batches
from support.spoilt.training import OPTIMIZERS, PRECISIONS, BadElement, SpoiltTraining
from support.training_state import assert_same_state, assert_unchanged, training_state

NAN, INF = float("nan"), float("inf")
NUM_STEPS = 5
[BATCH] = labelled_batches(1)

CASES = [
    pytest.param(make_optimizer, precision, id=f"{name}-{kind}")
    for name, make_optimizer in OPTIMIZERS.items()
    for kind, precision in PRECISIONS.items()
    # Leave these cases out: up to torch 2.13, fused SGD on CPU does not update half-precision
    # weights, and fills their momentum with uninitialized memory (pytorch#191763).
    if not (name.startswith("fused SGD") and precision.weights != torch.float32)
]
each_case = pytest.mark.parametrize(("make_optimizer", "precision"), CASES)
each_value = pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
each_place = pytest.mark.parametrize("bad_step", [0, 3], ids=["first step", "later step"])


@pytest.mark.fast_sample(40)
@each_place
@each_value
@each_case
def test_one_bad_element_changes_nothing(make_optimizer, precision, value, bad_step):
    """One bad gradient element leaves weights, optimizer state, schedule and average unchanged."""
    training = SpoiltTraining(make_optimizer, precision, value=value)

    for index, batch in enumerate(labelled_batches(NUM_STEPS)):
        before, averages_before = training.state(), training.averages()
        report = training.step(batch, bad=index == bad_step)

        assert report.output.overflow.item() == (index == bad_step)
        assert report.skipped.item() == (index == bad_step)
        if index == bad_step:
            assert_unchanged(before, training.state())
            assert_same_state(averages_before, training.averages())


@pytest.mark.fast_sample(16)
@each_place
@each_case
def test_training_goes_on_as_if_the_bad_batch_had_not_been(make_optimizer, precision, bad_step):
    """A run with a bad batch ends bitwise like a run without that batch."""
    disturbed, undisturbed = (SpoiltTraining(make_optimizer, precision) for _ in range(2))

    for index, batch in enumerate(labelled_batches(NUM_STEPS)):
        disturbed.step(batch, bad=index == bad_step)
        if index != bad_step:
            undisturbed.step(batch)

    assert_same_state(undisturbed.state(), disturbed.state())
    assert_same_state(undisturbed.averages(), disturbed.averages())


@each_place
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_other_batches_train_as_in_plain_torch(make_optimizer, bad_step):
    """Unclipped training with a bad batch equals plain torch without that batch, bitwise.

    A skipped first step may create optimizer state, which must equal torch's initial state.
    """
    training = SpoiltTraining(
        make_optimizer, use_clip_grad=False, lr_scheduler=None, max_consecutive_skips=None
    )
    reference = copy.deepcopy(training.network)
    optimizer = make_optimizer(reference.parameters())

    for index, batch in enumerate(labelled_batches(NUM_STEPS)):
        training.step(batch, bad=index == bad_step)
        if index != bad_step:
            reference(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    for ours, theirs in zip(training.network.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.cuda
@each_place
@each_value
@pytest.mark.parametrize("precision", [PRECISIONS["float32"], PRECISIONS["fp16 autocast"]], ids=str)
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_bad_element_changes_nothing_on_cuda(make_optimizer, precision, value, bad_step):
    """A skipped update on a CUDA device leaves the training state bitwise unchanged."""
    training = SpoiltTraining(make_optimizer, precision, value=value, device="cuda")

    for index, (inputs, labels) in enumerate(labelled_batches(NUM_STEPS)):
        before, averages_before = training.state(), training.averages()
        report = training.step((inputs.cuda(), labels.cuda()), bad=index == bad_step)

        assert report.skipped.item() == (index == bad_step)
        if index == bad_step:
            assert_unchanged(before, training.state())
            assert_same_state(averages_before, training.averages())


def test_counters_follow_applied_and_skipped_updates():
    """Each report counts applied, skipped and consecutive skipped updates up to its step."""
    training = SpoiltTraining(OPTIMIZERS["fused AdamW"])
    bad = (False, True, True, False, True)

    reports = [
        training.step(batch, bad=bad_here)
        for batch, bad_here in zip(labelled_batches(NUM_STEPS), bad, strict=True)
    ]

    assert [report.applied_updates.item() for report in reports] == [1, 1, 1, 2, 2]
    assert [report.skipped_updates.item() for report in reports] == [0, 1, 2, 2, 3]
    assert [report.consecutive_skips.item() for report in reports] == [0, 1, 2, 0, 1]


def test_the_rate_stays_until_an_update_is_applied():
    """A skipped update does not advance the schedule: the next step uses the same rate."""
    training = SpoiltTraining(OPTIMIZERS["fused AdamW"])
    bad = (False, True, True, False, False)

    rates = [
        training.step(batch, bad=bad_here).output.learning_rate.item()
        for batch, bad_here in zip(labelled_batches(NUM_STEPS), bad, strict=True)
    ]

    assert rates == pytest.approx([1e-2, 5e-3, 5e-3, 5e-3, 1e-2 / 3])


def test_plain_torch_loses_the_model_to_one_bad_element():
    """Clipping and AdamW of plain torch spread one NaN over every weight."""
    network = Classifier()
    optimizer = AdamW(network.parameters(), lr=1e-2)
    bad_element = BadElement(network.layers[0].weight, NAN)
    [(inputs, labels)] = labelled_batches(1)

    bad_element.active = True
    network(inputs, labels).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
    optimizer.step()

    assert all(parameter.isnan().all() for parameter in network.parameters())


def test_the_attributes_for_skipping_do_not_leak_into_a_plain_step():
    """After a skipped update, a plain ``optimizer.step()`` neither skips nor divides."""
    training = SpoiltTraining(OPTIMIZERS["fused AdamW"])
    [(inputs, labels)] = labelled_batches(1)
    reference = copy.deepcopy(training.network)
    plain = OPTIMIZERS["fused AdamW"](reference.parameters())
    training.step((inputs, labels), bad=True)
    training.bad_element.active = False

    for network, optimizer in ((training.network, training.optimizer), (reference, plain)):
        network(inputs, labels).backward()
        optimizer.step()

    for ours, theirs in zip(training.network.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def averages_of(ema):
    """Return copies of the averages by name."""
    return {name: average.clone() for name, average in ema.named_averages()}


class MaskedSum(nn.Module):
    """A linear layer that returns its loss as numerator and denominator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs, mask):
        products = self.layer(inputs).squeeze(1).float()
        return (products * mask.nan_to_num()).sum(), mask.sum()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize(
    "mask",
    [torch.tensor([1.0, NAN, 1.0]), torch.ones(70_000, dtype=torch.float16)],
    ids=["nan", "beyond float16"],
)
def test_a_denominator_that_is_not_finite_changes_nothing(mask, fused):
    """A denominator that is NaN, or inf in float16, skips the update and changes nothing."""
    network = MaskedSum()
    optimizer = AdamW(network.parameters(), lr=0.1, fused=fused)
    ema = ExponentialMovingAverage(network)
    cell = MFTrainOneStepCell(network, optimizer, calculate_per_token_loss=True, ema=ema)
    cell(torch.ones(3, 4), torch.ones(3))
    before, average = training_state(network, optimizer), averages_of(ema)

    output = cell(torch.ones(len(mask), 4), mask)

    assert output.overflow
    assert cell.last_report.skipped
    assert_same_state(before, training_state(network, optimizer))
    assert_same_state(average, averages_of(ema))


@pytest.mark.parametrize("rate", [NAN, INF])
def test_a_rate_that_is_no_number_raises_before_the_update(rate):
    """A non-finite learning rate is an error, and weights and optimizer are unchanged."""
    training = SpoiltTraining(OPTIMIZERS["fused AdamW"])
    training.step(BATCH)
    before = training.state()
    [group] = training.optimizer.param_groups
    last, group["lr"] = group["lr"], rate

    with pytest.raises(ValueError, match=f"of parameter group 0 must be finite, got {rate}"):
        training.step(BATCH)
    group["lr"] = last
    assert_unchanged(before, training.state())


def test_a_rate_on_the_device_that_is_no_number_skips():
    """An update is skipped if its learning rate is a non-finite tensor, which is not read."""
    rate = torch.tensor(1e-2)
    training = SpoiltTraining(
        lambda parameters: AdamW(parameters, lr=rate, fused=True), lr_scheduler=None
    )
    before = [parameter.clone() for parameter in training.network.parameters()]
    training.optimizer.param_groups[0]["lr"].fill_(NAN)

    report = training.step(BATCH)

    assert report.skipped
    assert not report.output.overflow
    assert report.output.learning_rate.isnan()
    after = training.network.parameters()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_batch_of_no_rows_is_refused():
    """The mean loss of no rows is NaN with finite gradients: the batch is refused."""
    training = SpoiltTraining(OPTIMIZERS["fused AdamW"])
    inputs, labels = BATCH
    training.step(BATCH)
    before = training.state()

    with pytest.raises(ValueError, match=r"at least one row.*of shape"):
        training.step((inputs[:0], labels[:0]))
    assert_unchanged(before, training.state())
