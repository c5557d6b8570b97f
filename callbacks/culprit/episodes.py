"""Join anomalies of successive steps into episodes."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

from mfwrap.callbacks.culprit.anomaly_log import NON_FINITE, UNKNOWN_CAUSE, Anomaly, BadRow, Kind
from mfwrap.callbacks.culprit.causes.evidence import Cause
from mfwrap.callbacks.culprit.judges.course import LossCourse
from mfwrap.callbacks.shared.step_values import StepNumbers

_GAP = 3
"""Largest number of steps from a finite anomaly of an episode to the next one."""

_CONSEQUENCES: frozenset[Kind] = frozenset(
    {"state_spike", "attention_logits", "expert_load", "update_growth"}
)
"""Kinds that a fault in a step before has as a consequence, some steps later."""

_GROWING: frozenset[Kind] = frozenset({"attention_logits", "expert_load", "update_growth"})
"""Kinds of which the last step of an episode tells more than the first."""

_LONGEST_LEVEL = 64
"""Largest number of steps after the last anomaly in which a level that stays high is bad. After as
many steps, all that the judges know is this level, and a loss that has not come back has
diverged."""

_FEWEST_HIGH = 5
"""Number of last losses of an episode whose median tells whether the loss has come back."""

_MOST_NAMED = 2
"""Largest number of samples of later steps in the log line; the record has all of them."""

_MOST_SEARCHED = 8
"""Largest number of steps of an episode whose rows are searched."""

_HIGH = 1.5
"""Smallest ratio of the loss of a finite anomaly to the usual one that is followed from there."""

_DIVERGED = 1.2
"""Smallest ratio of a loss that has diverged to the usual one before."""

DIVERGED = "diverged"
_AFTER_DIVERGING = (
    "go back to a checkpoint from before this step, and look at what has changed there: the data, "
    "the loss or the rate"
)

_AFTER_RUNNING_AWAY = (
    "look for a wrong sign in the loss, and for a term of it that has no lower bound"
)

_USUAL_CAUSES = frozenset({UNKNOWN_CAUSE, DIVERGED, "data", "rank_data"})
"""Causes that may be of the run's own nature."""

_EARLY, _LONG, _NO_LOWER, _LEARNED = 20, 20, 0.95, 0.9
"""Step before which a run has hardly learned anything, the smallest number of steps in which it
should have, the smallest ratio of a loss that is no lower than before, and the largest one of a run
that has learned."""

_WITH_GOOD_WEIGHTS = frozenset({UNKNOWN_CAUSE, "data", "rank_data", "loss", "setting"})
"""Causes of a higher loss that may leave the weights as good as they were."""

_OUTLIER = 10.0
"""Smallest ratio of a row's loss to the usual one, and to the first ones of the run, that is not of
the run's own nature."""

_AT_RATE, _SAME_RATE = 64, 0.5
"""Number of steps after an episode of the learning rate in which this is still to blame, and the
smallest ratio to the rate of then that is still as high."""

_BACK = 5
"""Number of steps after an episode in which numbers that are usual again seem unusual."""

_REFINED = ("cause", "explanation", "suggestion", "layer", "where", "name")
"""Fields of a later anomaly that complete the record of an episode whose cause was unknown."""


@dataclass(slots=True, kw_only=True)
class OpenEpisode:
    """Successive anomalies of which the first one has a record."""

    step: int
    """First step."""

    kind: Kind
    """Kind of the first anomaly."""

    is_shared: bool
    """Whether all ranks have found the first anomaly."""

    cause: str
    last_step: int
    last_anomaly: int = -1
    """Last step that was an anomaly by itself; later ones only stay at a level that is too high."""

    num_steps: int = 1
    """Number of bad steps."""

    num_skipped: int = 0
    """Number of these steps whose update was skipped."""

    usual_loss: float | None = None
    """Loss that was expected before the loss left its course; ``None`` if it has not."""

    has_outlier: bool = False
    """Whether the rows that are named had losses far above the usual one and the first ones."""

    rate: float | None = None
    """Learning rate of the first step; ``None`` if unknown."""

    loss_before: float | None = None
    """Loss that was expected at the first step; ``None`` if it was unknown."""

    last_losses: list[float] = field(default_factory=list)
    """Loss of each of the last steps since it has left its course."""

    loss_level: float | None = None
    """Loss half way between the usual one and that of the first spike of the loss."""

    norm_level: float | None = None
    """As `loss_level` for the global norm, on a logarithmic scale."""

    refined: dict[str, Any] = field(default_factory=dict)
    """What a later anomaly has told about a cause that was unknown before."""

    num_searched: int = 0
    """Number of steps whose rows were searched."""

    names_samples: bool = False
    """Whether the last search has named samples."""

    later_samples: list[dict[str, Any]] = field(default_factory=list)
    """Samples of the steps after the first one, each with its step, ready for JSON."""

    run_away: str = ""
    """What the loss has done, if it has run away downwards or has not come back; set when the
    episode ends, or much later if the loss comes back half way and no further."""

    back_at: int | None = None
    """Step at which a loss had come back that was said to stay away; ``None`` if it had not."""

    has_relapsed: bool = False
    """Whether the loss had come back, as was told, and is no lower at the end all the same."""

    latest: str | None = None
    """What the last anomaly has told, if it is of the same kind and grows for many steps."""

    reach: int = _GAP
    """Number of good steps after which the episode has ended."""

    is_over: bool = False
    """Whether the end was returned by `Episodes.add` or `Episodes.end`."""

    is_told: bool = False
    """Whether the log has the end, so that only what is new since then is left to say."""

    def follow(self, anomaly: Anomaly, loss: float, risen: float, reach: int) -> None:
        """Note an anomaly of the episode, from whose step the episode lasts for `reach` steps.

        Args:
            anomaly: Anomaly of the last step.
            loss: Loss of the step on this rank.
            risen: Loss to which it has risen; the middle one if it stays high.
            reach: Number of good steps after which the episode has ended.
        """
        self.last_anomaly, self.reach = anomaly.step, reach
        is_later = anomaly.step > self.step
        if not is_later:
            self.loss_before = anomaly.usual_loss
        if anomaly.samples_detail is not None:
            self.num_searched += 1
            self.names_samples = bool(anomaly.samples)
            if is_later:
                rows = anomaly.as_record().get("samples", ())
                self.later_samples += [{"step": anomaly.step, **row} for row in rows]
        if is_later and anomaly.kind == "state_spike" != self.kind:
            return  # a sample finds what has changed in the steps before it
        self.last_step = anomaly.step
        if is_later:
            self.num_steps += 1
            self.num_skipped += bool(anomaly.skipped)
        if is_later and anomaly.kind == self.kind in _GROWING:
            self.latest = anomaly.explanation
        usual_loss, usual_norm = anomaly.usual_loss, anomaly.usual_global_norm
        is_high = anomaly.kind in {"loss_spike", "loss_shift"}
        if usual_loss is not None and anomaly.kind not in NON_FINITE:
            is_high |= 0 < _HIGH * usual_loss < loss
        if is_high and self.loss_level is None and usual_loss is not None:
            self.usual_loss, self.loss_level = usual_loss, (usual_loss + risen) / 2
            num_before = 0 if anomaly.since is None else anomaly.step - anomaly.since
            self.last_losses = [loss] * num_before
        self.look(loss)
        if anomaly.kind == "spike" and self.norm_level is None and usual_norm is not None:
            self.norm_level = math.sqrt(usual_norm * (anomaly.global_norm or math.inf))

    def look(self, loss: float) -> None:
        """Follow the loss of a step, which may have come back to its level."""
        if self.loss_level is not None:
            self.last_losses = [*self.last_losses, loss][-_FEWEST_HIGH:]

    @property
    def has_diverged(self) -> bool:
        """Whether the loss has left its course, and has not come back half way since."""
        if len(self.last_losses) < _FEWEST_HIGH or self.loss_level is None:
            return False
        least = self.loss_level
        if self.usual_loss is not None and self.usual_loss > 0:
            least = max(least, _DIVERGED * self.usual_loss)
        # Of non-finite losses, the median is NaN or infinite.
        return not statistics.median(self.last_losses) <= least

    @property
    def is_high(self) -> bool:
        """Whether the last loss is above the usual one from before the episode."""
        return bool(self.last_losses) and not self.is_back(self.last_losses[-1])

    @property
    def _stays_high(self) -> bool:
        if len(self.last_losses) < _FEWEST_HIGH or not self.usual_loss:
            return False
        return 0 < _HIGH * self.usual_loss < statistics.median(self.last_losses)

    def is_back(self, loss: float) -> bool:
        """Tell whether a loss is about the usual one from before the episode, or less."""
        usual = self.usual_loss
        return usual is None or usual <= 0 or loss <= _DIVERGED * usual

    @property
    def has_ruined(self) -> bool:
        """Whether the weights are ruined: the loss has diverged, by a cause that lies in them.

        After the end, a loss that is still far above the usual one is enough.
        """
        is_high = self._stays_high if self.is_over else self.has_diverged
        has_diverged = bool(self.run_away) or is_high
        return has_diverged and self.refined.get("cause", self.cause) not in _WITH_GOOD_WEIGHTS

    def is_worse_than(self, loss: float | None) -> bool:
        """Tell whether the last losses are higher than a loss; false if it is unknown."""
        if loss is None or not self.last_losses:
            return False
        return not statistics.median(self.last_losses) <= loss

    def has_ended_before(self, step: int) -> bool:
        """Tell whether too many good steps in a row have come before a step."""
        return step - max(self.last_step, self.last_anomaly) > self.reach

    def has_stayed(self, numbers: StepNumbers) -> bool:
        """Tell whether a step without an anomaly has a loss or norm like the bad steps before."""
        if self.has_ended_before(numbers.step):
            return False
        if numbers.overflow or numbers.step - self.last_anomaly > _LONGEST_LEVEL:
            return False
        values = ((numbers.loss, self.loss_level), (numbers.global_norm, self.norm_level))
        return any(
            value is not None and level is not None and value > level for value, level in values
        )

    def as_record(self) -> dict[str, Any]:
        """Return the fields that complete the record of the first anomaly, ready for JSON."""
        names = ("step", "kind", "last_step", "num_steps", "num_skipped")
        latest = {} if self.latest is None else {"latest": self.latest}
        diverged: dict[str, Any] = {"diverged": self.course()} if self.course() else {}
        if self.back_at is not None or self.has_relapsed:
            diverged["back"] = self.back_at
        known = {name: getattr(self, name) for name in names}
        rows = {"num_searched": self.num_searched, "later_samples": self.later_samples}
        later = rows if self.later_samples else {}
        return {**known, **self.refined, **latest, **diverged, **later}

    def course(self) -> str:
        """Say how the loss has left its course for good, in a clause; empty if it has not."""
        if self.run_away or not self.has_diverged:
            return self.run_away
        middle = statistics.median(self.last_losses)
        return (
            f"the loss had not come back by then: about {middle:.4g}, after {self.usual_loss:.4g}"
        )

    def going_on(self, loss: float) -> str:
        """Describe the episode in one line while it goes on; takes the loss of the step."""
        said = ""
        if self.has_diverged:
            said = f"; the loss is {loss:.4g}, after {self.usual_loss:.4g} before"
        return f"the episode of step {self.step} goes on after {self.num_steps} bad steps{said}"

    def _rows(self) -> str:
        """Name the samples of later steps."""
        rows = [dict(row) for row in self.later_samples]
        said = [f"step {row.pop('step')}, {BadRow(**row).place}" for row in rows[:_MOST_NAMED]]
        more = len(rows) - len(said)
        return "; ".join(said) + (f"; and {more} more" if more else "")

    def __str__(self) -> str:
        """Describe the end of the episode in one line."""
        skipped = f", {self.num_skipped} updates skipped" if self.num_skipped else ""
        rows = f"samples of later steps: {self._rows()}" if self.later_samples else ""
        back = ""
        if self.back_at is not None:
            back = f"the loss was near its former level again at step {self.back_at}"
        told = dict.fromkeys(
            [self.refined.get("explanation") or self.latest or "", back or self.course(), rows]
        )
        said = "".join(f"; {clause}" for clause in told if clause)
        bad = "1 bad step" if self.num_steps == 1 else f"{self.num_steps} bad steps"
        if self.is_told and (news := back or self.course()):
            return f"after the episode of step {self.step}, {news}"
        return (
            f"the episode of step {self.step} ended at step {self.last_step} after {bad}{skipped}"
            f"{said}"
        )


@final
class Episodes:
    """Tell whether an anomaly begins an episode or goes on with the last one.

    An anomaly goes on with an episode if the step before was one, too. After a finite anomaly, any
    others up to three steps later do, as well: weights that were ruined raise the loss again and
    again, until it overflows. A change of the training state that a sample finds, and attention
    logits, loads of experts or updates that have grown, are consequences of an episode since the
    sample before.

    Steps whose loss or global norm stays high after a spike belong to the episode, too, until it
    has come down half way, or has stayed for 64 steps.

    Args:
        state_interval: Steps from one sample of the training state to the next.
        course: Course of this rank's loss. A loss that does not come back has diverged if it is
            worse than the first ones, or if it has run away downwards; ``None`` if unknown.
    """

    def __init__(self, state_interval: int, course: LossCourse | None = None) -> None:
        self._state_interval, self._course = state_interval, course
        self.last: OpenEpisode | None = None
        """The last episode, which may be over."""
        self.astray: OpenEpisode | None = None
        """The first episode that is over and whose loss has not been back at any step since."""
        self.early: OpenEpisode | None = None
        """The first episode that began early, and whose cause is the learning rate; or a suspected
        one, which is told only if the loss shows it."""
        self._step = 0
        """Last step."""

    def goes_on(self, step: int, kind: Kind, *, is_shared: bool) -> bool:
        """Tell whether an anomaly goes on with the last episode.

        Args:
            step: Step of the anomaly.
            kind: Kind of the anomaly.
            is_shared: Whether all ranks have found the anomaly.
        """
        episode = self.last
        if episode is None:
            return False
        gap = step - episode.last_anomaly
        if kind in _CONSEQUENCES:
            return gap <= self._state_interval
        if kind not in NON_FINITE and episode.kind not in NON_FINITE:
            return gap <= _GAP
        # A non-finite loss with finite gradients, which one rank has, is no overflow of all ranks.
        is_alike = is_shared == episode.is_shared or episode.kind not in NON_FINITE
        # After good steps, an overflow is a fault of its own, unless the loss is still high.
        reach = _GAP if episode.kind not in NON_FINITE and episode.is_high else 1
        return gap <= reach and (is_alike or kind not in NON_FINITE)

    @property
    def names_samples(self) -> bool:
        """Whether the samples of the last episode's next step are to be searched, too.

        They are as long as each search names some: data may have several bad rows in a row. When
        the weights are ruined, all rows are alike, and no search names one.
        """
        episode = self.last
        if episode is None or episode.is_over:
            return False
        return episode.names_samples and episode.num_searched < _MOST_SEARCHED

    def explain(self, step: int) -> bool:
        """Tell whether a fault with a known cause explains unusual numbers of a step.

        Unusual data are no such fault: data have rows like these again. But a row far above
        everything that the run has seen is one.
        """
        episode = self.last
        if episode is None or (episode.cause in _USUAL_CAUSES and not episode.has_outlier):
            return False
        return step <= episode.last_step + _BACK

    def add(
        self, anomaly: Anomaly, loss: float, *, is_shared: bool
    ) -> tuple[bool, OpenEpisode | None]:
        """Add an anomaly to the last episode, or begin another one with it.

        Args:
            anomaly: Anomaly of the last step.
            loss: Loss of the step on this rank.
            is_shared: Whether all ranks have found the anomaly.

        Returns:
            Whether the anomaly begins an episode, and the episode that this has ended.
        """
        self._step, episode = anomaly.step, self.last
        shift = None if self._course is None else self._course.shift
        risen = loss if shift is None else shift.now
        goes_on = self.goes_on(anomaly.step, anomaly.kind, is_shared=is_shared)
        if episode is not None and goes_on:
            before = episode.as_record()
            episode.follow(anomaly, loss, risen, self._reach(anomaly.kind))
            # What a fault in the steps before has as a consequence tells nothing of its cause.
            is_new = anomaly.kind == episode.kind or anomaly.kind not in _GROWING
            if is_new and episode.cause == UNKNOWN_CAUSE != anomaly.cause:
                episode.cause = anomaly.cause
                known = {name: getattr(anomaly, name) for name in _REFINED}
                episode.refined = {name: v for name, v in known.items() if v is not None}
            # An episode that has ended is told again only if there is more to tell.
            episode.is_over = episode.is_over and episode.as_record() == before
            return False, None
        ended = self.end()
        self.last = OpenEpisode(
            step=anomaly.step,
            kind=anomaly.kind,
            is_shared=is_shared,
            cause=anomaly.cause,
            last_step=anomaly.step,
            num_skipped=int(bool(anomaly.skipped)),
            rate=anomaly.learning_rate,
            has_outlier=self._has_outlier(anomaly),
        )
        self.last.follow(anomaly, loss, risen, self._reach(anomaly.kind))
        if anomaly.step < _EARLY and anomaly.cause == "learning_rate":
            self.early = self.early or self.last
            first = None if self._course is None else self._course.first
            # The loss just before may have risen already.
            earlier = [one for one in (self.last.loss_before, first) if one is not None]
            self.last.loss_before = min(earlier) if earlier else None
        return True, ended

    def _has_outlier(self, anomaly: Anomaly) -> bool:
        losses = [row.loss for row in anomaly.samples if row.loss is not None]
        first = None if self._course is None else self._course.first
        known = [loss for loss in (anomaly.usual_loss, first) if loss is not None]
        return bool(losses and known) and min(losses) > _OUTLIER * max(known) > 0

    def suspect(self, step: int, cause: Cause) -> None:
        """Follow the loss as after an early episode: it shows whether there has been one.

        Small networks learn with large updates, too. So nothing is told unless the loss is high.

        Args:
            step: Step of the last of some large updates.
            cause: What follows from them if the loss is high.
        """
        course = self._course
        if self.early is not None or step >= _EARLY or course is None:
            return
        self.early = OpenEpisode(
            step=step,
            kind="update_spike",
            is_shared=True,
            cause=cause.name,
            last_step=step,
            last_anomaly=step,
            loss_before=course.first,
            refined={
                "cause": cause.name,
                "explanation": cause.explanation,
                "suggestion": cause.suggestion,
            },
            is_over=True,
        )

    def pass_over(self, numbers: StepNumbers) -> OpenEpisode | None:
        """Include a step that is no anomaly; return the last episode if it has ended before it.

        What is usual soon follows a loss or a norm that stays at the level of bad steps, for
        example while the data are bad. Such a step still belongs to the episode.
        """
        episode = self.last
        if episode is None or episode.is_over:
            return None
        episode.look(numbers.loss)
        if episode.has_stayed(numbers):
            episode.last_step = numbers.step
            episode.num_steps += 1
            episode.num_skipped += numbers.skipped
        return self.end() if episode.has_ended_before(numbers.step) else None

    def step_of_rate(self, step: int, rate: float) -> int | None:
        """Return the step of the last episode if its cause was a rate that is still as high.

        Args:
            step: Step that may be a consequence.
            rate: Its learning rate; NaN if unknown.
        """
        last = self.last
        if last is None or last.cause != "learning_rate" or last.rate is None:
            return None
        is_near = step - last.last_step <= _AT_RATE
        return last.step if is_near and rate >= _SAME_RATE * last.rate else None

    @property
    def diverged_step(self) -> int | None:
        """First step of the episode that has ruined the weights; ``None`` if none has."""
        last = None if self.last is None or self.last.is_over else self.last
        known = (one for one in (self.astray, last) if one is not None)
        return next((one.step for one in known if one.has_ruined), None)

    def watch(self, numbers: StepNumbers) -> OpenEpisode | None:
        """Follow the loss since an episode that is over; return it if there is more to tell.

        A loss that has come half way back may still be on its way. So it has diverged only if it
        has not once been back for 64 steps, or until the training ends. If it comes back later,
        that is told, too.
        """
        self._step = numbers.step
        self._forget_what_did_no_harm()
        if self.astray is None:
            self.astray = self._early_and_high()
        astray = self.astray
        if astray is None or not astray.is_over:
            return None
        astray.look(numbers.loss)
        is_told = bool(astray.run_away)
        if astray.is_back(statistics.median(astray.last_losses) if is_told else numbers.loss):
            self.astray = None
            astray.back_at = numbers.step if is_told else None
            return astray if is_told else None
        is_long = numbers.step - astray.last_step >= _LONGEST_LEVEL or astray is self.early
        return self._stayed_away() if is_long else None

    def close(self) -> list[OpenEpisode]:
        """End the training; return the episodes whose records are to be completed."""
        ends = (self._stayed_away(), self.end(), self._learned_nothing())
        return list({one.step: one for one in ends if one is not None}.values())

    def _forget_what_did_no_harm(self) -> None:
        """Forget the early episode if the run has learned since: what comes later is not of it."""
        early, course = self.early, self._course
        if early is None or course is None or not early.is_over or not early.loss_before:
            return
        is_long = self._step - early.step >= _LONG
        if is_long and early is not self.astray and course.last < _LEARNED * early.loss_before:
            self.early = None

    def _early_and_high(self) -> OpenEpisode | None:
        """Return the early episode if the losses since then are far above those at first.

        They have risen from step to step, so that none is unusual after the one before.
        """
        early, course = self.early, self._course
        if early is None or course is None or not early.is_over or early.run_away:
            return None
        is_short, before = self._step - early.step < _LONG, early.loss_before
        if is_short or not before or not 0 < _HIGH * before < course.last:
            return None
        early.usual_loss, early.loss_level = before, (before + course.last) / 2
        early.last_losses = [course.last] * _FEWEST_HIGH
        return early

    def _learned_nothing(self) -> OpenEpisode | None:
        """Return the early episode after which the loss has come back, but not fallen any further.

        So it is with weights that the first updates have ruined and with a rate that has gone down
        again since.
        """
        early, course = self.early, self._course
        if early is None or course is None or not early.is_over or not early.loss_before:
            return None
        is_short = self._step - early.step < _LONG
        is_told = bool(early.run_away) and early.back_at is None
        if is_short or is_told or not 0 < _NO_LOWER * early.loss_before <= course.last:
            return None
        early.run_away = (
            f"the loss is no lower at the end than before: about {course.last:.4g}, "
            f"after {early.loss_before:.4g}"
        )
        early.has_relapsed, early.back_at = early.back_at is not None, None
        return early

    def _stayed_away(self) -> OpenEpisode | None:
        """Return the episode that the loss has not come back from, unless that is told already."""
        away = self.astray
        if away is None or away.run_away or not away.is_over:
            return None
        if len(away.last_losses) < _FEWEST_HIGH or any(map(away.is_back, away.last_losses)):
            return None
        middle, usual = statistics.median(away.last_losses), away.usual_loss
        away.run_away = f"the loss has not come back since: about {middle:.4g}, after {usual:.4g}"
        self._find_in_course(away)
        return away

    def _find_in_course(self, episode: OpenEpisode) -> None:
        """Name the divergence as the cause if none is known and the loss is worse than at first."""
        first = None if self._course is None else self._course.first
        if episode.cause == UNKNOWN_CAUSE and episode.is_worse_than(first):
            episode.refined |= {"cause": DIVERGED, "suggestion": _AFTER_DIVERGING}

    def _reach(self, kind: Kind) -> int:
        """Return how long an episode waits for more: some things are looked at every few steps."""
        return self._state_interval if kind in _CONSEQUENCES else _GAP

    def end(self) -> OpenEpisode | None:
        """End the last episode, and return it if its record is to be completed."""
        episode = self.last
        if episode is None or episode.is_over:
            return None
        episode.is_over = True
        run_away = "" if self._course is None else self._course.run_away
        if episode.cause == UNKNOWN_CAUSE and run_away:
            episode.refined |= {"cause": DIVERGED, "suggestion": _AFTER_RUNNING_AWAY}
        elif episode.has_diverged:
            self._find_in_course(episode)
        episode.run_away = run_away or episode.course()
        losses = episode.last_losses
        if self.astray is None and losses and not episode.is_back(losses[-1]):
            self.astray = episode
        return episode if episode.num_steps > 1 or episode.refined else None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the last episode, ready for JSON, and the others that may have more to tell."""
        last = {} if self.last is None else asdict(self.last)
        others = {"astray": self.astray, "early": self.early}
        if self.last is None and self.early is None:
            return None
        return last | {name: one and asdict(one) for name, one in others.items()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state that `state_dict` returned."""
        known = dict(state or {})
        others = [known.pop(name, None) for name in ("astray", "early")]
        self.last = OpenEpisode(**known) if known else None
        self.astray, self.early = (self._known(one) for one in others)
        if self.astray is not None and self.early is not None and self.astray == self.early:
            self.early = self.astray

    def _known(self, state: Mapping[str, Any] | None) -> OpenEpisode | None:
        """Return the episode of a state, which may be the last one."""
        is_last = state and self.last is not None and self.last.step == state["step"]
        return self.last if is_last else OpenEpisode(**state) if state else None
