"""Replay the recorded runs of training cells with mfwrap."""

import functools
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import mfwrap
from support.golden.traces import (
    TOLERANCE,
    assert_same,
    cases,
    network_of,
    optimizer_of,
    scale_sense_of,
    tensor,
)

PLAIN = "train_one_step_cell"
LOSS_SCALE = "train_one_step_with_loss_scale_cell"
MF = "mf_train_one_step_cell"

LARGEST_SCALE = 2.0**60
"""Largest loss scale at which mfwrap and MindSpore agree on overflows in the recorded runs.

Up to this scale, the float32 sum of squares of the scaled gradients overflows only if an element of
the gradients is not finite.
"""


def recorded_scales(case: dict[str, Any]) -> list[float]:
    """Return every loss scale of a recorded run."""
    given = case["scale_sense"] or {}
    return [
        *(given[name] for name in ("value", "loss_scale_value") if name in given),
        *(event["set_sense_scale"] for event in case["events"]),
        *(float(step["loss_scale"]) for step in case["expected"]),
    ]


FAR_SCALES = frozenset(
    name
    for family in (LOSS_SCALE, MF)
    for name, case in cases(family).items()
    if max(recorded_scales(case)) > LARGEST_SCALE
)
"""Ids of the cases with a loss scale above `LARGEST_SCALE`."""


class Replay:
    """Replay a recorded case step by step with mfwrap.

    Args:
        case: Recorded case with a field ``wrapper``, the name of its training cell.
        fused: Whether to use torch's fused optimizer, which skips an update on the device. If
            False, the cell reads the overflow flag on the host to skip an update.
    """

    def __init__(self, case: Mapping[str, Any], *, fused: bool) -> None:
        self.case = case
        self.network = network_of(case)
        parameters = dict(self.network.named_parameters())
        self.optimizer, self.schedule = optimizer_of(case, parameters, fused=fused)
        self._parameters = [parameters[recorded["name"]] for recorded in case["params"]]
        keywords = dict(case["wrapper_args"], lr_scheduler=self.schedule)
        if case["scale_sense"] is not None:
            keywords["scale_sense"] = scale_sense_of(case["scale_sense"])
        self.cell: Any = getattr(mfwrap, case["wrapper"])(self.network, self.optimizer, **keywords)

    def batch(self, step: int) -> list[Tensor]:
        """Return the network's inputs at a step."""
        return [tensor(value) for value in self.case["batches"][self.case["batch_index"][step]]]

    def weights(self) -> list[Tensor]:
        """Return flat copies of the weights, in the order of the recorded ``params``."""
        return [parameter.detach().clone().flatten() for parameter in self._parameters]

    def set_scale(self, index: int) -> None:
        """Call ``set_sense_scale`` if the recorded run did so before this step."""
        for event in self.case["events"]:
            if event["before_step"] == index:
                self.cell.set_sense_scale(torch.full(event["shape"], event["set_sense_scale"]))

    def step(self, index: int) -> Any:
        """Run one recorded step and return the cell's output."""
        self.set_scale(index)
        return self.cell(*self.batch(index))


def replays(*families: str, without: Collection[str] = ()) -> list[Any]:
    """Return pytest parameters ``family, name, fused`` for the cases of some families.

    Each case appears twice, with a fused optimizer and with an unfused one.
    """
    return [
        pytest.param(family, name, fused, id=f"{name}-{'fused' if fused else 'in_place'}")
        for family in families
        for name in cases(family)
        if name not in without
        for fused in (True, False)
    ]


class Run(NamedTuple):
    """The results of all steps of a replay, read on the host only after its last step."""

    replay: Replay
    outputs: list[Any]
    reports: list[Any]
    weights: list[Tensor]

    def stacked(self, field: str) -> Tensor:
        """Return a field of the outputs of all steps."""
        return torch.stack([getattr(output, field) for output in self.outputs])

    def reported(self, field: str) -> Tensor:
        """Return a field of the reports of all steps."""
        return torch.stack([getattr(report, field) for report in self.reports])

    def recorded(self, field: str) -> list[Any]:
        """Return the recorded values of a field at all steps."""
        return [step[field] for step in self.replay.case["expected"]]

    def assert_weights(self) -> None:
        """Assert that the weights after every step agree with the recorded weights."""
        recorded = [list(chain.from_iterable(weights)) for weights in self.recorded("params")]
        assert_same(torch.stack(self.weights), recorded, relative=TOLERANCE)


@functools.cache
def run_of(family: str, name: str, fused: bool) -> Run:  # noqa: FBT001  (a parameter of tests)
    """Replay a case and return its run, which is cached because several tests check it."""
    run = Run(Replay(cases(family)[name], fused=fused), [], [], [])
    for index in range(run.replay.case["steps"]):
        run.outputs.append(run.replay.step(index))
        run.reports.append(getattr(run.replay.cell, "last_report", None))
        run.weights.append(torch.cat(run.replay.weights()))
    return run
