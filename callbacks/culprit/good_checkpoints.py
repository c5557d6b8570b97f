"""Tell which checkpoints of a run have weights from before an episode."""

import re
from collections.abc import Sequence
from pathlib import Path

from mfwrap.callbacks.culprit.anomaly_log import SHIFTS
from mfwrap.callbacks.culprit.causes.rate import BEFORE_STEP, LOWER_RATE, MUCH_LOWER_RATE
from mfwrap.checkpoints.run_folders import checkpoints_of_run
from mfwrap.records.episodes import Episode, episodes_of
from mfwrap.records.json_lines import read_json_lines
from mfwrap.records.run_record import loop_checkpoints, read_facts, step_of_saved

_EARLY = 100
"""Last step at which updates that were too large are as old as the run."""

_UNDECIDED = 64
"""Number of steps after an episode within which it is found whether the loss comes back."""

_NONE_GOOD = "no checkpoint has good weights: start anew"

_ADVISED = re.compile(rf"{BEFORE_STEP} (\d+)")


def good_checkpoints(episode: Episode, saved: Sequence[Path]) -> list[Path]:
    """Return the checkpoints with weights from before an episode."""
    last = _last_good_step(episode)
    return [each for each in saved if step_of_saved(each) <= last]


def _last_good_step(episode: Episode) -> int:
    """Return the last step whose weights are from before an episode; -1 if none are good.

    The weights that the step before it has left are those that it had, and may be its cause. If the
    rate was too high from the start on, no weights are good.
    """
    record = episode.records[0]
    if advised := _ADVISED.search(record.get("suggestion") or ""):
        # The rate of that step is at fault, and no weights before it.
        return int(advised[1]) - 1
    if record.get("suggestion") in {LOWER_RATE, MUCH_LOWER_RATE} and episode.step <= _EARLY:
        return -1
    return int(record.get("since", episode.step)) - 2


def _good_start(episode: Episode, resumed: Sequence[int]) -> str:
    """Return which checkpoint of another folder a run was resumed from, if it has good weights."""
    good = [step for step in resumed if step <= _last_good_step(episode)]
    return f"the checkpoint of step {good[-1]} that it was resumed from" if good else ""


def undiverged_checkpoints(folder: Path, saved: Sequence[Path]) -> list[Path]:
    """Return the checkpoints from before the loss has left its course for good, if it has.

    Args:
        folder: Run folder, which has ``anomalies.jsonl`` if a monitor has found anything.
        saved: Some of its checkpoints.
    """
    first = next((one for one in episodes_in(folder) if one.has_diverged), None)
    return list(saved) if first is None else good_checkpoints(first, saved)


def divergence_in(folder: Path) -> str:
    """Say that the loss of a run has left its course for good, and which weights are from before.

    Args:
        folder: Run folder, as for `undiverged_checkpoints`.

    Returns:
        One sentence; empty if the training has not diverged.
    """
    episode = next((one for one in episodes_in(folder) if one.has_diverged), None)
    if episode is None:
        return ""
    first = episode.records[0]
    saved = checkpoints_of_run(folder) or loop_checkpoints(folder)
    good = good_checkpoints(episode, saved)
    if good:
        which = f"{good[-1].name} is the newest from before"
    elif start := _good_start(episode, read_facts(folder).get("resumed") or ()):
        which = f"{start} is from before"
    elif saved:
        which = _NONE_GOOD
        which += " with a lower learning rate" if first.get("cause") == "learning_rate" else ""
    else:
        # A loop may save them in any place.
        which = first.get("suggestion") or "go back to a checkpoint from before this step"
    why = first.get("explanation") or first["diverged"]
    return f"the training diverged at step {shown_from(episode)} ({why}); {which}"


def shown_from(episode: Episode) -> int:
    """Return the first step in which an episode shows; a shift is found some steps later."""
    first = episode.records[0]
    since: int = first.get("since", episode.step)
    return since if first.get("kind") in SHIFTS else episode.step


def to_return_to(folder: Path, saved: Sequence[Path]) -> list[Path]:
    """Return the newest checkpoint from before a divergence, or an episode that may become one.

    Args:
        folder: Run folder, as for `undiverged_checkpoints`.
        saved: Some of its checkpoints, in the order of their steps.

    Returns:
        At most one checkpoint.
    """
    since = step_of_saved(saved[-1]) - _UNDECIDED if saved else 0
    risks = (one for one in episodes_in(folder) if one.has_diverged or one.last_step >= since)
    first = next(risks, None)
    return [] if first is None else good_checkpoints(first, saved)[-1:]


def episodes_in(folder: Path) -> list[Episode]:
    """Return the episodes that the main process has recorded in a run folder."""
    file = folder / "anomalies.jsonl"
    return episodes_of([(0, read_json_lines(file) if file.is_file() else [])])


def newest_good(episode: Episode, saved: Sequence[Path], resumed: Sequence[int]) -> str:
    """Return a clause with the newest good checkpoint; empty for a run without checkpoints.

    Args:
        episode: Episode from which the loss has not come back.
        saved: Checkpoints of the run.
        resumed: Steps at which the run was resumed, also from a checkpoint of another folder.
    """
    if good := good_checkpoints(episode, saved):
        return f"; {good[-1].name} is the newest from before"
    if start := _good_start(episode, resumed):
        return f"; {start} is from before"
    return "; no checkpoint is good" if saved else ""
