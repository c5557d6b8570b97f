"""Rates of coming updates are those that the schedule sets later."""

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from transformers import get_cosine_schedule_with_warmup

from mfwrap.step.rate_table import LENGTH, RateTable, coming_rates
from support.captured_training import numbers, train, training

SCHEDULES = {
    "cosine": lambda opt: CosineAnnealingLR(opt, 30),
    "restarts": lambda opt: CosineAnnealingWarmRestarts(opt, 7),
    "lambda": lambda opt: LambdaLR(opt, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "product": lambda opt: MultiplicativeLR(opt, lambda n: 0.99 - n / 1e4),
    "one cycle": lambda opt: OneCycleLR(opt, [1.0, 2.0], 60, cycle_momentum=False),
    "sequence": lambda opt: SequentialLR(opt, [LinearLR(opt, 0.1, 1, 5), StepLR(opt, 3)], [5]),
    "transformers": lambda opt: get_cosine_schedule_with_warmup(opt, 5, 50),
}


def optimizer():
    """Return an optimizer with two groups and two rates."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return SGD([{"params": [weights[0]], "lr": 0.5}, {"params": [weights[1]], "lr": 0.25}])


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize("begun", [0, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_coming_rates_are_the_schedules(name, begun):
    """The rates are those that the schedule sets, from wherever it stands; it does not move."""
    stepped = optimizer()
    schedule = SCHEDULES[name](stepped)
    for _ in range(begun):
        schedule.step()
    before = dict(schedule.state_dict())

    found = coming_rates(schedule, stepped, 40)

    assert {k: v for k, v in schedule.state_dict().items() if k != "_schedulers"} == {
        k: v for k, v in before.items() if k != "_schedulers"
    }
    expected = []
    for _ in range(40):
        expected.append([group["lr"] for group in stepped.param_groups])
        schedule.step()
    assert found == expected


def test_a_schedule_that_cannot_be_copied_is_refused():
    """A schedule that holds an open file is refused by its name."""

    class Logged(LambdaLR):
        def __init__(self, opt):
            self.lines = (line for line in ())
            super().__init__(opt, lambda _: 1.0)

    stepped = optimizer()

    with pytest.raises(TypeError, match=r"must be copyable .* got Logged: cannot pickle"):
        RateTable(stepped, Logged(stepped), torch.device("cpu"))


def test_a_rate_on_another_device_is_refused():
    """A graph cannot use a rate that is a tensor elsewhere."""
    elsewhere = optimizer()
    elsewhere.param_groups[1]["lr"] = torch.tensor(0.1, device="meta")

    with pytest.raises(ValueError, match=r"tensors on cpu .* got a tensor on meta"):
        RateTable(elsewhere, None, torch.device("cpu"))


def test_applied_updates_use_up_the_table():
    """While the schedule sets the rates, the host need not fill the table anew."""
    stepped = optimizer()
    table = RateTable(stepped, SCHEDULES["lambda"](stepped), torch.device("cpu"))
    stepped.step()
    table.restart(torch.tensor(0))
    for _ in range(3):
        assert not table.is_outdated
        table.step()

    stepped.param_groups[0]["lr"] = 7.0
    assert table.is_outdated


def test_a_run_may_be_longer_than_the_table():
    """The table is filled anew while the run goes on, whatever updates are skipped."""
    generator = torch.Generator().manual_seed(0)
    skips = (torch.rand(2 * LENGTH + 20, generator=generator) < 0.1).tolist()
    factors = [float("nan") if skip else 1.0 for skip in skips]

    found, expected = (
        numbers(each, train(each, factors))
        for each in (
            training(
                capture=capture,
                make_schedule=lambda opt: LambdaLR(opt, lambda n: 2.0 ** -(n % 7)),
                max_consecutive_skips=None,
            )
            for capture in (True, False)
        )
    )

    assert found == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def one_cycle(number):
    """Return a maker of a schedule that raises ValueError at its step `number` + 1."""
    return lambda opt: OneCycleLR(opt, 1e-4, number, cycle_momentum=False)


def listed(number):
    """Return a maker of a schedule of `number` + 1 rates, which then raises IndexError."""
    factors = [2.0 ** -(n % 5) for n in range(number + 1)]
    return lambda opt: LambdaLR(opt, factors.__getitem__)


def until_the_end(make_schedule, num_updates, *, capture):
    """Train until the schedule raises; every fifth update is skipped."""
    trained = training(capture=capture, make_schedule=make_schedule)
    results = []
    for update in range(num_updates):
        try:
            results += train(trained, [float("nan") if update % 5 == 2 else 1.0], seed=update)
        except (ValueError, IndexError) as error:
            weights = [weight.detach() for weight in trained.network.parameters()]
            return update, repr(error), numbers_of([*results, *weights])
    trained.cell.flush()
    return num_updates, None, numbers_of([*results, *trained.network.parameters()])


def numbers_of(tensors):
    """Return all results as numbers."""
    return [float(x) for each in tensors if each is not None for x in each.detach().ravel()]


@pytest.mark.parametrize("number", [3, 20, LENGTH + 9])
@pytest.mark.parametrize("make", [one_cycle, listed])
@pytest.mark.parametrize("beyond", [0, 9])
def test_a_schedule_with_an_end_trains_up_to_it(make, number, beyond):
    """A captured run ends at the update at which a plain one ends, with the same weights."""
    num_updates = (number + beyond) * 5 // 4
    found, expected = (
        until_the_end(make(number), num_updates, capture=capture) for capture in (True, False)
    )
    assert (expected[1] is None) == (beyond == 0)
    assert found[:2] == expected[:2]
    # The device has the rates in float32.
    assert found[2] == pytest.approx(expected[2], rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("flushed", range(LENGTH - 3, LENGTH + 2))
def test_a_flush_may_reach_the_end_of_the_table(flushed):
    """A flush by the caller, after whichever update, changes no rate."""
    rates = []
    for capture in (True, False):
        trained = training(
            capture=capture,
            network=Minute,
            make_schedule=lambda opt: LambdaLR(opt, lambda n: 2.0 ** -(n % 7)),
        )
        rates.append([])
        for update in range(LENGTH + 5):
            rates[-1].append(trained.cell(torch.ones(1, 1)).learning_rate.item())
            if update == flushed:
                trained.cell.flush()
    assert rates[0] == rates[1]


class Minute(torch.nn.Linear):
    """A network of one weight that returns its loss."""

    def __init__(self):
        super().__init__(1, 1)

    def forward(self, inputs):
        return super().forward(inputs).square().mean()
