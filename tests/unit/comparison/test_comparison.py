"""Two runs with one planted difference: the first difference is named exactly."""

import dataclasses
import re

import pytest

from mfwrap.comparison import compare_runs
from mfwrap.comparison.differences import Row
from mfwrap.records import read_json_lines
from mfwrap.records.fingerprints import read_fingerprints
from support.compared_runs import Plan, train_by_cell, train_rank, train_recorded, train_shard
from support.run_folders import write_lines, write_run


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the folder of a run without a planted difference."""
    return train_recorded(tmp_path_factory.mktemp("plain"), Plan())


def differences(found):
    """Return step, kind and name of each difference in the results."""
    return [(each.step, each.kind, each.name) for each in found.differences]


def causes(found):
    """Return step, kind and name of each cause."""
    return [(each.step, each.kind, each.name) for each in found.causes]


ALL_AFTER_THE_LOSS = [("loss", "loss"), ("gradient", None), ("weight", None)]


@pytest.mark.parametrize(
    ("plan", "results", "given"),
    [
        (Plan(), [], []),
        (
            Plan(seed=1),
            [(1, *each) for each in ALL_AFTER_THE_LOSS],
            [(1, "random numbers", "host")],
        ),
        (Plan(weight_after=3), [(3, "weight", "middle.weight")], []),
        (Plan(row_at=4), [(4, *each) for each in ALL_AFTER_THE_LOSS], [(4, "data", "inputs")]),
        (
            Plan(order_at=2),
            [(2, *each) for each in ALL_AFTER_THE_LOSS],
            [(2, "data", "inputs, labels")],
        ),
        (Plan(rate_at=3), [(3, "weight", None)], [(3, "learning rate", "learning_rate")]),
        (Plan(scale=4096.0), [], [(1, "loss scale", "loss_scale")]),
        (
            Plan(gradient_at=4),
            [(4, "gradient", "middle.weight"), (4, "weight", "middle.weight")],
            [],
        ),
        (
            Plan(activation_at=4),
            [(4, "gradient", "middle.bias"), (4, "weight", "first.weight")],
            [],
        ),
        (Plan(loss_at=5), [(5, *each) for each in ALL_AFTER_THE_LOSS], []),
        (Plan(initial_seed=1), [(0, "weight", None)], []),
    ],
    ids=lambda each: str(
        {k: v for k, v in dataclasses.asdict(each).items() if v != getattr(Plan(), k)}
        if isinstance(each, Plan)
        else ""
    ),
)
def test_planted(plain, tmp_path, plan, results, given):
    """Step, kind and name of what differs first, and what differed before, are those planted."""
    found = compare_runs(plain, train_recorded(tmp_path, plan))

    assert differences(found) == results
    assert causes(found) == given
    assert found.is_equal == (not results and not given)


def test_rows(plain, tmp_path):
    """Rows that differ are named; a batch with the same rows in another order is recognized."""
    [other_row] = compare_runs(plain, train_recorded(tmp_path / "a", Plan(row_at=4))).causes
    [order] = compare_runs(plain, train_recorded(tmp_path / "b", Plan(order_at=4))).causes

    assert other_row.rows == (Row(rank=0, micro_batch=1, row=2),)
    assert not other_row.is_other_order
    assert order.is_other_order
    assert {each.micro_batch for each in order.rows} == {0}


def test_tolerance(plain, tmp_path):
    """Noise within the tolerance is no difference, but the first different bit is still told."""
    folder = train_recorded(tmp_path, Plan(noise=1e-6))
    found = compare_runs(plain, folder, 1e-3)

    assert found.is_equal
    assert found.first_of_any_size == compare_runs(plain, folder).differences[0]
    assert found.first_of_any_size.relative == pytest.approx(1e-6, rel=1.5)
    assert differences(compare_runs(plain, folder, 1e-8))[0] == (0, "weight", None)
    # A difference beyond the tolerance is found among differences within it.
    both = train_recorded(tmp_path / "both", Plan(noise=1e-6, gradient_at=4))
    assert differences(compare_runs(plain, both, 1e-3))[0] == (4, "gradient", "middle.weight")


def test_lengths_and_intervals(plain, tmp_path):
    """Steps that both runs have recorded are compared."""
    longer = compare_runs(plain, train_recorded(tmp_path / "long", Plan(num_steps=9)))
    rare = compare_runs(plain, train_recorded(tmp_path / "rare", Plan(interval=2, weight_after=3)))

    assert longer.is_equal
    assert longer.steps == (1, 2, 3, 4, 5, 6)
    assert [tuple(each) for each in longer.recorded] == [(1, 6), (1, 9)]
    assert rare.steps == (2, 4)
    assert differences(rare)[0] == (4, "loss", "loss")
    assert rare.last_equal["weight"] == 2
    assert rare.first_later == {}


def test_what_is_recorded_after_the_first_difference(tmp_path):
    """The step is known from which both runs have it."""
    for name in ("one", "two"):
        records = [{"step": step, "loss": float(step)} for step in range(1, 9)]
        records[0]["loss"] = {"one": 3.0, "two": 7.0}[name]
        for number in (3, 5):
            records[number]["weight_norm"] = 1.0
        write_lines(tmp_path / name / "training_state.jsonl", records)
    found = compare_runs(tmp_path / "one", tmp_path / "two")

    assert (found.steps, found.compared) == ((1,), ("loss",))
    assert found.first_later == {"weight": 4}


def test_resumed(plain, tmp_path):
    """A resumed run equals an uninterrupted one; wrong weights at the resume are found there."""
    train_recorded(tmp_path, Plan(num_steps=4, save_after=3))
    resumed = train_recorded(tmp_path, Plan(first_step=4))
    assert compare_runs(plain, resumed).is_equal

    lines = read_json_lines(resumed / "fingerprints.jsonl")
    restart = next(number for number, line in enumerate(lines) if number and "run" in line)
    assert lines[restart]["step"] == 3
    lines[restart]["weights"] = lines[0]["weights"]
    write_lines(resumed / "fingerprints.jsonl", lines)
    [first] = compare_runs(plain, resumed).differences

    assert (first.step, first.kind, first.at_start) == (3, "weight", True)


def test_records_alone(plain, tmp_path):
    """Without fingerprints, norms and losses are compared, and the rest is not claimed."""
    before = train_recorded(tmp_path / "a", Plan(fingerprints=False))
    gradient = train_recorded(tmp_path / "b", Plan(fingerprints=False, gradient_at=4))
    found = compare_runs(before, gradient)

    assert differences(found) == [(4, "gradient", "middle.weight")]
    assert found.compared == ("loss scale", "learning rate", "loss", "gradient", "skipped update")
    # A weight that changes after step 3 is seen in the loss of step 4.
    weight = train_recorded(tmp_path / "c", Plan(fingerprints=False, weight_after=3))
    assert differences(compare_runs(plain, weight))[0] == (4, "loss", "loss")


def test_start_and_data(plain, tmp_path):
    """With other initial weights, what the first step was given is told, too."""
    found = compare_runs(plain, train_recorded(tmp_path, Plan(initial_seed=1, seed=1, row_at=1)))

    assert differences(found) == [(0, "weight", None)]
    assert causes(found) == [(1, "random numbers", "host"), (1, "data", "inputs")]


def test_settings(tmp_path):
    """A setting that the recipe and the records have is told once."""
    for name, seed in (("a", 0), ("b", 1)):
        record = {"step": 1, "loss": 1.0, "max_grad_norm": 1.0 + seed}
        write_lines(tmp_path / name / "metrics.jsonl", [record])
        recipe = f"training: {{data_seed: {seed}}}\nstep: {{max_grad_norm: {1.0 + seed}}}\n"
        (tmp_path / name / "recipe.yaml").write_text(recipe)
    both = compare_runs(tmp_path / "a", tmp_path / "b").settings
    (tmp_path / "a" / "recipe.yaml").unlink()
    records = compare_runs(tmp_path / "a", tmp_path / "b").settings

    assert [each.name for each in both] == ["training.data_seed", "step.max_grad_norm"]
    assert [each.name for each in records] == ["max_grad_norm"]


@pytest.mark.parametrize("fused", [True, False])
def test_cell(tmp_path, fused):
    """A gradient that differs in a loop around the cell is named, also after clipping."""
    plain = train_by_cell(tmp_path / "a", Plan(), fused=fused)
    same = train_by_cell(tmp_path / "b", Plan(), fused=fused)
    planted = train_by_cell(tmp_path / "c", Plan(gradient_at=4), fused=fused)

    assert compare_runs(plain, same).is_equal
    found = compare_runs(plain, planted)
    assert differences(found)[0] == (4, "gradient", "middle.weight")
    assert {"data", "random numbers", "gradient"} <= set(found.compared)


def test_gradients_before_and_after_clipping(tmp_path):
    """Gradients that were recorded before and after clipping are not compared with each other."""
    fused = train_by_cell(tmp_path / "a", Plan())
    other = train_by_cell(tmp_path / "b", Plan(), fused=False)

    assert compare_runs(fused, other, 1e-4).is_equal


@pytest.fixture(scope="module")
def on_ranks(two_ranks, tmp_path_factory):
    """Return a function that trains on two ranks and returns the run folder."""
    folders = {}

    def train(plan):
        if plan not in folders:
            folders[plan] = tmp_path_factory.mktemp("ranks")
            two_ranks.run(train_rank, str(folders[plan]), dataclasses.asdict(plan))
        return folders[plan]

    return train


@pytest.mark.parametrize(
    ("plan", "first", "ranks"),
    [
        (Plan(dropout=0.0, gradient_at=4), (4, "gradient", "middle.weight"), (1,)),
        (Plan(dropout=0.0, loss_at=4), (4, "loss", "loss"), (1,)),
        (Plan(dropout=0.0, row_at=4), (4, "loss", "loss"), (1,)),
        (Plan(dropout=0.0, weight_after=4), (4, "weight", "middle.weight"), ()),
    ],
    ids=["gradient", "loss", "row", "weight"],
)
def test_ranks(on_ranks, plan, first, ranks):
    """The rank where a difference began is named, before the reduction spreads it."""
    found = compare_runs(on_ranks(Plan(dropout=0.0)), on_ranks(plan))

    assert differences(found)[0] == first
    assert found.differences[0].ranks == ranks


def test_other_numbers_of_ranks(on_ranks, tmp_path):
    """One process and two ranks with the same rows agree within a tolerance."""
    alone = train_recorded(tmp_path / "a", Plan(dropout=0.0))
    found = compare_runs(alone, on_ranks(Plan(dropout=0.0)), 1e-4)

    assert found.is_equal
    assert found.num_ranks == (1, 2)
    assert {"data", "loss", "gradient", "weight"} <= set(found.compared)
    assert "random numbers" not in found.compared
    other = compare_runs(alone, on_ranks(Plan(dropout=0.0, row_at=4)), 1e-4)
    assert causes(other) == [(4, "data", None)]
    flipped = train_recorded(tmp_path / "b", Plan(dropout=0.0, weight_after=4))
    [weight] = compare_runs(flipped, on_ranks(Plan(dropout=0.0)), 1e-4).differences
    assert (weight.step, weight.kind, weight.name) == (4, "weight", "middle.weight")


@pytest.fixture(scope="module")
def sharded(two_ranks, tmp_path_factory):
    """Return a function that trains a sharded network on two ranks and returns the run folder."""

    def train(plan):
        folder = tmp_path_factory.mktemp("sharded")
        two_ranks.run(train_shard, str(folder), dataclasses.asdict(plan))
        return folder

    return train


def test_sharded(sharded):
    """Runs of a sharded network are equal, or differ in the planted tensor on the planted rank."""
    plain = sharded(Plan())

    assert compare_runs(plain, sharded(Plan())).is_equal
    for plan, first in (
        (Plan(weight_after=3), (3, "weight", "middle.weight")),
        (Plan(activation_at=4), (4, "gradient", "middle.bias")),
        (Plan(row_at=4), (4, "loss", "loss")),
    ):
        found = compare_runs(plain, sharded(plan))
        assert differences(found)[0] == first
        assert found.differences[0].ranks == (1,)
    assert [each.ranks for each in found.causes] == [(1,)]


def test_sharded_against_one_process(sharded, tmp_path):
    """Shards add up to the tensors of one process, bit by bit before the first reduction."""
    alone, two = train_by_cell(tmp_path / "a", Plan()), sharded(Plan())
    shares = read_fingerprints(read_json_lines(two / "fingerprints.jsonl"), "f").shares

    assert set(shares.values()) == {"part"}
    [first, *_] = compare_runs(alone, two).differences
    assert (first.step, first.at_start) == (1, False)
    assert first.relative < 1e-6
    found = compare_runs(alone, two, 1e-4)
    assert found.is_equal
    assert {"data", "loss", "gradient", "weight"} <= set(found.compared)
    for plan, kind, name in (
        (Plan(weight_after=3), "weight", "middle.weight"),
        (Plan(gradient_at=3), "gradient", "middle.weight"),
    ):
        [first, *_] = compare_runs(train_by_cell(tmp_path / kind, plan), two, 1e-4).differences
        assert (first.step, first.kind, first.name) == (3, kind, name)
    data = compare_runs(alone, sharded(Plan(row_at=3)), 1e-4)
    assert causes(data) == [(3, "data", None)]


def test_wrong_folders(plain, tmp_path):
    """A folder that is no run, and runs with nothing in common, are errors that say so."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for folder, reason in (
        ("none", "there is no such folder"),
        ("file", "it is a file"),
        ("empty", "neither a *.jsonl"),
    ):
        with pytest.raises(FileNotFoundError, match=re.escape(reason)):
            compare_runs(plain, tmp_path / folder)
    late = tmp_path / "late"
    late.mkdir()
    (late / "metrics.jsonl").write_text('{"step": 50, "loss": 1.0}\n')
    message = "no step is recorded in both; the first has steps 1 to 6, the second 50 to 50"
    with pytest.raises(ValueError, match=message):
        compare_runs(plain, late)
    with pytest.raises(ValueError, match="they have recorded different numbers"):
        compare_runs(write_run(tmp_path / "cell"), plain_state(tmp_path / "state"))
    with pytest.raises(ValueError, match="`tolerance` must be >= 0 and finite, got -1"):
        compare_runs(plain, plain, -1)


def plain_state(folder):
    """Write a run folder with another kind of records than `write_run`."""
    folder.mkdir()
    (folder / "training_state.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    return folder
