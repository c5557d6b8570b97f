"""`data_skip_steps` leaves the data of the first updates out, also in a training that resumes."""

import itertools

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from mfwrap.trainer import MFTrainer
from support.ranks.changing import train_until
from support.trainer_runs import EndlessCounting, new_trainer

NUM_ROWS, UPDATES_AN_EPOCH = 16, 4
ROWS = [{"inputs": torch.tensor(float(row))} for row in range(NUM_ROWS)]


class Recording(nn.Module):
    """A network that records the rows of each micro-batch that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.rows: list[float] = []

    def forward(self, inputs):
        """Return a loss that depends on the rows and on random numbers."""
        self.rows += inputs.tolist()
        noise = torch.rand(inputs.shape)
        return {"loss": (self.weight * (inputs + noise)).square().mean()}


def trained(folder, *, resume=None, skip=None, rows=None, data=ROWS, **settings) -> MFTrainer:
    """Train with updates of four rows, and return the trainer."""
    torch.manual_seed(1)
    trainer = new_trainer(
        MFTrainer,
        folder,
        model=Recording(),
        data=data,
        extras={"data_collator": None, "data_skip_steps": skip, "skip_rows": rows},
        **{"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1} | settings,
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


class Epochs(TrainerCallback):
    """Note how many epochs are done when one begins."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_epoch_begin(self, args, state, control, **_):
        self.seen.append(state.epoch)


def rows_of(trainer: MFTrainer) -> list[list[float]]:
    """Return the rows of each update."""
    rows = trainer.model.rows
    return [rows[index : index + 4] for index in range(0, len(rows), 4)]


@pytest.fixture(scope="module")
def every_row(tmp_path_factory) -> list[list[float]]:
    """Return the rows of each update of three passes over the data."""
    rows = rows_of(trained(tmp_path_factory.mktemp("all"), max_steps=12, save_strategy="no"))
    passes = [itertools.chain(*rows[first : first + 4]) for first in (0, 4, 8)]
    assert [sorted(each) for each in passes] == [list(range(NUM_ROWS))] * 3
    return rows


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("skip", [0, 1, 3, 4, 6])
def test_the_data_of_the_first_updates_are_left_out(every_row, tmp_path, skip):
    """A training makes as many updates as without, on the data that follow the skipped ones."""
    trainer = trained(tmp_path, skip=skip, max_steps=5, save_strategy="no")

    assert rows_of(trainer) == every_row[skip : skip + 5]
    assert trainer.state.global_step == 5
    assert trainer.state.epoch == pytest.approx((skip + 5) / UPDATES_AN_EPOCH)
    assert "_run_epoch" not in vars(trainer)


def test_epochs_count_updates(every_row, tmp_path):
    """One epoch is four updates, of which the last three begin the second pass."""
    trainer = trained(tmp_path, skip=3, max_steps=-1, num_train_epochs=1, save_strategy="no")

    assert rows_of(trainer) == every_row[3:7]


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("skip", [3, None], ids=["the same", "left out"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_resume_continues_with_the_data_that_follow(every_row, tmp_path, step, skip):
    """Resumed in the middle or at the end of a pass, the training ends like the unbroken one."""
    unbroken = trained(tmp_path / "unbroken", skip=3, max_steps=7)
    resumed = trained(
        tmp_path / "resumed",
        resume=tmp_path / "unbroken" / f"checkpoint-{step}",
        skip=skip,
        max_steps=7,
    )

    assert rows_of(resumed) == every_row[3 + step : 10]
    assert torch.equal(resumed.model.weight, unbroken.model.weight)
    again = trained(
        tmp_path / "again", resume=tmp_path / "resumed" / "checkpoint-6", skip=3, max_steps=7
    )
    assert rows_of(again) == every_row[9:10]


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("skip", [1, 4, 6])
def test_a_resume_with_another_number_begins_there(every_row, tmp_path, skip):
    """For data that have changed: the number counts from the start of the data."""
    trained(tmp_path / "first", max_steps=6)
    resumed = trained(
        tmp_path / "moved", resume=tmp_path / "first" / "checkpoint-6", skip=skip, max_steps=8
    )
    again = trained(
        tmp_path / "again", resume=tmp_path / "moved" / "checkpoint-7", skip=skip, max_steps=8
    )

    assert rows_of(resumed) == every_row[skip : skip + 2]
    assert rows_of(again) == every_row[skip + 1 : skip + 2]


def test_a_resume_leaves_the_rest_of_a_pass_out(every_row, tmp_path):
    """Without the rows of its last update, a pass ends at the checkpoint, and the next one begins.

    In the next pass, the third update has no rows.
    """
    rows = [*((0, row) for row in range(12, 16)), *((1, row) for row in range(8, 12))]
    trained(tmp_path / "with", max_steps=6)
    checkpoint, begun = tmp_path / "with" / "checkpoint-3", Epochs()
    expected = trained(tmp_path / "from the start", rows=rows, max_steps=6)
    resumed = trained(
        tmp_path / "resumed", resume=checkpoint, rows=rows, max_steps=6, callbacks=[begun]
    )

    assert begun.seen == [1]
    assert rows_of(resumed) == [every_row[update] for update in (4, 5, 7)]
    # The weights depend on random numbers, too.
    assert torch.equal(resumed.model.weight, expected.model.weight)
    assert resumed.state.epoch == expected.state.epoch == 2


def test_ignore_data_skip_wins(every_row, tmp_path):
    """As in MindFormers, the setting has no effect with `ignore_data_skip`."""
    trainer = trained(tmp_path, skip=3, max_steps=2, ignore_data_skip=True, save_strategy="no")
    assert rows_of(trainer) == every_row[:2]


def test_data_without_a_length_are_refused(tmp_path):
    """Without a length, the Trainer does not know where a pass ends."""
    with pytest.raises(
        ValueError, match="needs training data with a length, got data_skip_steps=3"
    ):
        trained(tmp_path, skip=3, data=EndlessCounting())


@pytest.mark.parametrize(("skip", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_bad_number_is_refused(tmp_path, skip, error):
    """The number must be an integer >= 0."""
    with pytest.raises(error, match="`data_skip_steps` must be"):
        trained(tmp_path, skip=skip)


@pytest.mark.parametrize("dispatches", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("skip", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_two_ranks_skip_the_rows_of_all(two_ranks, tmp_path, skip, dispatches):
    """Two ranks, and one rank that resumes their run, train on the rows of one that never skips."""
    settings = {"accelerator_config": {"dispatch_batches": dispatches}}
    alone = settings | {"gradient_accumulation_steps": 12}
    expected = train_until(0, str(tmp_path / "alone"), skip + 4, alone)["rows"]
    settings |= {"data_skip_steps": skip}
    folder = str(tmp_path / "skipping")
    results = two_ranks.run(train_until, folder, 2, settings)

    for update in (1, 2):
        rows = [row for result in results for row in result["rows"][update]]
        assert sorted(rows) == sorted(expected[skip + update])
    resumed = train_until(0, folder, 4, settings)["rows"]
    assert {n: sorted(rows) for n, rows in resumed.items()} == {
        n: sorted(expected[skip + n]) for n in (3, 4)
    }
