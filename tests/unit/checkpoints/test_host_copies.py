"""A copy of the state in host memory stays as it is, and keeps what tensors share."""

import logging
from collections import OrderedDict

import pytest
import torch

from mfwrap.checkpoints import host_copies
from mfwrap.checkpoints.host_copies import HostCopies, available_memory, memory_problem


def state_of(*tensors):
    """Return nested state with some tensors."""
    return {
        "state": {number: {"exp_avg": tensor, "step": 3} for number, tensor in enumerate(tensors)},
        "param_groups": [{"lr": torch.tensor(0.5), "betas": (0.9, torch.ones(1)), "params": [0]}],
    }


def test_the_copy_stays_as_it_is():
    """What changes in place afterwards does not change the copy: tensors, lists and dicts."""
    state = state_of(torch.arange(6.0).reshape(2, 3))
    copied = HostCopies().copy(state)
    state["state"][0]["exp_avg"].add_(1)
    state["param_groups"][0]["betas"][1].zero_()
    state["param_groups"][0]["params"].append(1)
    state["state"][1] = {}

    assert torch.equal(copied["state"][0]["exp_avg"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(copied["param_groups"][0]["betas"][1], torch.ones(1))
    assert copied["param_groups"][0]["params"] == [0]
    assert copied["state"].keys() == {0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_dtypes_and_shapes(dtype):
    """Dtype, shape, strides and class are kept, also of empty tensors and of scalars."""
    tensors = OrderedDict(
        transposed=torch.ones(2, 3, dtype=dtype).t(),
        scalar=torch.ones((), dtype=dtype),
        empty=torch.ones(0, 4, dtype=dtype),
        conjugated=torch.ones(2, dtype=dtype).conj(),
    )
    copied = HostCopies().copy(tensors)
    assert type(copied) is OrderedDict
    for name, tensor in tensors.items():
        assert copied[name].dtype == tensor.dtype
        assert copied[name].stride() == tensor.stride()
        assert torch.equal(copied[name], tensor)


def test_shared_memory_is_shared_in_the_copy():
    """Tied weights are one tensor in the copy, and a view is a view of the same storage."""
    weight = torch.randn(4, 4)
    copied = HostCopies().copy({"a": weight, "tied": weight.detach(), "view": weight[1:, 2]})
    assert copied["a"].data_ptr() == copied["tied"].data_ptr() != weight.data_ptr()
    copied["a"][2, 2] = 7
    assert copied["view"][1] == 7


def test_buffers_are_used_again():
    """The next copy takes the released buffers; those of other sizes are given back."""
    copies = HostCopies()
    first = copies.copy([torch.zeros(100), torch.zeros(50)])
    places = {each.data_ptr() for each in first}
    copies.release()
    second = copies.copy([torch.ones(100), torch.ones(50)])
    assert {each.data_ptr() for each in second} == places
    assert all(torch.equal(each, torch.ones_like(each)) for each in second)
    copies.release()
    third = copies.copy([torch.ones(100)])
    assert {each.data_ptr() for each in third} < places


def test_too_little_memory(monkeypatch):
    """A copy that does not fit is refused before anything is copied; kept buffers count."""
    copies = HostCopies()
    copies.copy([torch.zeros(1000)])
    copies.release()
    monkeypatch.setattr(host_copies, "available_memory", lambda: 5000)
    with pytest.raises(MemoryError, match=r"needs a copy of 0\.\d MB .*only 0\.0 MB are available"):
        copies.copy([torch.zeros(1000), torch.zeros(2000)])
    copies.copy([torch.zeros(1000), torch.zeros(1000, dtype=torch.int8)])


def test_the_memory_is_said_once(caplog):
    """The memory of the copies is logged when it grows."""
    copies = HostCopies()
    with caplog.at_level(logging.INFO):
        for size in (1, 1, 3):
            copies.copy([torch.zeros(size, 250_000)])
            copies.release()
    assert [record.args for record in caplog.records] == [("1.0 MB",), ("3.0 MB",)]


def test_available_memory(tmp_path):
    """The tightest limit counts: the machine's, or that of the control group."""
    (tmp_path / "proc/self").mkdir(parents=True)
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    assert available_memory(tmp_path) is None

    (tmp_path / "proc/meminfo").write_text("MemFree: 1 kB\nMemAvailable:   5000 kB\n")
    assert available_memory(tmp_path) == 5_120_000

    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (group / "memory.current").write_text("3000\n")
    (group / "memory.stat").write_text("anon 2000\ninactive_file 500\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 5_120_000
    (group / "memory.max").write_text("4000\n")
    assert available_memory(tmp_path) == 1500
    (group / "memory.max").write_text("1000\n")
    assert available_memory(tmp_path) == 0


def test_where_the_system_does_not_say(monkeypatch):
    """Without a known amount of memory, nothing is refused."""
    monkeypatch.setattr(host_copies, "available_memory", lambda: None)
    assert memory_problem(1 << 60) is None
