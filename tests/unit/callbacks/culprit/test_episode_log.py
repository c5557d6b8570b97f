"""Episodes are written when they begin and when they end, by one rank."""

import pytest

from mfwrap.callbacks.culprit.anomaly_log import Anomaly
from mfwrap.callbacks.culprit.episode_log import EpisodeLog
from mfwrap.callbacks.culprit.episodes import Episodes
from mfwrap.callbacks.culprit.judges.course import LossCourse
from mfwrap.callbacks.shared.step_values import StepNumbers, StepValues, numbers_of
from mfwrap.records.json_lines import read_json_lines


def numbers(step: int, num_skips: int = 0, *, overflow: bool = False) -> StepNumbers:
    """Return numbers of an ordinary step, or of one whose update was skipped as those before."""
    values = StepValues(loss=1.0, consecutive_skips=num_skips, overflow=overflow)
    return numbers_of(step, values)


def written(folder, *, is_main: bool, is_shared: bool) -> list[tuple]:
    """Return step, last step and number of steps of the records of an episode of 100 steps."""
    rank = 0 if is_main else 1
    log = EpisodeLog(Episodes(10, LossCourse()), folder, rank, first_step=0, is_main=is_main)
    log.add(None, numbers(1), is_shared=False)
    for step in range(2, 102):
        bad = Anomaly(step=step, kind="gradient_not_finite", ranks=(), layer=None, skipped=True)
        log.add(bad, numbers(step), is_shared=is_shared)
    log.close()
    name = "anomalies.jsonl" if is_main else "anomalies_rank1.jsonl"
    records = read_json_lines(folder / name) if (folder / name).exists() else []
    return [(one["step"], one.get("last_step"), one.get("num_steps")) for one in records]


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_hundred_skips_are_two_records(is_main, is_shared, tmp_path):
    """What all ranks have found is written by the main process alone."""
    records = written(tmp_path, is_main=is_main, is_shared=is_shared)
    assert records == ([(2, None, None), (2, 101, 100)] if is_main or not is_shared else [])


def test_an_end_is_written_at_the_next_good_steps(tmp_path, caplog):
    """A run that goes on does not keep the end back."""
    log = EpisodeLog(Episodes(10, LossCourse()), tmp_path, 0, first_step=0, is_main=True)
    for step in (1, 2):
        bad = Anomaly(step=step, kind="spike", ranks=(), layer=None)
        log.add(bad, numbers(step), is_shared=True)
    for step in range(3, 7):
        log.add(None, numbers(step), is_shared=False)
    assert "the episode of step 1 ended at step 2 after 2 bad steps; see" in caplog.text


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("overflow", [True, False])
def test_updates_that_are_all_skipped(caplog, is_main, goes_on, overflow):
    """The log says so at growing intervals, and at the end unless the last update was made."""
    log = EpisodeLog(Episodes(10, LossCourse()), None, 0, first_step=0, is_main=is_main)
    for step in range(2, 42):
        bad = Anomaly(step=step, kind="gradient_not_finite", ranks=(), layer=None, skipped=True)
        log.add(bad, numbers(step, step - 1, overflow=overflow), is_shared=True)
    if not goes_on:
        log.add(None, numbers(42), is_shared=False)
    log.close()

    said = [line for line in caplog.messages if "no update was made" in line]
    why = ", each with non-finite gradients" if overflow else ""
    expected = [
        *(f"step {1 + n}: no update was made in the last {n} steps{why}" for n in (8, 16, 32)),
        *([f"no update was made in the last 40 steps{why}"] if goes_on else []),
    ]
    assert said == (expected if is_main else [])


def test_an_episode_that_goes_on(caplog):
    """The log says so at growing intervals, with the loss if that has left its course."""
    log = EpisodeLog(Episodes(10, LossCourse()), None, 0, first_step=0, is_main=True)
    for step in range(2, 42):
        bad = Anomaly(step=step, kind="loss_spike", ranks=(0,), layer=None, usual_loss=2.0)
        log.add(bad, numbers_of(step, StepValues(loss=40.0)), is_shared=False)

    assert [line for line in caplog.messages if "goes on" in line] == [
        f"step {1 + n}: the episode of step 2 goes on after {n} bad steps; the loss is 40, after 2 "
        "before"
        for n in (8, 16, 32)
    ]


def test_what_is_told_after_an_end_is_not_told_again(caplog):
    """The line has only what is new: that the loss stays away, or is back."""
    log = EpisodeLog(Episodes(10, LossCourse()), None, 0, first_step=0, is_main=True)
    for step in range(2, 5):
        bad = Anomaly(step=step, kind="loss_spike", ranks=(0,), layer=None, usual_loss=2.0)
        log.add(bad, numbers_of(step, StepValues(loss=4.0)), is_shared=False)
    for step in range(5, 105):
        loss = 2.9 if step < 90 else 2.0
        log.add(None, numbers_of(step, StepValues(loss=loss)), is_shared=False)

    assert caplog.messages[1:] == [
        "the episode of step 2 ended at step 4 after 3 bad steps",
        "after the episode of step 2, the loss has not come back since: about 2.9, after 2",
        "after the episode of step 2, the loss was near its former level again at step 92",
    ]
