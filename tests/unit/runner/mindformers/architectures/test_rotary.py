"""Scaled rotary embeddings are those that MindFormers computes."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mfwrap.runner import RecipeError
from support.model_config import converted

HEAD, LENGTH = 32, 64
SIZES = f"type: LlamaConfig, hidden_size: {4 * HEAD}, num_heads: 4, theta: 1000.0"


def table(settings):
    """Return the cosines that transformers computes for the first positions, shape (64, 32)."""
    config = LlamaConfig(**converted(f"{{{SIZES}, {settings}}}").config)
    rotary = LlamaRotaryEmbedding(config)
    cosines, _ = rotary(torch.zeros(1), torch.arange(LENGTH)[None])
    return cosines[0].numpy()


def cosines(frequencies, positions=None, factor=1.0):
    """Return the same table computed from frequencies of shape (16,)."""
    positions = np.arange(LENGTH) if positions is None else positions
    angles = np.outer(positions, frequencies)
    return np.cos(np.concatenate([angles, angles], axis=1)) * factor


def plain(base=1000.0):
    """Return unscaled frequencies."""
    return base ** (-np.arange(0, HEAD, 2) / HEAD)


def test_without_scaling():
    """The factor is ignored without a method."""
    expected = pytest.approx(cosines(plain()), abs=1e-5)

    assert table("scaling_factor: 4.0") == expected
    assert table("extend_method: 'None'") == expected


def test_ntk_multiplies_the_base():
    """NTK scales the base of the embedding."""
    expected = pytest.approx(cosines(plain(4000.0)), abs=1e-5)

    assert table("extend_method: NTK, scaling_factor: 4") == expected


@pytest.mark.parametrize(
    ("length", "trained", "factor"), [(8192, 2048, 4.0), (1024, 2048, 1.0), (8192, 8192, 1.0)]
)
def test_before_1_0_the_factor_follows_from_the_length(length, trained, factor):
    """It is the length in units of that of the pretraining, and at least 1."""
    sizes = f"{SIZES}, seq_length: {length}, pretrain_seqlen: {trained}"

    linear = converted(f"{{{sizes}, extend_method: PI}}").config["rope_parameters"]
    larger_base = converted(f"{{{sizes}, extend_method: NTK}}").config["rope_parameters"]

    assert linear["factor"] == factor
    assert larger_base["rope_theta"] == 1000.0 * factor


@pytest.mark.parametrize(
    "settings",
    [
        "extend_method: PI, scaling_factor: 4.0",
        "extend_method: linear, scaling_factor: {factor: 4.0}",
    ],
)
def test_linear_methods_divide_the_positions(settings):
    """PI and linear divide the positions by the factor."""
    assert table(settings) == pytest.approx(cosines(plain(), np.arange(LENGTH) / 4), abs=1e-5)


def test_llama3_scales_long_waves():
    """LLAMA3 divides the frequencies of long waves and interpolates those between."""
    scaling = (
        "{factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0,"
        " original_max_position_embeddings: 256}"
    )
    expected = []
    for frequency in plain():
        turns = 256 * frequency / (2 * math.pi)
        share = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        expected.append(share * frequency + (1 - share) * frequency / 8.0)

    found = table(f"extend_method: LLAMA3, scaling_factor: {scaling}")
    assert found == pytest.approx(cosines(np.array(expected)), abs=1e-5)


def test_yarn_scales_by_turns_and_temperature():
    """YARN interpolates slow dimensions, keeps fast ones, and scales the result."""
    scaling = (
        "{factor: 4.0, beta_fast: 32.0, beta_slow: 1.0, mscale: 1.0, mscale_all_dim: 0.5,"
        " original_max_position_embeddings: 256}"
    )

    def dimension(turns):
        return HEAD * math.log(256 / (turns * 2 * math.pi)) / (2 * math.log(1000.0))

    low, high = max(math.floor(dimension(32.0)), 0), min(math.ceil(dimension(1.0)), HEAD - 1)
    slow = np.clip((np.arange(HEAD // 2) - low) / (high - low), 0, 1)
    frequencies = plain() * (1 - slow) + plain() / 4.0 * slow
    temperature = (0.1 * math.log(4.0) + 1) / (0.1 * 0.5 * math.log(4.0) + 1)

    found = table(f"extend_method: YARN, scaling_factor: {scaling}")
    assert found == pytest.approx(cosines(frequencies, factor=temperature), abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "key", "says"),
    [
        ("extend_method: DYNAMIC_NTK", "extend_method", "expected one of"),
        ("extend_method: YARN, scaling_factor: 4.0", "scaling_factor", "expected a mapping"),
        ("extend_method: LLAMA3, scaling_factor: {factor: 8.0}", "scaling_factor", "the keys"),
        (
            "extend_method: linear, scaling_factor: {factor: large}",
            "scaling_factor",
            "expected a number for factor, got 'large'",
        ),
        ("extend_method: PI, scaling_factor: [2]", "scaling_factor", "expected a number"),
        ("extend_method: PI, seq_length: 4096", "scaling_factor", "versions of MindFormers differ"),
        ("theta: large", "theta", "expected a number, got 'large'"),
    ],
)
def test_an_unknown_or_incomplete_scaling_is_an_error(settings, key, says):
    """The error names the key."""
    with pytest.raises(RecipeError, match=says) as raised:
        converted(f"{{{SIZES.replace('theta: 1000.0', 'bos_token_id: 1')}, {settings}}}")

    assert f": model.model_config.{key}: " in str(raised.value)
