"""Find the layer, rank and micro-batch at fault when a step goes wrong."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from mfwrap.callbacks.culprit.anomaly_log import Anomaly, WeightNorm
from mfwrap.callbacks.culprit.evidence import RankEvidence, is_explained_by_scale
from mfwrap.callbacks.culprit.norm_history import GlobalNormHistory, RunningNorms, WeightWatch
from mfwrap.callbacks.culprit.recorder import StepRecorder, indices_of
from mfwrap.callbacks.culprit.replay import Origin, origin_of_loss
from mfwrap.callbacks.culprit.verdict import Verdict, verdict_of
from mfwrap.callbacks.shared.non_finite import BufferWatch
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.collectives import gather_objects, this_rank
from mfwrap.tensors.norm_groups import layer_of, layer_of_module
from mfwrap.tensors.wrappers import plain_name, unwrapped_network

_MOST_GROUPS = 8
"""Largest number of groups, of weights, and of each rank's buffers in a record."""


_AFTER_A_WEIGHT = (None, "activation", "gradient", "loss")
"""Places at which a weight that has grown may show; ``None`` without a replay."""


class StepEvidence(NamedTuple):
    """Tensors of a step, kept on the device until the step has been judged."""

    names: tuple[str, ...]
    """Names of the ``G`` groups; empty without local norms."""

    local_norm: Tensor | None
    """Local norms, shape ``(G,)``, float32; ``None`` if the step has none."""

    usual_norm: Tensor | None
    """Running mean of each group's norm before the step, shape ``(G,)``, float32; NaN for a group
    without a norm so far."""


@final
class CulpritFinder:
    """Decide for each step whether it is good or bad, and find where a bad step went wrong.

    A good step costs a few operations on tensors with one element per group of gradients. After a
    bad step, the finder reads local norms, weights and buffers, and replays the step if it has a
    recorder.
    Overflow and global norm are the same on all ranks. So all ranks detect an overflow or a spike
    together, and then exchange their evidence.

    Args:
        network: Network whose weights and buffers are watched; ``None`` if the loop does not pass
            it.
        spike_factor: Smallest ratio of a spike to the usual global norm, see `GlobalNormHistory`.
        limit: Largest finite number that a gradient can hold.
        recorder: Records the inputs of steps for a replay; ``None`` turns the replay off.
    """

    def __init__(
        self,
        network: nn.Module | None,
        *,
        spike_factor: float,
        limit: float,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.weights = None if network is None else WeightWatch(network)
        self.buffers = None if network is None else BufferWatch(network)
        self.recorder = recorder
        self.num_scale_overflows = 0
        """Number of overflows so far that happened only because the loss scale was too high."""
        self._network = network
        self._spike_factor = spike_factor
        self._limit = limit
        self._history = GlobalNormHistory(spike_factor)
        self._running: RunningNorms | None = None
        self._saved_running: Mapping[str, Any] | None = None
        self._last_overflow: int | None = None

    def end_step(self, output: Any, names: Sequence[str], applied: Tensor | None) -> StepEvidence:
        """Update the usual norms with a step's local norms, and return the evidence for `judge`.

        No host-device synchronization.

        Args:
            output: Output of the step: a named tuple or a loss.
            names: Names of the groups of gradients, one per local norm.
            applied: Whether the update was applied, shape ``()``, bool; ``None`` if unknown.
        """
        norms = getattr(output, "local_norm", None)
        if norms is None or applied is None:
            return StepEvidence((), None, None)
        running = self._running
        if running is None or running.names != tuple(names):
            saved = self._saved_running if running is None else running.state_dict()
            running = self._running = RunningNorms(names, norms.device)
            if saved is not None:
                running.load_state_dict(saved)
        evidence = StepEvidence(running.names, norms, running.usual)
        running.add(norms, applied)
        return evidence

    def judge(
        self, numbers: StepNumbers, evidence: StepEvidence, *, weights_have_moved: bool
    ) -> Anomaly | None:
        """Return the anomaly of a step, or ``None`` if the step was good.

        Call this once for each step, in the order of the steps. Synchronizes with the device if
        the step was bad.

        Args:
            numbers: Loss, norm and other numbers of the step, on the host.
            evidence: Evidence that `end_step` returned for the step.
            weights_have_moved: Whether a later update has already changed the weights.
        """
        if numbers.overflow:
            return self._overflow(numbers, evidence, weights_have_moved=weights_have_moved)
        norm, usual = numbers.global_norm, self._history.usual
        is_spike = norm is not None and self._history.is_spike(norm)
        # Add the norm even if this rank's loss is non-finite. The loss differs between ranks, but
        # the history must be the same on all of them, so that they detect the same spikes.
        if norm is not None and not numbers.skipped:
            self._history.add(norm)
        if is_spike:
            return self._spike(numbers, evidence, usual)
        return None if math.isfinite(numbers.loss) else self._lone_loss(numbers, evidence)

    def _overflow(
        self, numbers: StepNumbers, evidence: StepEvidence, *, weights_have_moved: bool
    ) -> Anomaly | None:
        own = self._own_evidence(numbers, evidence)
        ranks = gather_objects(own)
        usual = self._history.usual
        if is_explained_by_scale(ranks, numbers.loss_scale, usual, self._limit):
            self.num_scale_overflows += 1
            return None
        verdicts: list[Verdict | None] = [None] * len(ranks)
        is_exact = None
        # Replay only the first of several overflows in a row: a diverged run would otherwise
        # replay every step.
        if self.recorder is not None and self._last_overflow != numbers.step - 1:
            is_exact = not weights_have_moved
            verdicts = gather_objects(
                self._replayed(self.recorder, numbers, is_exact=is_exact) if own.has_fault else None
            )
        self._last_overflow = numbers.step
        found = [
            rank
            for rank, verdict in enumerate(verdicts)
            if verdict is not None and verdict.origin is not None
        ]
        bad_losses = [each.rank for each in ranks if not math.isfinite(each.loss)]
        # Blame the ranks with the most specific evidence: first what a replay found, then a
        # non-finite loss, then changed weights, then non-finite gradients.
        blamed = (
            found
            or bad_losses
            or [each.rank for each in ranks if each.weights]
            or [each.rank for each in ranks if each.bad_groups]
        )
        first = ranks[blamed[0]] if blamed else own
        verdict = verdicts[first.rank]
        origin = None if verdict is None else verdict.origin
        bad = [first.group(number) for number in reversed(first.bad_groups)]
        where, name = (None, None) if origin is None else (origin.where, origin.name)
        by_weight = bool(first.weights) and where in _AFTER_A_WEIGHT
        if by_weight:
            # A weight that has grown makes values overflow in a later module. The weight is the
            # cause, the module is where it shows.
            where, name = "weight", first.weights[0].name
        return Anomaly(
            kind="loss_not_finite" if bad_losses else "gradient_not_finite",
            ranks=tuple(blamed),
            layer=self._layer(first, None if by_weight else origin, loss_is_finite=not bad_losses),
            where=where,
            name=name,
            micro_batch=None if origin is None else origin.micro_batch,
            rows=None if origin is None else origin.rows,
            indices=None if origin is None else origin.indices,
            is_replay_exact=None if verdict is None else is_exact,
            replay=None if verdict is None else verdict.result,
            replay_detail=(verdict.detail or None) if verdict is not None else None,
            num_clean_replays=None if verdict is None else verdict.num_clean,
            gradients=tuple(bad[:_MOST_GROUPS]),
            num_groups=len(bad),
            **_common(numbers, ranks, usual, first.weights),
        )

    def _lone_loss(self, numbers: StepNumbers, evidence: StepEvidence) -> Anomaly:
        """Return the anomaly of a step with a non-finite loss and finite gradients.

        The other ranks do not know about this loss, so this method must not start a collective.
        The step is not replayed: its update was applied, and a replay would need the weights from
        before the update. But the recorder has kept the loss of each micro-batch.
        """
        own = self._own_evidence(numbers, evidence)
        bad = None if self.recorder is None else self.recorder.bad_micro_batch()
        known: dict[str, Any] = {}
        if bad is not None and self.recorder is not None:
            number, call = bad
            network = self.recorder.network
            origin = origin_of_loss(network, call)
            known = {"micro_batch": number, "indices": indices_of(network, call)}
            if origin.where == "targets":
                known |= {"where": origin.where, "name": origin.name}
        return Anomaly(
            kind="loss_not_finite",
            ranks=(own.rank,),
            layer=None,
            **known,
            **_common(numbers, [own], self._history.usual, own.weights),
        )

    def _spike(
        self, numbers: StepNumbers, evidence: StepEvidence, usual: float | None
    ) -> Anomaly | None:
        ranks = gather_objects(self._own_evidence(numbers, evidence))
        rises = sorted(
            (
                (each.rise(number), each, number)
                for each in ranks
                for number in range(len(each.norms))
            ),
            key=lambda entry: -entry[0],
        )
        highest = rises[0][0] if rises else 0.0
        weights = next((each.weights for each in ranks if each.weights), ())
        blamed = [each.rank for each in ranks if each.weights] or sorted(
            {each.rank for rise, each, _ in rises if rise >= highest / 2}
        )
        groups = tuple(each.group(number) for _, each, number in rises[:_MOST_GROUPS])
        blamed_name = weights[0].name if weights else groups[0].name if groups else None
        return Anomaly(
            kind="spike",
            ranks=tuple(blamed),
            layer=None if blamed_name is None else self._layer_of(blamed_name),
            where="weight" if weights else None,
            name=weights[0].name if weights else None,
            gradients=groups,
            num_groups=sum(rise >= self._spike_factor for rise, _, _ in rises),
            **_common(numbers, ranks, usual, weights),
        )

    def _own_evidence(self, numbers: StepNumbers, evidence: StepEvidence) -> RankEvidence:
        norms, usual = evidence.local_norm, evidence.usual_norm
        return RankEvidence(
            rank=this_rank(),
            loss=numbers.loss,
            names=evidence.names,
            norms=() if norms is None else tuple(norms.tolist()),
            usual_norms=() if usual is None else tuple(usual.tolist()),
            weights=() if self.weights is None else tuple(self.weights.changed()[:_MOST_GROUPS]),
            buffers=() if self.buffers is None else self.buffers.newly_bad()[:_MOST_GROUPS],
        )

    def _replayed(self, recorder: StepRecorder, numbers: StepNumbers, *, is_exact: bool) -> Verdict:
        return verdict_of(
            recorder,
            1.0 if numbers.loss_scale is None else numbers.loss_scale,
            loss_is_finite=math.isfinite(numbers.loss),
            is_exact=is_exact,
        )

    def _layer(
        self, evidence: RankEvidence, origin: Origin | None, *, loss_is_finite: bool
    ) -> str | None:
        if origin is not None:
            is_of_batch = origin.where in {"input", "targets"}
            return self._layer_of(origin.name) if origin.name and not is_of_batch else None
        if evidence.weights:
            return self._layer_of(evidence.weights[0].name)
        bad = evidence.bad_groups
        if not bad or (len(bad) == len(evidence.norms) and not loss_is_finite):
            # A non-finite loss makes all gradients non-finite, wherever the forward went wrong. So
            # the gradients do not reveal the layer.
            return None
        # Backward computes the gradients in reverse order, and a non-finite gradient spreads to the
        # gradients computed after it. So the fault began in the bad group with the highest index.
        return self._layer_of(evidence.names[bad[-1]])

    def _layer_of(self, name: str) -> str:
        """Return the layer of a parameter, a module or a group of gradients."""
        if self._network is None:
            # The loop does not pass its network. Assume that `name` is the name of a parameter: by
            # default each group of gradients has only one parameter.
            return layer_of(name)
        named = unwrapped_network(self._network).named_parameters(remove_duplicate=False)
        is_parameter = any(name == plain_name(parameter) for parameter, _ in named)
        return layer_of(name) if is_parameter else layer_of_module(name)

    def gather(self) -> None:
        """Gather the usual norms of all ranks, so that `state_dict` has them.

        Call it on every rank.
        """
        if self._running is not None:
            self._running.gather()

    def state_dict(self) -> dict[str, Any]:
        """Return the usual norms, `num_scale_overflows` and the last overflow, ready for JSON.

        Synchronizes with the device. If `gather` was called since the last step, the state has the
        usual local norms of all ranks, otherwise only those of this rank.
        """
        running = self._saved_running if self._running is None else self._running.state_dict()
        return {
            "global_norm": self._history.state_dict(),
            "local_norms": running,
            "num_scale_overflows": self.num_scale_overflows,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._history.load_state_dict(state["global_norm"])
        self._saved_running = state["local_norms"]
        self._running = None
        self.num_scale_overflows = state["num_scale_overflows"]
        self._last_overflow = state.get("last_overflow")


def _common(
    numbers: StepNumbers,
    ranks: Sequence[RankEvidence],
    usual: float | None,
    weights: tuple[WeightNorm, ...],
) -> dict[str, Any]:
    """Return the fields that anomalies of every kind have."""
    return {
        "step": numbers.step,
        "weights": weights,
        "buffers": tuple(dict.fromkeys(name for each in ranks for name in each.buffers)),
        "losses": tuple(each.loss for each in ranks),
        "global_norm": numbers.global_norm,
        "usual_global_norm": usual,
        "loss_scale": numbers.loss_scale,
        "skipped": numbers.skipped,
        "consecutive_skips": numbers.consecutive_skips,
    }
