"""Programs of two ranks of which one alone finds an anomaly."""

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap import MFTrainOneStepCell
from mfwrap.callbacks import LoopMonitor
from mfwrap.callbacks.culprit.anomaly_log import Anomaly
from mfwrap.callbacks.culprit.finder import CulpritFinder
from mfwrap.callbacks.culprit.judges.step import StepScores
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.collectives import all_ranks_meet, gather_objects
from support.cause_evidence import ORDINARY

__all__ = ["LONE", "explain_overflow", "find_alone", "find_together", "load_alone", "raise_rate"]

NAN = math.nan
_QUIET = ORDINARY._replace(usual_global_norm=1.0)
_LIMIT = 65504.0


LONE: dict[str, tuple[StepScores, float]] = {
    "spike": (_QUIET._replace(usual_global_norm=0.01, global_norm=20.0), 1.0),
    "vanishing_gradient": (_QUIET._replace(usual_global_norm=1e4, global_norm=-20.0), 1.0),
    "learning_rate_spike": (_QUIET._replace(learning_rate=0.1), 1.0),
    "loss_not_finite": (_QUIET, NAN),
    "loss_spike": (_QUIET, 50.0),
    "loss_drop": (_QUIET, 1e-3),
    "loss_shift": (_QUIET, 1.0),
    "norm_shift": (_QUIET, 1.0),
    "local_norm_spike": (_QUIET._replace(num_risen=1), 1.0),
    "update_spike": (_QUIET._replace(num_moved=1), 1.0),
    "local_norm_drop": (_QUIET._replace(num_fallen=1), 1.0),
    "zero_gradient": (_QUIET._replace(num_dead=1), 1.0),
    "state_spike": (_QUIET._replace(highest_state=20.0, num_bad_states=0), 1.0),
    "attention_logits": (_QUIET._replace(num_logits=1, num_loads=0), 1.0),
    "expert_load": (_QUIET._replace(num_logits=0, num_loads=1), 1.0),
    "update_growth": (_QUIET, 1.0),
}
"""Scores and loss with which one rank alone finds an anomaly, by its kind."""


_SHIFTS = {"loss_shift": {"loss": 1.06}, "norm_shift": {"global_norm": 0.01}}
"""Numbers that a rank has from a step on."""


def _alone() -> AbstractContextManager[Any]:
    """Let a rank wait only briefly for the others where none of them comes."""
    meet = functools.partial(all_ranks_meet, seconds=0.1)
    return patch("mfwrap.callbacks.culprit.finder.all_ranks_meet", meet)


class _Judged:
    """A finder that judges steps with given scores."""

    def __init__(self, *, replays: bool = False) -> None:
        self.network = nn.Linear(2, 1)
        recorder = StepRecorder(self.network) if replays else None
        self.finder = CulpritFinder(self.network, spike_factor=2.0, limit=_LIMIT, recorder=recorder)
        self._step = 0

    def judge(self, scores: StepScores, **values: Any) -> Anomaly | None:
        self._step += 1
        self.finder.judges.begin_step(self._step)
        known = {"loss": 1.0, "overflow": False, "global_norm": 1.0, "skipped": False, **values}
        known = {"loss_scale": None, "consecutive_skips": 0, **known}
        output = SimpleNamespace(loss=torch.tensor(1.0), global_norm=torch.tensor(1.0))
        judgement = self.finder.judges.end_step(self._step, output, None, None)
        numbers = StepNumbers(step=self._step, **known)
        return self.finder.judge(numbers, judgement, scores, weights_have_moved=False)


def find_alone(rank: int, kind: str) -> list[Any]:
    """Let rank 1 alone find an anomaly; return its kind, and whether it is shared.

    The collective after each anomaly shows that no rank has started another one.
    """
    judged, found = _Judged(), []
    scores, loss = LONE[kind]
    for step in range(1, 100):
        if kind == "update_growth" and rank == 1:
            with _alone():
                anomaly = judged.judge(_QUIET._replace(update_ratio=0.004 * 1.05**step))
        elif kind in _SHIFTS and rank == 1 and step > 50:
            with _alone():
                anomaly = judged.judge(_QUIET, **_SHIFTS[kind])
        elif step == 11 and rank == 1:
            with torch.no_grad():
                judged.network.weight += float(kind == "state_spike")
            with _alone():
                anomaly = judged.judge(scores, loss=loss)
        else:
            anomaly = judged.judge(_QUIET)
        if anomaly is not None:
            found.append([anomaly.kind, judged.finder.is_shared])
            break
    gather_objects(f"after {kind}")
    return found


def find_together(rank: int) -> list[list[bool]]:
    """Find spikes alone and together, at the same steps again and again."""
    found = []
    for ranks in ((0, 1), (1,), (0, 1), (0,), (0, 1), (0, 1)):
        judged = _Judged()
        for _ in range(10):
            judged.judge(_QUIET)
        # The others do not know of a non-finite loss of one rank.
        loss = NAN if rank == 1 and rank in ranks else 1.0
        with nullcontext() if len(ranks) == 2 else _alone():
            anomaly = judged.judge(LONE["spike"][0] if rank in ranks else _QUIET, loss=loss)
        losses = 0 if anomaly is None else len(anomaly.losses)
        found.append([anomaly is not None, judged.finder.is_shared, losses == len(ranks)])
        gather_objects(ranks)
    return found


def explain_overflow(rank: int) -> list[Any]:
    """Let both ranks judge an overflow that the loss scale explains by rank 0's norms alone."""
    judged = _Judged(replays=True)
    judged.judge(_QUIET)
    usual = 1e3 if rank == 0 else 1e-6
    scores = _QUIET._replace(usual_global_norm=usual)
    anomaly = judged.judge(scores, overflow=True, skipped=True, loss_scale=2.0**10 - rank)
    gather_objects("after the overflow")
    return [anomaly is None, judged.finder.num_scale_overflows]


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor, factor: float) -> torch.Tensor:
        return (self.body(inputs)[:, 0] - inputs[:, 0]).square().mean() * factor


class _Loop:
    """A loop on two ranks with a monitor that replays."""

    def __init__(self, folder: Path, factor: float = 1.0) -> None:
        torch.manual_seed(0)
        network = DistributedDataParallel(_Loss())
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        self.cell = MFTrainOneStepCell(network, self.optimizer, use_clip_grad=True, local_norm=True)
        self.monitor = LoopMonitor(self.cell, folder, replay=True)
        self._factor = factor

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.cell(torch.randn(8, 4), self._factor)
            self.monitor.end_step()


def raise_rate(rank: int, folder: str) -> None:
    """Raise the learning rate of rank 1 alone in the middle of a training."""
    loop = _Loop(Path(folder))
    loop.train(12)
    if rank == 1:
        loop.optimizer.param_groups[0]["lr"] = 1.0
    loop.train(12)
    loop.monitor.close()


def load_alone(rank: int, folder: str) -> None:
    """Let rank 1 alone load the monitor's state of a training with smaller gradients."""
    small = _Loop(Path(folder) / "small", factor=1e-4)
    small.train(12)
    small.monitor.flush()
    state = small.monitor.state_dict()
    small.monitor.close()
    loop = _Loop(Path(folder) / "loop")
    loop.train(12)
    if rank == 1:
        loop.monitor.load_state_dict(state)
    with _alone():
        loop.train(12)
        loop.monitor.close()
