"""Another program asks a running training for a checkpoint, and gets its path."""

import re
import signal
import subprocess
import sys

import pytest
import torch
from transformers import TrainerCallback

from mfwrap.accelerate import attach
from mfwrap.callbacks import CheckpointMonitor, LoopMonitor
from mfwrap.checkpoints.locks import RUN_LOCK, owning
from mfwrap.records import checkpoint_requests
from mfwrap.records.checkpoint_requests import (
    CheckpointRequests,
    request_checkpoint,
    wait_for_checkpoint,
)
from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator
from support.launches import environment, wait_until
from support.monitored_loop import Clock
from support.ranks.processes import run_ranks
from support.ranks.requests import ASKED, train_and_ask
from support.recipe_texts import recipe_text
from support.trainer_runs import new_trainer


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(checkpoint_requests, "_SECONDS_BETWEEN_LOOKS", 0.0)


def left_in(folder):
    """Return the names of the files of requests."""
    return sorted(path.name.partition(".")[0] for path in folder.glob("_mfwrap_re*"))


def checkpoints_in(folder):
    """Return the names of the checkpoints."""
    return sorted(path.name for path in folder.glob("checkpoint-*"))


class Asks(TrainerCallback):
    """Ask for a checkpoint at the end of some steps, as another program would."""

    def __init__(self, folder, *steps) -> None:
        self.folder, self.steps = folder, steps

    def on_step_end(self, _args, state, _control, **_):
        """Ask."""
        if state.global_step in self.steps:
            request_checkpoint(self.folder)


def test_a_request_is_answered_when_the_checkpoint_is_in_place(tmp_path, monkeypatch):
    """A training looks once a second; the file stays until the checkpoint has its name."""
    monkeypatch.undo()
    clock = Clock()
    requests = CheckpointRequests(clock)
    with owning(tmp_path / RUN_LOCK):
        requests.open(tmp_path)
        assert not requests.is_due(1)
        token = request_checkpoint(tmp_path)
        request_checkpoint(tmp_path)  # a second program

        assert not requests.is_due(2)
        clock.now += 1.0
        assert requests.is_due(3)
        assert requests.is_due(3)
        requests.saved("checkpoint-3")
        assert not requests.is_due(3)
        assert left_in(tmp_path) == ["_mfwrap_request"]
        (tmp_path / "checkpoint-3").mkdir()
        clock.now += 1.0
        assert not requests.is_due(4)

        assert left_in(tmp_path) == ["_mfwrap_ready"]
        assert wait_for_checkpoint(tmp_path, token) == tmp_path / "checkpoint-3"
        requests.close()
        assert left_in(tmp_path) == []


def test_a_request_that_nothing_was_saved_for_is_taken_again(tmp_path):
    """A callback may have canceled the checkpoint; one of another step does not answer it."""
    requests = CheckpointRequests()
    with owning(tmp_path / RUN_LOCK):
        requests.open(tmp_path)
        request_checkpoint(tmp_path)
        requests.saved(tmp_path)

        assert [requests.is_due(step) for step in (1, 2)] == [True, True]
        requests.close()


def test_folders_without_a_training_that_saves(tmp_path):
    """A folder that is no run, has no training, or has one that does not save is named."""
    trainer = new_trainer(MFTrainer, tmp_path / "run", save_strategy="steps", save_steps=4)
    trainer.train()
    cases = {"nowhere": "is not a run folder", "run": "no training runs in"}
    for name, says in cases.items():
        with pytest.raises(ValueError, match=says):
            request_checkpoint(tmp_path / name)
    with (
        owning(tmp_path / "run" / RUN_LOCK),
        pytest.raises(ValueError, match="takes no requests for checkpoints: a Trainer takes them"),
    ):
        request_checkpoint(tmp_path / "run")


def test_a_request_is_not_for_a_later_training(tmp_path):
    """What a killed training has left is deleted, and saves nothing."""
    run = tmp_path / "run"
    run.mkdir()
    program = f"""
import os, signal
from pathlib import Path
from mfwrap.checkpoints.locks import RUN_LOCK, owning
from mfwrap.records.checkpoint_requests import CheckpointRequests, request_checkpoint
run = Path({str(run)!r})
with owning(run / RUN_LOCK):
    CheckpointRequests().open(run)
    print(request_checkpoint(run), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert left_in(run) == ["_mfwrap_request"]
    with pytest.raises(ValueError, match="ended before it said that the checkpoint is complete"):
        wait_for_checkpoint(run, killed.stdout.decode().strip())

    new_trainer(MFTrainer, run, save_strategy="steps", save_steps=100, max_steps=3).train()

    assert checkpoints_in(run) == ["checkpoint-3"]
    assert left_in(run) == []


def test_a_trainer_saves_and_trains_on(tmp_path):
    """The checkpoint is one of the run: the limit counts it, and a resume continues exactly."""
    whole = new_trainer(MFTrainer, tmp_path / "whole", max_steps=6)
    whole.train()
    run = tmp_path / "run"
    settings = {"save_strategy": "steps", "save_steps": 6, "save_total_limit": 2, "max_steps": 6}
    asked = new_trainer(MFTrainer, run, callbacks=[Asks(run, 1, 3, 4)], **settings)
    asked.train()

    assert checkpoints_in(run) == ["checkpoint-4", "checkpoint-6"]
    assert left_in(run) == []
    resumed = new_trainer(MFTrainer, run, **settings)
    resumed.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    for trainer in (asked, resumed):
        for expected, weight in zip(
            whole.model.parameters(), trainer.model.parameters(), strict=True
        ):
            assert torch.equal(expected, weight)


def test_a_checkpoint_monitor_records_the_checkpoint(tmp_path):
    """It notes the health of the checkpoint, and deletes old ones by its own rule."""
    monitor = CheckpointMonitor(save_checkpoint_steps=100, keep_checkpoint_max=1)
    callbacks = [Asks(tmp_path, 1, 3), monitor]
    new_trainer(MFTrainer, tmp_path, callbacks=callbacks, max_steps=4).train()

    assert checkpoints_in(tmp_path) == ["checkpoint-4"]
    text = (tmp_path / "checkpoint_health.jsonl").read_text()
    assert re.findall(r'"(checkpoint-\d)"', text) == [f"checkpoint-{n}" for n in (1, 3, 4)]


def test_two_ranks_save_at_the_same_step(tmp_path):
    """Rank 0 sees each request, and both ranks save one checkpoint."""
    assert run_ranks(tmp_path, train_and_ask) == [0, 0]

    saved = [(tmp_path / f"saved_{rank}").read_text() for rank in range(2)]
    assert saved[0] == saved[1]
    steps = [int(step) for step in saved[0].split()]
    assert len(steps) == len(ASKED)
    assert all(asked <= step for asked, step in zip(ASKED, steps, strict=True))


@pytest.mark.parametrize("is_attached", [True, False])
def test_a_loop_saves_if_it_is_asked(tmp_path, is_attached):
    """`save_state` answers the request; a loop that saves itself answers in its next step."""
    accelerator = new_accelerator()
    attached = attach(accelerator)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if is_attached:
        model, optimizer = accelerator.prepare(model, optimizer)
    step = attached if is_attached else optimizer
    run, answers = tmp_path / "run", []
    with LoopMonitor(step, run, model=None if is_attached else model) as monitor:
        for number in range(1, 6):
            loss = model(torch.ones(1, 2)).sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            monitor.end_step(None if is_attached else loss.detach())
            if number == 1:
                with pytest.raises(ValueError, match=r"if it reads `LoopMonitor\.should_save`"):
                    request_checkpoint(run)
            if number == 3:
                token = request_checkpoint(run)
            answers.append(monitor.should_save)
            if monitor.should_save and is_attached:
                accelerator.save_state(str(tmp_path / "step_3"))
        assert answers == [False, False, True, False, False]
        assert wait_for_checkpoint(run, token) == (tmp_path / "step_3" if is_attached else run)
    assert left_in(run) == []


@pytest.mark.slow
def test_the_command(tmp_path):
    """A recipe's run saves for `mfwrap checkpoint` of another process, and goes on."""
    training = {"max_steps": 10**6, "save_strategy": "steps", "save_steps": 10**6}
    (tmp_path / "small.yaml").write_text(recipe_text(training=training))
    run = tmp_path / "runs" / "small"

    def command(*words):
        words = [sys.executable, "-m", "mfwrap", *words]
        settings = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True}
        return subprocess.run(words, check=False, **settings)

    words = [sys.executable, "-m", "mfwrap", "train", "small.yaml"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), **quiet) as process:
        try:
            wait_until(lambda: any(run.glob("_mfwrap_ready*")), 240, lambda: "no training")
            saved = command("checkpoint", "runs/small", "--wait")
            assert (saved.returncode, saved.stderr) == (0, "")
            checkpoint = tmp_path / saved.stdout.strip()
            assert re.fullmatch(r"checkpoint-\d+", checkpoint.name)
            assert process.poll() is None
            assert ": intact (" in command("verify", str(checkpoint)).stdout
            process.terminate()
            assert process.wait() == 75
        finally:
            process.kill()
    refused = command("checkpoint", "runs/small")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "mfwrap: no training runs in runs/small\n"
