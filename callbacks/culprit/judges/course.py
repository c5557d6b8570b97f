"""Judge the loss and the global norm of each step by their courses so far, on the host."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

import torch

from mfwrap.callbacks.culprit.judges.growth import line_growth

_LENGTH = 64
"""Number of steps whose distances from what was expected tell how far the loss may move."""

RECENT = 5
"""Number of values whose median is expected next."""

_FEWEST = 5
"""Number of known distances before a shift is looked for; fewer say little about the course."""

LOSS_LIMIT, _LOG_LIMIT = 7.5, 5.0
"""Smallest scores of the loss and of its logarithm that are a spike of a single step."""

HIGHER = 3.5
"""Smallest score of a loss that is clearly higher. It is a spike if that of the global norm is."""

_SHIFTS = ((3, 4.0), (6, 2.0))
"""Numbers of steps in a row, and the smallest score of each of them, that are a lasting shift."""

_LONGEST = RECENT + max(number for number, _ in _SHIFTS)
"""Number of values that are kept: the last ones, and those from which they have shifted."""

_BEGUN = 1.0
"""Smallest score of the steps before a shift in which it has already begun."""

_SHIFT_ENDS = 20
"""Number of steps after a shift from which on another one needs twice the deviations: a run whose
tasks become harder has one after the other."""

_PRIOR, _LOG_PRIOR = 0.2, 0.2
"""Deviations that are assumed before there are values: as a share of the loss, and of its
logarithm. They fade with the number of values, to the shares below."""

_LEAST = 0.05
"""Least share of the prior that is left."""

_LEAST_OF_FIRST = 0.002
"""Least deviation of a loss, as a share of the first losses."""

_LEAST_ABOUT_ZERO = 0.05
"""Least deviation of a loss that has been zero, or below. That of a policy is rounding noise as
long as all rewards are equal, and a tenth of an advantage when they are not."""

_ADVANTAGE = 1.0
"""Size of a loss that has been zero, or below, which is ordinary at any time: that of an
advantage."""

_ROUNDING = 1e-7
"""A smaller loss is negative, or zero but for rounding in float32."""

_FEWEST_LOSSES = 3
"""Number of losses before one is judged: the first ones of a run may be anything."""

_EARLY, _EARLY_FACTOR = 8, 3.0
"""Number of distances up to which a spike must be that many times larger."""

_EARLY_RATIO = 20.0
"""Smallest ratio of a loss to the largest one of the first losses that is a spike, however much
these have fallen."""

_FADES_AFTER = 1.5
"""Number of values after which half of the prior is left."""

_SECOND = 0.55
"""Share of the second largest distance that is the least deviation: a run that has had a spike has
another one."""

_ALIKE = 0.5
"""Smallest ratio of a distance to that of a spike which has the same cause."""

_FAR_BEYOND, _FEW_SPIKES, _MOST_SPIKES = math.log(1000.0), 4, 0.15
"""Smallest distance of a logarithm that is a spike, however far the spikes before were, and the
largest number and share of values that may be spikes: more of them are the run's nature."""

_FAR_BEYOND_EARLY, _FEWEST_USUAL = math.log(30_000.0), 20
"""The same distance before there are so many others: a loss of rare classes, which is almost zero
in most steps, has few spikes at first."""

_RARE = 0.01
"""Largest expected loss that may be that of rare classes. Among the first losses of such a run, a
loss that is no higher than one of the first five is ordinary."""

_FEWEST_FALLS = 11
"""Number of distances from which on it is known how far the losses usually fall."""

_DROP, _LOG_DROP, _DROPPED = -6.0, -5.0, 1 / 1.5
"""Largest scores of the loss and of its logarithm that are a drop of a single step, and the largest
ratio of the loss to what was expected."""

_OPPOSITE, _LEAST_EARLY_CHANGE = 0.5, 0.5
"""Smallest share of the expected loss that one below zero has if its sign is wrong, and how far it
must be away after the first few losses: those of a policy vary about zero by a few tenths."""

_RUN_AWAY = 1e4
"""Smallest ratio of a loss below zero to the largest of the first losses, or to 1 where these are
smaller, that is no fall of an ordinary loss. A log-likelihood falls below zero, too, and an actor's
loss is the negated return."""

_FIRST_LOSSES = 64
"""Number of losses up to which one is compared with the first ones."""

_LOWERED = 0.2
"""Largest ratio of a learning rate to the highest one before that is a remedy of large updates."""

_RISES = (
    (20, 1, 6, min, 1.2, 0.1),
    (20, 1, 5, min, 1.15, 0.3),
    (64, 3, 20, statistics.median, 1.1, 0.3),
)
"""Number of losses up to which a rise is looked for; numbers of first and of last losses; the one
of the last that must be higher, and the smallest ratio to the median of the first; the smallest
ratio of the largest update to the weights."""

CourseKind = Literal["loss_spike", "loss_drop", "loss_shift"]


_NORM_PRIOR, _NORM_SHIFT, _NORM_RATIO = 0.5, (3, 3.0), 8.0
"""The prior and a shift of the logarithm of the global norm, and the smallest factor of such a
shift, or of a growth. Unlike a loss, a norm may also shift to less."""

_LEAST_FIT = 0.9
"""Smallest share of the variance of the logarithms that a line of growing norms explains."""


class Shift(NamedTuple):
    """A number that stays far from what it was, or moves away from it step by step."""

    of: Literal["loss", "global norm"]

    before: float
    """Number that was expected before, or that the growth began with."""

    now: float
    """Middle number since then, or the number that it has grown to."""

    num_steps: int

    is_growth: bool = False
    """Whether the number has grown in all of these steps."""

    num_before: int = 0
    """Number of steps before these in which the number was already farther than usual."""

    update: float = 0.0
    """Largest update before a rise from the first losses of a run, as a ratio to the weights; 0
    for all other shifts."""

    def __str__(self) -> str:
        """Say it in a clause."""
        if self.is_growth:
            return (
                f"the {self.of} has grown from about {self.before:.4g} to about {self.now:.4g} in "
                f"{self.num_steps} steps"
            )
        if self.update:
            return (
                f"the {self.of} of the last {self.num_steps} steps is {self.now:.4g} in the "
                f"middle, and that of the first ones {self.before:.4g}"
            )
        return (
            f"the {self.of} has been about {self.now:.4g} for {self.num_steps} steps, after about "
            f"{self.before:.4g}"
        )


@final
class LossCourse:
    """Tell from the losses of a rank so far whether the next one has left their course.

    A spike is a loss far above what is expected, by its own deviation and by that of its logarithm,
    or a clearly higher one in a step whose global norm is clearly higher. A drop is a loss far
    below, or below zero where no loss has been; or the first one of a loss that has run away
    downwards, to ten thousand times the first ones. A shift is a loss that stays above what was
    expected before, for three or six steps in a row, or above the first losses of the run after
    updates that were large.
    What is expected is the median of the last five losses, and the deviation follows from the
    distances of 64 losses from what was expected of them, so the run's own noise decides. That the
    losses fall is no noise.
    """

    def __init__(self) -> None:
        self.shift: Shift | None = None
        """Shift that the last loss has shown; ``None`` without one."""
        self.first: float | None = None
        """Median of the first five losses, or of those so far; ``None`` without losses."""
        self._first: list[float] = []
        self.score = self.expected = math.nan
        """Deviations of the last loss from what was expected of it, and this number; NaN if they
        are unknown."""
        self._plain = _Series(lambda expected: _PRIOR * abs(expected), self._least_deviation)
        self._log = _Series(lambda _: _LOG_PRIOR)
        self._first_losses = _FirstLosses()
        self._num_shifts, self._since_shift = 0, _SHIFT_ENDS
        self._was_zero = self._has_run_away = False

    @property
    def last(self) -> float:
        """Median of the last five losses; NaN if they are unknown."""
        return self._plain.expected(0)

    @property
    def run_away(self) -> str:
        """What a loss without a lower bound has done, in a clause; empty if it has not."""
        last, largest = self.last, max(map(abs, self._first), default=math.inf)
        if not last < -_RUN_AWAY * max(largest, 1.0):
            return ""
        return f"the loss has run away to {last:.4g}, after {self.first:.4g} at first"

    def add(
        self,
        loss: float,
        *,
        norm_score: float = math.nan,
        update: tuple[float, float] = (math.nan, math.nan),
        counts: bool = True,
    ) -> CourseKind | None:
        """Judge a loss, and include it in the course.

        Args:
            loss: Loss of a step. One that is not finite is ignored.
            norm_score: Score of its global norm, see `NormCourse`.
            update: Ratio of the step's update to the weights, and its learning rate.
            counts: Whether the update was applied. Otherwise the loss is not included.
        """
        self.shift = None
        self.score, self.expected = math.nan, self._plain.expected(0)
        self._plain.begin()
        self._log.begin()
        if not math.isfinite(loss):
            return None
        log = math.log(loss) if loss > 0 else math.nan
        found: CourseKind | None = None
        factor = self._plain.early_factor
        self.score = self._plain.score(loss)
        score = self.score / factor
        is_positive = not math.isnan(log) and self._log.num_distances > 0
        log_score = self._log.score(log) / factor if is_positive else math.nan
        if self._log.num_distances > 0 and not self._was_zero and self._is_opposite(loss):
            # However little is known, the sign is.
            score, log_score = self.score, -math.inf
        # A loss about zero, such as that of a policy, may be anything for longer.
        if self._plain.num_distances < (_EARLY if self._was_zero else _FEWEST_LOSSES - 1):
            score = math.nan
        is_far = score > LOSS_LIMIT and (log_score > _LOG_LIMIT or not is_positive)
        is_far = self._is_far_above_all(loss) or (is_far and not self._may_be_rare(loss))
        # The logarithm of a loss about zero says nothing about its size.
        is_far |= not self._was_zero and self._is_far_beyond(log)
        if is_far or (score > HIGHER and norm_score > HIGHER):
            found = "loss_spike"
        elif (
            score < _DROP
            and (log_score < _LOG_DROP or loss < 0 > self.expected)
            and loss < min(_DROPPED * self.expected, self.expected / _DROPPED)
        ):
            found = "loss_drop"
        if counts:
            if len(self._first) < RECENT:
                self._first.append(loss)
                self.first = statistics.median(self._first)
            self._was_zero |= loss < _ROUNDING
            self._plain.add(loss)
            if not math.isnan(log):
                self._log.add(log)
            self.shift = self._first_losses.add(loss, *update) or self._shift()
            self._since_shift = self._since_shift + 1 if self.shift is None else 0
            self._num_shifts += self._since_shift == _SHIFT_ENDS
            found = self._runs_away(found)
        return "loss_shift" if found is None and self.shift is not None else found

    def _runs_away(self, found: CourseKind | None) -> CourseKind | None:
        """Return the kind of a step, a drop if the loss has run away for the first time."""
        is_new = bool(self.run_away) and not self._has_run_away
        self._has_run_away |= is_new
        return found or ("loss_drop" if is_new else None)

    def _is_opposite(self, loss: float) -> bool:
        """Tell whether a loss has the wrong sign, and is not just about zero, as of a policy."""
        is_early = self._plain.num_distances < _EARLY
        least = _LEAST_EARLY_CHANGE if is_early else 0.0
        return loss < -_OPPOSITE * self.expected < 0 and self.expected - loss > least

    def _may_be_rare(self, loss: float) -> bool:
        """Tell whether an early loss may be that of a rare class, as one before was."""
        is_early = self._plain.num_distances < _FEWEST_USUAL
        return is_early and 0 < self.expected < _RARE and loss <= max(self._first)

    def _is_far_above_all(self, loss: float) -> bool:
        """Tell whether an early loss is far above all: losses that fall look like noise."""
        is_early = _FEWEST_LOSSES - 1 <= self._plain.num_distances < _EARLY
        least = _ADVANTAGE if self._was_zero else 0.0
        return is_early and 0 < _EARLY_RATIO * max(self._plain.highest, least) < loss

    def _is_far_beyond(self, log: float) -> bool:
        """Tell whether a loss is a spike, however far the spikes before were; such is its score."""
        is_far = self._log.is_far_beyond(log)
        if is_far:
            self.score = max(self.score, LOSS_LIMIT)
        return is_far

    def _least_deviation(self) -> float:
        """Return the deviation of a loss that was never noisy: a loss of almost zero may double."""
        if self.first is None:
            return 0.0
        least = _LEAST_OF_FIRST * abs(self.first)
        return max(least, _LEAST_ABOUT_ZERO) if self._was_zero else least

    def forget(self, *, others_alike: bool = False) -> None:
        """Forget how far the last loss was from what was expected of it.

        Args:
            others_alike: Whether to forget earlier losses that were half as far, too, such as those
                of the same row before it was found.
        """
        self._plain.forget(others_alike=others_alike)
        self._log.forget(others_alike=others_alike)

    def _shift(self) -> Shift | None:
        for number, limit in _SHIFTS:
            expected, values, scores = self._plain.last(number, _FEWEST)
            if scores and min(scores) > limit * 2**self._num_shifts:
                return Shift(
                    "loss",
                    expected,
                    statistics.median(values),
                    number,
                    num_before=self._plain.num_begun(number),
                )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the course, ready for JSON."""
        return {
            "first": self._first,
            "first_losses": self._first_losses.state_dict(),
            "plain": self._plain.state_dict(),
            "log": self._log.state_dict(),
            "num_shifts": self._num_shifts,
            "since_shift": self._since_shift,
            "was_zero": self._was_zero,
            "has_run_away": self._has_run_away,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._first = list(state["first"])
        self.first = statistics.median(self._first) if self._first else None
        # A run that goes on from an older state is past its first losses.
        unknown = {"losses": [], "largest_update": 0.0, "rate": 0.0, "has_ended": True}
        self._first_losses.load_state_dict(state.get("first_losses", unknown))
        self._plain.load_state_dict(state["plain"])
        self._log.load_state_dict(state["log"])
        self._num_shifts, self._since_shift = state["num_shifts"], state["since_shift"]
        self._was_zero = state.get("was_zero", False)
        self._has_run_away = state.get("has_run_away", False)


@final
class NormCourse:
    """Tell whether the global norm of the gradients has a new size, and not in a single step.

    A shift is three norms in a row that are far from the size before. Where a norm changes a little
    in each step, that size moves with it. So a line that fits the logarithms of the last eleven
    norms is an anomaly, too, if it has grown by the factor of a shift: gradients that nobody sets
    to zero grow so, and a training that diverges.
    """

    def __init__(self) -> None:
        self.score = math.nan
        """Deviations of the logarithm of the last norm from what was expected; NaN if unknown."""
        self.is_far_beyond = False
        """Whether the last norm is a spike, however far the spikes before were."""
        self._log = _Series(lambda _: _NORM_PRIOR)

    @property
    def num_distances(self) -> int:
        """Number of known distances of norms from what was expected of them."""
        return self._log.num_distances

    def add(self, norm: float | None, *, counts: bool = True) -> Shift | None:
        """Judge a global norm, and include it in the course.

        Args:
            norm: Global norm of a step; ``None`` if it is unknown.
            counts: Whether the update was applied. Otherwise the norm is not included.

        Returns:
            Its shift or growth; ``None`` if it has neither.
        """
        self.score, self.is_far_beyond = math.nan, False
        self._log.begin()
        if norm is None or not 0 < norm < math.inf:
            return None
        self.is_far_beyond = self._log.is_far_beyond(math.log(norm))
        if self._log.num_distances >= _FEWEST_LOSSES - 1:
            self.score = self._log.score(math.log(norm)) / self._log.early_factor
        if not counts:
            return None
        self._log.add(math.log(norm))
        number, limit = _NORM_SHIFT
        expected, values, scores = self._log.last(number, number)
        is_far = bool(scores) and (min(scores) > limit or max(scores) < -limit)
        if is_far and min(abs(each - expected) for each in values) >= math.log(_NORM_RATIO):
            middle = statistics.median(values)
            return Shift("global norm", math.exp(expected), math.exp(middle), number)
        return self._growth()

    def _growth(self) -> Shift | None:
        values = self._log.values
        if len(values) < _LONGEST:
            return None
        logs = torch.tensor(values, dtype=torch.float64, device="cpu")
        if line_growth(logs[None], _LEAST_FIT).item() < math.log(_NORM_RATIO):
            return None
        ends = math.exp(values[0]), math.exp(values[-1])
        return Shift("global norm", *ends, len(values), is_growth=True)

    def forget(self) -> None:
        """Forget how far the last norm was from what was expected of it."""
        self._log.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the course, ready for JSON."""
        return self._log.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._log.load_state_dict(state)


@final
class _FirstLosses:
    """Tell whether the loss stays above the first losses of a run after updates that were large.

    Such losses are what is usual in this run, so its course does not show them. Without a large
    update, they may be those of other data.
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._largest_update = self._rate = 0.0
        self._has_ended = False

    def add(self, loss: float, update_ratio: float, rate: float) -> Shift | None:
        """Include a loss, and the update after it: its ratio to the weights, and its rate.

        Returns:
            The rise that the loss has shown, once; ``None`` without one.
        """
        if self._has_ended:
            return None
        self._losses.append(loss)
        found = self._shift()
        # A loss of zero or less has no ratio to others. A much lower rate is the remedy, or the end
        # of a schedule.
        is_last = loss <= 0 or len(self._losses) == _FIRST_LOSSES or rate < _LOWERED * self._rate
        self._has_ended = found is not None or is_last
        if self._has_ended:
            self._losses = []
        if math.isfinite(update_ratio):
            self._largest_update = max(self._largest_update, update_ratio)
        if math.isfinite(rate):
            self._rate = max(self._rate, rate)
        return found

    def _shift(self) -> Shift | None:
        update = self._largest_update
        for most, num_first, number, chosen, least, least_update in _RISES:
            if len(self._losses) > most:
                continue
            first = statistics.median(self._losses[:num_first])
            last = self._losses[num_first:][-number:]
            is_high = len(last) == number and chosen(last) > least * first
            if is_high and update >= least_update:
                return Shift("loss", first, statistics.median(last), number, update=update)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": self._losses,
            "largest_update": self._largest_update,
            "rate": self._rate,
            "has_ended": self._has_ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses = list(state["losses"])
        self._largest_update, self._has_ended = state["largest_update"], state["has_ended"]
        self._rate = state["rate"]


@final
class _Series:
    """The last values of a series, and their distances from what was expected of them.

    Args:
        prior: Takes an expected value, and returns the deviation that is assumed before there are
            values.
        least: Returns the least deviation.
    """

    def __init__(
        self, prior: Callable[[float], float], least: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._prior, self._least = prior, least
        self._values: deque[float] = deque(maxlen=_LONGEST)
        self._distances: deque[float] = deque(maxlen=_LENGTH + _LONGEST - RECENT)
        self._has_new = False

    @property
    def num_distances(self) -> int:
        """Number of known distances."""
        return len(self._distances)

    @property
    def values(self) -> list[float]:
        """The last values, at most eleven."""
        return list(self._values)

    @property
    def highest(self) -> float:
        """Largest of the last values; NaN without values."""
        return max(self._values, default=math.nan)

    @property
    def early_factor(self) -> float:
        """How many times larger a spike must be, because little is known."""
        return _EARLY_FACTOR if self.num_distances < _EARLY else 1.0

    def expected(self, number: int) -> float:
        """Return what was expected before the last `number` values; NaN without values."""
        earlier = list(self._values)[: len(self._values) - number][-RECENT:]
        # Of an even number, the lower middle one: a mean of two would carry one outlier twice.
        return statistics.median_low(earlier) if earlier else math.nan

    def score(self, value: float) -> float:
        """Return how many deviations a value is above the expected one; NaN if unknown."""
        expected = self.expected(0)
        prior = self._prior(expected)
        deviation = _deviation(self._distances, prior, rises=value > expected)
        return (value - expected) / math.hypot(deviation, self._least())

    def is_far_beyond(self, value: float) -> bool:
        """Tell whether a value is far above what is expected and above all but a few others."""
        known = sorted(list(self._distances)[-_LENGTH:])
        if len(known) < _EARLY:
            return False
        usual = known[-1 - max(_FEW_SPIKES, int(_MOST_SPIKES * len(known)))]
        least = _FAR_BEYOND if len(known) >= _FEWEST_USUAL else _FAR_BEYOND_EARLY
        return value - self.expected(0) > max(usual, 0.0) + least

    def last(self, number: int, fewest: int) -> tuple[float, list[float], list[float]]:
        """Return what was expected before the last values, these values, and their scores.

        Args:
            number: Number of values.
            fewest: Number of distances that must be known before; otherwise there are no scores.
        """
        expected, values = self.expected(number), list(self._values)[-number:]
        before = self._distances_before(number)
        if len(before) < fewest:
            return expected, values, []
        deviation = math.hypot(_deviation(before, self._prior(expected)), self._least())
        return expected, values, [(value - expected) / deviation for value in values]

    def num_begun(self, number: int) -> int:
        """Return how many values before the last `number` ones were already higher than usual.

        Losses that rise step by step are in what was expected, so the oldest ones are usual.
        """
        usual = statistics.median(list(self._values)[:RECENT])
        deviation = _deviation(self._distances_before(number), self._prior(usual))
        least = usual + _BEGUN * math.hypot(deviation, self._least())
        earlier = reversed(list(self._values)[:-number])
        return sum(1 for _ in itertools.takewhile(lambda value: value > least, earlier))

    def _distances_before(self, number: int) -> list[float]:
        return list(self._distances)[: len(self._distances) - number][-_LENGTH:]

    def begin(self) -> None:
        """Begin a step, which may have no value."""
        self._has_new = False

    def add(self, value: float) -> None:
        """Include the value of a step."""
        if self._values:
            self._distances.append(value - self.expected(0))
            self._has_new = True
        self._values.append(value)

    def forget(self, *, others_alike: bool = False) -> None:
        """Forget the distance of the step's value, if it has one, and those that are alike."""
        if self._has_new:
            least, self._has_new = _ALIKE * abs(self._distances.pop()), False
            if others_alike:
                usual = [one for one in self._distances if abs(one) < least]
                self._distances = deque(usual, self._distances.maxlen)

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._values), "distances": list(self._distances)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values.clear()
        self._values.extend(state["values"])
        self._distances.clear()
        self._distances.extend(state["distances"])


def _deviation(
    distances: Sequence[float] | deque[float], prior: float, *, rises: bool = True
) -> float:
    """Return the deviation of the next value: that of the distances, and a prior that fades.

    Args:
        distances: Distances of the values before from what was expected of them.
        prior: Deviation that is assumed before there are values.
        rises: Whether the next value may be above what is expected of it.
    """
    signed = list(distances)[-_LENGTH:]
    number = len(signed)
    fall = min(statistics.median(signed), 0.0) if number >= _FEWEST_FALLS else 0.0
    known = sorted(abs(distance - fall) for distance in signed)
    spread = 0.0
    if known:
        middle, high = known[(number - 1) // 2], known[int((number - 1) * 0.95)]
        spread = max(1.4826 * middle, high / 1.96) * math.sqrt(1 + 4 / number)
    if number > 1:
        # Early in a training, a loss falls by more than it ever rises.
        jumps = sorted(each - fall for each in signed) if rises else known
        spread = max(spread, _SECOND * jumps[-2])
    left = max(_FADES_AFTER / (_FADES_AFTER + number), _LEAST)
    # Of a series that has not moved yet, nothing is known.
    return math.hypot(spread, prior * left) or math.inf
