"""Attributes that the table calls the same are there."""

import pytest
import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

import mfwrap
from mfwrap.callbacks import Callback, PyNativeCallback
from mfwrap.callbacks.pynative.facts import pynative_arguments, pynative_state
from mfwrap.mindspore.callback import CallbackParameters, RunContext
from mfwrap.names.attributes import ANYWHERE, KINDS, ROWS
from mfwrap.names.texts import SAME

PAIRS = [(torch.ones(4, 2), torch.ones(4, 1))] * 2


def same(kind):
    """Return the attributes of a kind of object that the table calls the same."""
    return {name for name, text in ROWS[kind].items() if text == SAME}


class Keys(Callback):
    """Keep the names of the facts that callbacks see."""

    def __init__(self):
        self.seen = set()

    def on_train_epoch_end(self, run_context):
        """Keep the facts of a training after its evaluation."""
        self.seen |= run_context.original_args().keys()

    def on_eval_end(self, run_context):
        """Keep the facts of an evaluation."""
        self.seen |= run_context.original_args().keys()


def test_facts_of_a_run():
    """A fact of a run that is called the same is among the facts of `Model`."""
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    keys = Keys()

    mfwrap.Model(network, nn.MSELoss(), optimizer, metrics={"loss"}).fit(1, PAIRS, PAIRS, 1, keys)

    assert same("cb_params") - keys.seen == set()
    # What the table says otherwise is no fact, and what it lacks is mfwrap's own.
    assert keys.seen - same("cb_params") == {
        *("is_world_process_zero", "loss_scale_manager", "lr_scheduler"),
    }


def test_attributes_of_objects():
    """An attribute that is called the same is there."""
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    update_cell = mfwrap.DynamicLossScaleUpdateCell(8.0, 2, 10)
    loss_cell = mfwrap.TrainOneStepWithLossScaleCell(network, optimizer, update_cell)
    plain_cell = mfwrap.TrainOneStepCell(network, optimizer)
    arguments = TrainingArguments("unused", max_steps=1, report_to="none", use_cpu=True)
    state = TrainerState(max_steps=1, num_train_epochs=1, train_batch_size=1)
    objects = {
        "run_context": [RunContext(CallbackParameters())],
        "training cell": [loss_cell, plain_cell],
        "loss-scale update cell": [update_cell],
        "Model": [mfwrap.Model],
        "PyNative state": [pynative_state(arguments, state, {})],
        "PyNative settings": [pynative_arguments(arguments, state, {})],
        "PyNative event": [PyNativeCallback],
    }

    for kind, some in objects.items():
        missing = {name for name in same(kind) if not any(hasattr(one, name) for one in some)}
        assert missing == set(), kind


@pytest.mark.parametrize("kind", ["optimizer", "network", "tensor"])
def test_other_attributes_are_absent(kind):
    """PyTorch's objects lack the attributes for which the table says what to write."""
    network = nn.Linear(2, 1)
    one = {
        "optimizer": torch.optim.SGD(network.parameters(), 0.1),
        "network": network,
        "tensor": torch.ones(1),
    }[kind]
    absent = {name for name in ROWS[kind] if not hasattr(one, name)}

    # An object of torch has these names, too, with another meaning.
    assert ROWS[kind].keys() - absent <= {"__call__"}


def test_kinds_are_in_the_table():
    """Every kind that a reader of scripts follows has rows."""
    assert {kind for kind, _ in KINDS} | set(KINDS.values()) <= ROWS.keys()
    for name, kind in ANYWHERE.items():
        assert name in ROWS[kind]
