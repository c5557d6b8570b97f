"""Attached runs load checkpoints of other kinds of runs and reject damaged ones."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mfwrap.checkpoints.manifest import write_manifest
from support.attached_runs import FACTORS, AttachedRun, RunSettings
from support.training_state import assert_same_state

ALL_APPLIED = (1.0,) * len(FACTORS)


def saved_by(folder, settings=None, *, attached=True, last=6, factors=FACTORS):
    """Train, save a checkpoint and return the run."""
    run = AttachedRun(settings, attached=attached)
    run.train(0, last, factors)
    run.accelerator.save_state(folder)
    return run


def counts(run):
    """Return the total numbers of applied and skipped updates."""
    state = run.state()
    return [state[f"/step/updates/0/{name}_updates"].item() for name in ("applied", "skipped")]


def assert_average_starts_from_the_weights(run):
    """Check that the averages equal the weights and their counters are zero."""
    state = run.state()
    for name, average in run.step.ema.named_averages():
        assert torch.equal(average, state[f"/network/{name}"])
    assert state["/step/ema/counters/applied_updates"] == 0
    assert state["/step/ema/counters/num_calls"] == 0


def test_a_checkpoint_of_accelerate_alone_starts_a_new_count(tmp_path):
    """Loading a checkpoint of accelerate alone resets counters and average, with warnings."""
    alone = saved_by(tmp_path, attached=False, factors=ALL_APPLIED)
    run = AttachedRun(RunSettings(seed=1))
    run.train(0, 3)

    with pytest.warns(UserWarning, match=f"^no .* in {tmp_path}") as caught:
        run.accelerator.load_state(tmp_path)

    assert [str(warning.message).partition(" in ")[0] for warning in caught] == [
        "no state of the step",
        "no average",
    ]
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert_same_state(alone.trained(), run.trained())
    assert counts(run) == [0, 0]
    assert_average_starts_from_the_weights(run)
    assert run.accelerator.optimizer_step_was_skipped is False


@pytest.mark.parametrize("attached", [False, True], ids=["of accelerate", "without a policy"])
def test_a_policy_for_spikes_starts_without_norms(tmp_path, attached):
    """A run that judges norms resumes a checkpoint that has none, and the other way round."""
    saved_by(tmp_path / "plain", attached=attached, factors=ALL_APPLIED)
    run = saved_by(tmp_path / "judged", RunSettings(seed=1, spike_policy="skip"))
    norms = "/step/updates/0/spike_values"
    assert run.state()[norms].isfinite().any()

    with contextlib.nullcontext() if attached else pytest.warns(UserWarning, match="^no "):
        run.accelerator.load_state(tmp_path / "plain")
    plain = AttachedRun()
    plain.accelerator.load_state(tmp_path / "judged")

    assert run.state()[norms].isnan().all()
    assert norms not in plain.state()


@pytest.mark.parametrize("loss_scale", ["none", "dynamic", "number"])
def test_the_scale_of_accelerates_scaler_is_taken_over(tmp_path, loss_scale):
    """The loss scale continues from ``scaler.pt`` if the checkpoint contains that file.

    A dynamic scale also continues the count of steps towards its growth.
    """
    settings = RunSettings(precision="fp16", loss_scale="none", ema=False)
    # The second of three updates overflows, which halves the scale. The third one counts.
    alone = saved_by(tmp_path, settings, attached=False, last=3)
    reached = alone.accelerator.scaler.get_scale()
    run = AttachedRun(RunSettings(precision="fp16", loss_scale=loss_scale, ema=False, seed=1))

    with pytest.warns(UserWarning, match="no state of the step"):
        run.accelerator.load_state(tmp_path)

    assert reached == 2.0**11
    assert run.step.loss_scale.item() == reached
    if loss_scale != "number":
        assert run.accelerator.scaler.state_dict()["_growth_tracker"] == 1
    assert_same_state(alone.trained(), run.trained())


def test_without_a_scaler_the_scale_stays(tmp_path):
    """The loss scale is unchanged if the checkpoint has no ``scaler.pt``."""
    saved_by(tmp_path, RunSettings(ema=False), attached=False, factors=ALL_APPLIED)
    run = AttachedRun(RunSettings(ema=False, loss_scale="number"))

    with pytest.warns(UserWarning, match="no state of the step"):
        run.accelerator.load_state(tmp_path)

    assert run.step.loss_scale.item() == 2.0**10


def test_a_scaler_that_was_switched_off_has_no_scale_to_take_over(tmp_path):
    """The loss scale is unchanged if the checkpoint's scaler was disabled."""
    settings = RunSettings(precision="fp16", loss_scale="none", ema=False)
    alone = AttachedRun(settings, attached=False)
    alone.accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    alone.accelerator.save_state(tmp_path)
    run = AttachedRun(RunSettings(ema=False, loss_scale="number"))

    with pytest.warns(UserWarning, match="no state of the step"):
        run.accelerator.load_state(tmp_path)

    assert run.step.loss_scale.item() == 2.0**10


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerate_alone_loads_what_an_attached_run_saved(tmp_path, precision):
    """Accelerate alone loads weights, optimizer, schedule and loss scale of an attached run."""
    attached = saved_by(tmp_path, RunSettings(precision=precision, loss_scale="none"), last=3)

    alone = AttachedRun(RunSettings(precision=precision, seed=1), attached=False)
    alone.accelerator.load_state(tmp_path)

    assert_same_state(attached.trained(), alone.trained())
    if precision == "fp16":
        scale = attached.step.loss_scale.item()
        assert alone.accelerator.scaler.get_scale() == scale == 2.0**11
        assert alone.accelerator.scaler.get_growth_interval() == 2


def test_an_average_that_was_not_saved_starts_from_the_loaded_weights(tmp_path):
    """A checkpoint without an average loads with a warning and restarts the average."""
    saved = saved_by(tmp_path, RunSettings(ema=False))
    run = AttachedRun(RunSettings(seed=1))
    run.train(0, 3)

    with pytest.warns(UserWarning, match=f"no average in {tmp_path}: the average starts from"):
        run.accelerator.load_state(tmp_path)

    expected, state = saved.state(), run.state()
    assert_same_state(expected, {name: state[name] for name in expected})
    assert_average_starts_from_the_weights(run)


def refused(run, folder, error, message):
    """Check that loading raises and leaves the run unchanged."""
    before = run.state()
    scale = run.step.loss_scale

    with pytest.raises(error, match=message):
        run.accelerator.load_state(folder)

    assert_same_state(before, run.state())
    assert run.step.loss_scale == scale


FOREIGN = {
    "of two optimizers": (
        RunSettings(num_networks=2, ema=False),
        RunSettings(ema=False),
        r"optimizers must have the keys \['0'\], got \['0', '1'\]",
    ),
    "of one optimizer": (
        RunSettings(ema=False),
        RunSettings(num_networks=2, ema=False),
        r"optimizers must have the keys \['0', '1'\], got \['0'\]",
    ),
}
OTHER_SCALES = {
    "of a dynamic scale": (RunSettings(), RunSettings(loss_scale="number")),
    "of a fixed scale": (RunSettings(loss_scale="fixed"), RunSettings()),
    "of an adaptive scale": (RunSettings(loss_scale="adaptive"), RunSettings()),
}


@pytest.mark.parametrize(("theirs", "ours", "message"), FOREIGN.values(), ids=FOREIGN)
def test_the_state_of_another_kind_of_run_is_refused(tmp_path, theirs, ours, message):
    """Loading a checkpoint with another number of optimizers raises and changes nothing."""
    saved_by(tmp_path, theirs)
    run = AttachedRun(ours)
    run.train(0, 3)

    refused(run, tmp_path, KeyError, message)


def test_an_average_that_the_run_has_not_is_asked_for(tmp_path):
    """Loading a checkpoint with an average raises if the run has no average."""
    saved_by(tmp_path)
    run = AttachedRun(RunSettings(ema=False))
    run.train(0, 3)

    refused(run, tmp_path, ValueError, f"cannot resume from {tmp_path}: it holds an average")


@pytest.mark.parametrize(("theirs", "ours"), OTHER_SCALES.values(), ids=OTHER_SCALES)
def test_a_loss_scale_of_another_kind_starts_anew(tmp_path, theirs, ours):
    """Loading keeps the run's loss scale, with a warning, if the saved scale is of another kind."""
    saved = saved_by(tmp_path, theirs)
    run = AttachedRun(ours)
    run.train(0, 3)
    scale = run.step.loss_scale

    with pytest.warns(UserWarning, match="the loss scale in .* another kind of update cell"):
        run.accelerator.load_state(tmp_path)

    assert torch.equal(run.step.loss_scale, scale)
    assert_same_state(saved.trained(), run.trained())


def changed_tensor(name, value):
    """Return a function that replaces a tensor in a checkpoint, or removes the tensor for None.

    The manifest is written anew, so that the step's own checks find the fault.
    """

    def damage(folder):
        path = folder / "mfwrap_step.safetensors"
        tensors = load_file(path)
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
        save_file(tensors, path)
        write_manifest(folder)

    return damage


def changed_record(key, value):
    """Return a function that changes the JSON file of a checkpoint, and writes a new manifest."""

    def damage(folder):
        path = folder / "mfwrap_step.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        record[key] = value
        path.write_text(json.dumps(record), encoding="utf-8")
        write_manifest(folder)

    return damage


AVERAGE = "ema/averages/layers.0.weight"
DAMAGES = {
    "scale is nan": (
        ValueError,
        "value",
        changed_tensor("loss_scale/value", torch.tensor(torch.nan)),
    ),
    "scale is zero": (ValueError, "value", changed_tensor("loss_scale/value", torch.zeros(()))),
    "no scale": (KeyError, "'value'", changed_tensor("loss_scale/value", None)),
    "no counter": (
        KeyError,
        "skipped_updates",
        changed_tensor("updates/0/skipped_updates", None),
    ),
    "counter of floats": (
        ValueError,
        "applied_updates",
        changed_tensor("updates/0/applied_updates", torch.ones(())),
    ),
    "no average of a weight": (KeyError, "layers.0.weight", changed_tensor(AVERAGE, None)),
    "an average of another shape": (
        ValueError,
        "layers.0.weight",
        changed_tensor(AVERAGE, torch.zeros(3)),
    ),
    "an unknown tensor": (KeyError, "epoch", changed_tensor("epoch", torch.zeros(()))),
    "a later format": (ValueError, "format_version", changed_record("format_version", 2)),
    "no tensors": (
        ValueError,
        "mfwrap_step.safetensors is missing",
        lambda folder: (folder / "mfwrap_step.safetensors").unlink(),
    ),
    "no record": (
        ValueError,
        "mfwrap_step.json is missing",
        lambda folder: (folder / "mfwrap_step.json").unlink(),
    ),
}


@pytest.mark.parametrize(("error", "message", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path, error, message, damage):
    """Loading a damaged checkpoint raises an error that names the fault, and changes nothing."""
    saved_by(tmp_path)
    damage(tmp_path)
    run = AttachedRun()
    run.train(0, 3)

    refused(run, tmp_path, error, message)


def cut(path):
    """Truncate a file to its first half, as a full disk would."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("name", ["mfwrap_step.safetensors", "mfwrap_step.json"])
def test_half_a_file_is_refused_by_its_name(tmp_path, name):
    """Loading a truncated file raises an error that names the file."""
    saved_by(tmp_path)
    cut(tmp_path / name)
    run = AttachedRun()
    run.train(0, 3)

    refused(run, tmp_path, ValueError, name)


def test_without_accelerates_own_file_nothing_is_changed(tmp_path):
    """Loading a checkpoint without the model file raises and leaves the run unchanged."""
    saved_by(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    run = AttachedRun()
    run.train(0, 3)

    refused(run, tmp_path, ValueError, "model.safetensors is missing")


def test_after_a_refused_checkpoint_training_goes_on(tmp_path):
    """After a rejected checkpoint the run trains on as if no load had been attempted."""
    saved_by(tmp_path)
    changed_record("format_version", 2)(tmp_path)
    unbroken = AttachedRun()
    unbroken.train(0, len(FACTORS))
    expected = unbroken.state()

    run = AttachedRun()
    run.train(0, 6)
    with pytest.raises(ValueError, match="format_version"):
        run.accelerator.load_state(tmp_path)
    run.train(6, len(FACTORS))

    assert_same_state(expected, run.state())
