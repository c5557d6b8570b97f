"""Checkpoints of a Trainer: when they are saved, which are kept, which are healthy."""

import json
import math
import re
from dataclasses import asdict

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from mfwrap import StepConfig
from mfwrap.callbacks import CheckpointMonitor, newest_healthy_checkpoint
from mfwrap.callbacks.checkpoint_health import HEALTH_FILE, CheckpointHealth
from mfwrap.callbacks.checkpoint_monitor import rotate_checkpoints
from mfwrap.checkpoints.written_files import list_own
from mfwrap.records.json_lines import read_json_lines
from mfwrap.records.run_files import open_records
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


def trained(folder, monitor, *, kind=MFTrainer, callbacks=(), step=None, **settings):
    """Train a tiny Llama with a monitor and one micro-batch per update; return the trainer."""
    step = StepConfig(local_norm=True) if step is None else step
    extras = {"step": step} if kind is MFTrainer else None
    arguments = {"gradient_accumulation_steps": 1, "max_steps": 6} | settings
    trainer = new_trainer(kind, folder, callbacks=[*callbacks, monitor], extras=extras, **arguments)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", [MFTrainer, Trainer])
def test_by_steps(kind, tmp_path):
    """Due steps and the last step are saved and recorded; the newest two are kept."""
    trained(tmp_path, CheckpointMonitor(2, keep_checkpoint_max=2), kind=kind, max_steps=7)

    assert steps_of(tmp_path) == [6, 7]
    assert [record["step"] for record in records(tmp_path)] == [2, 4, 6, 7]
    assert all(record["healthy"] for record in records(tmp_path))
    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-7"
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_by_time(tmp_path):
    """A checkpoint is saved one step after the interval has passed; then a new interval starts."""
    clock = Clock()

    class Seconds(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            clock.now += 4.0

    monitor = CheckpointMonitor(save_checkpoint_seconds=10, keep_checkpoint_max=0, clock=clock)
    trained(tmp_path, monitor, callbacks=[Seconds()], max_steps=10)

    assert steps_of(tmp_path) == [4, 8, 10]


def test_an_unhealthy_checkpoint(tmp_path, caplog):
    """An unhealthy checkpoint is recorded with its reasons, and the last healthy one is kept."""
    factors = [1.0] * 3 + [NAN] * 3
    trained(tmp_path, CheckpointMonitor(1, keep_checkpoint_max=2), model=spoilt_llama(factors))
    found = {record["step"]: record for record in records(tmp_path)}

    assert [found[step]["healthy"] for step in range(1, 7)] == [True] * 3 + [False] * 3
    assert found[4]["reasons"] == ["the loss is nan"]
    assert found[6]["reasons"] == ["the loss is nan", "3 updates in a row were skipped"]
    assert steps_of(tmp_path) == [3, 5, 6]
    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    assert "checkpoint-6 is unhealthy: the loss is nan, 3 updates in a row were skipped" in [
        r.getMessage() for r in caplog.records
    ]


def test_a_resume_from_the_newest_healthy_one(tmp_path):
    """A run resumed from the newest healthy checkpoint replaces the unhealthy checkpoints."""
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
    """A resumed run ends with the same state of the monitor as an uninterrupted run."""
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
    # The run in "parts" first had `max_steps=3`, which shortens its schedule, so its norms differ
    # from those of the run in "whole".
    assert theirs["global_norm"] == pytest.approx(ours["global_norm"], rel=0.5)
    assert theirs["skipped_updates"] == 3
    assert CheckpointMonitor.from_state(states[0])._settings == whole._settings


def test_weights_that_are_not_finite(tmp_path):
    """Non-finite weights are found at a save, also in a stock Trainer."""

    class Spoil(TrainerCallback):
        def on_step_end(self, _args, state, _control, *, model, **_):
            if state.global_step == 4:
                with torch.no_grad():
                    model.lm_head.weight[0, 0] = math.inf

    trained(tmp_path, CheckpointMonitor(2), kind=Trainer, callbacks=[Spoil()], max_steps=4)

    assert [(r["step"], r["reasons"]) for r in records(tmp_path)] == [
        (2, []),
        (4, ["the weight lm_head.weight is not finite"]),
    ]


def test_buffers_and_the_optimizer_that_are_not_finite(tmp_path):
    """A NaN input leaves NaN in running statistics although its update was skipped."""

    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 1)

        def forward(self, x):
            return {"loss": self.head(self.norm(x)).square().mean()}

    class Spoil(TrainerCallback):
        def on_step_end(self, _args, state, _control, *, model, optimizer, **_):
            if state.global_step == 3:
                optimizer.state[model.head.bias]["exp_avg"].fill_(math.inf)

    rows = [{"x": torch.full((2,), NAN if row == 2 else 1.0 * row)} for row in range(8)]
    trainer = MFTrainer(
        Normalized(),
        TrainingArguments(
            tmp_path,
            max_steps=4,
            per_device_train_batch_size=2,
            report_to="none",
            use_cpu=True,
            train_sampling_strategy="sequential",
        ),
        train_dataset=rows,
        callbacks=[CheckpointMonitor(1), Spoil()],
    )
    trainer.train()
    reasons = [record["reasons"] for record in records(tmp_path)]

    statistics = "2 buffers are not finite, the first is norm.running_mean"
    assert reasons[0] == []
    assert reasons[1] == [statistics, "the loss is nan"]
    assert reasons[2] == [statistics, "the optimizer state exp_avg of head.bias is not finite"]
    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def test_a_skipped_spike_is_not_usual(tmp_path):
    """The norm of a spike whose update was skipped does not enter the usual norm."""
    monitor = CheckpointMonitor(2)
    spikes = StepConfig(
        use_clip_grad=True, use_skip_data_by_global_norm=True, global_norm_spike_threshold=1e-9
    )
    trained(tmp_path, monitor, step=spikes, max_steps=2)

    assert monitor.state()["attributes"]["saved_run"]["global_norm"]["num_steps"] == 0


def test_the_time_flag_is_on_the_training_device():
    """The flag that ranks exchange is on the training device, also without a step's output."""
    monitor = CheckpointMonitor(save_checkpoint_seconds=10)

    assert monitor._time_flag(torch.device("meta")).device.type == "meta"


def test_the_embeddings_gradient(tmp_path):
    """The threshold is compared with the norm of the embedding's gradient, not its square."""
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
    assert low_record["reasons"] == [f"the gradient norm of an embedding is {norms[0]:.6g}"]
    assert high_record["healthy"]


@pytest.mark.parametrize(
    ("num_kept", "best", "healthy", "left"),
    [
        (1, None, [], [10]),
        (3, None, [], [3, 4, 10]),
        (9, None, [], [1, 2, 3, 4, 10]),
        (1, 2, [], [2, 10]),
        (1, None, [1, 3], [3, 10]),
        (2, 1, [1, 3, 10], [1, 4, 10]),
        (1, 9, [9], [10]),
    ],
)
def test_what_is_left(num_kept, best, healthy, left, tmp_path):
    """The newest, the best and the newest healthy checkpoints are kept, and others' folders."""
    lines = open_records(tmp_path / HEALTH_FILE, 0)
    for step in (1, 2, 3, 4, 10):
        (tmp_path / f"checkpoint-{step}" / "deep").mkdir(parents=True)
        name = f"checkpoint-{step}"
        health = CheckpointHealth(checkpoint=name, step=step, healthy=step in healthy)
        lines.append(asdict(health))
        list_own(tmp_path / name)
    for other in ("checkpoint-x", "checkpoint-5"):
        (tmp_path / other).mkdir()
    rotate_checkpoints(
        tmp_path, num_kept, None if best is None else str(tmp_path / f"checkpoint-{best}")
    )

    kept = {f"checkpoint-{step}" for step in left}
    found = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert found == kept | {"checkpoint-x", "checkpoint-5"}


@pytest.mark.parametrize(
    ("anomalies", "left"),
    [
        ([], [100, 110]),
        ([{"step": 62, "kind": "loss_spike"}], [60, 100, 110]),
        ([{"step": 35, "kind": "loss_spike"}], [100, 110]),
        (
            [
                {"step": 35, "since": 33, "kind": "loss_shift"},
                {"step": 35, "kind": "loss_shift", "last_step": 44, "diverged": "so"},
            ],
            [20, 100, 110],
        ),
    ],
    ids=["none", "undecided", "long ago", "diverged"],
)
@pytest.mark.parametrize("records_health", [True, False])
def test_what_a_run_that_goes_wrong_can_return_to(anomalies, left, records_health, tmp_path):
    """The newest checkpoint from before is kept, also while the loss may still come back."""
    health = open_records(tmp_path / HEALTH_FILE, 0)
    for step in (20, 60, 100, 110):
        name = f"checkpoint-{step}"
        (tmp_path / name).mkdir()
        list_own(tmp_path / name)
        if records_health:
            health.append(asdict(CheckpointHealth(checkpoint=name, step=step, healthy=True)))
    for each in anomalies:
        open_records(tmp_path / "anomalies.jsonl", 1000).append(each)
    rotate_checkpoints(tmp_path, 2, None)

    found = sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-*"))
    assert found == left


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
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=re.escape(message)):
        CheckpointMonitor(**settings)


def test_two_that_delete(tmp_path):
    """``save_total_limit`` raises an error, because the monitor already deletes checkpoints."""
    with pytest.raises(ValueError, match="save_total_limit=3 and keep_checkpoint_max=5 would"):
        trained(tmp_path, CheckpointMonitor(1), save_total_limit=3)


def test_a_step_reads_nothing(tmp_path):
    """A step makes no host read that synchronizes with the device."""
    monitor = CheckpointMonitor(100, save_checkpoint_seconds=1e6, embedding_local_norm_threshold=1)
    outputs = []

    class Keep(TrainerCallback):
        def on_step_end(self, *_, step_output, step_report, **__):
            outputs.append((step_output, step_report))

    trainer = trained(tmp_path, monitor, callbacks=[Keep()], max_steps=1)
    state, args = TrainerState(max_steps=99), trainer.args
    monitor.on_train_begin(args, TrainerState(global_step=1))
    step_output, step_report = outputs[0]
    values = {"step_output": step_output, "step_report": step_report}

    def step(number):
        state.global_step = number
        monitor.on_step_end(args, state, trainer.control, **values)

    # The first step is not counted: it allocates the buffers that values are copied into.
    step(1)
    with HostReads() as counted:
        for number in (2, 3, 4):
            step(number)

    assert [name for name in counted.names if name != "to"] == []
