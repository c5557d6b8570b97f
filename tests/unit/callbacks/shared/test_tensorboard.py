"""Events files of TensorBoard."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mfwrap.callbacks.shared.tensorboard import EventsFile


def points(folder, tag) -> list[tuple[int, float]]:
    """Return the points of a curve, in the order of steps."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return sorted((event.step, event.value) for event in events.Scalars(tag))


def test_no_file_before_the_first_point(tmp_path):
    """The folder and the file are created with the first point."""
    folder = tmp_path / "curves"
    events = EventsFile(folder)
    events.close()
    assert not folder.exists()

    events.add("loss", 1.0, 1)
    events.close()
    assert points(folder, "loss") == [(1, 1.0)]


def test_points_after_closing(tmp_path):
    """A point after `close` opens a second file in the same folder."""
    events = EventsFile(tmp_path)
    for step in (1, 2):
        events.add("loss", step / 2, step)
        events.close()

    assert len(list(tmp_path.iterdir())) == 2
    assert points(tmp_path, "loss") == [(1, 0.5), (2, 1.0)]


def test_without_tensorboard(tmp_path, monkeypatch):
    """If TensorBoard is not installed, the error says how to install it."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r'pip install "mfwrap\[tensorboard\]"'):
        EventsFile(tmp_path)
