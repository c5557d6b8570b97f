"""The table says what to write for a name, and what it says exists."""

import importlib
import inspect
import math
import pkgutil
import re

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

import mfwrap.callbacks
import mfwrap.schedules
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
        ("optimizer", "group_lr", "write", "`optimizer.param_groups`"),
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
    if "tensorboard" in text:
        importlib.import_module("tensorboard")
    for path in PATH.findall(text):
        pkgutil.resolve_name(path)
    calls = [
        mfwrap.MFTrainOneStepCell,
        mfwrap.Model,
        mfwrap.Model.train,
        mfwrap.AdamWeightDecay,
        mfwrap.callbacks.CheckpointConfig,
        mfwrap.schedules.CosineWithWarmUpLR,
        Trainer.train,  # and of `MFTrainer`
        Accelerator,
    ]
    arguments = {name for call in calls for name in inspect.signature(call).parameters}
    of_torch = {"alpha", "fused", "gamma", "max", "mode", "momentum", "p", "reduction", "start_dim"}
    of_torch |= {"approximate", "dim", "eps", "indexing", "keepdim", "shuffle"}
    arguments |= {"warmup_steps"}  # of `FormulaLR`, by keyword
    assert set(re.findall(r"(\w+)=", text)) <= arguments | of_torch


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        # From the signatures in MindSpore 2.7.
        ("SGD", {"lr": 0.1}),
        ("ASGD", {"lr": 0.1}),
        ("RMSProp", {"lr": 0.1, "alpha": 0.9, "eps": 1e-10}),
        ("Adadelta", {"lr": 1.0, "rho": 0.9, "eps": 1e-6}),
    ],
)
def test_defaults_of_optimizers(name, defaults):
    """A text has both defaults, torch's and MindSpore's, where they differ."""
    text = find("nn", name).text
    of_torch = inspect.signature(pkgutil.resolve_name(PATH.findall(text)[0])).parameters

    for argument, value in defaults.items():
        if of_torch[argument].default != value:
            assert f"{of_torch[argument].default} " in text.replace(",", " ")
            assert f" {value} " in f"{text} ".replace(",", " ")


def test_defaults_of_operators():
    """What a text writes in place of an operator has the operator's defaults."""
    x = torch.tensor([[3.0, 0.001], [4.0, 0.002]])
    norm = torch.tensor([5.0, 0.01])  # the root of max(sum of squares, 1e-4) along axis 0

    assert find("ops", "L2Normalize").text.startswith(
        "`torch.nn.functional.normalize(x, dim=0, eps=0.01)`"
    )
    assert torch.allclose(torch.nn.functional.normalize(x, dim=0, eps=0.01), x / norm)
    assert find("ops", "Argmax").text.startswith("`torch.argmax(x, dim=-1)`")
    assert find("ops", "Argmin").text.startswith("`torch.argmin(x, dim=-1)`")


def value_of(text, start="`", **names):
    """Return the value of the first code in a text that begins with `start`."""
    code = text[text.index(start) + 1 :].partition("`")[0].removeprefix("gamma=")
    return eval(code, {"torch": torch, **names})  # noqa: S307  (of our own table)


def test_gelu_is_the_tanh_form():
    """`ops.GeLU` and `nn.GELU` return the numbers in MindSpore's documentation."""
    operator = value_of(find("ops", "GeLU").text, x=torch.tensor([1.0, 2.0, 3.0]))
    layer = value_of(find("nn", "GELU").text)

    assert torch.allclose(operator, torch.tensor([0.841192, 1.9545976, 2.9963627]), atol=5e-7)
    assert torch.allclose(layer(torch.tensor([-1.0])), torch.tensor([-0.15880802]), atol=5e-7)


@pytest.mark.parametrize(
    ("name", "start", "schedule", "options"),
    [
        ("WarmUpLR", "`learning_rate", "ConstantWarmUpLR", {"warmup_steps": 4}),
        (
            *("CosineDecayLR", "`min_lr", "CosineWithWarmUpLR"),
            {"warmup_steps": 0, "total_steps": 10, "lr_end": 0.01},
        ),
        (
            *("PolynomialDecayLR", "`end +", "PolynomialWithWarmUpLR"),
            {"warmup_steps": 0, "total_steps": 10, "decay_steps": 10, "lr_end": 0.01, "power": 2},
        ),
    ],
)
def test_formulas_of_schedules(name, start, schedule, options):
    """The formula for a schedule of one's own gives the rates of the schedule in the same text."""
    text = find("nn", name).text
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    rates = getattr(mfwrap.schedules, schedule)(optimizer, **options)
    numbers = {"learning_rate": 0.1, "max_lr": 0.1, "min_lr": 0.01, "end": 0.01, "power": 2}
    numbers |= {"warmup_steps": 4, "decay_steps": 10, "pi": math.pi, "cos": math.cos}

    assert f"`mfwrap.schedules.{schedule}" in text
    for step in range(11):
        rate = value_of(text, start, step=step, **numbers)
        assert rate == pytest.approx(rates.rate(0.1, step=step), rel=1e-12), step


def test_the_formula_of_an_exponential_schedule():
    """The formula gives the rates of torch's schedule with the `gamma` in the same text."""
    text = find("nn", "ExponentialDecayLR").text
    numbers = {"decay_rate": 0.9, "decay_steps": 4, "learning_rate": 0.1}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    gamma = value_of(text, "`gamma=", **numbers)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)

    for step in range(9):
        rate = value_of(text, "`learning_rate *", step=step, **numbers)
        assert rate == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_weight_decay_of_an_optimizer_of_ones_own():
    """What replaces `decay_weight` is what torch's SGD does for its `weight_decay`."""
    parameter = torch.tensor([2.0, -3.0])
    parameter.grad = torch.tensor([0.5, 0.25])
    expected = parameter - value_of(
        find("optimizer class", "decay_weight").text,
        parameter=parameter,
        gradient=parameter.grad,
        group={"weight_decay": 0.1},
    )
    torch.optim.SGD([parameter], lr=1.0, weight_decay=0.1).step()

    assert torch.equal(parameter, expected)


@pytest.mark.parametrize(
    "name", ["GeneratorDataset", "NumpySlicesDataset", "MnistDataset", "CocoDataset"]
)
def test_data_sets_that_shuffle(name):
    """The text of a data set that MindSpore shuffles by default says so."""
    assert "`shuffle=True`, because MindSpore shuffles" in find("dataset", name).text


@pytest.mark.parametrize(
    ("area", "name", "arguments"),
    [
        ("ops", "BatchMatMul", ["transpose_a", "transpose_b"]),
        ("ops", "MatMul", ["transpose_a", "transpose_b"]),
        ("nn", "MatMul", ["transpose_x1", "transpose_x2"]),
        ("ops", "CumSum", ["exclusive", "reverse"]),
    ],
)
def test_arguments_that_torch_lacks(area, name, arguments):
    """A text says what to write for arguments that torch's function does not have."""
    assert all(f"`{one}`" in find(area, name).text for one in arguments)


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
