"""After a rollback, the learning rate is lowered for a while."""

import json
import multiprocessing
import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset
from transformers.optimization import Adafactor, AdafactorSchedule

from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.callbacks.metrics_recorder import MetricsRecorder
from mfwrap.records.json_lines import read_json_lines
from mfwrap.trainer import MFTrainer, Rollback
from support.ranks.rollbacks import NUM_ROWS as NUM_ROWS_OF_RANKS
from support.ranks.rollbacks import going_back
from support.trainer_runs import new_trainer

NUM_ROWS, MAX_STEPS = 48, 24
KIND = "loss_not_finite"
SLOW = Rollback(kinds=(KIND,), rate_factor=0.125, slow_updates=5)


class Rows(Dataset):
    """Rows of which those with listed indices are NaN."""

    def __init__(self, bad):
        self._bad = bad

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        row = torch.arange(3.0).add(index % 5).cos()
        return {"inputs": row * (torch.nan if index in self._bad else 1.0), "labels": row.flip(0)}


class Network(nn.Module):
    """A small network."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).sin().reshape(3, 3))

    def forward(self, inputs, labels):
        """Return the loss."""
        return {"loss": (inputs @ self.weight - labels).square().mean()}


class TensorRates(MFTrainer):
    """A trainer whose learning rate is a tensor."""

    def create_optimizer(self, model=None):
        """Create the optimizer."""
        optimizer = super().create_optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64)
        return optimizer


def index_at(step, seed=42):
    """Return the index of a row of a step of the first epoch."""
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))
    return int(order[2 * (step - 1)])


def trained(folder, bad_steps=(), *, kind=MFTrainer, resume=None, rollback=SLOW, **arguments):
    """Train, and return the trainer."""
    trainer = new_trainer(
        kind,
        folder,
        model=Network(),
        data=Rows({index_at(step) for step in bad_steps}),
        callbacks=[TrainingStateMonitor(), MetricsRecorder(folder)],
        extras={"data_collator": None, "rollback": rollback},
        **{
            "gradient_accumulation_steps": 1,
            "save_strategy": "steps",
            "save_steps": 2,
            "max_steps": MAX_STEPS,
        }
        | arguments,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def rates_of(trainer, folder):
    """Return the rates of all steps: those of the log, those of the record, the schedule's own."""
    logged = {
        each["step"]: each["learning_rate"]
        for each in trainer.state.log_history
        if "learning_rate" in each
    }
    recorded = {
        each["step"]: each["learning_rate"]
        for each in read_json_lines(folder / "metrics.jsonl")
        if "learning_rate" in each
    }
    return logged, recorded


def assert_lowered(trainer, folder, ordinary, slow):
    """Fail unless the rates of exactly the steps in `slow` are lowered."""
    factors = {step: 0.125 if step in slow else 1.0 for step in ordinary}
    for rates in rates_of(trainer, folder):
        expected = {step: rate * factors[step] for step, rate in ordinary.items()}
        assert rates == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        (MFTrainer, "constant"),
        (MFTrainer, "cosine"),
        (TensorRates, "linear"),
        pytest.param(MFTrainer, "linear", marks=pytest.mark.slow),
        pytest.param(TensorRates, "constant", marks=pytest.mark.slow),
        pytest.param(TensorRates, "cosine", marks=pytest.mark.slow),
    ],
)
def test_the_rates(tmp_path, kind, schedule):
    """Exactly the updates after the checkpoint have lower rates; the schedule keeps its own."""
    arguments = {"kind": kind, "lr_scheduler_type": schedule}
    plain = trained(tmp_path / "plain", **arguments)
    ordinary, _ = rates_of(plain, tmp_path / "plain")
    trainer = trained(tmp_path / "run", [9], **arguments)

    assert_lowered(trainer, tmp_path / "run", ordinary, range(9, 14))
    done = json.loads((tmp_path / "run" / "rollbacks.json").read_text())["rollbacks"]
    assert [(each["rate_factor"], each["slow_updates"]) for each in done] == [(0.125, 5)]
    last, expected = (float(each.optimizer.param_groups[0]["lr"]) for each in (trainer, plain))
    assert last == pytest.approx(expected)
    # The rows of one update are missing, so compare with the same rollback at the ordinary rate.
    ordinary_run = trained(tmp_path / "other", [9], rollback=Rollback(kinds=(KIND,)), **arguments)
    assert not torch.equal(trainer.model.weight, ordinary_run.model.weight)


def test_the_update(tmp_path):
    """The first lowered update of SGD is the ordinary one times the factor."""
    moved = []
    for rollback in (Rollback(kinds=(KIND,)), SLOW):
        folder = tmp_path / str(len(moved))
        arguments = {"optim": "sgd", "lr_scheduler_type": "constant", "max_steps": 10}
        trained(folder, [9], rollback=rollback, save_steps=1, **arguments)
        weights = [
            load_file(folder / f"checkpoint-{step}" / "model.safetensors")["weight"]
            for step in (8, 9)
        ]
        moved.append(weights[1] - weights[0])

    assert moved[0].abs().max() > 0
    torch.testing.assert_close(moved[1], moved[0] / 8, rtol=1e-3, atol=1e-7)


def test_rollbacks_in_a_row(tmp_path):
    """Factors of overlapping rollbacks are not multiplied."""
    ordinary, _ = rates_of(trained(tmp_path / "plain"), tmp_path / "plain")
    trainer = trained(tmp_path / "run", [9, 12])

    done = json.loads((tmp_path / "run" / "rollbacks.json").read_text())["rollbacks"]
    assert [each["checkpoint"] for each in done] == ["checkpoint-8", "checkpoint-10"]
    assert_lowered(trainer, tmp_path / "run", ordinary, range(9, 16))


@pytest.mark.parametrize("warmup_steps", [0, 24])
def test_the_return_is_no_anomaly(tmp_path, warmup_steps):
    """The monitor does not report the return to the ordinary rate, nor a rise of a warm-up."""
    slow = Rollback(kinds=(KIND, "learning_rate_spike"), rate_factor=0.01, slow_updates=16)
    trainer = trained(tmp_path, [5], rollback=slow, warmup_steps=warmup_steps)

    done = json.loads((tmp_path / "rollbacks.json").read_text())["rollbacks"]
    assert [each["kind"] for each in done] == [KIND]
    assert not (tmp_path / "anomalies.jsonl").exists()
    assert trainer.state.global_step == MAX_STEPS


def killed(folder, step):
    """Train, and kill this process when a checkpoint gets its name."""

    def kill(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith(f"/checkpoint-{step}"):
            os._exit(9)

    sys.addaudithook(kill)
    trained(folder, [9])


@pytest.mark.parametrize("step", [10, 12, 14])
def test_a_kill(tmp_path, step):
    """A run that is killed before, in or after the lowered updates ends bitwise the same."""
    whole = trained(tmp_path / "whole", [9])
    process = multiprocessing.get_context("fork").Process(
        target=killed, args=(tmp_path / "killed", step)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    # Without the setting the run goes on with what its file says.
    trainer = trained(tmp_path / "killed", [9], resume="auto", rollback=Rollback(kinds=(KIND,)))

    assert torch.equal(trainer.model.weight, whole.model.weight)
    names = ("step", "loss", "learning_rate")
    log, expected = (
        [[one[name] for name in names] for one in each.state.log_history if "loss" in one]
        for each in (trainer, whole)
    )
    assert log == expected


@pytest.mark.slow
def test_two_ranks(two_ranks, tmp_path):
    """Both ranks lower their rates in the same steps, and keep the same weights."""
    order = torch.randperm(NUM_ROWS_OF_RANKS, generator=torch.Generator().manual_seed(42))
    bad = int(order[4 * 4 + 3])  # on rank 1, at step 5
    settings = {"rate_factor": 0.5, "slow_updates": 3}
    slow, plain = (
        two_ranks.run(going_back, str(tmp_path / name), "labels", bad, None, given)
        for name, given in (("slow", settings), ("plain", {}))
    )

    ratios = [a / b for a, b in zip(slow[0]["rates"], plain[0]["rates"], strict=True)]
    assert ratios == pytest.approx([1] * 4 + [0.5] * 3 + [1] * 7, nan_ok=False)
    assert slow[0]["rates"] == slow[1]["rates"]
    assert torch.equal(slow[0]["weight"], slow[1]["weight"])
    assert not torch.equal(slow[0]["weight"], plain[0]["weight"])


def test_an_optimizer_without_rate(tmp_path):
    """An optimizer that computes its own rates is refused before the first step."""
    model = Network()
    optimizer = Adafactor(model.parameters())
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        model=model,
        data=Rows(()),
        callbacks=[TrainingStateMonitor()],
        extras={
            "data_collator": None,
            "rollback": SLOW,
            "optimizers": (optimizer, AdafactorSchedule(optimizer)),
        },
    )
    with pytest.raises(ValueError, match=r"`rate_factor` .* got Adafactor, which computes"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"rate_factor": 0.0, "slow_updates": 2}, ValueError, "`rate_factor` must be > 0"),
        ({"rate_factor": 1.5, "slow_updates": 2}, ValueError, "`rate_factor` must be a number > 0"),
        ({"rate_factor": "half", "slow_updates": 2}, TypeError, "`rate_factor` must be a number"),
        ({"rate_factor": 0.5}, ValueError, "`slow_updates` must be >= 1 exactly if"),
        ({"slow_updates": 3}, ValueError, "`slow_updates` must be >= 1 exactly if"),
        ({"rate_factor": 0.5, "slow_updates": -1}, ValueError, "`slow_updates` must"),
    ],
)
def test_wrong_settings(settings, error, text):
    """Each setting is checked."""
    with pytest.raises(error, match=text):
        Rollback(**settings)
