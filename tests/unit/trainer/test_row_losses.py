"""The loss by source and by row is that of the logits, computed by hand in float64."""

import math
import warnings

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import ConcatDataset, Subset

from mfwrap.records.row_losses import read_row_losses
from mfwrap.trainer import row_losses as module
from mfwrap.trainer.row_losses import check_state
from support.programs import FORKING
from support.row_losses import (
    BATCH,
    Recording,
    by_hand,
    die_at,
    losses_of_rows,
    names_of,
    order_of,
    still,
    train_on_rank,
    trained,
)
from support.trainer_runs import Counting, EndlessCounting, padded, tiny_llama
from support.versions import COUNTS_SHIFTED

NAMES = names_of(20)
SAVES = {"save_strategy": "steps", "save_steps": 2}


def entries_of(log):
    """Return loss and tokens by source of each entry of the training log."""
    return [
        tuple(
            {name[len(of) :]: value for name, value in entry.items() if name.startswith(of)}
            for of in ("loss/", "tokens/")
        )
        for entry in log
        if "learning_rate" in entry
    ]


def assert_as_by_hand(log, expected):
    """Fail unless each entry of a log has the losses computed by hand, which make its `loss`."""
    logged = [entry["loss"] for entry in log if "learning_rate" in entry]
    for (losses, tokens), (sums, counts), loss in zip(
        entries_of(log), expected, logged, strict=True
    ):
        assert losses.keys() == sums.keys()
        assert tokens == {name: counts.get(name, 0) for name in dict.fromkeys(NAMES)}
        for name, of_source in losses.items():
            assert of_source == pytest.approx(sums[name] / counts[name], rel=1e-5)
        total = sum(losses[name] * tokens[name] for name in losses)
        assert total / sum(tokens.values()) == pytest.approx(loss, rel=1e-5)


@COUNTS_SHIFTED
def test_loss_by_source_is_that_of_the_logits(tmp_path):
    """Each source has its own mean; together they make the loss that is logged."""
    recording = Recording()
    run = trained(tmp_path, loss_by=NAMES, callbacks=[recording])

    assert_as_by_hand(run.log, by_hand(recording.weights, NAMES))
    with_rare = ["rare" in losses for losses, _ in entries_of(run.log)]
    assert set(with_rare) == {True, False}


@COUNTS_SHIFTED
def test_two_ranks(two_ranks, tmp_path):
    """The sources are summed over all ranks, with a last update that has fewer rows."""
    settings = {"loss_by": NAMES, "row_losses": True, "max_steps": 4}
    log, weights = two_ranks.run(train_on_rank, str(tmp_path), settings)[0]
    # Of the second update of an epoch, 8 rows are left, and 4 rows fill it up.
    expected = by_hand(weights, NAMES, batch=2 * BATCH)

    assert_as_by_hand([log[0], log[2]], [expected[0], expected[2]])
    table = read_row_losses(tmp_path).to_pandas()
    first = table[table.step == 1]
    assert sorted(first["index"]) == sorted(order_of(0, 20)[:12])
    for name, total in expected[0][0].items():
        of_source = first[first.source == name]
        assert (of_source.loss * of_source.targets).sum() == pytest.approx(total, rel=1e-5)


def test_a_resume_within_a_logging_interval(tmp_path):
    """The log of the interval has all of its steps, also those before the checkpoint."""
    settings = {"loss_by": NAMES, "logging_steps": 3, **SAVES}
    whole = trained(tmp_path / "whole", **settings)
    trained(tmp_path / "run", **settings | {"max_steps": 2, "lr_scheduler_type": "constant"})
    resumed = trained(tmp_path / "run", resume=tmp_path / "run" / "checkpoint-2", **settings)

    assert [tokens for _, tokens in entries_of(resumed.log)] == [
        tokens for _, tokens in entries_of(whole.log)
    ]
    again = trained(tmp_path / "whole", resume=tmp_path / "whole" / "checkpoint-2", **settings)
    assert entries_of(again.log) == entries_of(whole.log)


def test_the_loss_of_each_row(tmp_path):
    """The file has each row of an epoch once, with its place, its loss and its source."""
    recording = Recording()
    trained(tmp_path, loss_by=NAMES, row_losses=True, callbacks=[recording], max_steps=8, **SAVES)
    table = read_row_losses(tmp_path).to_pandas().sort_values(["epoch", "position"])

    order = order_of(0, 20) + order_of(1, 20)
    assert list(table["index"]) == order
    assert list(table.position) == [*range(20), *range(20)]
    assert list(table.epoch) == [0] * 20 + [1] * 20
    assert list(table.source) == [NAMES[index] for index in order]
    assert list(table.step) == [4 * e + p // BATCH + 1 for e in (0, 1) for p in range(20)]
    for row, at in zip(table.itertuples(), range(40), strict=True):
        if at % 7 == 0:
            weights = recording.weights[row.step - 1]
            ((loss, count),) = losses_of_rows(weights, [Counting(20)[row.index]])
            assert (row.loss, row.targets) == (pytest.approx(loss / count, rel=1e-5), count)


def rows_in(folder):
    """Return the recorded rows of a run in the order of its steps."""
    table = read_row_losses(folder).to_pandas()
    return table.sort_values(["step", "position"]).reset_index(drop=True)


def test_a_kill_and_a_resume_keep_each_row_once(tmp_path):
    """A killed process loses the rows since its checkpoint; the resumed one writes them again."""
    settings = {"loss_by": NAMES, "row_losses": True, **SAVES}
    trained(tmp_path / "whole", **settings)
    process = FORKING.Process(target=die_at, args=(str(tmp_path / "run"), 5, settings))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert rows_in(tmp_path / "run").step.max() == 4
    trained(tmp_path / "run", resume=tmp_path / "run" / "checkpoint-4", **settings)

    assert rows_in(tmp_path / "run").equals(rows_in(tmp_path / "whole"))
    # Resuming from an earlier checkpoint removes the rows of later steps.
    trained(
        tmp_path / "run",
        resume=tmp_path / "run" / "checkpoint-2",
        **settings | {"save_strategy": "no", "max_steps": 3},
    )
    assert rows_in(tmp_path / "run").step.max() == 3


def test_an_error_keeps_the_rows_before_it(tmp_path):
    """The rows before an error are written; those of an earlier run have been renamed."""
    settings = {"row_losses": True, "max_steps": 3}
    trained(tmp_path, **settings)

    class Fails(Recording):
        def on_step_end(self, _, state, *__, **___):
            if state.global_step == 2:
                raise OverflowError

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(OverflowError):
            trained(tmp_path, callbacks=[Fails()], **settings)

    assert any("names of its files now end in .1" in str(each.message) for each in caught)
    assert len(list((tmp_path / "row_losses.1").glob("*.parquet"))) == 1
    assert rows_in(tmp_path).step.max() == 2
    assert "source" not in rows_in(tmp_path)


def test_rows_do_not_pile_up(tmp_path, monkeypatch):
    """Without logs and checkpoints, rows are written once there are many, and each only once."""
    monkeypatch.setattr(module, "_MAX_ROWS", 8)
    trained(tmp_path, row_losses=True, logging_strategy="no", save_strategy="no", max_steps=4)

    steps = [path.name[6:23] for path in sorted((tmp_path / "row_losses").glob("*.parquet"))]
    assert steps == ["00000001_00000002", "00000002_00000003", "00000004_00000004"]
    assert sorted(rows_in(tmp_path)["index"]) == list(range(20))


def test_rows_left_out(tmp_path):
    """Rows that are left out are in no source and in no file."""
    skipped = [(0, 0), (0, 7), (0, 8)]
    run = trained(
        tmp_path, loss_by=NAMES, row_losses=True, skip_rows=skipped, logging_steps=4, max_steps=4
    )
    order = [index for at, index in enumerate(order_of(0, 20)) if (0, at) not in skipped]

    ((_, tokens),) = entries_of(run.log)
    rows = rows_in(tmp_path)
    assert list(rows["index"]) == order
    assert rows.groupby("source").targets.sum().to_dict() == {n: t for n, t in tokens.items() if t}


def as_table(names):
    """Return the rows of `Counting` as a table with a column of sources."""
    rows = [Counting(20)[index] for index in range(20)]
    columns = {name: [row[name].tolist() for row in rows] for name in ("input_ids", "labels")}
    return Dataset.from_dict(columns | {"site": names})


def collated(rows):
    """Return rows of lists as one batch."""
    return padded(
        [{name: torch.tensor(row[name]) for name in ("input_ids", "labels")} for row in rows]
    )


def test_a_loss_that_is_not_finite(tmp_path):
    """A micro-batch that the logged mean leaves out is in no source; its rows are recorded."""
    model, factor = still(), [1.0]
    model.lm_head.register_forward_hook(lambda _, __, logits: logits * factor[0])

    class Spoils(Recording):
        def on_step_begin(self, _, state, *__, **___):
            factor[0] = torch.nan if state.global_step == 1 else 1.0

    settings = {"loss_by": NAMES, "row_losses": True, "max_steps": 3, "logging_steps": 3}
    run = trained(tmp_path, model=model, callbacks=[Spoils()], **settings)

    ((losses, tokens),) = entries_of(run.log)
    rows = rows_in(tmp_path)
    assert all(map(math.isfinite, losses.values()))
    assert rows[rows.step == 2].loss.isna().all()
    kept = rows[rows.step != 2].groupby("source").targets.sum()
    assert kept.to_dict() == {name: number for name, number in tokens.items() if number}


HALVES = ["first"] * 8 + ["second"] * 12


@pytest.mark.parametrize(
    ("data", "loss_by", "names"),
    [
        (lambda: as_table(NAMES), "site", NAMES),
        (lambda: [dict(row) for row in as_table(NAMES)], "site", NAMES),
        (lambda: Subset(as_table(NAMES), range(5, 15)), "site", NAMES[5:15]),
        (
            lambda: ConcatDataset([as_table(NAMES).select(range(8)), as_table(NAMES)]),
            "site",
            NAMES[:8] + NAMES,
        ),
        (
            lambda: ConcatDataset(
                [as_table(NAMES).select(range(8)), as_table(NAMES).select(range(12))]
            ),
            ["first", "second"],
            HALVES,
        ),
    ],
    ids=["table", "list", "subset", "column of parts", "parts"],
)
def test_data_that_say_where_they_come_from(tmp_path, data, loss_by, names):
    """The source is a column, which no collator sees, or the part of several data sets."""
    settings = {
        "max_steps": -1,
        "num_train_epochs": 1,
        "logging_steps": 100,
        "logging_first_step": True,
    }
    settings["gradient_accumulation_steps"] = 1
    run = trained(
        tmp_path,
        data=data(),
        loss_by=loss_by,
        row_losses=True,
        data_collator=collated,
        **settings,
    )
    ((_, tokens),) = entries_of(run.log)

    rows = rows_in(tmp_path)
    assert {row.index: row.source for row in rows.itertuples()} == dict(enumerate(names))
    first = rows[rows.step == 1].groupby("source").targets.sum().to_dict()
    assert first == {name: number for name, number in tokens.items() if number}
    assert list(tokens) == list(dict.fromkeys(names))


def flattened(rows):
    """Return rows as one sequence without padding, whose positions tell where each begins."""
    labels = [torch.cat([torch.tensor([-100]), row["labels"][1:]]) for row in rows]
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(row["labels"])) for row in rows])[None],
    }


def test_rows_in_one_sequence(tmp_path):
    """Rows that a collator puts into one sequence are told apart by their positions."""
    recording = Recording()
    trained(
        tmp_path,
        loss_by=NAMES,
        row_losses=True,
        data_collator=flattened,
        max_steps=1,
        callbacks=[recording],
    )
    rows = read_row_losses(tmp_path).to_pandas()
    counted = [len(Counting(20)[index]["labels"]) - 1 for index in order_of(0, 20)[:BATCH]]

    assert list(rows.targets) == counted
    # The tiny Llama attends across rows, so only the first one has the loss that it has alone.
    ((loss, count),) = losses_of_rows(recording.weights[0], [Counting(20)[rows["index"][0]]])
    assert rows.loss[0] == pytest.approx(loss / count, rel=1e-5)


class Silent(nn.Module):
    """A model that returns its loss alone."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_llama()

    def forward(self, input_ids, labels=None, attention_mask=None):
        """Return the loss."""
        return {"loss": self.inner(input_ids, labels=labels).loss}


class Doubled(Silent):
    """A model that trains on twice its cross entropy."""

    def forward(self, input_ids, labels=None, attention_mask=None):
        """Return loss and logits."""
        found = self.inner(input_ids, labels=labels)
        return {"loss": 2 * found.loss, "logits": found.logits}


class ScaledLater(Silent):
    """A model whose loss becomes another one, without a change that its graph shows."""

    left = 4

    def forward(self, input_ids, labels=None, attention_mask=None):
        """Return loss and logits."""
        found = self.inner(input_ids, labels=labels)
        self.left -= 1
        return {"loss": (1.02 if self.left < 0 else 1.0) * found.loss, "logits": found.logits}


class Flipped(Silent):
    """A model whose loss has the rows in another order, from a call on."""

    left = 0

    def forward(self, input_ids, labels=None, attention_mask=None):
        """Return loss and logits."""
        logits, order = self.inner(input_ids).logits, [0] if self.left <= 0 else []
        self.left -= 1
        pairs = (each.flip(order).flatten(0, 1) for each in (logits[:, :-1], labels[:, 1:]))
        return {"loss": nn.functional.cross_entropy(*pairs), "logits": logits}


class FlippedLater(Flipped):
    """A model whose first micro-batches are right."""

    left = 4


class Unlabeled(Silent):
    """A model that takes no labels."""

    def forward(self, input_ids):
        """Return loss and logits."""
        found = self.inner(input_ids, labels=input_ids)
        return {"loss": found.loss, "logits": found.logits}


def unlabeled(rows):
    """Return rows of the same length as one batch without labels."""
    return {"input_ids": torch.stack([row["input_ids"][:5] for row in rows])}


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"model": Silent}, ValueError, "lacks an output with `logits`"),
        ({"model": Doubled}, ValueError, "mean of the losses of its targets, got"),
        ({"model": ScaledLater}, ValueError, "mean of the losses of its targets, got"),
        (
            {"model": ScaledLater, "loss_by": None, "row_losses": True},
            ValueError,
            "mean of the losses of its targets, got",
        ),
        ({"model": Flipped}, ValueError, r"got \d+ targets that differ from the label"),
        (
            {"model": FlippedLater, "loss_by": None, "row_losses": True},
            ValueError,
            r"got \d+ targets that differ from the label",
        ),
        (
            {"model": Unlabeled, "data_collator": unlabeled},
            ValueError,
            "lacks `labels` in its inputs",
        ),
        ({"label_smoothing_factor": 0.1}, ValueError, "`label_smoothing_factor` must be 0"),
        ({"loss_by": 3}, TypeError, "name of a column, a sequence of names or None, got 3"),
        ({"loss_by": np.array(NAMES)}, TypeError, r"; give loss_by\.tolist\(\)"),
        ({"loss_by": "site"}, ValueError, "got 'site' and Counting with the columns unknown"),
        ({"loss_by": [*NAMES[:-1], None]}, ValueError, "of each row, .* got None in row 19"),
        ({"loss_by": ["1", 1] * 10}, ValueError, "differ as text, got 1 in row 1 and '1'"),
        ({"loss_by": NAMES[1:]}, ValueError, "got 19 names for 20 rows"),
        (
            {"data": Counting(300), "loss_by": [*map(str, range(300))]},
            ValueError,
            "at most 256 sources, got 300",
        ),
        ({"data": EndlessCounting}, ValueError, "map-style data set with a length"),
        (
            {"ignore_data_skip": True},
            ValueError,
            "`loss_by` must be left out with this data loader",
        ),
        ({"row_losses": 1}, TypeError, "`row_losses` must be a bool"),
    ],
)
def test_what_is_refused(tmp_path, settings, error, says):
    """One sentence says why there is no loss by source."""
    settings = {n: v() if isinstance(v, type) else v for n, v in settings.items()}
    with pytest.raises(error, match=says):
        trained(tmp_path, **{"loss_by": NAMES} | settings)


@pytest.mark.parametrize(
    "state",
    [{}, {"sources": ["a"], "totals": [[1.0], []]}, {"sources": [1], "totals": [[1.0], [1.0]]}],
)
def test_a_damaged_state(state):
    """A state that does not fit is refused before anything is loaded; none is a state, too."""
    check_state(None)
    check_state({"sources": ["a"], "totals": [[1.5], [2.0]]})
    with pytest.raises((LookupError, ValueError)):
        check_state(state)


def test_nothing_is_left_on_the_model(tmp_path):
    """The hook is there during micro-batches only, and training is not changed by it."""
    followed = trained(tmp_path / "a", loss_by=NAMES, row_losses=True)
    alone = trained(tmp_path / "b")

    hooks, usual = (run.trainer.model._forward_hooks.values() for run in (followed, alone))
    assert [*hooks] == [*usual]
    assert [e["loss"] for e in followed.log[:-1]] == [e["loss"] for e in alone.log[:-1]]
    assert all(torch.equal(followed.weights[name], w) for name, w in alone.weights.items())
