"""`RankClock` records the sections of all ranks, and names the rank that slows the others."""

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState

from mfwrap import MFTrainOneStepCell
from mfwrap.callbacks import RankClock
from mfwrap.callbacks.rank_clock import slow_ranks
from mfwrap.checkpoints.written_files import LIST
from mfwrap.collectives import Section, section_clock
from mfwrap.records import read_json_lines
from support.ranks.clock import SLOW_RANK, find_slow_rank, find_slow_rank_of_trainer
from support.ranks.pool import RankPool
from support.small_networks import Classifier, labelled_batches

PLACES = {
    "data": "data",
    "forward": "forward_backward",
    "hook": "reduction",
    "optimizer": "update",
    "nowhere": None,
}
"""Section that is named for each place where a rank takes longer."""

NAMED = [section.name.lower() for section in Section]


def assert_named(records, place):
    """Fail unless every message after the first names the slow rank with its section, alone."""
    named = {(each["rank"], each["section"]) for one in records for each in one.get("slow", [])}
    assert named == ({(SLOW_RANK, PLACES[place])} if PLACES[place] else set())
    assert [one["step"] for one in records if "slow" in one] == ([3, 7] if named else [])
    times = [one for one in records if "slow" not in one]
    assert [one["step"] for one in times] == [1, 2, 3, 4, 5, 6, 7]
    assert all(len(one[name]) == len(times[0]["data"]) for one in times for name in NAMED)


def test_a_slow_rank_is_named(two_ranks, tmp_path):
    """A rank that is slow in its communication hook is named in the first message."""
    records, _ = two_ranks.run(find_slow_rank, "DDP", "hook", str(tmp_path), 9)

    assert_named(records, "hook")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """Start four processes that are the ranks of one process group."""
    with RankPool(4, tmp_path_factory.mktemp("four_ranks")) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", ["DDP", "FSDP2", "attached"])
def test_one_of_four_ranks_is_slow(four_ranks, tmp_path, layout, place):
    """A slow rank is named with its section, under DDP and FSDP2, with the cell and attached."""
    if (layout, place) == ("FSDP2", "hook"):
        pytest.skip("fully_shard has no communication hook")
    records, *_ = four_ranks.run(find_slow_rank, layout, place, str(tmp_path), 9)

    assert_named(records, place)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["data", "forward"])
def test_a_slow_rank_of_a_trainer(two_ranks, tmp_path, place):
    """MFTrainer names the slow rank; a checkpoint has the times of all steps before it."""
    records, _ = two_ranks.run(find_slow_rank_of_trainer, place, str(tmp_path))

    named = {(each["rank"], each["section"]) for one in records for each in one.get("slow", [])}
    assert named == {(SLOW_RANK, PLACES[place])}
    steps = [one["step"] for one in records if "slow" not in one]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 9]


@given(
    st.integers(2, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
    st.sampled_from([Section.DATA, Section.FORWARD_BACKWARD, Section.REDUCTION, Section.UPDATE]),
    st.floats(1.0, 100.0),
)
def test_the_rank_with_the_longest_section_is_slow(ranks, section, excess):
    """The rank is named with its own time and the median of the others; the others wait for it."""
    number, slow = ranks
    means = [[0.1, 0.6, 0.1, 0.2, 0.01 + excess * (rank != slow)] for rank in range(number)]
    means[slow][section] += excess

    [found] = slow_ranks(means, tolerance=0.2)
    assert (found.rank, found.section) == (slow, section.name.lower())
    assert found.milliseconds == pytest.approx(1e3 * means[slow][section])
    assert found.others == pytest.approx(1e3 * means[slow - 1][section])


def test_small_differences_are_not_slow():
    """A rank is slow from the tolerance on, as a share of the time of a step."""
    means = [[0, 0.8, 0, 0, 0.2], [0, 0.9, 0, 0, 0.1], [0, 0.8, 0, 0, 0.2]]

    assert slow_ranks(means, tolerance=0.11) == []
    [found] = slow_ranks(means, tolerance=0.09)
    assert str(found) == (
        "rank 1 is slow: forward-backward takes 900 ms, the median of the other ranks is 800 ms"
    )


def test_a_rank_for_which_others_wait_without_a_reason():
    """If the others wait for a rank, it is named even if all of its sections are as fast."""
    means = [[0, 0.1, 0, 0, 0.8], [0, 0.1, 0, 0, 0.01], [0, 0.1, 0, 0, 0.9]]

    [found] = slow_ranks(means, tolerance=0.2)
    assert found.section == "unmeasured"
    assert str(found) == (
        "rank 1 is slow outside of its measured sections: it waits 10 ms for other ranks, the "
        "median of the other ranks is 850 ms"
    )


def test_unknown_times_name_nobody():
    """A rank whose times are unknown is neither slow nor compared."""
    unknown = [math.nan] * len(Section)

    assert slow_ranks([unknown, [0, 9, 0, 0, 0]], tolerance=0.2) == []
    assert slow_ranks([], tolerance=0.2) == []


def train(callback, num_steps, *, report=True, last=None):
    """Train alone, with callbacks called by hand; call `last` before the end of the training."""
    network = Classifier()
    cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1, fused=True))
    state, control = TrainerState(), TrainerControl()
    for batch in labelled_batches(num_steps):
        callback.on_step_begin(None, state, control)
        cell(*batch)
        state.global_step += 1
        step_report = cell.last_report if report else None
        callback.on_step_end(None, state, control, step_report=step_report)
    if last is not None:
        last(None, state, control)
    callback.on_train_end(None, state, control)


def test_one_process(tmp_path):
    """A process alone records its times, and asks for none after its training."""
    train(RankClock(2, folder=tmp_path), 5)

    records = read_json_lines(tmp_path / "rank_clock.jsonl")
    assert [one["step"] for one in records] == [1, 2, 3]
    assert all(list(one) == ["step", *NAMED] for one in records)
    assert all(one["forward_backward"][0] > 0 < one["update"][0] for one in records)
    assert not section_clock.is_on


def test_all_times_before_a_save(tmp_path):
    """`on_pre_save` writes the times of all steps, the last one included."""
    callback = RankClock(10, folder=tmp_path)
    train(callback, 3, last=callback.on_pre_save)

    assert [one["step"] for one in read_json_lines(tmp_path / "rank_clock.jsonl")] == [1, 2, 3]


def test_a_loop_without_reports(tmp_path, caplog):
    """If the loop passes no reports, one warning says so and nothing is written."""
    with caplog.at_level(logging.WARNING):
        train(RankClock(2, folder=tmp_path), 3, report=False)

    (record,) = caplog.records
    assert "this loop passes no `step_report`" in record.message
    assert [path.name for path in tmp_path.iterdir()] == [LIST]


def test_a_folder_is_needed():
    """Without ``args.output_dir``, `folder` is required."""
    with pytest.raises(ValueError, match="RankClock needs `folder`"):
        train(RankClock(), 1)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"step_interval": 0}, ValueError, "`step_interval` must be"),
        ({"step_interval": math.pi}, TypeError, "`step_interval` must be"),
        ({"tolerance": 0.0}, ValueError, "`tolerance` must be"),
        ({"folder": 3}, TypeError, "`folder` must be a path or None, got 3"),
    ],
)
def test_wrong_arguments(settings, error, message):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=message):
        RankClock(**settings)
