"""Checkpoints of a real Trainer: when they are saved, which are kept, which are healthy."""

import json
import math
import re

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState

from mfwrap import StepConfig
from mfwrap.callbacks import CheckpointMonitor, newest_healthy_checkpoint
from mfwrap.callbacks.checkpoint_health import (
    CheckpointHealth,
    has_bad_weights,
    health_of,
    record_health,
)
from mfwrap.records.json_lines import read_json_lines
from mfwrap.trainer import MFTrainer
from support.host_reads import HostReads
from support.monitored_loop import Clock
from support.trainer_runs import new_trainer, spoilt_llama

NAN = math.nan


def steps_of(folder) -> list[int]:
    """Return the steps of the checkpoints in a folder."""
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


def records(folder) -> list[dict]:
    """Return the health records of a run."""
    return read_json_lines(folder / "checkpoint_health.jsonl")


def trained(folder, monitor, *, kind=MFTrainer, callbacks=(), **settings):
    """Train a tiny Llama, one micro-batch an update, under a monitor."""
    extras = {"step": StepConfig(local_norm=True)} if kind is MFTrainer else None
    arguments = {"gradient_accumulation_steps": 1, "max_steps": 6} | settings
    trainer = new_trainer(kind, folder, callbacks=[*callbacks, monitor], extras=extras, **arguments)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", [MFTrainer, Trainer])
def test_by_steps(kind, tmp_path):
    """Every second step and the last; the last two are kept, and each has a line."""
    trained(tmp_path, CheckpointMonitor(2, keep_checkpoint_max=2), kind=kind, max_steps=7)

    assert steps_of(tmp_path) == [6, 7]
    assert [record["step"] for record in records(tmp_path)] == [2, 4, 6, 7]
    assert all(record["healthy"] for record in records(tmp_path))
    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-7"
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_by_time(tmp_path):
    """A step after ten seconds are over, the checkpoint is saved, and the clock starts anew."""
    clock = Clock()

    class Seconds(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            clock.now += 4.0

    monitor = CheckpointMonitor(save_checkpoint_seconds=10, keep_checkpoint_max=0, clock=clock)
    trained(tmp_path, monitor, callbacks=[Seconds()], max_steps=10)

    assert steps_of(tmp_path) == [4, 8, 10]


def test_an_unhealthy_checkpoint(tmp_path, caplog):
    """One with a loss that is nan is on record with the reason; an older one is kept for it."""
    factors = [1.0] * 3 + [NAN] * 3
    trained(tmp_path, CheckpointMonitor(1, keep_checkpoint_max=2), model=spoilt_llama(factors))
    found = {record["step"]: record for record in records(tmp_path)}

    assert [found[step]["healthy"] for step in range(1, 7)] == [True] * 3 + [False] * 3
    assert found[4]["reasons"] == ["the loss is nan"]
    assert found[6]["reasons"] == ["the loss is nan", "3 updates in a row were skipped"]
    assert steps_of(tmp_path) == [3, 5, 6]
    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    assert "checkpoint-6 is not healthy: the loss is nan, 3 updates in a row were skipped" in [
        r.getMessage() for r in caplog.records
    ]


def test_a_resume_from_the_newest_healthy_one(tmp_path):
    """The run goes on from it and its checkpoints take the place of the ill ones."""
    trained(tmp_path, CheckpointMonitor(1), model=spoilt_llama([1.0] * 3 + [NAN] * 3))
    healthy = newest_healthy_checkpoint(tmp_path)
    extras = {"step": StepConfig(local_norm=True)}
    again = new_trainer(
        MFTrainer,
        tmp_path,
        callbacks=[CheckpointMonitor(1)],
        extras=extras,
        gradient_accumulation_steps=1,
        max_steps=6,
    )
    again.train(resume_from_checkpoint=str(healthy))

    assert again.attached.last_report.applied_updates == 6
    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    assert [r["healthy"] for r in records(tmp_path)][-3:] == [True] * 3


def test_what_is_usual_goes_on_after_a_resume(tmp_path):
    """The state of a run in two parts is that of a run in one, and JSON can hold it."""
    spoilt = [1.0, NAN, 1.0, 1.0, NAN, NAN]
    whole = CheckpointMonitor(3)
    trained(tmp_path / "whole", whole, model=spoilt_llama(spoilt))
    trained(tmp_path / "parts", CheckpointMonitor(3), model=spoilt_llama(spoilt[:3]), max_steps=3)
    later = CheckpointMonitor(3)
    again = new_trainer(
        MFTrainer,
        tmp_path / "parts",
        model=spoilt_llama(spoilt[3:]),
        callbacks=[later],
        extras={"step": StepConfig(local_norm=True)},
        gradient_accumulation_steps=1,
        max_steps=6,
    )
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    states = [json.loads(json.dumps(monitor.state())) for monitor in (whole, later)]
    ours, theirs = (state["attributes"]["saved_run"] for state in states)

    assert [r["skips_since_last"] for r in records(tmp_path / "parts")] == [1, 2]
    assert [r["skips_since_last"] for r in records(tmp_path / "whole")] == [1, 2]
    assert (ours["global_norm"]["num_steps"], ours["skipped_updates"]) == (3, 3)
    # The schedule of the first part is shorter, so that norms differ a little.
    assert theirs["global_norm"] == pytest.approx(ours["global_norm"], rel=0.5)
    assert theirs["skipped_updates"] == 3
    assert CheckpointMonitor.from_state(states[0])._settings == whole._settings


def test_weights_that_are_not_finite(tmp_path):
    """They are found when the checkpoint is saved, also in a stock Trainer."""

    class Spoil(TrainerCallback):
        def on_step_end(self, _args, state, _control, *, model, **_):
            if state.global_step == 4:
                with torch.no_grad():
                    model.lm_head.weight[0, 0] = math.inf

    trained(tmp_path, CheckpointMonitor(2), kind=Trainer, callbacks=[Spoil()], max_steps=4)

    assert [(r["step"], r["reasons"]) for r in records(tmp_path)] == [
        (2, []),
        (4, ["a weight is not finite"]),
    ]


def test_the_embeddings_gradient(tmp_path):
    """Its norm, not the square of it, is compared."""
    norms = []

    class Note(TrainerCallback):
        def on_step_end(self, *_, step_output, step_report, **__):
            index = step_report.local_norm_names.index("model.embed_tokens.weight")
            norms.append(step_output.local_norm[index].item())

    monitor = CheckpointMonitor(1, embedding_local_norm_threshold=1e-9)
    trained(tmp_path / "low", monitor, callbacks=[Note()], max_steps=1)
    high = CheckpointMonitor(1, embedding_local_norm_threshold=norms[0] * 1.01)
    trained(tmp_path / "high", high, max_steps=1)
    (low_record,), (high_record,) = records(tmp_path / "low"), records(tmp_path / "high")

    assert low_record["embedding_norm"] == pytest.approx(norms[0])
    assert low_record["reasons"] == [f"the norm of the embedding's gradient is {norms[0]:.6g}"]
    assert high_record["healthy"]


def test_the_last_record_counts(tmp_path):
    """A checkpoint that was saved again is what it was found to be then; one must be there."""
    for step, healthy in ((2, True), (10, True), (4, True), (4, False), (30, True)):
        record_health(
            tmp_path, CheckpointHealth(checkpoint=f"checkpoint-{step}", step=step, healthy=healthy)
        )
    for step in (2, 4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()

    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10").rmdir()
    assert newest_healthy_checkpoint(str(tmp_path)) == tmp_path / "checkpoint-2"
    assert newest_healthy_checkpoint(tmp_path / "none") is None


FINE = {
    "loss": 1.0,
    "global_norm": 2.0,
    "overflow": False,
    "consecutive_skips": 2,
    "embedding_norm": 0.5,
    "embedding_limit": 1.0,
    "most_skips": 2,
    "is_spike": False,
    "weights_are_bad": False,
}


@pytest.mark.parametrize(
    ("values", "num_reasons"),
    [
        ({}, 0),
        ({"loss": None, "global_norm": None, "embedding_norm": None, "consecutive_skips": None}, 0),
        ({"loss": math.inf}, 1),
        ({"consecutive_skips": 3}, 1),
        ({"is_spike": True}, 1),
        ({"is_spike": True, "overflow": True}, 0),
        ({"embedding_norm": 1.0}, 1),
        ({"embedding_norm": NAN}, 1),
        ({"embedding_norm": NAN, "overflow": True}, 0),
        ({"embedding_norm": 9.0, "embedding_limit": None}, 0),
        ({"weights_are_bad": True, "loss": NAN}, 2),
    ],
)
def test_reasons(values, num_reasons):
    """Each sign of illness is one reason; an overflow says nothing of norms."""
    assert len(health_of(**FINE | values)) == num_reasons


def test_bad_weights():
    """Of floating type, trainable or not."""
    model = nn.Linear(2, 2)
    assert not has_bad_weights(model)
    model.bias.requires_grad_(requires_grad=False)[0] = -math.inf
    assert has_bad_weights(model)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ValueError, "`save_checkpoint_steps` or `save_checkpoint_seconds` must be > 0"),
        ({"save_checkpoint_steps": -1}, ValueError, "`save_checkpoint_steps` must be >= 0"),
        ({"save_checkpoint_steps": 1.0}, TypeError, "`save_checkpoint_steps` must be an int"),
        ({"save_checkpoint_seconds": -1}, ValueError, "`save_checkpoint_seconds` must be > 0"),
        ({"save_checkpoint_steps": 1, "keep_checkpoint_max": -1}, ValueError, "must be >= 0"),
        ({"save_checkpoint_steps": 1, "most_skips": True}, TypeError, "`most_skips` must be an"),
        (
            {"save_checkpoint_steps": 1, "embedding_local_norm_threshold": 0},
            ValueError,
            "`embedding_local_norm_threshold` must be > 0",
        ),
        (
            {"save_checkpoint_steps": 1, "use_checkpoint_health_monitor": 1},
            TypeError,
            "`use_checkpoint_health_monitor` must be a bool",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(settings, error, message):
    """An argument that does not fit is refused at construction."""
    with pytest.raises(error, match=re.escape(message)):
        CheckpointMonitor(**settings)


def test_two_that_delete(tmp_path):
    """The Trainer's own limit is refused."""
    with pytest.raises(ValueError, match=r"`save_total_limit` must be None .* got 3"):
        trained(tmp_path, CheckpointMonitor(1), save_total_limit=3)


def test_a_step_reads_nothing(tmp_path):
    """What tells health is on its way to the host without a wait."""
    monitor = CheckpointMonitor(100, save_checkpoint_seconds=1e6, embedding_local_norm_threshold=1)
    outputs = []

    class Keep(TrainerCallback):
        def on_step_end(self, *_, step_output, step_report, **__):
            outputs.append((step_output, step_report))

    trainer = trained(tmp_path, monitor, callbacks=[Keep()], max_steps=1)
    state, args = TrainerState(max_steps=99), trainer.args
    monitor.on_train_begin(args, TrainerState())
    step_output, step_report = outputs[0]
    values = {"step_output": step_output, "step_report": step_report}

    def step(number):
        state.global_step = number
        monitor.on_step_end(args, state, trainer.control, **values)

    # The first one makes the memory that values are copied into.
    step(1)
    with HostReads() as counted:
        for number in (2, 3, 4):
            step(number)

    assert [name for name in counted.names if name != "to"] == []
