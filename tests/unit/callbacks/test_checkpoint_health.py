"""Reasons why a checkpoint is unhealthy, and the newest healthy checkpoint of a run."""

import math

import pytest

from mfwrap.callbacks import newest_healthy_checkpoint
from mfwrap.callbacks.checkpoint_health import (
    CheckpointHealth,
    health_of,
    open_health_records,
    record_health,
)

NAN = math.nan


def test_the_last_record_counts(tmp_path):
    """The last record of a checkpoint counts, and only an existing checkpoint is returned."""
    lines = open_health_records(tmp_path, 0)
    for step, healthy in ((2, True), (10, True), (4, True), (4, False), (30, True)):
        record_health(
            lines, CheckpointHealth(checkpoint=f"checkpoint-{step}", step=step, healthy=healthy)
        )
    for step in (2, 4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()

    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10").rmdir()
    assert newest_healthy_checkpoint(str(tmp_path)) == tmp_path / "checkpoint-2"
    assert newest_healthy_checkpoint(tmp_path / "none") is None


FINE = {
    "loss": 1.0,
    "global_norm": 2.0,
    "overflow": False,
    "consecutive_skips": 2,
    "embedding_norm": 0.5,
    "embedding_limit": 1.0,
    "most_skips": 2,
    "is_spike": False,
    "non_finite": {"weight": ()},
}


@pytest.mark.parametrize(
    ("values", "num_reasons"),
    [
        ({}, 0),
        ({"loss": None, "global_norm": None, "embedding_norm": None, "consecutive_skips": None}, 0),
        ({"loss": math.inf}, 1),
        ({"consecutive_skips": 3}, 1),
        ({"is_spike": True}, 1),
        ({"is_spike": True, "overflow": True}, 0),
        ({"embedding_norm": 1.0}, 1),
        ({"embedding_norm": NAN}, 1),
        ({"embedding_norm": NAN, "overflow": True}, 0),
        ({"embedding_norm": 9.0, "embedding_limit": None}, 0),
        ({"non_finite": {"weight": ("a",), "buffer": ("b", "c")}, "loss": NAN}, 3),
    ],
)
def test_reasons(values, num_reasons):
    """Each fault gives one reason, but the norms of an overflowed step give no reason."""
    assert len(health_of(**FINE | values)) == num_reasons


def test_non_finite_tensors_are_named():
    """A reason names the only or the first non-finite tensor of its kind."""
    reasons = health_of(**FINE | {"non_finite": {"weight": ("a",), "buffer": ("b", "c")}})

    assert reasons == (
        "the weight a is not finite",
        "2 buffers are not finite, the first is b",
    )
