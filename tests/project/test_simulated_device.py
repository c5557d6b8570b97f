"""The simulated device finds faults that only show on CUDA, and mfwrap has none of them."""

import pytest

from support.device import needs_backends, run

pytestmark = needs_backends


@pytest.fixture(scope="module")
def cases():
    """Return what each planted fault, and each case without one, has shown."""
    return run("support.device.cases:found")


@pytest.fixture(scope="module")
def ways():
    """Return what each way into mfwrap has shown."""
    return run("support.device.ways:found")


@pytest.fixture(scope="module")
def recomputed():
    """Return what a check has found that runs steps twice, with wrong operators and without."""
    return run("support.device.recomputed:found")


@pytest.fixture(scope="module")
def captures():
    """Return what captured steps have shown."""
    return run("support.device.captures:found")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("an event reused", "event reused"),
        ("a pinned buffer read early", "pinned buffer read early"),
        ("a pinned buffer written early", "pinned buffer written early"),
        ("a missing record_stream", "missing record_stream"),
        ("a read inside a capture", "not allowed in a capture"),
        ("a wrong stream", "wrong stream"),
    ],
)
def test_a_planted_fault_is_named(cases, name, kind):
    """The first fault that is found is the planted one."""
    assert cases[name]["kinds"][0] == kind


@pytest.mark.parametrize(
    ("name", "list_of", "entry"),
    [
        ("a host read in the norms", "reads", "aten::_local_scalar_dense"),
        ("a copy from unpinned memory", "synchronizations", "copy from unpinned memory"),
        ("a synchronization in a monitor", "synchronizations", "synchronize"),
    ],
)
def test_a_planted_wait_is_named_with_its_line(cases, name, list_of, entry):
    """A wait that is planted is listed each time, with the operator and the line that causes it."""
    found = cases[name][list_of]

    assert len(found) >= 3
    assert all(each.startswith(f"{entry} at ") and "cases.py:" in each for each in found)


@pytest.mark.parametrize(
    "name",
    [
        "steps of a cell",
        "two copies to the host",
        "a recorded stream",
        "a monitor",
        "a monitor of a network on two devices",
        "an update inside a capture",
        "a side stream that waits",
        "a scale from pinned memory",
        "dropped copies",
    ],
)
def test_without_a_fault_nothing_is_found(cases, name):
    """The same work without the planted fault is silent; the host waits for events alone."""
    found = cases[name]

    assert (found["faults"], found["reads"], found["synchronizations"]) == ([], [], [])
    assert all("deferred.py" in wait for wait in found["waits"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cell", "attach", "MFTrainer", "every monitor", "Model"])
def test_each_way_trains_without_a_fault(ways, way):
    """Losses, norms and weights are those of the CPU, and the host waits for nothing but events."""
    found = ways[way]

    assert found["numbers"] == pytest.approx(found["expected"], rel=1e-5)
    assert found["updates"] == 14
    assert (found["faults"], found["reads"], found["synchronizations"]) == ([], [], [])
    assert all("deferred.py" in wait for wait in found["waits"])


@pytest.mark.slow
def test_the_hook_of_replicas_waits_for_nothing(ways):
    """Under DistributedDataParallel mfwrap's hook adds no wait to torch's own, which is in C++."""
    found = ways["DDP"]

    assert found["numbers"] == pytest.approx(found["expected"], rel=1e-5)
    assert (found["updates"], found["faults"], found["reads"]) == (14, [], [])
    assert {each.rpartition(" at ")[2] for each in found["synchronizations"]} == {"autograd"}
    assert all("deferred.py" in wait for wait in found["waits"])


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_replayed_steps_are_the_plain_steps(captures, optimizer):
    """Replays of a graph compute what plain steps do; the network runs for captures only.

    Between the updates parameters are frozen, states loaded, and the rate and the scale set. The
    graph is then captured again: six runs of two micro-batches for 14 updates.
    """
    found = captures[optimizer]

    assert found["numbers"] == pytest.approx(found["expected"], rel=1e-6, nan_ok=True)
    assert found["forwards"] == [12, 28]
    assert (found["faults"], found["reads"]) == ([], [])
    assert all("captured.py:" in each for each in found["synchronizations"])
    assert len(found["synchronizations"]) <= 1
    assert all("deferred.py" in wait for wait in found["waits"])


@pytest.mark.parametrize("name", ["state in new tensors", "a batch that is not copied"])
def test_a_replay_uses_the_memory_of_the_capture(captures, name):
    """What is not kept in the memory of the capture gives other numbers."""
    found = captures[name]

    assert found["numbers"] != pytest.approx(found["expected"], rel=1e-3, nan_ok=True)


def test_a_read_in_a_captured_network_is_named(captures):
    """A network that reads its loss on the host is found in the capture, with the operator."""
    first = captures["a network that reads its loss"]["faults"][0]

    assert first.startswith("not allowed in a capture: the host reads (aten::_local_scalar_dense)")


def test_a_capture_that_fails_changes_nothing(captures):
    """The error is given in one sentence; the same update can be captured again."""
    found = captures["a capture that fails"]

    [error] = found["errors"]
    assert "hold, with capture=True, got: a kernel that cannot be captured" in error
    assert found["numbers"] == pytest.approx(found["expected"], rel=1e-6, nan_ok=True)
    assert (found["faults"], found["reads"]) == ([], [])


def test_fifty_wrong_operators_are_named(recomputed):
    """Of 50 products that are wrong by one bit in one of two runs, all are named, by tensor."""
    assert len(recomputed["expected"]) == 50
    assert recomputed["found"] == recomputed["expected"]
    assert recomputed["devices"] == ["simulated:0"]


def test_a_step_that_is_run_twice_reads_nothing(recomputed):
    """Without a fault nothing is recorded, and the host reads nothing from the device."""
    assert recomputed["without"] == []
    assert recomputed["faults"] == []
    assert recomputed["reads"] == []
