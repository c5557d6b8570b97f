"""A setting of the program that changes is noticed, unless it does so from the start on."""

import math
import weakref

import pytest
import torch
from torch import nn
from transformers import GPT2Config

from mfwrap.callbacks.culprit.judges.settings import SettingWatch


class Network(nn.Module):
    """A network with a configuration, a dropout and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = GPT2Config(resid_pdrop=0.1)
        self.drop = nn.Dropout(0.1)
        self.linear = nn.Linear(2, 2)
        self.temperature = 1.0
        self.settings = {"kl_weight": 0.1}


def watched(changes, *, num_steps=10):
    """Return what a watch has noticed at the end of steps, before which functions are called.

    Args:
        changes: Functions of network and optimizer, by step.
        num_steps: Number of steps.
    """
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    watch = SettingWatch(network)
    for step in range(1, num_steps + 1):
        if step in changes:
            changes[step](network, optimizer)
        watch.look(step, optimizer)
    return [str(one) for one in watch.changes(num_steps)]


def set_in_group(**settings):
    """Return a function that changes a parameter group."""
    return lambda _, optimizer: optimizer.param_groups[0].update(settings)


def set_in_network(place, **settings):
    """Return a function that changes attributes of a part of the network."""

    def change(network, _):
        owner = network.get_submodule(place) if place != "config" else network.config
        vars(owner).update(settings)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_in_group(eps=1e-3), "`eps` of the optimizer changed from 1e-08 to 0.001 in step 6"),
        (
            set_in_group(betas=(0.9, 0.5)),
            "`betas` of the optimizer changed from (0.9, 0.999) to (0.9, 0.5) in step 6",
        ),
        (set_in_network("drop", p=0.9), "`p` of drop changed from 0.1 to 0.9 in step 6"),
        (
            set_in_network("", temperature=0.01),
            "`temperature` of the network changed from 1.0 to 0.01 in step 6",
        ),
        (
            set_in_network("config", resid_pdrop=0.5),
            "`resid_pdrop` of the network changed from 0.1 to 0.5 in step 6",
        ),
        (
            lambda network, _: network.settings.update(kl_weight=9.0),
            "`kl_weight` of the network changed from 0.1 to 9.0 in step 6",
        ),
        (
            set_in_network("", settings={"kl_weight": 9.0}),
            "`kl_weight` of the network changed from 0.1 to 9.0 in step 6",
        ),
        (
            lambda network, _: network.eval(),
            "`training` of the network changed from True to False in step 6",
        ),
    ],
)
def test_a_setting_that_changes(change, said):
    """It is named with its values and its step, for twenty steps."""
    assert watched({6: change})[0] == said
    assert watched({6: change}, num_steps=25)[0] == said
    assert watched({6: change}, num_steps=26) == []


def test_what_a_schedule_does_is_no_change():
    """The learning rate, and what changes from the start on."""
    rates = {step: set_in_group(lr=1 / step) for step in range(1, 11)}
    decays = {step: set_in_group(weight_decay=1 / step) for step in range(2, 11)}

    assert watched(rates) == []
    assert watched(decays) == []


@pytest.mark.parametrize("later", [torch.ones(3), torch.ones(()), "text"])
def test_a_number_that_becomes_something_else_is_no_setting(later):
    """A forward may leave a tensor in an attribute that begins as a number."""
    uses = {step: set_in_network("", temperature=later) for step in range(6, 9)}

    assert watched({**uses, 9: set_in_network("", temperature=2.0)}) == []


class Gone:
    """An object that weak references point to."""

    rate = 0.5


def test_what_cannot_be_read_or_compared():
    """A reference to what is gone, a number that is NaN, and one that is deleted."""
    network, holder = Network(), Gone()
    network.holder, network.last, network.short = weakref.proxy(holder), math.nan, 0.5
    watch = SettingWatch(network)
    for step in range(1, 9):
        if step == 6:
            del holder, network.short
            network.last = float("nan")
        watch.look(step, None)

    assert watch.changes(8) == ()


def test_a_number_that_is_switched_off():
    """None is a value of a setting."""
    off = watched({6: set_in_network("", temperature=None)})

    assert off == ["`temperature` of the network changed from 1.0 to None in step 6"]


def test_a_change_counts_once():
    """A setting that is put back, or changed again, is no new change."""
    there_and_back = {6: set_in_group(eps=1e-3), 7: set_in_group(eps=1e-8)}

    assert len(watched(there_and_back)) == 1


def test_without_a_network_or_an_optimizer():
    """Nothing is compared."""
    watch = SettingWatch(None)
    for step in range(1, 9):
        watch.look(step, None)

    assert watch.changes(8) == ()
