"""MindSpore's mixed-precision levels set the autocast dtype, and outputs are float32."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from mfwrap.mindspore.train_network import AutocastNetwork, Precision, precision_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("level", "device", "expected"),
    [
        ("O0", CPU, Precision(None, scales_loss=False)),
        ("O1", CPU, Precision(torch.float16, scales_loss=False)),
        ("O2", CUDA, Precision(torch.float16, scales_loss=True)),
        ("O3", CUDA, Precision(torch.float16, scales_loss=False)),
        ("auto", CPU, Precision(None, scales_loss=False)),
        ("auto", torch.device("xpu"), Precision(torch.bfloat16, scales_loss=False)),
    ],
)
def test_levels(level, device, expected):
    """Level and device determine the autocast dtype and whether the loss is scaled."""
    assert precision_of(level, device) == expected


@pytest.mark.parametrize("supported", [True, False])
def test_auto_asks_a_cuda_device(monkeypatch, supported):
    """On CUDA, ``auto`` is bfloat16 if the device supports it, else float16 with a loss scale."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: supported)

    assert precision_of("auto", CUDA) == (
        Precision(torch.bfloat16, scales_loss=False)
        if supported
        else Precision(torch.float16, scales_loss=True)
    )


class Pair(NamedTuple):
    score: torch.Tensor
    count: int


def test_outputs_come_back_in_float32():
    """Half-precision tensors in any structure become float32; other values do not change."""
    network = nn.Linear(2, 2)
    network.forward = lambda score: (
        Pair(score @ score, 3),
        [score @ score],
        CausalLMOutput(logits=score @ score),
        score.double(),
    )
    pair, listed, output, double = AutocastNetwork(network, torch.float16)(torch.ones(2, 2) / 3)

    assert isinstance(pair, Pair)
    assert isinstance(output, CausalLMOutput)
    assert pair.score.dtype == listed[0].dtype == output.logits.dtype == torch.float32
    assert (pair.count, double.dtype) == (3, torch.float64)
    # The value shows that the product was computed in float16: a float32 product differs.
    assert float(pair.score[0, 0]) == float(torch.tensor(1 / 3).half().square() * 2)
