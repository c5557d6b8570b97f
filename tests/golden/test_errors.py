"""Wrong arguments raise the exception types recorded from MindSpore and MindFormers."""

import ast
import builtins
import functools
import re

import pytest
import torch
from torch import nn

from mfwrap import (
    AdaptiveLossScaleUpdateCell,
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    MFTrainOneStepCell,
    StaticLossScaler,
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
    clip_by_global_norm,
)
from support.golden.networks import LinearProbe, PerToken
from support.golden.traces import cases, parametrized

GRADIENTS = (torch.tensor([3.0, 4.0]),)


def build(cell, **keywords):
    """Return a cell around a small network."""
    network = nn.Linear(2, 1)
    return cell(network, torch.optim.SGD(network.parameters(), lr=0.1), **keywords)


def loss_scale_cell(scale_sense):
    """Return a TrainOneStepWithLossScaleCell around a small network."""
    return build(TrainOneStepWithLossScaleCell, scale_sense=scale_sense)


def mf_cell(**keywords):
    """Return MindFormers' cell around a small network."""
    return build(MFTrainOneStepCell, **keywords)


def adaptive(**keywords):
    """Return the adaptive update cell with the positional arguments of the recorded calls."""
    return AdaptiveLossScaleUpdateCell(4096, 2, 20, **keywords)


def scaling_calls():
    """Return functions that repeat the recorded calls of managers and scalers, by recorded call.

    The classes have MindSpore's signatures, so the recorded arguments are passed unchanged.
    """
    kinds = (
        DynamicLossScaleManager,
        DynamicLossScaler,
        FixedLossScaleManager,
        StaticLossScaler,
    )
    by_name = {kind.__name__: kind for kind in kinds}
    calls = {}
    for case in cases("argument_errors").values():
        if called_name(case) in by_name:
            arguments = ast.literal_eval(f"({case['call'].partition('(')[2][:-1]},)")
            calls[case["call"]] = functools.partial(by_name[called_name(case)], *arguments)
    return calls


def called_name(case):
    """Return the name of the function or class that a recorded call calls."""
    return case["call"].partition("(")[0]


# MindFormers passes the limit to ClipGradNorm; mfwrap's cell takes it as `max_grad_norm`.
CALLS = {
    **scaling_calls(),
    "clip_by_global_norm(grads, -1.0)": lambda: clip_by_global_norm(GRADIENTS, -1.0),
    "clip_by_global_norm(grads, 1.0, use_norm=5.0)": lambda: clip_by_global_norm(
        GRADIENTS, 1.0, use_norm=5.0
    ),
    "clip_by_global_norm(grads, True)": lambda: clip_by_global_norm(GRADIENTS, True),  # noqa: FBT003  (by position, as in MindSpore)
    "clip_by_global_norm((), 1.0)": lambda: clip_by_global_norm((), 1.0),
    "ClipGradNorm(0)": lambda: mf_cell(max_grad_norm=0),
    "ClipGradNorm('a')": lambda: mf_cell(max_grad_norm="a"),
    "TrainOneStepWithLossScaleCell(scale_sense=1024.0)": lambda: loss_scale_cell(1024.0),
    "TrainOneStepWithLossScaleCell(scale_sense=1024)": lambda: loss_scale_cell(1024),
    "TrainOneStepWithLossScaleCell(scale_sense='a')": lambda: loss_scale_cell("a"),
    "TrainOneStepWithLossScaleCell(scale_sense=Tensor shape (1,1))": lambda: loss_scale_cell(
        torch.ones(1, 1)
    ),
    "TrainOneStepWithLossScaleCell(scale_sense=Tensor shape (1,))": lambda: loss_scale_cell(
        torch.ones(1)
    ),
    "set_sense_scale(2.0)": lambda: loss_scale_cell(torch.ones(())).set_sense_scale(2.0),
    "set_sense_scale(Tensor of shape (3,))": lambda: loss_scale_cell(
        torch.ones(())
    ).set_sense_scale(torch.ones(3)),
    "TrainOneStepCell(sens=0)": lambda: build(TrainOneStepCell, sens=0),
    "TrainOneStepCell(sens=None)": lambda: build(TrainOneStepCell, sens=None),
    "MFTrainOneStepCell(scale_sense=2)": lambda: mf_cell(scale_sense=2),
    "MFTrainOneStepCell(scale_sense='a')": lambda: mf_cell(scale_sense="a"),
    "MFTrainOneStepCell(scale_sense=True)": lambda: mf_cell(scale_sense=True),
    "MFTrainOneStepCell(scale_sense=Tensor shape (2,))": lambda: mf_cell(scale_sense=torch.ones(2)),
    "MFTrainOneStepCell(max_grad_norm=0.0)": lambda: mf_cell(max_grad_norm=0.0),
    "MFTrainOneStepCell(global_norm_spike_threshold=1)": lambda: mf_cell(
        global_norm_spike_threshold=1
    ),
    "AdaptiveLossScaleUpdateCell(4096, 2, 20, max_scale_window=0)": lambda: adaptive(
        max_scale_window=0
    ),
    "AdaptiveLossScaleUpdateCell(4096, 2, 20, max_scale_window=20, min_scale_window=20)": (
        lambda: adaptive(max_scale_window=20, min_scale_window=20)
    ),
    "AdaptiveLossScaleUpdateCell(4096, 2, 20, min_scale_window=20.0)": lambda: adaptive(
        min_scale_window=20.0
    ),
}

ON_PURPOSE = {"err_49": ValueError, "err_62": None}
"""By case: what mfwrap raises where it differs from the recording; None if it raises nothing.

err_49: `set_sense_scale` raises for a tensor of a wrong shape, as the constructor does.
err_62: An int is accepted as a threshold.
"""


def test_every_call_is_made():
    """CALLS contains every recorded call."""
    assert {case["call"] for case in cases("argument_errors").values()} == CALLS.keys()


@pytest.mark.parametrize("case", parametrized("argument_errors"))
def test_argument(case):
    """A call raises exactly the recorded exception type, or succeeds as the recorded call did."""
    recorded = getattr(builtins, case["type"]) if case["result"] == "raises" else None
    expected = ON_PURPOSE.get(case["id"], recorded)
    call = CALLS[case["call"]]
    if expected is None:
        call()
        return
    with pytest.raises(expected) as raised:
        call()
    assert raised.type is expected
    # The message begins with the argument that MindSpore's message names and ends with the value.
    assert re.match(rf"`{named_argument(case)}` .*must .*got [^.]", str(raised.value))


OTHER_NAMES = {
    "err_12": "init_loss_scale",
    "err_34": "x",
    "err_49": "sens",
    # MindFormers passes the limit to ClipGradNorm and names it `clip_norm`.
    **dict.fromkeys(("err_35", "err_37", "err_60"), "max_grad_norm"),
}
"""By case: the argument that mfwrap's message names, where MindSpore's message does not."""


def named_argument(case):
    """Return the argument that the error message must name."""
    if case["id"] in OTHER_NAMES:
        return OTHER_NAMES[case["id"]]
    words = re.findall(r"\w+", case["message"])
    return next(word for word in words if re.fullmatch(r"sens|[a-z]+(_[a-z]+)+", word)
                and word != "clip_by_global_norm")  # fmt: skip


def test_set_sense_scale_of_the_mf_cell():
    """`set_sense_scale` of MindFormers' cell raises a TypeError for a number."""
    with pytest.raises(TypeError, match="`sens` must be a tensor"):
        mf_cell().set_sense_scale(2.0)


def test_skip_without_clip():
    """Skipping by global norm without clipping raises an error when the cell is constructed."""
    case = cases("mf_runtime_errors")["mf_runtime_skip_without_clip"]
    assert case["type"] == "TypeError"
    network = LinearProbe({"w0": torch.ones(3)})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="`use_skip_data_by_global_norm` needs"):
        MFTrainOneStepCell(network, optimizer, **case["wrapper_args"])


def test_per_token_with_a_scalar_denominator():
    """A denominator of shape () works like a denominator of shape (1,)."""
    case = cases("mf_runtime_errors")["mf_runtime_per_token_scalar_denominator"]
    arguments = {name: value for name, value in case["network"].items() if name != "kind"}
    network = PerToken(**arguments)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    cell = MFTrainOneStepCell(network, optimizer, **case["wrapper_args"])
    output = cell(torch.ones(4, 2), torch.ones(4, 1), torch.ones(4))
    for name, dtype, shape in case["output_signature"]:
        value = getattr(output, name)
        actual = (None, None) if value is None else (str(value.dtype), list(value.shape))
        assert actual == (dtype and f"torch.{dtype}", shape)
