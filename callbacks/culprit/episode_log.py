"""Write the episodes of a run: a record when one begins, and one when it ends."""

from collections.abc import Iterable
from pathlib import Path
from typing import final

from mfwrap.callbacks.culprit.anomaly_log import Anomaly, AnomalyLog
from mfwrap.callbacks.culprit.episodes import Episodes, OpenEpisode
from mfwrap.callbacks.culprit.notes import Note
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.step_values import StepNumbers

_FEWEST = 8
"""Number of bad steps, or of skipped updates in a row, that is logged, as is each doubling."""


@final
class EpisodeLog:
    """Write the anomaly that begins an episode, and the end of an episode of several steps.

    While all updates of an episode are skipped, the log says so at growing intervals, and when the
    training ends.

    Of what all ranks find together, the main process alone writes the records. What one rank has
    found, this rank writes.

    Args:
        episodes: Episodes of the run.
        folder: Run folder; ``None`` writes to the log only.
        rank: Rank of this process.
        first_step: Steps finished before this training; 0 for a training from the start.
        is_main: Whether this is the main process.

    Raises:
        OSError: If files cannot be written to the run folder.
    """

    def __init__(
        self,
        episodes: Episodes,
        folder: Path | None,
        rank: int,
        *,
        first_step: int,
        is_main: bool,
    ) -> None:
        self._episodes = episodes
        self._log = AnomalyLog(folder, rank, first_step=first_step)
        self._is_main = is_main
        self._num_skips = 0
        """Skipped updates in a row, the last step included."""
        self._num_overflows = 0
        """Overflows in a row, the last step included."""

    def add(self, anomaly: Anomaly | None, numbers: StepNumbers, *, is_shared: bool) -> None:
        """Add the judgement of a step.

        Args:
            anomaly: Anomaly of the step; ``None`` if it has none.
            numbers: Numbers of the step.
            is_shared: Whether all ranks have found the anomaly.
        """
        number = self._num_skips = numbers.consecutive_skips
        self._num_overflows = self._num_overflows + 1 if numbers.overflow else 0
        if _is_told(number):
            self._tell_skips(f"step {numbers.step}: ")
        last = self._episodes.last
        before = 0 if last is None else last.num_steps
        if anomaly is None:
            self._write_end(self._episodes.watch(numbers))
            self._write_end(self._episodes.pass_over(numbers))
        else:
            begins, ended = self._episodes.add(anomaly, numbers.loss, is_shared=is_shared)
            self._write_end(ended)
            if begins and (self._is_main or not is_shared):
                self._log.write(anomaly)
        if last is not None and last.num_steps > before and _is_told(last.num_steps):
            self._tell_that_goes_on(last, numbers)

    def _tell_that_goes_on(self, episode: OpenEpisode, numbers: StepNumbers) -> None:
        # Overflows in a row are told as updates that were not made.
        told_otherwise = episode.num_skipped == episode.num_steps
        if not (episode.is_over or told_otherwise) and (self._is_main or not episode.is_shared):
            said = episode.going_on(numbers.loss)
            run_logger(__package__).warning("step %d: %s", numbers.step, said)

    def note(self, notes: Iterable[Note]) -> None:
        """Write notes of this rank. What one rank notes, the others mostly note, too."""
        for one in notes:
            self._log.write(one, logs=self._is_main)

    def close(self) -> None:
        """Write the end of an episode that goes on, and that the last updates were skipped.

        Call it when the training ends, or has failed; then another call writes nothing.
        """
        for ended in self._episodes.close():
            self._write_end(ended)
        if self._num_skips > 1 and not _is_told(self._num_skips):
            self._tell_skips()
        self._num_skips = 0

    def _tell_skips(self, where: str = "") -> None:
        if self._is_main:
            all_overflow = self._num_overflows >= self._num_skips
            why = ", each with non-finite gradients" if all_overflow else ""
            run_logger(__package__).warning(
                "%sno update was made in the last %d steps%s", where, self._num_skips, why
            )

    def _write_end(self, episode: OpenEpisode | None) -> None:
        if episode is not None and (self._is_main or not episode.is_shared):
            self._log.write(episode)
            episode.is_told = True


def _is_told(number: int) -> bool:
    """Return whether so many bad steps, or skips in a row, are told when they happen."""
    return number >= _FEWEST and number.bit_count() == 1
