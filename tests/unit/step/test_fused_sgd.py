"""Fused SGD is skipped exactly, and its momentum may begin late."""

import pytest
import torch
from torch.optim import SGD

from support.host_reads import HostReads
from support.optimizer_runs import (
    CLOSE,
    DAMPENED,
    HALF,
    Run,
    flag,
    fused,
    give,
    gradients_of,
    kind,
    parameters_of,
    scalar,
)


def test_dampening_reads_the_flag_until_the_first_applied_update():
    """Fused SGD with dampening reads once per step until its first applied update."""
    run, reads = Run(DAMPENED["fused SGD dampening"]), []
    for skip in (True, True, False, True, False):
        give(run.parameters, gradients_of(0))
        with HostReads() as host:
            run.skippable.step(scalar(4.0), flag(skip=skip))
        reads.append(len(host.reads))

    assert reads == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("skip_first", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": True},
        {"weight_decay": 0.1, "maximize": True},
        {"dampening": 0.5},
        {"dampening": 0.5, "weight_decay": 0.1, "maximize": True},
    ],
    ids=str,
)
def test_a_momentum_may_begin_late(settings, skip_first):
    """A parameter whose first gradient comes late agrees with torch's unfused SGD.

    The reference is unfused, because torch's fused SGD without the wrapper fails in this case.
    """
    run = Run(fused(SGD, lr=0.1, momentum=0.9, **settings))
    expected = Run(kind(SGD, lr=0.1, momentum=0.9, **settings))
    for step in range(4):
        gradients = gradients_of(step)
        if step < 2:
            gradients[1] = None
        if step == 2 and skip_first:
            run.skipped()
        run.divided(gradients, 4.0)
        expected.plain(gradients)

    for ours, theirs in zip(run.weights(), expected.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert run.skippable.skips_on_device


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}], ids=str)
def test_a_fused_sgd_that_does_not_update_is_refused(dtype, settings):
    """Fused SGD with half-precision weights on CPU raises an error.

    That optimizer would skip whole vectors silently, see pytorch#191763. Unfused SGD trains these
    weights, and fused SGD trains float32 weights.
    """
    with pytest.raises(ValueError, match="got fused SGD with half-precision weights on CPU"):
        Run(fused(SGD, lr=0.1, **settings), parameters_of(dtype))

    for build, kept in ((fused(SGD, lr=0.1), torch.float32), (kind(SGD, lr=0.1), dtype)):
        run = Run(build, parameters_of(kept))
        run.divided([torch.ones_like(parameter) for parameter in run.parameters], 4.0)
        for weights, before in zip(run.weights(), parameters_of(kept), strict=True):
            assert (weights != before).all()
