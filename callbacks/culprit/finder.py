"""Find the layer, rank and micro-batch at fault when a step goes wrong."""

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import nn

from mfwrap.callbacks.culprit.anomaly_log import Anomaly, Kind
from mfwrap.callbacks.culprit.causes.causes import cause_of
from mfwrap.callbacks.culprit.causes.evidence import CauseEvidence, StepTrace
from mfwrap.callbacks.culprit.causes.rate import IN_A_ROW, large_in_a_row
from mfwrap.callbacks.culprit.episodes import Episodes
from mfwrap.callbacks.culprit.gathering import EvidenceGatherer, HostStep
from mfwrap.callbacks.culprit.judges.course import LOSS_LIMIT
from mfwrap.callbacks.culprit.judges.judges import Judges
from mfwrap.callbacks.culprit.judges.kinds import StepKinds
from mfwrap.callbacks.culprit.judges.step import JudgedStep, StepScores
from mfwrap.callbacks.culprit.layers import LayerNames, layer_of_rise
from mfwrap.callbacks.culprit.notes import RunNotes
from mfwrap.callbacks.culprit.rank_evidence import (
    RankEvidence,
    is_explained_by_scale,
    is_scale_alone,
    number_or_none,
)
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder, indices_of
from mfwrap.callbacks.culprit.replay.reference import References
from mfwrap.callbacks.culprit.replay.replay import (
    Origin,
    origin_in_others,
    origin_of_loss,
    origin_outside,
)
from mfwrap.callbacks.culprit.replay.rows import RowSearch
from mfwrap.callbacks.culprit.replay.samples import SampleSearch, with_samples
from mfwrap.callbacks.culprit.replay.verdict import Verdict, verdict_of
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.collectives import all_ranks_meet, gather_objects, num_ranks

_MOST_GROUPS = 8
"""Largest number of groups, and of weights, in a record."""

_TRACE = 10
"""Number of steps whose scores are kept, at least."""

_NOT_IN_ROWS = frozenset({"weight", "weights", "targets", "mask"})
"""Places of a fault for which all rows are alike."""

_NOWHERE = frozenset({"input", "targets", "mask", "other_weight"})
"""Places of a fault that are in no layer."""

_AFTER_A_WEIGHT = (None, "activation", "gradient", "loss")
"""Places at which a weight that has grown may show; ``None`` without a replay."""


@final
class CulpritFinder:
    """Decide for each step whether it is good or bad, and find where a bad step went wrong.

    The judges look at each step on the device; `judge` reads their summary on the host. After a bad
    step, the finder reads local norms, weights, buffers and optimizer state, and replays the step
    if it has a recorder.
    Overflow and global norm are the same on all ranks. So all ranks detect an overflow or a spike
    of the global norm together, and then exchange their evidence. What is usual may differ if one
    rank alone has loaded a state. So before a spike the ranks make sure that all of them have found
    it. Everything else is one rank's own: it is recorded by this rank, without a message.

    Args:
        network: Network whose weights and buffers are watched; ``None`` if the loop does not pass
            it.
        spike_factor: Smallest ratio of a spike to what is usual.
        limit: Largest finite number that a gradient can hold.
        state_interval: Steps from one sample of weights, optimizer state and buffers to the next.
        step: Finished steps.
        recorder: Records the inputs of steps for a replay; ``None`` turns the replay off.
        samples: Searches the rows of the recorder; ``None`` turns the search off.
        references: Calls of earlier steps, to compare the program with; ``None`` without a replay.
    """

    def __init__(
        self,
        network: nn.Module | None,
        *,
        spike_factor: float,
        limit: float,
        state_interval: int = 10,
        step: int = 0,
        recorder: StepRecorder | None = None,
        samples: SampleSearch | None = None,
        references: References | None = None,
    ) -> None:
        self.recorder = recorder
        self._samples, self._references = samples, references
        self.num_scale_overflows = 0
        """Number of overflows so far that happened only because the loss scale was too high."""
        self.is_shared = False
        """Whether all ranks have judged the last step together."""
        self.judges = Judges(network, state_interval, step)
        """Look at each step, on the device."""
        self.episodes = Episodes(state_interval, self.judges.course)
        self.notes = RunNotes(network, self.judges, step, recorder)
        """What should not be so in any run; call `of_step` after `judge`."""
        self._gatherer = EvidenceGatherer(
            network, self.judges, recorder, samples, references, self.notes
        )
        self._layers = LayerNames(network)
        self._spike_factor = spike_factor
        self._limit = limit
        self._state_interval = state_interval
        self._trace: deque[StepTrace] = deque(maxlen=max(_TRACE, state_interval))
        self._raised: StepTrace | None = None
        self._kinds = StepKinds(spike_factor, self.judges.course)

    def judge(
        self,
        numbers: StepNumbers,
        judgement: JudgedStep,
        scores: StepScores,
        *,
        weights_have_moved: bool,
    ) -> Anomaly | None:
        """Return the anomaly of a step, or ``None`` if the step was good.

        Call this once for each step, in the order of the steps. Synchronizes with the device if
        the step was bad.

        Args:
            numbers: Loss, norm and other numbers of the step, on the host.
            judgement: What ``judges.end_step`` returned for the step.
            scores: Its summary, on the host.
            weights_have_moved: Whether a later update has already changed the weights.
        """
        step = HostStep(numbers, judgement, scores, weights_have_moved)
        applied = not (numbers.overflow or numbers.skipped)
        self._kinds.follow(numbers, scores, applied=applied)
        if self._kinds.num_large == IN_A_ROW:
            self.episodes.suspect(numbers.step, large_in_a_row(scores.learning_rate))
        trace = StepTrace(
            numbers.step,
            applied,
            scores,
            self._kinds.rate_rise,
            loss=numbers.loss,
            global_norm=numbers.global_norm,
            terms=numbers.losses,
        )
        self._trace.append(trace)
        if trace.rate_rise is not None:
            self._raised = trace
        elif self._raised is not None and not self._raised.rate_lasts(scores.learning_rate):
            self._raised = None
        self.is_shared = numbers.overflow
        if numbers.overflow:
            return self._overflow(step)
        kind = self._kinds.shared(numbers, scores)
        if kind is not None:
            # The state of this rank may differ, so that it finds the anomaly alone.
            self.is_shared = all_ranks_meet(f"{kind} {numbers.step}")
            return self._finite([kind], step)
        kinds = self._kinds.own(scores)
        # A loss that falls after a divergence is recovering.
        is_drop = "loss_drop" in kinds and not self.judges.course.run_away
        if is_drop and self.episodes.diverged_step is not None:
            kinds = [each for each in kinds if each != "loss_drop"]
        # A rate that has jumped is the cause of the loss.
        if not math.isfinite(numbers.loss) and "learning_rate_spike" not in kinds:
            own = self._own_evidence("loss_not_finite", step)
            return self._lone_loss(step, own, [own])
        return self._finite(kinds, step) if kinds else None

    def close(self) -> None:
        """Remove all hooks from network and optimizer, but those of the recorder."""
        self.judges.close()
        if self._references is not None:
            self._references.close()

    def forget(self, step: int) -> None:
        """Forget how unusual a step was, if that has a known cause.

        What a fault has done to the numbers is not the run's own noise, in which a later fault
        would be lost. Call it for each step, after `episodes` has it.
        """
        last = self.episodes.last
        if last is None or not self.episodes.explain(step):
            return
        # What is usual of the global norm stays the same on all ranks.
        is_of_all = last.is_shared or num_ranks() == 1
        is_outlier = last.has_outlier and step == last.step
        self.judges.forget(global_norm=is_of_all, others_alike=is_outlier)
        if is_of_all:
            self._kinds.forget()

    def _overflow(self, step: HostStep) -> Anomaly | None:
        numbers = step.numbers
        own = self._own_evidence("gradient_not_finite", step)
        ranks = gather_objects(own)
        is_explained = is_explained_by_scale(ranks, self._limit)
        is_exact = not step.weights_have_moved
        verdicts = self._replayed_on_all(step, own, is_exact=is_exact)
        unscaled = [
            each and each.norm_without_scale(in_float16=rank.in_float16)
            for each, rank in zip(verdicts, ranks, strict=True)
        ]
        if is_scale_alone(ranks, unscaled, is_explained=is_explained):
            self.num_scale_overflows += 1
            return None
        blamed = blamed_ranks(ranks, verdicts)
        first = ranks[blamed[0]] if blamed else own
        verdict = verdicts[first.rank]
        origin = None if verdict is None else verdict.origin
        where, name = (None, None) if origin is None else (origin.where, origin.name)
        shown = origin
        if first.weights and where in _AFTER_A_WEIGHT:
            # A weight that has grown makes values overflow in a later module. The weight is the
            # cause, the module is where it shows.
            where, name, shown = "weight", first.weights[0].name, None
        bad = [first.group(number) for number in reversed(first.bad_groups)]
        is_loss = not all(math.isfinite(each.loss) for each in ranks)
        found = Anomaly(
            step=numbers.step,
            kind="loss_not_finite" if is_loss else "gradient_not_finite",
            ranks=tuple(blamed),
            layer=self._layer(first, shown, loss_is_finite=not is_loss),
            where=where,
            name=name,
            gradients=tuple(bad[:_MOST_GROUPS]),
            num_groups=len(bad),
        )
        if verdict is not None:
            found = _with_replay(found, verdict, is_exact=is_exact)
        found = self._completed(found, step, ranks, origin=shown, verdict=verdict)
        is_covered = found.replay in {None, "reproduced"} or origin is not None
        is_covered |= self.recorder is not None and bool(self.recorder.last_batches)
        may_be_in_rows = where not in _NOT_IN_ROWS and is_covered
        search = self._searched(found.kind, step) if may_be_in_rows else None
        search = search or self._without_targets(_origin_of(verdicts[own.rank]), numbers.step)
        if found.replay == "not_covered" and origin is None and not is_covered:
            search = RowSearch((), "not searched: the fault is outside of the network")
        # A rank may have had an anomaly of its own, so that this step is not its first.
        return with_samples(found, gather_objects(search))

    def _without_targets(self, origin: Origin | None, step: int) -> RowSearch | None:
        """Return the rows of a micro-batch of this rank in which no row has targets."""
        if origin is None or origin.where != "targets" or self._samples is None:
            return None
        return self._samples.of_micro_batch(origin.micro_batch, step)

    def _searched(self, kind: Kind, step: HostStep) -> RowSearch | None:
        """Return the rows of this rank that stand out in a step that is not finite."""
        wanted = self._is_first(kind, step) or self.episodes.names_samples
        if self._samples is None or not wanted:
            return None
        return self._samples.search(
            step.numbers, is_finite=False, weights_have_moved=step.weights_have_moved
        )

    def _is_first(self, kind: Kind, step: HostStep) -> bool:
        """Tell whether a step begins an episode.

        Only the first of several bad steps is replayed: a diverged run would otherwise replay every
        step.
        """
        return not self.episodes.goes_on(step.numbers.step, kind, is_shared=self.is_shared)

    def _own_evidence(self, kind: Kind, step: HostStep) -> RankEvidence:
        is_first, shift = self._is_first(kind, step), self._kinds.shift(kind)
        own = self._gatherer.gather(kind, step, is_first=is_first, shift=shift)
        return dataclasses.replace(
            own,
            diverged_step=self.episodes.diverged_step,
            rate_step=self.episodes.step_of_rate(step.numbers.step, step.scores.learning_rate),
        )

    def _replayed_on_all(
        self, step: HostStep, own: RankEvidence, *, is_exact: bool
    ) -> list[Verdict | None]:
        """Return the verdict of each rank; ``None`` for one that has no fault or no recorder."""
        if self.recorder is None:
            return [None] * num_ranks()
        verdict, numbers = None, step.numbers
        if own.has_fault and self._is_first("gradient_not_finite", step):
            verdict = verdict_of(
                self.recorder,
                1.0 if numbers.loss_scale is None else numbers.loss_scale,
                loss_is_finite=math.isfinite(numbers.loss),
                is_exact=is_exact,
            )
        # A rank may have had an anomaly of its own, so that this step is not its first.
        return gather_objects(verdict)

    def _lone_loss(
        self, step: HostStep, own: RankEvidence, ranks: Sequence[RankEvidence]
    ) -> Anomaly:
        """Return the anomaly of a step with a non-finite loss and finite gradients.

        The other ranks may not know about this loss, so this method must not start a collective.
        The step is not replayed exactly: its update was applied, and a replay would need the
        weights from before the update. But the recorder has kept the loss of each micro-batch.

        Args:
            step: The step.
            own: Evidence of this rank.
            ranks: Evidence of all ranks that have found an anomaly.
        """
        numbers, recorder = step.numbers, self.recorder
        at_fault = tuple(each.rank for each in ranks if not math.isfinite(each.loss))
        found = Anomaly(step=numbers.step, kind="loss_not_finite", ranks=at_fault, layer=None)
        bad = [n for n, loss in enumerate(own.micro_losses) if not math.isfinite(loss)]
        origin = None
        if recorder is not None and bad:
            number, call = bad[0], recorder.last_step[bad[0]]
            origin = origin_of_loss(call)
            indices = indices_of(call)
            found = dataclasses.replace(found, micro_batch=number, indices=indices)
            if origin.where == "loss":
                origin = origin_in_others(recorder) or origin
            if origin.where != "loss":
                rows = origin.rows or None
                found = dataclasses.replace(
                    found,
                    where=origin.where,
                    name=origin.name,
                    micro_batch=number if origin.where != "other_weight" else None,
                    rows=rows,
                )
            elif numbers.global_norm is None or not math.isfinite(numbers.global_norm):
                # A module may have made the outputs non-finite, or the update the weights.
                origin = self._origin_with_later_weights(own, numbers)
        if recorder is not None and origin is None:
            origin = origin_outside(recorder)
            if origin is not None:
                found = dataclasses.replace(
                    found,
                    where=origin.where,
                    name=origin.name,
                    micro_batch=_micro_batch_of(origin),
                    rows=origin.rows,
                )
        if origin is not None and origin.where in {"activation", "gradient", "weight"}:
            layer = self._layer(own, origin, loss_is_finite=False)
            found = dataclasses.replace(found, where=origin.where, name=origin.name, layer=layer)
        found = self._completed(found, step, ranks, origin=origin)
        search = None if found.where in _NOT_IN_ROWS else self._searched(found.kind, step)
        search = search or self._without_targets(origin, numbers.step)
        return with_samples(found, [search])

    def _origin_with_later_weights(self, own: RankEvidence, numbers: StepNumbers) -> Origin | None:
        """Replay a step whose update was applied, unless the update has ruined the weights."""
        is_ruined = any(not math.isfinite(each.norm) for each in own.risen_weights)
        if self.recorder is None or is_ruined:
            return None
        scale = 1.0 if numbers.loss_scale is None else numbers.loss_scale
        return verdict_of(self.recorder, scale, loss_is_finite=False, is_exact=False).origin

    def _finite(self, kinds: Sequence[Kind], step: HostStep) -> Anomaly | None:
        """Return the anomaly of a step with finite gradients.

        Starts a collective only if all ranks have found the anomaly.

        Args:
            kinds: Its kinds, the most telling one first.
            step: The step.
        """
        own = self._own_evidence(kinds[0], step)
        has_state = own.states or own.buffers or own.changed
        kind = next((each for each in kinds if each != "state_spike" or has_state), None)
        if kind is None:
            return None
        # Whether an episode goes on may differ between ranks, so they always exchange evidence.
        ranks = gather_objects(own) if self.is_shared else [own]
        is_rate = kind == "learning_rate_spike"
        if not (is_rate or all(math.isfinite(each.loss) for each in ranks)):
            return self._lone_loss(step, own, ranks)
        # Of norms that have dropped, the lowest come first.
        sign = -1.0 if kind == "local_norm_drop" else 1.0
        rises = sorted(
            (
                (each.rise(number) ** sign, each, number)
                for each in ranks
                for number in range(len(each.norms))
                if each.is_judged(number) and each.rise(number) > 0
            ),
            key=lambda entry: -entry[0],
        )
        highest = rises[0][0] if rises else 0.0
        weights = [each.rank for each in ranks if each.weights]
        losses = [each.rank for each in ranks if each.loss_score > LOSS_LIMIT]
        risen = sorted({each.rank for rise, each, _ in rises if rise >= highest / 2})
        blamed = weights or (losses if len(losses) < len(ranks) else []) or risen
        if is_rate:
            blamed = [ranks[0].rank]
        by_sample = kind == "state_spike" and not ranks[0].changed
        first = next((each for each in ranks if each.rank in blamed), ranks[0])
        # Step of the last sample of weights and optimizer state before this step.
        sample_before = (step.numbers.step - 1) // self._state_interval * self._state_interval
        groups = tuple(each.group(number) for _, each, number in rises[:_MOST_GROUPS])
        since = sample_before + 1 if by_sample else None
        shift = self._kinds.shift(kind)
        if shift is not None:
            since = step.numbers.step - shift.num_steps - shift.num_before + 1
        found = Anomaly(
            step=step.numbers.step,
            kind=kind,
            ranks=tuple(blamed) if num_ranks() > 1 or blamed else (first.rank,),
            layer=self._layers.common(first.dead) or layer_of_rise(self._layers, first),
            gradients=groups,
            num_groups=sum(rise >= self._spike_factor for rise, _, _ in rises),
            since=since,
        )
        found = self._completed(found, step, ranks)
        return with_samples(found, [each.search for each in ranks])

    def _completed(
        self,
        found: Anomaly,
        step: HostStep,
        ranks: Sequence[RankEvidence],
        *,
        origin: Origin | None = None,
        verdict: Verdict | None = None,
    ) -> Anomaly:
        """Return an anomaly with its cause, and with the fields that all kinds have."""
        numbers, optimizer = step.numbers, step.judgement.optimizer
        first = next((each for each in ranks if each.rank in found.ranks), ranks[0])
        shift = self._kinds.shift(found.kind)
        cause = cause_of(
            CauseEvidence(
                kind=found.kind,
                trace=tuple(self._trace),
                ranks=ranks,
                blamed=first,
                # The step before a shift was bad, too.
                is_first=self._is_first(found.kind, step) and shift is None,
                shift=shift,
                knows_optimizer=optimizer is not None,
                layer=found.layer,
                origin=origin,
                verdict=verdict,
                growth=self._kinds.growth,
                raised=self._raised,
                since=found.since,
                diverged_step=min(
                    filter(None, (each.diverged_step for each in ranks)), default=None
                ),
                rate_step=first.rate_step,
                run_away=self.judges.course.run_away if found.kind == "loss_drop" else "",
                global_norm=numbers.global_norm,
            )
        )
        if cause.tensors:
            # The place of the cause, not that of its first consequence.
            found = dataclasses.replace(
                found,
                layer=self._layers.common(cause.tensors),
                where=cause.where,
                name=cause.tensors[0] if cause.where else None,
            )
        elif not cause.is_in_layer:
            found = dataclasses.replace(found, layer=None)
        return dataclasses.replace(
            found,
            micro_batch=cause.micro_batch if found.micro_batch is None else found.micro_batch,
            cause=cause.name,
            explanation=cause.explanation or None,
            suggestion=cause.suggestion or None,
            weights=first.weights[:_MOST_GROUPS],
            states=tuple(one for one in first.states if one.kind != "weight")[:_MOST_GROUPS],
            moved=first.moved[:_MOST_GROUPS],
            buffers=tuple(dict.fromkeys(name for each in ranks for name in each.buffers)),
            losses=tuple(each.loss for each in ranks),
            usual_loss=shift.before
            if shift is not None and shift.of == "loss"
            else number_or_none(first.usual_loss),
            learning_rate=number_or_none(step.scores.learning_rate),
            global_norm=numbers.global_norm,
            usual_global_norm=shift.before
            if shift is not None and shift.of == "global norm"
            else number_or_none(step.scores.usual_global_norm),
            loss_scale=numbers.loss_scale,
            skipped=numbers.skipped,
            consecutive_skips=numbers.consecutive_skips,
        )

    def _layer(
        self, evidence: RankEvidence, origin: Origin | None, *, loss_is_finite: bool
    ) -> str | None:
        if origin is not None:
            if origin.where in _NOWHERE or not (origin.name or origin.beside):
                return None
            return self._layers.of(origin.name) if origin.name else ""
        if evidence.weights:
            return self._layers.of(evidence.weights[0].name)
        bad = evidence.bad_groups
        if not bad or (len(bad) == len(evidence.norms) and not loss_is_finite):
            # A non-finite loss makes all gradients non-finite, wherever the forward went wrong. So
            # the gradients do not reveal the layer.
            return None
        # Backward computes the gradients in reverse order, and a non-finite gradient spreads to the
        # gradients computed after it. So the fault began in the bad group with the highest index.
        return self._layers.of(evidence.names[bad[-1]])

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual, `num_scale_overflows` and the last episode, ready for JSON.

        Synchronizes with the device. If ``judges.gather`` was called since the last step, the state
        has what is usual on all ranks, otherwise only on this rank.
        """
        return {
            "judges": self.judges.state_dict(),
            "num_scale_overflows": self.num_scale_overflows,
            "kinds": self._kinds.state_dict(),
            "episode": self.episodes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.num_scale_overflows = state["num_scale_overflows"]
        self.judges.load_state_dict(state["judges"])
        self._kinds.load_state_dict(state["kinds"])
        self.episodes.load_state_dict(state["episode"])


def blamed_ranks(ranks: Sequence[RankEvidence], verdicts: Sequence[Verdict | None]) -> list[int]:
    """Return the ranks with the most specific evidence of a step that is not finite.

    First come those in which a replay found an origin, then those with a non-finite loss, then
    those with changed weights, then those with non-finite gradients.

    Args:
        ranks: Evidence of all ranks.
        verdicts: Verdict of each rank.
    """
    return (
        [rank for rank, each in enumerate(verdicts) if each is not None and each.origin is not None]
        or [each.rank for each in ranks if not math.isfinite(each.loss)]
        or [each.rank for each in ranks if each.weights]
        or [each.rank for each in ranks if each.bad_groups]
    )


def _origin_of(verdict: Verdict | None) -> Origin | None:
    return None if verdict is None else verdict.origin


def _micro_batch_of(origin: Origin | None) -> int | None:
    """Return the micro-batch of an origin; weights are used in all of them."""
    if origin is None or origin.where in {"weights", "other_weight"}:
        return None
    return origin.micro_batch


def _with_replay(found: Anomaly, verdict: Verdict, *, is_exact: bool) -> Anomaly:
    """Return an anomaly with what a replay tells."""
    origin = verdict.origin
    return dataclasses.replace(
        found,
        micro_batch=_micro_batch_of(origin),
        rows=None if origin is None else origin.rows,
        indices=None if origin is None else origin.indices,
        is_replay_exact=is_exact,
        replay=verdict.result,
        replay_detail=verdict.detail or None,
        num_clean_replays=verdict.num_clean,
    )
