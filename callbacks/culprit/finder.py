"""Who is to blame for a step that went wrong: layer, rank, micro-batch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from mfwrap.callbacks.culprit.anomaly_log import Anomaly, GroupNorm, WeightNorm, layer_of
from mfwrap.callbacks.culprit.evidence import (
    RankEvidence,
    is_explained_by_scale,
)
from mfwrap.callbacks.culprit.norm_history import GlobalNormHistory, RunningNorms
from mfwrap.callbacks.culprit.recorder import StepRecorder
from mfwrap.callbacks.culprit.replay import Origin, replay_step
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.collectives import gather_objects, this_rank
from mfwrap.tensors.wrappers import tensor_norms, trainable

__all__ = [
    "CulpritFinder",
    "StepEvidence",
    "WeightWatch",
]


_MOST_GROUPS = 8


class StepEvidence(NamedTuple):
    """What is kept of a step until it is known whether it went well: tensors on the device."""

    names: tuple[str, ...]
    local_norm: Tensor | None
    """Shape ``(G,)``, float32; ``None`` if it is not known."""

    usual_norm: Tensor | None
    """Shape ``(G,)``, float32: before the step; nan where none is known."""


@final
class CulpritFinder:
    """Judge steps, and of one that went wrong find out where it did.

    While all is well it costs a few operations on ``(G,)`` tensors a step. Of a step that went
    wrong the local norms are read, and weights are looked at. On several ranks they exchange what
    they found if an overflow or a spike, on which all agree, was the reason.

    Args:
        network: Whose weights are watched; ``None`` if it is not known.
        spike_factor: As in `GlobalNormHistory`.
        limit: The largest gradient that is finite.
        recorder: Holds the inputs of steps, for their replay; ``None`` for none.
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
        self.recorder = recorder
        self.num_scale_overflows = 0
        """Overflows so far by which a loss scale found its level."""
        self._spike_factor = spike_factor
        self._limit = limit
        self._history = GlobalNormHistory(spike_factor)
        self._running: RunningNorms | None = None
        self._saved_running: Mapping[str, Any] | None = None
        self._last_replayed: int | None = None

    def end_step(self, output: Any, names: Sequence[str], applied: Tensor | None) -> StepEvidence:
        """Keep what may be asked for of a step, and learn its norms. Does not wait.

        Args:
            output: Of the step, a named tuple or a loss.
            names: Of the groups of its local norms.
            applied: Shape ``()``, bool: whether the update was; ``None`` if it is not known.
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
        """Say what went wrong in a step; ``None`` if nothing did. Waits if something did.

        Called once for each step, in their order.

        Args:
            numbers: Of the step.
            evidence: Of the step.
            weights_have_moved: A later update has been done already.
        """
        if numbers.overflow:
            return self._overflow(numbers, evidence, weights_have_moved=weights_have_moved)
        norm, usual = numbers.global_norm, self._history.usual
        is_spike = norm is not None and self._history.is_spike(norm)
        # Whatever this rank's own loss is: all ranks have to know the same of norms.
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
        origins: list[Origin | None] = [None] * len(ranks)
        is_exact = None
        # One of a row of steps is enough: a run that has diverged would only repeat itself.
        if self.recorder is not None and self._last_replayed != numbers.step - 1:
            is_exact = not weights_have_moved
            origins = gather_objects(self._replayed(numbers) if own.has_fault else None)
        if self.recorder is not None:
            self._last_replayed = numbers.step
        found = [rank for rank, origin in enumerate(origins) if origin is not None]
        bad_losses = [each.rank for each in ranks if not math.isfinite(each.loss)]
        blamed = (
            found
            or bad_losses
            or [each.rank for each in ranks if each.weights]
            or [each.rank for each in ranks if each.bad_groups]
        )
        first = ranks[blamed[0]] if blamed else own
        origin = origins[first.rank] if found else None
        bad = [first.group(number) for number in reversed(first.bad_groups)]
        where, name = (origin.where, origin.name) if origin is not None else (None, None)
        if origin is None and first.weights:
            where, name = "weight", first.weights[0].name
        return Anomaly(
            kind="loss_not_finite" if bad_losses else "gradient_not_finite",
            ranks=tuple(blamed),
            layer=_layer(first, origin, loss_is_finite=not bad_losses),
            where=where,
            name=name,
            micro_batch=None if origin is None else origin.micro_batch,
            rows=None if origin is None else origin.rows,
            indices=None if origin is None else origin.indices,
            is_replay_exact=is_exact,
            gradients=tuple(bad[:_MOST_GROUPS]),
            num_groups=len(bad),
            **_common(numbers, ranks, usual, first.weights),
        )

    def _lone_loss(self, numbers: StepNumbers, evidence: StepEvidence) -> Anomaly:
        """Return the record of a loss that is not finite though all gradients are.

        The loss is this rank's own, and the others may know nothing of it: none is asked. Nor is
        the step replayed: its update was applied, and the weights that it had are gone.
        """
        own = self._own_evidence(numbers, evidence)
        return Anomaly(
            kind="loss_not_finite",
            ranks=(own.rank,),
            layer=None,
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
        risen = [entry for entry in rises if entry[0] >= self._spike_factor]
        weights = next((each.weights for each in ranks if each.weights), ())
        blamed = [each.rank for each in ranks if each.weights] or sorted(
            {each.rank for rise, each, _ in rises if rise >= highest / 2}
        )
        groups: list[GroupNorm] = [each.group(number) for _, each, number in rises[:_MOST_GROUPS]]
        layer = layer_of(weights[0].name) if weights else None
        return Anomaly(
            kind="spike",
            ranks=tuple(blamed),
            layer=layer or (layer_of(groups[0].name) if groups else None),
            where="weight" if weights else None,
            name=weights[0].name if weights else None,
            gradients=tuple(groups),
            num_groups=len(risen),
            **_common(numbers, ranks, usual, weights),
        )

    def _own_evidence(self, numbers: StepNumbers, evidence: StepEvidence) -> RankEvidence:
        norms, usual = evidence.local_norm, evidence.usual_norm
        known = norms is not None and usual is not None
        return RankEvidence(
            rank=this_rank(),
            loss=numbers.loss,
            names=evidence.names if known else (),
            norms=tuple(norms.tolist()) if norms is not None and known else (),
            usual_norms=tuple(usual.tolist()) if usual is not None and known else (),
            weights=() if self.weights is None else tuple(self.weights.changed()[:_MOST_GROUPS]),
        )

    def _replayed(self, numbers: StepNumbers) -> Origin | None:
        if self.recorder is None:
            return None
        scale = 1.0 if numbers.loss_scale is None else numbers.loss_scale
        try:
            return replay_step(self.recorder, scale)
        except RuntimeError as error:
            # Out of memory, for example: no reason to end a training that goes on.
            run_logger(__package__).warning("step %d cannot be replayed: %s", numbers.step, error)
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of usual norms, as JSON can hold it; waits for the device."""
        running = self._saved_running if self._running is None else self._running.state_dict()
        return {
            "global_norm": self._history.state_dict(),
            "local_norms": running,
            "num_scale_overflows": self.num_scale_overflows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._history.load_state_dict(state["global_norm"])
        self._saved_running = state["local_norms"]
        self._running = None
        self.num_scale_overflows = state["num_scale_overflows"]


def _layer(evidence: RankEvidence, origin: Origin | None, *, loss_is_finite: bool) -> str | None:
    if origin is not None:
        return layer_of(origin.name) if origin.name and origin.where != "input" else None
    if evidence.weights:
        return layer_of(evidence.weights[0].name)
    bad = evidence.bad_groups
    if not bad or (len(bad) == len(evidence.norms) and not loss_is_finite):
        # From a loss that is not finite all gradients are, wherever the forward went wrong.
        return None
    # The nearest to the loss: backward came there first.
    return layer_of(evidence.names[bad[-1]])


def _common(
    numbers: StepNumbers,
    ranks: Sequence[RankEvidence],
    usual: float | None,
    weights: tuple[WeightNorm, ...],
) -> dict[str, Any]:
    return {
        "step": numbers.step,
        "weights": weights,
        "losses": tuple(each.loss for each in ranks),
        "global_norm": numbers.global_norm,
        "usual_global_norm": usual,
        "loss_scale": numbers.loss_scale,
        "skipped": numbers.skipped,
        "consecutive_skips": numbers.consecutive_skips,
    }


_MOST_RISE = 4.0
"""A norm that has risen by more since it was last looked at is named."""


@final
class WeightWatch:
    """Remember the norms of a network's trainable weights, and find those that have risen.

    Args:
        network: Whose; its norms are taken at once. Sharded weights are not watched.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._before: dict[str, tuple[Tensor, int]] = {}
        self.look()

    def look(self) -> None:
        """Take the norms of all weights, with one read of them; does not wait for the device."""
        weights = trainable(self._network)
        self._before = {}
        # The norm of a whole weight would take a message, and not all ranks may come here.
        if weights and not any(hasattr(w, "full_tensor") for w in weights.values()):
            norms = tensor_norms(list(weights.values())).unbind()
            sizes = [weight.numel() for weight in weights.values()]
            self._before = dict(zip(weights, zip(norms, sizes, strict=True), strict=True))

    def changed(self) -> list[WeightNorm]:
        """Return weights that are not finite or whose norm has risen, the worst first.

        Reads the weights and waits for the device. A weight that was smaller than the root mean
        square of all, such as one that began at zero, counts as if it had been of that size. If it
        is most of them, as after an update that was not finite, none is returned.
        """
        weights = trainable(self._network)
        known = {name: self._before[name] for name in weights if name in self._before}
        if not known:
            return []
        now = tensor_norms([weights[name] for name in known]).tolist()
        sizes = [size for _, size in known.values()]
        before = [norm.item() for norm, _ in known.values()]
        typical = math.sqrt(sum(norm**2 for norm in before) / sum(sizes))
        if not math.isfinite(typical):
            typical = 0.0
        risen = []
        for name, size, norm, norm_before in zip(known, sizes, now, before, strict=True):
            rise = norm / max(norm_before, typical * math.sqrt(size), 1e-30)
            if not rise <= _MOST_RISE:
                rank = rise if math.isfinite(rise) else math.inf
                risen.append((rank, WeightNorm(name=name, norm=norm, norm_before=norm_before)))
        if len(risen) > max(1, len(known) // 2):
            # What all weights have suffered is a consequence, no cause.
            return []
        return [weight for _, weight in sorted(risen, key=lambda pair: -pair[0])]
