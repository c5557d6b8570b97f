"""The learning rates of all groups are reported, checked and lowered."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from transformers import Adafactor as OwnRates

from mfwrap import MFTrainOneStepCell
from mfwrap.optimizers.chained import ChainedOptimizer
from mfwrap.step.rates import has_bad_rate, learning_rates, lowered_rates
from support.host_reads import HostReads
from support.small_networks import Classifier, labelled_batches

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "rates",
    [[0.1], [0.1, 0.1, 0.1], [0.1, 0.02], [0, 1], [torch.tensor(0.1), 0.02], [torch.tensor([0.3])]],
    ids=str,
)
def test_learning_rates_are_those_of_all_groups(rates):
    """`learning_rates` returns the rates of all groups as a float32 vector without a host read."""
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    optimizer = SGD(groups, lr=0.1)
    with HostReads() as host:
        found = learning_rates(optimizer, CPU)

    assert host.reads == []
    assert torch.equal(found, torch.tensor([float(rate) for rate in rates]))


def test_learning_rates_are_a_copy():
    """Changing a rate in place does not change the rates that were reported."""
    rate = torch.tensor(0.1)
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=rate)
    found = learning_rates(optimizer, CPU)
    rate.fill_(0.5)

    assert torch.equal(found, torch.tensor([0.1]))


def test_a_group_without_a_rate_has_none():
    """The reported rate is NaN if a group's rate is None or missing."""
    optimizer = OwnRates([nn.Parameter(torch.ones(2))])

    rates = learning_rates(optimizer, CPU)

    assert (rates.shape, rates.dtype, rates.isnan().all().item()) == ((1,), torch.float32, True)
    del optimizer.param_groups[0]["lr"]
    assert learning_rates(optimizer, CPU).isnan().all()


def test_an_optimizer_that_makes_its_own_rates_trains_as_it_does_alone():
    """An optimizer without a group rate trains in the cell as it does alone."""
    [(inputs, labels)] = labelled_batches(1)
    networks = [Classifier(), Classifier()]
    networks[1].load_state_dict(networks[0].state_dict())
    alone, inner = (OwnRates(network.parameters()) for network in networks)
    cell = MFTrainOneStepCell(networks[1], inner)
    for _ in range(3):
        networks[0](inputs, labels).backward()
        alone.step()
        alone.zero_grad()
        assert cell(inputs, labels).learning_rate.isnan()

    for expected, actual in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_a_rate_that_is_not_finite_is_an_error(caplog):
    """A non-finite number is refused with its group; a tensor is flagged without a host read."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = AdamW([{"params": [weight]} for weight in weights], lr=1e-2)
    assert has_bad_rate(optimizer, CPU) is None

    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    with HostReads() as counted:
        fine = has_bad_rate(optimizer, CPU)
    assert counted.reads == []
    assert not fine
    optimizer.param_groups[0]["lr"] = torch.tensor(math.inf)
    assert has_bad_rate(optimizer, CPU)

    optimizer.param_groups[1]["lr"] = math.nan
    with pytest.raises(ValueError, match="rate of parameter group 1 must be finite, got nan"):
        learning_rates(optimizer, CPU)
    assert learning_rates(optimizer, CPU, may_be_bad=True)[1].isnan()
    optimizer.param_groups[0]["lr"] = 0.5
    assert has_bad_rate(optimizer, CPU)
    assert "all stages of the pipeline skip an update: the learning rate of" in caplog.text


def test_lowered_rates():
    """The optimizers of a chain use the lower rates; an error restores their own."""
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    rate = torch.tensor(0.25)
    chain = ChainedOptimizer(SGD([first], lr=0.5), SGD([second], lr=rate))
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    with lowered_rates(chain, 0.125):
        chain.step()
    assert first.tolist() == [-0.0625, -0.0625]
    assert second.tolist() == [-0.03125, -0.03125]

    with pytest.raises(KeyError), lowered_rates(chain, 0.125):
        raise KeyError
    assert chain.param_groups[0]["lr"] == 0.5
    assert chain.param_groups[1]["lr"] is rate
    assert rate.item() == 0.25
