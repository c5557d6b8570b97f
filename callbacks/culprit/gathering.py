"""Gather what this rank knows about a step that went wrong."""

import math
from typing import Any, NamedTuple, final

from torch import nn
from torch.optim import SGD, Optimizer

from mfwrap.callbacks.culprit.anomaly_log import Kind
from mfwrap.callbacks.culprit.causes.evidence import SPOILT
from mfwrap.callbacks.culprit.judges.course import Shift
from mfwrap.callbacks.culprit.judges.judges import Judges
from mfwrap.callbacks.culprit.judges.step import JudgedStep, StepScores
from mfwrap.callbacks.culprit.notes import RunNotes
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence, number_or_none
from mfwrap.callbacks.culprit.replay.difference import Difference, first_difference
from mfwrap.callbacks.culprit.replay.micro_batches import (
    factor_change,
    factors_of,
    losses_again,
    losses_of,
)
from mfwrap.callbacks.culprit.replay.precision import computes_in_float16
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.culprit.replay.reference import References
from mfwrap.callbacks.culprit.replay.rows import RowSearch
from mfwrap.callbacks.culprit.replay.samples import IN_ROWS, SPOILT_BY_UPDATE, SampleSearch
from mfwrap.callbacks.shared.non_finite import BufferWatch
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.collectives import this_rank
from mfwrap.tensors.wrappers import unwrapped_optimizer

_MOST_BUFFERS = 8
"""Largest number of buffers of a rank in a record."""

_DROPS = frozenset({"loss_drop", "local_norm_drop"})
"""Kinds for which the step is compared with the step before, although no row stands out."""


class HostStep(NamedTuple):
    """A step on the host, and what the judges found in it."""

    numbers: StepNumbers
    judgement: JudgedStep
    scores: StepScores
    weights_have_moved: bool
    """Whether a later update has already changed the weights."""


@final
class EvidenceGatherer:
    """Read norms, weights, buffers, optimizer state and losses of micro-batches after a bad step.

    Args:
        network: Network whose buffers are watched; ``None`` if unknown.
        judges: Judges of the steps.
        recorder: Recorder of the network's calls; ``None`` without a replay.
        samples: Searches rows of finite steps; ``None`` without a replay.
        references: Calls of earlier steps; ``None`` without a replay.
        notes: Knows which weights have changed lately; ``None`` if unknown.
    """

    def __init__(
        self,
        network: nn.Module | None,
        judges: Judges,
        recorder: StepRecorder | None,
        samples: SampleSearch | None = None,
        references: References | None = None,
        notes: RunNotes | None = None,
    ) -> None:
        self._notes = notes
        self._buffers = None if network is None else BufferWatch(network)
        self._states, self._settings = judges.states, judges.settings
        self._course = judges.course
        self._recorder = recorder
        self._samples, self._references = samples, references
        self._in_float16: bool | None = None

    def gather(
        self, kind: Kind, step: HostStep, *, is_first: bool, shift: Shift | None = None
    ) -> RankEvidence:
        """Return this rank's evidence. Synchronizes with the device; starts no collective.

        Args:
            kind: Kind of the anomaly.
            step: The step.
            is_first: Whether the step begins an episode. Only then is anything run again.
            shift: Shift of the loss or the global norm, if the anomaly is one.
        """
        numbers, judgement, scores = step.numbers, step.judgement, step.scores
        is_in_rows = kind in IN_ROWS
        compares = is_first and (is_in_rows or kind in _DROPS)
        states, recorder = self._states, self._recorder
        calls = [] if recorder is None else recorder.last_step
        factors = factors_of(calls)
        earlier_factors = () if recorder is None else factors_of(recorder.earlier_step)
        risen = [] if states is None else states.risen(numbers.step, judgement.optimizer)
        moved = judgement.moved()
        odd = {*moved, *(one.name for one in risen if one.kind == "weight")}
        asked = recorder if is_first and math.isfinite(numbers.loss) else None
        search, difference = None, None
        if recorder is not None and compares:
            difference = first_difference(recorder)
        if self._samples is not None and is_first and is_in_rows:
            search = self._searched(step, difference)
        program = None
        # Before a shift, the program was good.
        num_bad = 1 if shift is None else shift.num_steps
        if self._references is not None and (compares or (is_first and num_bad > 1)):
            program = self._references.change(num_bad)
            if program is not None and self._notes is not None:
                # Weights that code has changed since then give other outputs, too.
                changed = self._notes.changed_weights(numbers.step, program.num_steps)
                program = None if changed else program
        return RankEvidence(
            search=search,
            program=program,
            difference=difference,
            forward=() if judgement.forward is None else judgement.forward.rises(),
            rank=this_rank(),
            loss=numbers.loss,
            names=judgement.names,
            norms=tuple(judgement.local_norm.tolist()),
            usual_norms=tuple(judgement.usual_norm.tolist()),
            loss_scale=numbers.loss_scale,
            in_float16=self._computes_in_float16(numbers),
            usual_global_norm=number_or_none(scores.usual_global_norm),
            scores=tuple(judgement.local_norm_scores.tolist()),
            dead=judgement.dead(),
            loss_score=self._course.score,
            usual_loss=self._course.expected,
            first_loss=self._course.first,
            moved=moved,
            impossible=judgement.impossible(scores.learning_rate),
            undivided={} if states is None else states.undivided(judgement.optimizer, odd),
            initial_rate=_initial_rate(judgement.optimizer),
            follows_gradients=isinstance(unwrapped_optimizer(judgement.optimizer), SGD),
            driven=() if states is None else states.driven(risen, judgement.travelled()),
            settings=self._settings.changes(numbers.step),
            changed=judgement.changed(),
            changed_before=None
            if self._notes is None
            else self._notes.changed_weights(numbers.step),
            states=tuple(risen),
            num_weights=0 if states is None else states.num_weights,
            micro_losses=losses_of(calls),
            outer_losses=() if recorder is None else tuple(map(float, recorder.last_losses)),
            terms=numbers.losses,
            factors=factors,
            factor_change=factor_change(factors, earlier_factors),
            earlier_losses=() if asked is None else losses_again(asked, asked.earlier_step),
            own_losses=() if asked is None else losses_again(asked, asked.last_step),
            buffers=()
            if self._buffers is None
            else tuple(self._buffers.newly_bad()[:_MOST_BUFFERS]),
        )

    def _searched(self, step: HostStep, difference: Difference | None) -> RowSearch | None:
        """Return the rows of a finite step that stand out; those of an input, by its size alone."""
        numbers, samples = step.numbers, self._samples
        if samples is None:
            return None
        if step.scores.update_ratio > SPOILT and not (numbers.overflow or numbers.skipped):
            # No row can be run again with the weights of the step.
            if difference is not None and difference.where == "input":
                return samples.of_input(difference.name, numbers.step)
            return RowSearch((), SPOILT_BY_UPDATE)
        return samples.search(numbers, is_finite=True, weights_have_moved=step.weights_have_moved)

    def _computes_in_float16(self, numbers: StepNumbers) -> bool:
        """Tell whether an overflow may be one of float16, which a first overflow looks for."""
        may_be_scale = numbers.overflow and (numbers.loss_scale or 1.0) > 1
        if self._in_float16 is None and may_be_scale and self._recorder is not None:
            self._in_float16 = computes_in_float16(self._recorder)
        return bool(self._in_float16)


def _initial_rate(optimizer: Any) -> float | None:
    """Return the largest rate that torch's schedules note in an optimizer; ``None`` without one."""
    inner = unwrapped_optimizer(optimizer)
    groups = inner.param_groups if isinstance(inner, Optimizer) else []
    rates = [float(group["initial_lr"]) for group in groups if "initial_lr" in group]
    return max(rates, default=None)
