"""Each recorded case is compared with mfwrap, or has a test of how mfwrap differs."""

import importlib
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.golden.traces import FOLDER, cases

NUM_CASES = {
    "adaptive_loss_scale_update_cell": 10,
    "amp_all_finite": 28,
    "amp_dynamic_loss_scaler": 18,
    "amp_scale_unscale": 12,
    "argument_errors": 41,
    "clip_by_global_norm": 24,
    "dynamic_loss_scale_manager": 13,
    "dynamic_loss_scale_update_cell": 37,
    "fixed_loss_scale_manager": 5,
    "fixed_loss_scale_update_cell": 5,
    "functional_step": 5,
    "grad_scale": 7,
    "grad_tables": 216,
    "mf_clip_grad_norm": 23,
    "mf_local_norm": 23,
    "mf_runtime_errors": 2,
    "mf_train_one_step_cell": 35,
    "optimizers": 20,
    "overflow_status": 10,
    "train_one_step_cell": 6,
    "train_one_step_with_loss_scale_cell": 13,
}
"""Number of recorded cases by file."""

INSTEAD = {
    # MindSpore's scale grows to infinity; mfwrap's scale stays finite.
    "dyn_grow_to_inf": "golden.test_loss_scale::test_dynamic_growth_to_infinity_is_not_done",
    "adaptive_09": "golden.test_loss_scale::test_adaptive_growth_to_infinity_is_not_done",
    # Above a loss scale of 2**60, mfwrap's definition of an overflow differs from MindSpore's.
    "ls_probe_natural_overflow": "golden.test_far_scales::test_far_scale_overflows_with_the_norm",
    "ls_probe_tensor_2p126": "golden.test_far_scales::test_far_scale_overflows_with_the_norm",
    "ls_relu_natural_overflow_b": "golden.test_far_scales::test_far_scale_overflows_with_the_norm",
    "ls_tensor1d_set_sense": "golden.test_far_scales::test_far_scale_overflows_with_the_norm",
    "mf_natural_overflow_b": "golden.test_far_scales::test_far_scale_overflows_with_the_norm",
    "mf_relu_natural_overflow": "golden.test_far_scales::test_far_scale_overflows_with_the_norm",
    # torch's Adam adds epsilon after the bias correction; MindSpore's Adam adds it before.
    "adam_eps_big": "golden.test_optimizers::test_another_epsilon",
    "adam_loss_scale": "golden.test_optimizers::test_another_epsilon",
    # mfwrap raises when the cell is constructed, MindFormers at the first step.
    "mf_runtime_skip_without_clip": "golden.test_errors::test_skip_without_clip",
    # The recording has no numbers; the test compares names, dtypes and shapes of the outputs.
    "mf_runtime_per_token_scalar_denominator": (
        "golden.test_errors::test_per_token_with_a_scalar_denominator"
    ),
}
"""Cases that the test in MAIN leaves out, and the test that runs each of them."""

MAIN = {
    "adaptive_loss_scale_update_cell": "golden.test_loss_scale::test_adaptive",
    "amp_all_finite": "golden.test_scalers::test_all_finite",
    "amp_dynamic_loss_scaler": "golden.test_scalers::test_dynamic_loss_scaler",
    "amp_scale_unscale": "golden.test_scalers::test_scale_and_unscale",
    "argument_errors": "golden.test_errors::test_argument",
    "clip_by_global_norm": "golden.test_gradients::test_clip_by_global_norm",
    "dynamic_loss_scale_manager": "golden.test_scalers::test_dynamic_loss_scale_manager",
    "dynamic_loss_scale_update_cell": "golden.test_loss_scale::test_dynamic",
    "fixed_loss_scale_manager": "golden.test_scalers::test_fixed_loss_scale_manager",
    "fixed_loss_scale_update_cell": "golden.test_loss_scale::test_fixed",
    "functional_step": "golden.test_functional::test_functional_step",
    "grad_scale": "golden.test_optimizers::test_unscaling",
    "grad_tables": "golden.test_functional::test_grad_tables",
    "mf_clip_grad_norm": "golden.test_gradients::test_global_norm",
    "mf_local_norm": "golden.test_gradients::test_local_norm",
    "mf_runtime_errors": None,
    "mf_train_one_step_cell": "golden.test_cells::test_weights",
    "optimizers": "golden.test_optimizers::test_weights_from_scaled_gradients",
    "overflow_status": "golden.test_cells::test_overflow_status",
    "train_one_step_cell": "golden.test_cells::test_plain_cell",
    "train_one_step_with_loss_scale_cell": "golden.test_cells::test_weights",
}
"""By file: the test that compares its cases with their recording; None if INSTEAD has them all."""


def function(path: str) -> Any:
    """Return the test function at ``module::name``."""
    module, _, name = path.partition("::")
    return getattr(importlib.import_module(module), name)


def ids_in(value: object) -> Iterator[str]:
    """Yield the case ids in a parameter of a test."""
    if isinstance(value, dict) and "id" in value:
        yield value["id"]
    elif isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from ids_in(one)


def ids_run_by(path: str) -> set[str]:
    """Return the ids of the cases that a test receives as parameters."""
    marks = [mark for mark in function(path).pytestmark if mark.name == "parametrize"]
    values = [value for mark in marks for value in mark.args[1]]
    parameters = [getattr(value, "values", value) for value in values]
    return {name for one in parameters for name in ids_in(one)}


def test_every_file_is_there():
    """All recorded files are present, with 553 cases in total."""
    found = {
        path.stem: len(json.loads(path.read_text(encoding="utf-8"))["cases"])
        for path in FOLDER.glob("*.json")
    }

    assert found == NUM_CASES
    assert sum(found.values()) == 553


@pytest.mark.parametrize("family", NUM_CASES)
def test_every_case_is_run(family):
    """Each case is run either by the test in MAIN or by the test in INSTEAD."""
    recorded = cases(family).keys()
    path = MAIN[family]
    run = recorded & ids_run_by(path) if path else set()

    assert len(recorded) == NUM_CASES[family]
    assert run | (recorded & INSTEAD.keys()) == recorded
    assert not run & INSTEAD.keys()


@pytest.mark.parametrize("name", INSTEAD)
def test_what_differs_has_a_test_of_its_own(name):
    """The test in INSTEAD receives the case as a parameter or names the case in its source."""
    path = INSTEAD[name]

    assert name in ids_run_by_or_named(path)


def ids_run_by_or_named(path: str) -> set[str]:
    """Return the case ids among a test's parameters and in its source."""
    test = function(path)
    named = {name for name in INSTEAD if f'"{name}"' in inspect.getsource(test)}
    return named | (ids_run_by(path) if hasattr(test, "pytestmark") else set())


def test_no_recorded_case_is_skipped():
    """The tests in MAIN run 541 cases; the other 12 cases have an entry in INSTEAD."""
    as_they_are = sum(
        len(cases(family).keys() & ids_run_by(path)) for family, path in MAIN.items() if path
    )

    assert (as_they_are, len(INSTEAD)) == (541, 12)
