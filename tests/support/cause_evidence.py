"""Evidence of made-up anomalies, for the rules of their causes."""

import dataclasses
import math
from typing import Any

from mfwrap.callbacks.culprit.anomaly_log import StateNorm
from mfwrap.callbacks.culprit.causes.causes import cause_of
from mfwrap.callbacks.culprit.causes.evidence import Cause, CauseEvidence, StepTrace
from mfwrap.callbacks.culprit.judges.step import StepScores
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence

__all__ = ["HIGH_LOSS", "NAMES", "NAN", "ORDINARY", "RANK", "cause", "state", "trace"]

NAN = math.nan
NAMES = ("wte.weight", "h.0.weight", "h.1.weight")
ORDINARY = StepScores(
    global_norm=0.2,
    usual_global_norm=1.0,
    local_norm=0.5,
    num_risen=0,
    num_fallen=0,
    num_dead=0,
    update=0.4,
    num_moved=0,
    num_changed=0,
    learning_rate=1e-3,
    lowest_rate=1e-3,
    ordinary_rate=1e-3,
    update_ratio=1e-3,
)
RANK = RankEvidence(
    rank=0,
    loss=3.0,
    names=NAMES,
    norms=(1.0, 1.0, 1.0),
    usual_norms=(1.0, 1.0, 1.0),
    scores=(0.0, 0.0, 0.0),
    usual_loss=3.0,
    num_weights=8,
    earlier_losses=((3.0, 3.0),),
)
HIGH_LOSS: dict[str, Any] = {"global_norm": 4.0}
"""Scores of a step with a loss that has doubled."""


def trace(*changes: dict[str, Any], applied: bool = True) -> tuple:
    """Return steps of which the last ones differ from ordinary ones, the present one last.

    Args:
        changes: Scores of the last steps that are not ordinary, or the ``rate_rise`` of a step.
        applied: Whether the updates were applied.
    """
    steps = [StepTrace(step, applied, ORDINARY) for step in range(14 - max(4, len(changes)), 14)]
    for place, change in enumerate(changes, len(steps) - len(changes)):
        scores = {name: value for name, value in change.items() if name != "rate_rise"}
        steps[place] = steps[place]._replace(
            scores=ORDINARY._replace(**scores), rate_rise=change.get("rate_rise")
        )
    return tuple(steps)


def of_the_start(steps: tuple) -> tuple:
    """Return steps as the first ones of a run."""
    return tuple(each._replace(step=number) for number, each in enumerate(steps, 1))


def cause(
    kind: str = "loss_spike",
    steps: tuple | None = None,
    *,
    others: tuple[RankEvidence, ...] = (),
    rank: dict[str, Any] | None = None,
    **known: Any,
) -> Cause:
    """Return the cause of an anomaly of rank 0, by default of a loss that has doubled."""
    is_high = steps is None or steps[-1].scores == ORDINARY._replace(**HIGH_LOSS)
    known_of_rank = {"loss": 6.0} if steps is None else {}
    steps = trace(HIGH_LOSS) if steps is None else steps
    known_of_rank |= {"loss_score": 20.0 if is_high else 0.3, **(rank or {})}
    blamed = dataclasses.replace(RANK, **known_of_rank)
    return cause_of(
        CauseEvidence(kind=kind, trace=steps, ranks=(blamed, *others), blamed=blamed, **known)
    )


def state(kind: str, name: str, rise: float) -> StateNorm:
    """Return a norm that has risen, or fallen, by a factor."""
    return StateNorm(kind=kind, name=name, norm=rise, norm_before=1.0, rise=rise)
