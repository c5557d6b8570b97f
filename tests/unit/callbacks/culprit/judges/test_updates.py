"""Sampled updates, compared with the updates of all elements."""

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.judges.updates import UpdateSample, ordinary_update
from support.host_reads import HostReads


def root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of all elements."""
    return tensor.double().square().mean().sqrt().float()


def test_small_weights_are_measured_exactly():
    """Up to 256 elements, the sample is the weight."""
    weights = [torch.randn(size) for size in (1, 3, 255, 256)]
    before = [weight.clone() for weight in weights]
    sample = UpdateSample(weights)
    for weight in weights:
        weight.add_(torch.randn_like(weight))

    updates, sizes, _ = sample.measure()

    changes = [root_mean_square(new - old) for new, old in zip(weights, before, strict=True)]
    torch.testing.assert_close(updates, torch.stack(changes))
    torch.testing.assert_close(sizes, torch.stack([root_mean_square(old) for old in before]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_weights_are_measured_by_a_sample(dtype: torch.dtype):
    """The estimate is close for a matrix and for a kernel in another memory format."""
    torch.manual_seed(0)
    kernel = torch.randn(32, 16, 3, 3).to(dtype).to(memory_format=torch.channels_last)
    weights = [torch.randn(512, 128).to(dtype), kernel]
    sample = UpdateSample(weights)
    for weight in weights:
        weight.add_(torch.randn_like(weight), alpha=0.1)

    updates, sizes, _ = sample.measure()

    assert updates == pytest.approx(0.1, rel=0.15)
    assert sizes == pytest.approx(1.0, rel=0.15)


def test_the_sample_meets_rows_and_columns():
    """An update of a few columns, or of a few rows, of a matrix is seen."""
    for index in (slice(None), slice(8)), (slice(8), slice(None)):
        weight = torch.zeros(256, 256)
        sample = UpdateSample([weight])
        weight[index] += 1

        assert 0.1 < sample.measure().update.item() < 0.3


def test_each_measurement_begins_where_the_last_one_ended():
    """No change is measured twice."""
    weight = torch.zeros(10)
    sample = UpdateSample([weight])
    weight += 1
    assert sample.measure().update.item() == 1
    assert sample.measure().update.item() == 0


def test_what_changes_between_steps_is_no_update():
    """After `begin`, the two changes are told apart; without it, both count as the update."""
    weight = torch.zeros(10)
    sample = UpdateSample([weight])
    weight += 1
    sample.begin()
    weight += 2
    told_apart = sample.measure()
    weight += 1
    together = sample.measure()

    assert (told_apart.update.item(), told_apart.outside.item()) == (2, 1)
    assert (together.update.item(), together.outside) == (1, None)


def test_weights_in_other_memory_are_others():
    """A sample is of the memory that it reads."""
    weight = torch.zeros(10)
    sample = UpdateSample([weight])
    assert sample.is_of([weight])
    assert not sample.is_of([weight.clone()])
    assert not sample.is_of([weight, weight])


def test_views_without_a_block_of_memory_and_empty_shards_are_nan():
    """What cannot be sampled as a view is unknown, not zero."""
    updates, *_ = UpdateSample([torch.zeros(4, 4)[:, 0], torch.zeros(0), torch.zeros(2)]).measure()

    assert updates.isnan().tolist() == [True, True, False]


def test_no_weights_have_no_updates():
    """A network without trainable weights has nothing to measure."""
    assert [len(each) for each in UpdateSample([]).measure()] == [0, 0, 0]


def test_measuring_reads_nothing_on_the_host():
    """No operation waits for the device."""
    network = nn.Linear(8, 8)
    sample = UpdateSample(list(network.parameters()))
    with HostReads() as reads:
        sample.measure()
    assert reads.reads == []


def test_a_weight_that_stays_non_finite_has_not_changed():
    """One that becomes non-finite between two updates has."""
    stays, turns, infinite = (nn.Parameter(torch.ones(4)) for _ in range(3))
    stays.data.fill_(torch.nan)
    infinite.data.fill_(torch.inf)
    sample = UpdateSample([stays, turns, infinite])
    turns.data.fill_(torch.nan)
    sample.begin()

    outside = sample.measure().outside
    assert outside is not None
    assert [size == 0 for size in outside.tolist()] == [True, False, True]


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99)])
@pytest.mark.parametrize("silent_steps", [1, 30, 1000])
def test_no_first_gradient_of_adam_is_above_its_ordinary_update(betas, silent_steps):
    """Whatever the gradients are after steps without one."""
    weight = nn.Parameter(torch.ones(16))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=betas)
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for step in range(silent_steps + 30):
        before = weight.detach().clone()
        size = 10.0 ** (step % 3) if step >= silent_steps else 0.0
        weight.grad = size * torch.rand(16, generator=generator)
        optimizer.step()
        largest = max(largest, root_mean_square((weight - before).detach()).item())

    assert largest / 1e-3 < ordinary_update(optimizer)
    if silent_steps == 1000:
        assert largest / 1e-3 > 0.3 * ordinary_update(optimizer)


def test_other_optimizers_have_no_ordinary_update():
    """Their updates are as large as the gradients, or have no second moment."""
    weights = [nn.Parameter(torch.ones(2))]
    tensors = (torch.tensor(0.9), torch.tensor(0.999))
    assert ordinary_update(torch.optim.SGD(weights, lr=1.0, momentum=0.9)) == 0
    assert ordinary_update(torch.optim.AdamW(weights, betas=tensors, foreach=False)) == 0
    assert ordinary_update(None) == 0
