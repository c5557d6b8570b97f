"""`save_state` writes and `load_state` restores the state of an attached step."""

import gc
import json
import pickle

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from safetensors import safe_open
from safetensors.torch import load_file

from mfwrap import ExponentialMovingAverage
from mfwrap.accelerate import attach
from mfwrap.accelerate.state import load_step
from support.attached_runs import FACTORS, LOSS_SCALES, AttachedRun, RunSettings, new_accelerator
from support.training_state import assert_same_state

OURS = {"mfwrap_loop.json", "mfwrap_manifest.json", "mfwrap_step.safetensors", "mfwrap_step.json"}
AFTER_APPLIED, AFTER_SKIPPED = 4, 6


@pytest.fixture(autouse=True, scope="module")
def _no_open_files_of_other_tests():
    """Free monitors of tests before, whose open files would be listed in a checkpoint."""
    gc.collect()


def files_in(folder):
    """Return the names of all files in a folder."""
    return {path.name for path in folder.iterdir()}


def own_state(run):
    """Return the part of a run's state that belongs to the step."""
    return {name: value for name, value in run.state().items() if name.startswith("/step/")}


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_own_files_lie_beside_those_of_accelerate(tmp_path, precision):
    """`save_state` adds files to accelerate's files and writes ``scaler.pt`` only in fp16."""
    settings = RunSettings(precision=precision, loss_scale="none")
    for attached in (False, True):
        run = AttachedRun(settings, attached=attached)
        run.train(0, 1)
        run.accelerator.save_state(tmp_path / str(attached))

    alone = files_in(tmp_path / "False")
    assert files_in(tmp_path / "True") == alone | OURS
    assert ("scaler.pt" in alone) == (precision == "fp16")


def test_the_tensors_are_the_live_values(tmp_path):
    """The saved tensors are bitwise equal to loss scale, counters and average."""
    run = AttachedRun()
    run.train(0, AFTER_SKIPPED)

    run.accelerator.save_state(tmp_path)

    saved = load_file(tmp_path / "mfwrap_step.safetensors")
    assert_same_state(own_state(run), {f"/step/{name}": value for name, value in saved.items()})
    assert saved["loss_scale/value"] == run.step.loss_scale
    assert saved["updates/0/applied_updates"] == run.step.last_report.applied_updates == 3
    assert saved["updates/0/skipped_updates"] == run.step.last_report.skipped_updates == 3
    assert saved["updates/0/consecutive_skips"] == 2
    for name, average in run.step.ema.named_averages():
        assert torch.equal(saved[f"ema/averages/{name}"], average)
    assert saved["ema/counters/applied_updates"] == 3


def test_a_person_can_read_the_record(tmp_path):
    """The JSON record contains the loss scale and the counts of updates."""
    run = AttachedRun()
    run.train(0, AFTER_SKIPPED)

    run.accelerator.save_state(tmp_path)

    record = json.loads((tmp_path / "mfwrap_step.json").read_text(encoding="utf-8"))
    assert record == {
        "format_version": 1,
        "parts": ["ema", "loss_scale", "updates"],
        "has_manifest": True,
        "loss_scale": run.step.loss_scale.item(),
        "applied_updates": [3],
        "skipped_updates": [3],
    }


def test_nothing_of_ours_is_a_pickle(tmp_path, monkeypatch):
    """Restoring the step from its files unpickles nothing."""
    saved = AttachedRun()
    saved.train(0, AFTER_SKIPPED)
    saved.accelerator.save_state(tmp_path)
    run = AttachedRun(RunSettings(seed=1))
    for method in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, method, None)
    monkeypatch.setattr(torch, "load", None)

    load_step(tmp_path, run.step.attachment)

    assert_same_state(own_state(saved), own_state(run))
    with safe_open(tmp_path / "mfwrap_step.safetensors", "pt") as file:
        assert len(file.keys()) == len(own_state(run))


def test_the_optimizer_of_an_unprepared_model_is_restored(tmp_path):
    """Its counts are loaded although the step sees its parameters in the first backward only."""
    for is_resumed in (False, True):
        accelerator = new_accelerator()
        step = attach(accelerator)
        network = torch.nn.Linear(2, 1)
        optimizer = accelerator.prepare(torch.optim.SGD(network.parameters(), lr=0.1))
        if is_resumed:
            accelerator.load_state(tmp_path)
        accelerator.backward(network(torch.ones(1, 2)).sum())
        optimizer.step()
        accelerator.save_state(tmp_path)

    assert step.last_report.applied_updates == 2


@pytest.mark.parametrize("stop", [AFTER_APPLIED, AFTER_SKIPPED], ids=["applied", "skipped"])
@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
def test_loading_brings_everything_back(tmp_path, loss_scale, stop):
    """After loading, the run repeats its steps bitwise in the same process."""
    run = AttachedRun(RunSettings(loss_scale=loss_scale))
    run.train(0, stop)
    run.accelerator.save_state(tmp_path)
    saved = run.state()
    first_losses = run.train(stop, len(FACTORS))
    first_end = run.state()

    run.accelerator.load_state(tmp_path)
    loaded = run.state()
    losses = run.train(stop, len(FACTORS))

    assert_same_state(saved, loaded)
    torch.testing.assert_close(losses, first_losses, rtol=0, atol=0, equal_nan=True)
    assert_same_state(first_end, run.state())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", ["fused AdamW", "foreach AdamW"])
def test_saving_after_each_update_changes_nothing(tmp_path, optimizer, accumulation):
    """Saving after each update does not change the run."""
    settings = RunSettings(optimizer=optimizer, accumulation=accumulation)
    unsaved = AttachedRun(settings)
    unsaved.train(0, len(FACTORS))
    expected = unsaved.state()

    run = AttachedRun(settings)
    for update in range(len(FACTORS)):
        run.train(update, update + 1)
        run.accelerator.save_state(tmp_path)

    assert_same_state(expected, run.state())


@pytest.mark.usefixtures("_late_results")
@pytest.mark.parametrize(("stop", "position"), [(1, 1), (2, 1), (3, 2), (6, 3)])
def test_what_is_pending_is_settled_before_it_is_saved(tmp_path, stop, position):
    """The saved schedule has counted the last update if that update was applied."""
    run = AttachedRun()
    run.train(0, stop)

    run.accelerator.save_state(tmp_path)

    schedule = torch.load(tmp_path / "scheduler.bin", weights_only=True)
    optimizer = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert schedule["last_epoch"] == position
    assert optimizer["param_groups"][0]["lr"] == 1e-2 * (1 / (1 + position))


@pytest.mark.usefixtures("_late_results")
def test_loading_drops_what_is_pending(tmp_path):
    """An update before loading does not step the schedule after loading."""
    run = AttachedRun()
    run.accelerator.save_state(tmp_path)
    run.train(0, 1)

    run.accelerator.load_state(tmp_path)
    run.step.flush()

    assert run.schedule.state_dict()["last_epoch"] == 0
    assert run.optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize(("stop", "skipped"), [(AFTER_APPLIED, False), (AFTER_SKIPPED, True)])
def test_a_resumed_run_knows_whether_its_last_update_was_skipped(tmp_path, stop, skipped):
    """A resumed run reports whether the last update before saving was skipped."""
    run = AttachedRun()
    run.train(0, stop)
    run.accelerator.save_state(tmp_path)

    resumed = AttachedRun(RunSettings(seed=1))
    resumed.accelerator.load_state(tmp_path)

    assert run.accelerator.optimizer_step_was_skipped is skipped
    assert resumed.accelerator.optimizer_step_was_skipped is skipped


def test_buffers_of_the_average_are_carried(tmp_path):
    """The averaged copies of buffers are saved and restored."""
    averages = []
    for seed in (0, 1):
        accelerator = new_accelerator()
        step = attach(accelerator, ema=lambda network: ExponentialMovingAverage(network, 0.5))
        torch.manual_seed(seed)
        network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network, optimizer = accelerator.prepare(network, optimizer)
        if seed == 0:
            accelerator.backward(network(torch.randn(4, 2)).square().mean())
            optimizer.step()
            accelerator.save_state(tmp_path)
        else:
            accelerator.load_state(tmp_path)
        averages.append(step.ema.state_dict())

    saved, loaded = averages
    assert saved["buffers"]["1.running_mean"].any()
    for part, tensors in saved.items():
        assert_same_state(tensors, loaded[part])


def test_automatic_names_and_a_limit_keep_whole_checkpoints(tmp_path):
    """With a checkpoint limit the oldest folder is deleted and the newest one is loaded."""
    project = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2
    )
    run = AttachedRun(project_config=project)
    for update in range(3):
        run.train(update, update + 1)
        run.accelerator.save_state()
    saved = run.state()
    run.train(3, len(FACTORS))

    run.accelerator.load_state()

    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["checkpoint_1", "checkpoint_2"]
    assert all(files_in(folder) >= OURS for folder in folders)
    assert_same_state(saved, run.state())


def test_a_damaged_checkpoint_of_automatic_names(tmp_path):
    """Without a folder, the newest checkpoint is verified; the error offers the one before it."""
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    run = AttachedRun(project_config=project)
    with pytest.raises(FileNotFoundError):
        run.accelerator.load_state()
    for _ in range(11):
        run.accelerator.save_state()
    newest = tmp_path / "checkpoints" / "checkpoint_10"
    content = bytearray((newest / "random_states_0.pkl").read_bytes())
    content[len(content) // 2] ^= 4
    (newest / "random_states_0.pkl").write_bytes(content)

    with pytest.raises(ValueError, match=r"checkpoint_10: random_states_0\.pkl is damaged") as said:
        run.accelerator.load_state()
    assert str(said.value).endswith(str(newest.with_name("checkpoint_9")))


@pytest.mark.parametrize("each_node", [False, True])
def test_the_only_process_saves_whoever_is_asked_to(tmp_path, each_node):
    """A single process writes mfwrap's files with and without ``save_on_each_node``."""
    project = ProjectConfiguration(project_dir=str(tmp_path), save_on_each_node=each_node)
    run = AttachedRun(project_config=project)

    run.accelerator.save_state(tmp_path / "saved")

    assert files_in(tmp_path / "saved") >= OURS


@pytest.mark.parametrize("method", ["save_state", "load_state"])
def test_inside_a_swap_nothing_is_saved_or_loaded(tmp_path, method):
    """Saving or loading inside a swap raises an error and changes nothing."""
    run = AttachedRun()
    run.train(0, 1)
    run.accelerator.save_state(tmp_path / "before")
    run.train(1, AFTER_APPLIED)
    state = run.state()
    folder = tmp_path / ("before" if method == "load_state" else "inside")

    with (
        run.step.ema.swap(),
        pytest.raises(RuntimeError, match="must not be called inside `swap`; call it after"),
    ):
        getattr(run.accelerator, method)(folder)

    assert not (tmp_path / "inside").exists()
    assert_same_state(state, run.state())
