"""After a bad step, a training goes back to a checkpoint and leaves the step's data out."""

import json
import multiprocessing
import os
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.records.run_record import read_facts
from mfwrap.trainer import BadSteps, MFTrainer, MonitorCallback, Rollback
from support.ranks.rollbacks import NUM_ROWS as NUM_ROWS_OF_RANKS
from support.ranks.rollbacks import going_back
from support.trainer_runs import new_trainer

NUM_ROWS = 24


class Rows(Dataset):
    """Rows of which some are bad.

    Args:
        bad: Factor of each bad row by its index.
    """

    def __init__(self, bad) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index):
        row = torch.arange(3.0).add(index).sin()
        return {"inputs": row * self._bad.get(index, 1.0), "labels": row.flip(0)}


class Noisy(nn.Module):
    """A small network whose loss depends on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).sin().reshape(3, 3))

    def forward(self, inputs, labels):
        """Return the loss."""
        noisy = inputs + 0.1 * torch.rand(inputs.shape)
        return {"loss": (noisy @ self.weight - labels).square().mean()}


class Twice(MFTrainer):
    """A trainer that calls the network twice for each micro-batch."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        """Return the loss of the second call."""
        model(**inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


def made(folder, bad, *, kind=MFTrainer, rollback=None, skip_rows=None, monitor=None, **arguments):
    """Return a trainer with updates of four rows."""
    return new_trainer(
        kind,
        folder,
        model=Noisy(),
        data=Rows(bad),
        callbacks=[TrainingStateMonitor(**monitor or {})],
        extras={"data_collator": None, "rollback": rollback, "skip_rows": skip_rows},
        **{
            "gradient_accumulation_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "max_steps": 14,
        }
        | arguments,
    )


def trained(folder, bad, *, resume=None, **settings):
    """Train, and return the trainer."""
    trainer = made(folder, bad, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def record_of(folder):
    """Return the content of ``rollbacks.json``."""
    return json.loads((folder / "rollbacks.json").read_text())


NAN = float("nan")
NOT_FINITE = Rollback(kinds=["loss_not_finite"], max_rollbacks=9)


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("index", range(NUM_ROWS))
def test_as_without_the_rows(tmp_path, index):
    """Weights and log are bitwise those of a run that leaves the rows out from its start."""
    trainer = trained(tmp_path / "run", {index: NAN}, rollback=NOT_FINITE)
    rows = tmp_path / "run" / "skip_rows.jsonl"
    fresh = trained(tmp_path / "fresh", {index: NAN}, skip_rows=rows)

    record = record_of(tmp_path / "run")
    assert record["pending"] is None
    for done in record["rollbacks"]:
        assert done["first_step"] > int(done["checkpoint"].partition("-")[2])
        assert len(done["rows"]) == 4
    assert trainer.state.global_step == 14
    assert torch.equal(trainer.model.weight, fresh.model.weight)
    first = record["rollbacks"][0]["first_step"]
    names = ("step", "loss", "learning_rate")
    log, expected = (
        [[one[name] for name in names] for one in each.state.log_history[first:14]]
        for each in (trainer, fresh)
    )
    assert log == expected


def test_a_spike(tmp_path):
    """An update that has been applied is undone, and the data around it are left out, too."""
    arguments = {"max_steps": 30, "save_steps": 4, "learning_rate": 1e-4}
    rollback = Rollback(max_rollbacks=1, updates_before=1, updates_after=1)
    trainer = trained(tmp_path / "run", {3: 1e3}, rollback=rollback, **arguments)
    record = record_of(tmp_path / "run")["rollbacks"]
    rows = tmp_path / "run" / "skip_rows.jsonl"
    fresh = trained(tmp_path / "fresh", {3: 1e3}, skip_rows=rows, **arguments)

    assert [done["kind"] for done in record] == ["spike"]
    assert "resumed" not in read_facts(tmp_path / "run")
    assert len(record[0]["rows"]) == 12
    assert torch.equal(trainer.model.weight, fresh.model.weight)


@pytest.mark.parametrize("index", [5, pytest.param(14, marks=pytest.mark.slow)])
def test_only_the_rows(tmp_path, index):
    """With a replay, only the rows at fault are left out."""
    rollback = Rollback(kinds=("loss_not_finite",), max_rollbacks=9, leave_out="rows")
    bad = {index: NAN, 7: NAN}
    trainer = trained(tmp_path / "run", bad, rollback=rollback, monitor={"replay": True})
    done = record_of(tmp_path / "run")["rollbacks"]
    rows = tmp_path / "run" / "skip_rows.jsonl"
    fresh = trained(tmp_path / "fresh", bad, skip_rows=rows)

    for epoch, position in [row for one in done for row in one["rows"]]:
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(42 + epoch))
        assert int(order[position]) in bad
    assert all("non-finite loss" in one["description"] for one in done)
    assert torch.equal(trainer.model.weight, fresh.model.weight)


@pytest.mark.parametrize("index", [5, 8, 14, 20])
def test_rows_whose_place_is_unknown(tmp_path, index):
    """A row may be named, but not where it is in the data: then the whole update is left out."""
    rollback = Rollback(kinds=("loss_not_finite",), max_rollbacks=1, leave_out="rows")
    settings = {"kind": Twice, "rollback": rollback, "monitor": {"replay": True}}
    trained(tmp_path, {index: NAN}, **settings)
    (done,) = record_of(tmp_path)["rollbacks"]
    assert len(done["rows"]) == 4


def test_no_checkpoint_before(tmp_path, caplog):
    """Without a checkpoint before the bad step, the training goes on and says why."""
    trainer = trained(tmp_path, {1: NAN}, rollback=NOT_FINITE, save_steps=13)

    assert trainer.state.global_step == 14
    assert "no rollback after loss_not_finite: there is no checkpoint before step" in caplog.text
    assert not (tmp_path / "rollbacks.json").exists()


def test_at_most(tmp_path, caplog):
    """After the largest number of rollbacks the training goes on, also in another process."""
    rollback = Rollback(kinds=("loss_not_finite",), max_rollbacks=1)
    bad = dict.fromkeys(range(4), NAN)
    trained(tmp_path, bad, rollback=rollback, max_steps=10)
    assert len(record_of(tmp_path)["rollbacks"]) == 1
    trainer = trained(tmp_path, bad, rollback=rollback, resume="auto")

    assert trainer.state.global_step == 14
    assert len(record_of(tmp_path)["rollbacks"]) == 1
    assert "no rollback after loss_not_finite: 1 rollbacks have been done" in caplog.text
    # A training from the start forgets those of an earlier run.
    with pytest.warns(UserWarning, match="has records of an earlier run"):
        trained(tmp_path, {}, rollback=rollback)
    assert not (tmp_path / "rollbacks.json").exists()


class Reports(MonitorCallback):
    """Report bad steps of the user's own kind, each once, at an event of a step.

    Args:
        planned: Bad steps by the event and the step at which they are found.
    """

    bad_kinds = ("own",)

    def __init__(self, planned) -> None:
        self._planned, self._found = planned, []

    def bad_steps(self):
        found, self._found = self._found, []
        return found

    def _look(self, event, step):
        self._found += self._planned.pop((event, step), [])

    def on_step_end(self, args, state, control, **_):
        self._look("step", state.global_step)

    def on_epoch_end(self, args, state, control, **_):
        self._look("epoch", state.global_step)

    def on_train_end(self, args, state, control, **_):
        self._look("training", state.global_step)


def train_with_reports(folder, planned):
    """Train for six steps, with a checkpoint every two steps; see `Reports`."""
    trainer = made(folder, {}, rollback=Rollback(kinds=("own",)), max_steps=6)
    trainer.add_callback(Reports(planned))
    trainer.train()
    assert trainer.state.global_step == 6


def test_what_one_rank_finds_at_the_end(tmp_path):
    """What other ranks do not know of is told to them at the latest at the end of the training."""
    bad = BadSteps("own", 6, 6, is_shared=False)
    train_with_reports(tmp_path, {("training", 6): [bad]})
    (done,) = record_of(tmp_path)["rollbacks"]

    assert (done["first_step"], done["checkpoint"]) == (6, "checkpoint-4")


def test_a_checkpoint_of_the_bad_step(tmp_path, caplog):
    """A checkpoint that was written after the bad step is too late, so the training goes on."""
    bad = BadSteps("own", 2, 2, is_shared=True)
    train_with_reports(tmp_path, {("step", 3): [bad]})

    assert "no rollback after own: there is no checkpoint before step 2" in caplog.text
    assert not (tmp_path / "rollbacks.json").exists()


def test_what_is_found_while_the_training_stops(tmp_path):
    """It does not take the place of the bad step for which the training goes back."""
    late, early = (BadSteps("own", step, step, is_shared=True) for step in (5, 1))
    train_with_reports(tmp_path, {("step", 5): [late], ("epoch", 5): [early]})
    (done,) = record_of(tmp_path)["rollbacks"]

    assert (done["first_step"], done["checkpoint"]) == (5, "checkpoint-4")


def killed(folder, bad, number):
    """Train, and kill this process at a renaming of a file after the decision to go back."""
    renamed = []

    def kill(event, arguments):
        if event == "os.rename":
            renamed.append(str(arguments[1]))
            decided = [one.endswith("skip_rows.jsonl") for one in renamed]
            if True in decided and len(renamed) - decided.index(True) > number:
                os._exit(9)

    sys.addaudithook(kill)
    trained(folder, bad, rollback=NOT_FINITE)


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("number", range(8))
def test_a_kill(tmp_path, number):
    """A run that is killed while it goes back ends as if it had not been killed."""
    bad = {6: NAN}
    expected = trained(tmp_path / "whole", bad, rollback=NOT_FINITE)
    process = multiprocessing.get_context("fork").Process(
        target=killed, args=(tmp_path / "killed", bad, number)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    trainer = trained(tmp_path / "killed", bad, rollback=NOT_FINITE, resume="auto")

    assert torch.equal(trainer.model.weight, expected.model.weight)
    assert record_of(tmp_path / "killed") == record_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("column", "first_step"), [("inputs", 5), pytest.param("labels", 5, marks=pytest.mark.slow)]
)
def test_two_ranks(two_ranks, tmp_path, column, first_step):
    """All ranks go back together, also after what one rank knows alone."""
    order = torch.randperm(NUM_ROWS_OF_RANKS, generator=torch.Generator().manual_seed(42))
    bad = int(order[4 * (first_step - 1) + 3])  # on rank 1
    folder = str(tmp_path / "run")
    results = two_ranks.run(going_back, folder, column, bad)
    rows = str(tmp_path / "run" / "skip_rows.jsonl")
    fresh = two_ranks.run(going_back, str(tmp_path / "fresh"), column, bad, rows)

    for result in results:
        done = result["rollbacks"][0]
        assert (done["first_step"], done["checkpoint"]) == (5, "checkpoint-4")
        assert done["rows"] == [[0, 16], [0, 17], [0, 18], [0, 19]]
        assert result["step"] == 14
        assert torch.equal(result["weight"], fresh[0]["weight"])


def test_a_damaged_file(tmp_path):
    """The error of a resume names the file."""
    trained(tmp_path, {6: NAN}, rollback=NOT_FINITE)
    (tmp_path / "rollbacks.json").write_text('{"format_version": 1, "pending": "../a"}')

    with pytest.raises(ValueError, match=r"rollbacks\.json is damaged .* give the rows"):
        trained(tmp_path, {}, resume="auto")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"kinds": "spike"}, TypeError),
        ({"kinds": ()}, ValueError),
        ({"leave_out": "row"}, ValueError),
        ({"max_rollbacks": 0}, ValueError),
        ({"updates_before": -1}, ValueError),
        ({"updates_after": 1.5}, TypeError),
    ],
)
def test_wrong_settings(settings, error):
    """Each setting is checked."""
    with pytest.raises(error, match=f"`{next(iter(settings))}` must"):
        Rollback(**settings)


def test_nobody_reports(tmp_path):
    """A kind that no callback reports is refused before the first step."""
    with pytest.raises(ValueError, match="reports anomalies of kind 'spikes', such as Training"):
        trained(tmp_path, {}, rollback=Rollback(kinds=("spikes",)))
    with pytest.raises(TypeError, match="`rollback` must be a mfwrap"):
        made(tmp_path, {}, rollback=3)
