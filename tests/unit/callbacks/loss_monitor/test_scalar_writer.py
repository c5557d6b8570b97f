"""The loss monitor's TensorBoard curves, under MindFormers' tags."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mfwrap.callbacks import MFLossMonitor
from support.monitored_loop import Loop, output

TWICE = {"learning-rate", "batch-size", "loss", "grad-norm"}


def curves(folder) -> dict[str, list[tuple[int, float]]]:
    """Return the curves in a folder by tag, as pairs of x and value."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def run(folder, outputs, **settings) -> dict[str, list[tuple[int, float]]]:
    """Run steps of half a second each, and return the curves."""
    loop = Loop(tensorboard_dir=folder, **settings)
    loop.send("on_train_begin")
    for values in outputs:
        loop.step(values, seconds=0.5)
    loop.send("on_train_end")
    return curves(folder)


def with_twins(tags) -> set[str]:
    """Return the tags, and the tags of the same curves over samples."""
    return {*tags, *(f"{tag} vs samples" for tag in tags)}


def test_curves_of_a_run(tmp_path):
    """Each record adds a point to the curves over steps and to the curves over samples."""
    found = run(tmp_path, [output(2.0, rate=0.5, norm=3.0), output(1.0, rate=0.25, norm=4.0)])

    assert found.keys() == with_twins(TWICE)
    values = {
        "loss": [2.0, 1.0],
        "learning-rate": [0.5, 0.25],
        "grad-norm": [3.0, 4.0],
        "batch-size": [4.0, 4.0],
    }
    for tag, expected in values.items():
        assert found[tag] == list(zip((1, 2), expected, strict=True))
        assert found[f"{tag} vs samples"] == list(zip((4, 8), expected, strict=True))


def test_curves_that_are_asked_for(tmp_path):
    """Loss scale and times are written if their flags are set."""
    found = run(
        tmp_path,
        [output(scale=1024.0)],
        flops_per_step=1e12,
        log_loss_scale_to_tensorboard=True,
        log_timers_to_tensorboard=True,
    )

    more = {"loss-scale", "iteration-time", "throughput"}
    once = {"B-samples-per-day", "model-flops-throughput-per-npu"}
    assert found.keys() == with_twins(TWICE | more) | once
    assert found["loss-scale"] == [(1, 1024.0)]
    assert found["iteration-time"] == [(1, 500.0)]
    assert found["throughput vs samples"] == [(4, 8.0)]
    assert found["model-flops-throughput-per-npu"] == [(1, 2.0)]
    assert found["B-samples-per-day"] == [(1, pytest.approx(8 * 86400 / 1e9))]


def test_operations_need_no_timers(tmp_path):
    """Throughput in FLOP/s is written without the flag for times."""
    found = run(tmp_path, [output()], flops_per_step=1e12)

    assert found["model-flops-throughput-per-npu"] == [(1, 2.0)]
    assert "iteration-time" not in found


def test_values_that_are_not_known(tmp_path):
    """Without norm and batch size, their curves and all curves over samples are missing."""
    found = run(
        tmp_path,
        [output(norm=None)],
        batch_size=None,
        log_loss_scale_to_tensorboard=True,
        log_timers_to_tensorboard=True,
    )

    assert found.keys() == {"learning-rate", "loss", "loss-scale", "iteration-time"}


def test_steps_that_are_not_printed(tmp_path):
    """Only steps with a record have a point."""
    found = run(tmp_path, [output(float(n)) for n in range(1, 7)], per_print_times=3)

    assert found["loss"] == [(3, 3.0), (6, 6.0)]


def test_steps_before_this_run(tmp_path):
    """With `initial_epoch` and `initial_step`, the curve continues after the earlier steps."""
    found = run(tmp_path, [output()], dataset_size=3, initial_epoch=1, initial_step=1)

    assert [x for x, _ in found["loss"]] == [5]
    assert [x for x, _ in found["loss vs samples"]] == [20]


def test_stock_loop(tmp_path):
    """In a loop that logs no loss scale, there is no curve of the loss scale."""
    loop = Loop(tensorboard_dir=tmp_path, log_loss_scale_to_tensorboard=True)
    loop.send("on_train_begin")
    loop.step(None)
    loop.send("on_log", logs={"loss": 2.0})
    loop.send("on_train_end")

    assert curves(tmp_path).keys() == with_twins({"loss", "batch-size"})


def test_no_file_before_the_first_record(tmp_path):
    """Only the main process creates an events file."""
    folder = tmp_path / "events"
    loop = Loop(tensorboard_dir=folder)
    loop.state.is_world_process_zero = False
    loop.send("on_train_begin")
    loop.step(output())
    loop.send("on_train_end")

    assert not folder.exists()


def test_a_second_run(tmp_path):
    """A second run of the same monitor writes to the same folder."""
    loop = Loop(tensorboard_dir=tmp_path)
    for _ in range(2):
        loop.send("on_train_begin")
        loop.step(output())
        loop.send("on_train_end")

    # Sort the steps, because TensorBoard reads files in the order of their names if they
    # were created in the same second.
    assert sorted(x for x, _ in curves(tmp_path)["loss"]) == [1, 2]


def test_without_tensorboard(tmp_path, monkeypatch):
    """Without TensorBoard, the constructor raises an error that says how to install it."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r'pip install "mfwrap\[tensorboard\]"'):
        MFLossMonitor(tensorboard_dir=tmp_path)
    MFLossMonitor()
