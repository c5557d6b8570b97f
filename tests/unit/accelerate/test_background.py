"""`save_state` in the background writes the checkpoint that it writes at once."""

import json
import logging
import shutil
import threading

import pytest
import torch
from accelerate.utils import ProjectConfiguration

from mfwrap.accelerate import background
from mfwrap.accelerate.attachment import LoopObserver
from mfwrap.checkpoints import host_copies
from mfwrap.checkpoints.manifest import MANIFEST, write_manifest
from mfwrap.checkpoints.verification import verify
from support.attached_runs import AttachedRun, RunSettings
from support.ranks.saving import save_in_the_background
from support.training_state import assert_same_state


@pytest.fixture
def gate(monkeypatch):
    """Hold the writer until the event is set; return the event and a list with its error."""
    opened, errors = threading.Event(), []
    real = background.save_object

    def save(value, path):
        assert opened.wait(60)
        if errors:
            raise errors.pop()
        return real(value, path)

    monkeypatch.setattr(background, "save_object", save)
    return opened, errors


def assert_same_files(folder, other):
    """Check that two checkpoints hold the same, and that the first manifest lists its files."""
    names = sorted(path.relative_to(other) for path in other.rglob("*"))
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == names
    for name in names:
        if name.name.startswith("optimizer"):
            own, expected = (torch.load(each / name, weights_only=True) for each in (folder, other))
            assert own["param_groups"] == expected["param_groups"]
            for number, state in expected["state"].items():
                assert_same_state(state, own["state"][number])
        elif (folder / name).is_file() and name.name != MANIFEST:
            assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    listed = [json.loads((each / MANIFEST).read_text())["files"] for each in (folder, other)]
    assert list(listed[0]) == list(listed[1])


@pytest.mark.parametrize(
    "settings", [RunSettings(), RunSettings(num_networks=2, ema=False)], ids=["one", "two"]
)
def test_the_same_checkpoint(tmp_path, gate, settings):
    """The loop changes its weights before the thread writes; loading restores the saved state."""
    opened, _ = gate
    expected = AttachedRun(settings)
    expected.train(0, 3)
    expected.accelerator.save_state(tmp_path / "at_once")

    run = AttachedRun(settings, async_save=True)
    run.train(0, 3)
    saved = run.state()
    assert run.accelerator.save_state(tmp_path / "later") == tmp_path / "later"
    run.train(3, 6)
    assert not (tmp_path / "later").exists()
    opened.set()
    run.step.wait_for_checkpoint()

    assert_same_files(tmp_path / "later", tmp_path / "at_once")
    copied = shutil.copytree(tmp_path / "later", tmp_path / "read")
    write_manifest(copied)
    assert (copied / MANIFEST).read_bytes() == (tmp_path / "later" / MANIFEST).read_bytes()
    run.accelerator.load_state(tmp_path / "later")
    assert_same_state(saved, run.state())
    assert not list(tmp_path.glob("_*"))


@pytest.mark.parametrize("ends", ["save", "load", "end", "detach"])
def test_who_waits(tmp_path, gate, ends):
    """The next save, a load, the end of the training and `detach` wait for the checkpoint."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    run = AttachedRun(async_save=True, project_config=project)
    run.train(0, 1)
    run.accelerator.save_state()
    first = tmp_path / "checkpoints" / "checkpoint_0"
    gate[0].set()
    if ends == "save":
        run.accelerator.save_state()
        verify(first)
        run.step.wait_for_checkpoint()
        assert [path.name for path in first.parent.iterdir()] == ["checkpoint_1"]
        return
    if ends == "load":
        run.accelerator.load_state(str(first))
    elif ends == "end":
        run.accelerator.end_training()
    else:
        run.step.detach()
    verify(first)


def test_the_newest_is_the_one_that_is_written(tmp_path, gate):
    """`load_state` without a folder waits before it looks for the newest checkpoint."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    run = AttachedRun(async_save=True, project_config=project)
    run.train(0, 2)
    saved = run.state()
    run.accelerator.save_state()
    run.train(2, 3)
    gate[0].set()
    run.accelerator.load_state()

    assert_same_state(saved, run.state())


def test_observers_are_told_when_it_is_complete(tmp_path, gate):
    """A checkpoint that replaces an older one at its path is not taken for the older one."""
    opened, _ = gate
    opened.set()
    run = AttachedRun(async_save=True)
    told = []

    class Observer(LoopObserver):
        def after_save(self, folder):
            told.append(folder)
            verify(folder)

    run.step.attachment.observers.append(Observer())
    run.train(0, 1)
    run.accelerator.save_state(tmp_path / "latest")
    run.step.wait_for_checkpoint()
    opened.clear()
    run.accelerator.save_state(tmp_path / "latest")
    assert told == [tmp_path / "latest"]
    opened.set()
    run.accelerator.end_training()
    assert told == [tmp_path / "latest"] * 2


def test_no_folder_is_given():
    """One sentence says which two ways there are."""
    with pytest.raises(ValueError, match="`save_state` needs `output_dir`, or a ProjectConfig"):
        AttachedRun().accelerator.save_state()


def test_an_error_of_the_thread(tmp_path, gate):
    """With one process, the next update raises the error; there is no checkpoint."""
    opened, errors = gate
    errors.append(OSError(28, "No space left on device"))
    run = AttachedRun(async_save=True)
    run.train(0, 1)
    run.accelerator.save_state(tmp_path / "a")
    opened.set()
    for thread in threading.enumerate():
        if thread.name == "mfwrap-checkpoint":
            thread.join()
    with pytest.raises(OSError, match="No space left on device"):
        run.train(1, 2)
    assert not (tmp_path / "a").exists()
    run.accelerator.save_state(tmp_path / "b")
    run.step.wait_for_checkpoint()
    verify(tmp_path / "b")


@pytest.mark.parametrize("reason", ["hooks", "pickle"])
def test_what_is_saved_at_once(tmp_path, caplog, reason):
    """Hooks of the loop find the real weights, and a pickle has them; one sentence says why."""
    run = AttachedRun(async_save=True)
    run.train(0, 1)
    seen = []
    if reason == "hooks":
        run.accelerator.register_save_state_pre_hook(
            lambda _models, weights, _folder: seen.append(dict(weights[0]))
        )
    for name in ("a", "b"):
        run.accelerator.save_state(tmp_path / name, safe_serialization=reason != "pickle")
        verify(tmp_path / name)
    said = {
        "hooks": "the loop has hooks of save_state of its own, which may read what is written",
        "pickle": "the weights are not saved as safetensors",
    }
    messages = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert messages == [f"save_state does not write in the background: {said[reason]}"]
    for weights in seen:
        assert_same_state(dict(run.network.state_dict()), weights)


def test_too_little_memory(tmp_path, monkeypatch):
    """A copy that does not fit is refused, and nothing is left."""
    monkeypatch.setattr(host_copies, "available_memory", lambda: 0)
    run = AttachedRun(async_save=True)
    run.train(0, 1)
    with pytest.raises(MemoryError, match="save without `async_save`"):
        run.accelerator.save_state(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    monkeypatch.undo()
    run.accelerator.save_state(tmp_path / "a")
    run.step.wait_for_checkpoint()
    verify(tmp_path / "a")


def test_two_ranks(two_ranks, tmp_path):
    """Both ranks have the checkpoint after waiting, and raise the error of the one that writes."""
    first, second = two_ranks.run(save_in_the_background, str(tmp_path))
    assert first == second
    has_checkpoint, has_no_second, error = first
    assert has_checkpoint
    assert has_no_second
    assert "No space left on device" in error


def test_the_argument():
    """`async_save` must be a bool."""
    with pytest.raises(TypeError, match="`async_save` must be a bool, got 'yes'"):
        AttachedRun(async_save="yes")
