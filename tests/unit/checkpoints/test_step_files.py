"""A step's state is read back as it was written; errors for damaged files name the file."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mfwrap.checkpoints.step_files import has_step_files, read_step_files, write_step_files

TENSORS, RECORD = "mfwrap_step.safetensors", "mfwrap_step.json"
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    st.sampled_from(
        [
            "layers.0.weight",
            "a/b",
            "/",
            "a/",
            "//a",
            "gewicht_ä",
            "重み",
            "__metadata__",
            " ",
            "a\\b",
        ]
    ),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw):
    """Draw a tensor of any dtype and shape, contiguous or not."""
    shape = draw(SHAPES)
    values = (
        torch.arange(torch.Size(shape).numel()).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    )
    return values.mT if len(shape) > 1 and draw(st.booleans()) else values


NAMED_TENSORS = st.dictionaries(NAMES, tensors(), max_size=4)


def state_of(averages=None, counters=None, **update_cell):
    """Return the state of a step with one optimizer, and with an average if `averages` is given."""
    state = {
        "loss_scale": {"value": torch.tensor(8.0), "update_cell": update_cell},
        "updates": {"0": {"applied_updates": torch.tensor(3)} if counters is None else counters},
    }
    if averages is not None:
        state["ema"] = {"averages": averages, "buffers": {}, "counters": {}}
    return state


def assert_equal(expected, actual):
    """Fail unless two nested mappings of tensors agree to the last bit."""
    if not isinstance(expected, dict):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
        return
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        assert_equal(value, actual[name])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    averages=st.none() | NAMED_TENSORS,
    update_cell=st.dictionaries(st.text("ab", min_size=1), tensors()),
)
def test_what_is_written_is_read(tmp_path, averages, update_cell):
    """Tensors with any names are read back, also names with dots, slashes or non-Latin letters."""
    state = state_of(averages, **update_cell)

    write_step_files(tmp_path, state, {})

    assert_equal(state, read_step_files(tmp_path))


@given(named=NAMED_TENSORS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_buffers_and_averages_of_one_name_stay_apart(tmp_path, named):
    """An averaged buffer and an averaged weight may have the same name."""
    state = state_of(named)
    state["ema"]["buffers"] = {name: tensor + tensor for name, tensor in named.items()}

    write_step_files(tmp_path, state, {})

    assert_equal(state, read_step_files(tmp_path))


def test_many_optimizers_stay_apart(tmp_path):
    """The counters of each optimizer are read back under the optimizer's number."""
    state = state_of()
    state["updates"] = {str(i): {"applied_updates": torch.tensor(i)} for i in range(12)}

    write_step_files(tmp_path, state, {})

    assert_equal(state, read_step_files(tmp_path))


def test_parameters_and_what_requires_grad_are_written_as_values(tmp_path):
    """Parameters are written as plain tensors without `requires_grad`."""
    weight = torch.nn.Parameter(torch.ones(2))

    write_step_files(tmp_path, state_of({"weight": weight}), {})

    [read] = read_step_files(tmp_path)["ema"]["averages"].values()
    assert torch.equal(read, weight.detach())
    assert not read.requires_grad


def test_the_record_says_its_format_and_what_was_given(tmp_path):
    """The record is JSON with the format version, the state's part names and the given entries."""
    write_step_files(tmp_path, state_of({}), {"loss_scale": 8.0})

    text = (tmp_path / RECORD).read_text(encoding="utf-8")
    assert json.loads(text) == {
        "format_version": 1,
        "parts": ["ema", "loss_scale", "updates"],
        "has_manifest": True,
        "loss_scale": 8.0,
    }
    assert text.endswith("}\n")


@pytest.mark.parametrize("present", [[], [TENSORS], [RECORD], [TENSORS, RECORD]], ids=str)
def test_either_file_says_that_a_step_was_saved(tmp_path, present):
    """A folder with only one of the two files still counts as having a step."""
    for name in present:
        (tmp_path / name).touch()

    assert has_step_files(tmp_path) == bool(present)


@pytest.mark.parametrize("missing", [TENSORS, RECORD])
def test_a_missing_file_is_named(tmp_path, missing):
    """The error for an incomplete checkpoint names the missing file."""
    write_step_files(tmp_path, state_of(), {})
    (tmp_path / missing).unlink()

    with pytest.raises(FileNotFoundError, match=missing):
        read_step_files(tmp_path)


RECORDS = {
    "a list": "[]",
    "a number": "1",
    "nothing": "null",
    "of no version": "{}",
    "of a later version": '{"format_version": 2, "parts": []}',
    "of a version in words": '{"format_version": "1", "parts": []}',
    "without parts": '{"format_version": 1}',
    "no JSON": "{",
    "empty": "",
    "not text": "\udcff",
}


@pytest.mark.parametrize("content", RECORDS.values(), ids=RECORDS)
def test_a_foreign_record_is_refused_by_name(tmp_path, content):
    """An invalid record raises a ValueError that names the file."""
    write_step_files(tmp_path, state_of(), {})
    (tmp_path / RECORD).write_bytes(content.encode("utf-8", "surrogateescape"))

    with pytest.raises(ValueError, match=RECORD):
        read_step_files(tmp_path)


FILES = {"empty": b"", "archive": b"PK\x03\x04", "pickle": b"\x80\x04}.", "zeros": b"\0" * 64}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_foreign_tensors_are_refused_by_name(tmp_path, content):
    """A tensor file that is not safetensors raises a ValueError that names the file."""
    write_step_files(tmp_path, state_of(), {})
    (tmp_path / TENSORS).write_bytes(content)

    with pytest.raises(ValueError, match=TENSORS):
        read_step_files(tmp_path)


def test_tensors_of_another_library_come_as_they_are(tmp_path):
    """Tensors with unknown names are returned, so that the caller can refuse them."""
    write_step_files(tmp_path, state_of(), {})
    save_file({"weight": torch.ones(2)}, tmp_path / TENSORS)

    state = read_step_files(tmp_path)

    assert sorted(state) == ["loss_scale", "updates", "weight"]
