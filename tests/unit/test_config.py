"""`StepConfig` has the documented defaults, and refuses invalid settings at construction."""

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap import StepConfig

# The documented defaults. If MindFormers has the setting, the default is the same as in
# MindFormers.
DEFAULTS = {
    "use_clip_grad": False,
    "max_grad_norm": 1.0,
    "local_norm": False,
    "gradient_accumulation_steps": 1,
    "not_split": (),
    "calculate_per_token_loss": False,
    "use_skip_data_by_global_norm": False,
    "global_norm_spike_threshold": 1.0,
    "spike_policy": "record",
    "spike_z": None,
    "local_norm_groups": None,
    "max_consecutive_skips": 100,
    "sync_each_batch": False,
    "accumulate_allreduce_grads_in_fp32": False,
}
FLAGS = [
    "use_clip_grad",
    "local_norm",
    "calculate_per_token_loss",
    "use_skip_data_by_global_norm",
    "sync_each_batch",
    "accumulate_allreduce_grads_in_fp32",
]


def test_defaults_are_the_contracts():
    """Without arguments, every setting has its documented default."""
    assert dataclasses.asdict(StepConfig()) == DEFAULTS


@pytest.mark.parametrize(
    ("local_norm", "sync_each_batch", "number"),
    [(True, True, 1), (True, False, 4), (False, True, 4)],
)
def test_local_norms_need_one_reduction(local_norm, sync_each_batch, number):
    """Local norms and a reduction of each micro-batch exclude each other, except with one."""
    settings = {"local_norm": local_norm, "sync_each_batch": sync_each_batch}
    StepConfig(gradient_accumulation_steps=number, **settings).check_micro_batches(number)

    with pytest.raises(ValueError, match=r"`local_norm` must be False .* with 4 micro-batches"):
        StepConfig(local_norm=True, sync_each_batch=True, gradient_accumulation_steps=4)


def test_float32_gradients_need_a_gradient_dtype():
    """Without ``Tensor.grad_dtype`` the setting would be ignored, so it is refused."""
    if hasattr(torch.Tensor, "grad_dtype"):
        assert StepConfig(accumulate_allreduce_grads_in_fp32=True)
        return
    with pytest.raises(ValueError, match=r"must be False with torch .* lacks Tensor.grad_dtype"):
        StepConfig(accumulate_allreduce_grads_in_fp32=True)


def test_settings_cannot_be_changed():
    """A config is frozen, and unknown attributes are an error."""
    config = StepConfig()

    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_grad_norm = 2.0
    with pytest.raises((AttributeError, TypeError)):
        config.max_gradient_norm = 2.0


def test_settings_are_given_by_keyword():
    """Positional arguments are a TypeError."""
    with pytest.raises(TypeError, match="positional"):
        StepConfig(True)  # noqa: FBT003  (the positional argument is the mistake under test)


def test_an_unknown_keyword_is_refused():
    """An unknown keyword is a TypeError."""
    with pytest.raises(TypeError, match="max_gradient_norm"):
        StepConfig(max_gradient_norm=1.0)


@given(
    st.sampled_from(["max_grad_norm", "global_norm_spike_threshold"]),
    st.integers(1, 10**6) | st.floats(min_value=0, exclude_min=True),
)
def test_norms_take_any_number_above_0(name, value):
    """Limits of norms accept ints and floats > 0, and infinity."""
    assert getattr(StepConfig(**{name: value}), name) == value


@pytest.mark.parametrize("name", ["max_grad_norm", "global_norm_spike_threshold"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, ValueError) for value in (0, -1.0, math.nan)),
        *((value, TypeError) for value in ("1", True, None)),
    ],
)
def test_norms_refuse_what_is_no_number_above_0(name, value, error):
    """A wrong value is an error that names the setting."""
    with pytest.raises(error, match=f"`{name}` must be"):
        StepConfig(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_flags_must_be_bools(name, value):
    """A flag that is not a bool is a TypeError."""
    with pytest.raises(TypeError, match=f"`{name}` must be a bool"):
        StepConfig(**{name: value})


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "max_consecutive_skips"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError), ("2", TypeError)],
)
def test_counts_must_be_ints_from_1_on(name, value, error):
    """A wrong value is an error that names the setting."""
    with pytest.raises(error, match=f"`{name}` must be"):
        StepConfig(**{name: value})


def test_only_max_consecutive_skips_may_be_none():
    """``None`` is allowed for the limit of skips only."""
    assert StepConfig(max_consecutive_skips=None).max_consecutive_skips is None
    with pytest.raises(TypeError, match="`gradient_accumulation_steps` must be an int"):
        StepConfig(gradient_accumulation_steps=None)


def test_skipping_by_global_norm_needs_clipping():
    """Skipping without clipping is an error at construction."""
    with pytest.raises(ValueError, match="`use_skip_data_by_global_norm` needs the global norm"):
        StepConfig(use_skip_data_by_global_norm=True)

    config = StepConfig(use_skip_data_by_global_norm=True, use_clip_grad=True)
    assert config.use_skip_data_by_global_norm


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, math.inf),
        ({"spike_policy": "skip"}, 6),
        ({"spike_policy": "clip"}, 2.5),
        ({"spike_policy": "skip", "spike_z": 4}, 4),
    ],
)
def test_each_policy_has_a_limit_for_spikes(settings, limit):
    """The limit is that of the policy unless it is set."""
    assert StepConfig(**settings).spike_limit == limit


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"spike_policy": "clamp"}, ValueError, r"`spike_policy` must be one of \['record', "),
        ({"spike_policy": "skip", "spike_z": 0}, ValueError, "`spike_z` must be"),
        ({"spike_policy": "skip", "spike_z": "6"}, TypeError, "`spike_z` must be"),
        ({"spike_z": 6}, ValueError, '`spike_z` has no effect with spike_policy="record", got 6'),
    ],
)
def test_a_wrong_policy_for_spikes_is_refused(settings, error, message):
    """A wrong value is an error that names the setting."""
    with pytest.raises(error, match=message):
        StepConfig(**settings)


@pytest.mark.parametrize(
    "groups", [None, "layer", ["bias"], ("weight$", "bias$"), lambda name: name, str.upper]
)
def test_groups_are_none_layer_patterns_or_a_callable(groups):
    """None, ``"layer"``, patterns and a callable are accepted unchanged."""
    assert StepConfig(local_norm_groups=groups).local_norm_groups is groups


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        *((groups, TypeError) for groups in ("layers", "bias", 3, {"bias"})),
        *((groups, ValueError) for groups in ([], (), ["bias", 3], [None])),
    ],
)
def test_groups_refuse_anything_else(groups, error):
    """A string other than ``"layer"``, an empty list, and other values are an error."""
    with pytest.raises(error, match="`local_norm_groups` must"):
        StepConfig(local_norm_groups=groups)


def test_a_pattern_that_is_no_regular_expression_is_refused():
    """An invalid regular expression is an error at construction."""
    with pytest.raises(ValueError, match=r"`local_norm_groups` must .*'\('"):
        StepConfig(local_norm_groups=["weight", "("])


@pytest.mark.parametrize(
    ("not_split", "error", "message"),
    [
        ("weights", TypeError, "a list of names and positions, got 'weights'"),
        ({"weights"}, TypeError, "a list of names and positions, got {'weights'}"),
        ([None], TypeError, "names and positions, got None"),
        ([True], TypeError, "names and positions, got True"),
        ([-1], ValueError, "positions >= 0, got -1"),
    ],
)
def test_what_is_not_split_must_be_named(not_split, error, message):
    """A single name, and what is neither a name nor a position, is an error."""
    with pytest.raises(error, match=f"`not_split` must .*{message}"):
        StepConfig(not_split=not_split)


@pytest.mark.parametrize("name", ["max_grad_norm", "global_norm_spike_threshold"])
@pytest.mark.parametrize(
    ("given", "kept"), [(3, 3.0), (10**400, math.inf), (Fraction(1, 4), 0.25)], ids=str
)
def test_limits_are_kept_as_floats(name, given, kept):
    """Any real number becomes the float that torch can compare with a tensor."""
    value = getattr(StepConfig(**{name: given}), name)

    assert (type(value), value) == (float, kept)
