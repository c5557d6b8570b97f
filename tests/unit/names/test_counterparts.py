"""The table says what to write for a name, and what it says exists."""

import importlib
import inspect
import math
import pkgutil
import re

import pytest
import torch
from accelerate import Accelerator

import mfwrap.callbacks
import mfwrap.schedules
import mfwrap.trainer
from mfwrap.names import attributes, libraries, training
from mfwrap.names.counterparts import absent_name, find
from mfwrap.names.resolution import PUBLIC_PACKAGES

TABLES = (training.ROWS, libraries.ROWS, attributes.ROWS)
TEXTS = sorted({text for table in TABLES for rows in table.values() for text in rows.values()})
PATH = re.compile(r"`((?:torch|mfwrap|accelerate|transformers)(?:\.\w+)+)")


@pytest.mark.parametrize(
    ("area", "name", "verdict", "text"),
    [
        ("nn", "Dense", "write", "`torch.nn.Linear`"),
        ("nn", "Lamb", "no counterpart", "torch and mfwrap have no such optimizer"),
        ("ops", "depend", "leave out", "nothing: statements of torch run in their order"),
        ("cb_params", "cur_step_num", "same", "the same"),
        ("optimizer", "get_lr", "write", "`[group['lr'] for group in optimizer.param_groups]`"),
    ],
)
def test_each_verdict(area, name, verdict, text):
    """A name is written otherwise, left out, without a counterpart, or the same."""
    assert find(area, name) == (verdict, text)


def test_an_unknown_name():
    """What the table does not have is unknown, also in an area that it does not have."""
    assert find("nn", "NoSuchLayer") is None
    assert find("no such area", "Dense") is None
    assert absent_name("NoSuchLayer") is None
    assert absent_name("Dense", of_callbacks=True) is None


@pytest.mark.parametrize("text", TEXTS)
def test_what_to_write_exists(text):
    """Each name and argument that a text suggests exists."""
    for path in PATH.findall(text):
        pkgutil.resolve_name(path)
    calls = [
        mfwrap.MFTrainOneStepCell,
        mfwrap.Model,
        mfwrap.Model.train,
        mfwrap.AdamWeightDecay,
        mfwrap.callbacks.CheckpointConfig,
        mfwrap.schedules.CosineWithWarmUpLR,
        mfwrap.trainer.MFTrainer.train,
        Accelerator,
    ]
    arguments = {name for call in calls for name in inspect.signature(call).parameters}
    of_torch = {"alpha", "fused", "gamma", "max", "mode", "momentum", "p", "reduction", "start_dim"}
    arguments |= {"warmup_steps"}  # of `FormulaLR`, by keyword
    assert set(re.findall(r"(\w+)=", text)) <= arguments | of_torch


def test_what_to_write_for_the_cosine():
    """The schedule that the table suggests has the rates of MindSpore's ``nn.CosineDecayLR``."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    schedule = mfwrap.schedules.CosineWithWarmUpLR(
        optimizer, warmup_steps=0, total_steps=10, lr_end=0.01
    )

    for step in range(15):
        cosine = math.cos(math.pi * min(step, 10) / 10)
        expected = 0.01 + 0.5 * (0.1 - 0.01) * (1 + cosine)
        assert schedule.rate(0.1, step) == pytest.approx(expected, rel=1e-12)


def test_no_name_has_two_texts():
    """An area is in one module of the table, or its names are."""
    for first, second in ((training.ROWS, libraries.ROWS), (libraries.ROWS, attributes.ROWS)):
        for area in first.keys() & second.keys():
            assert not first[area].keys() & second[area].keys()


def test_no_name_is_both_absent_and_there():
    """Names that mfwrap has are found in its packages, and are not listed a second time."""
    ours = {name for each in PUBLIC_PACKAGES for name in importlib.import_module(each).__all__}
    listed = {name for area in ("mindspore", "nn", "ops", "callbacks") for name in names_of(area)}

    # MindFormers' Muon takes all weights of a model, mfwrap's only matrices.
    assert not listed & ours
    assert names_of("mindformers") & ours == {"Muon"}


def names_of(area):
    """Return the names of an area."""
    return {name for table in TABLES for name in table.get(area, {})}
