"""Reasons why a checkpoint is unhealthy, and the newest healthy checkpoint of a run."""

import math
from dataclasses import asdict

import pytest

from mfwrap.callbacks import newest_healthy_checkpoint
from mfwrap.callbacks.checkpoint_health import (
    HEALTH_FILE,
    CheckpointHealth,
    health_of,
)
from mfwrap.records.json_lines import JsonLines

NAN = math.nan


def test_the_last_record_counts(tmp_path):
    """The last record of a checkpoint counts, and only an existing checkpoint is returned."""
    lines = JsonLines(tmp_path / HEALTH_FILE)
    for step, healthy in ((2, True), (10, True), (4, True), (4, False), (30, True)):
        name = f"checkpoint-{step}"
        lines.append(asdict(CheckpointHealth(checkpoint=name, step=step, healthy=healthy)))
    for step in (2, 4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()

    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10").rmdir()
    assert newest_healthy_checkpoint(str(tmp_path)) == tmp_path / "checkpoint-2"
    assert newest_healthy_checkpoint(tmp_path / "none") is None


def test_a_checkpoint_after_a_divergence_does_not_count(tmp_path):
    """Its weights are finite, and the loss has not come back."""
    lines, anomalies = JsonLines(tmp_path / HEALTH_FILE), JsonLines(tmp_path / "anomalies.jsonl")
    for step in (20, 40, 60):
        name = f"checkpoint-{step}"
        lines.append(asdict(CheckpointHealth(checkpoint=name, step=step, healthy=True)))
        (tmp_path / name).mkdir()
    anomalies.append({"step": 45, "since": 43, "kind": "loss_shift"})
    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-60"

    anomalies.append({"step": 45, "kind": "loss_shift", "last_step": 60, "diverged": "so it is"})
    assert newest_healthy_checkpoint(tmp_path) == tmp_path / "checkpoint-40"


KNOWN = {
    "loss": 1.0,
    "global_norm": 2.0,
    "overflow": False,
    "consecutive_skips": 2,
    "embedding_norm": 0.5,
}
FINE = {
    "known": KNOWN,
    "embedding_limit": 1.0,
    "most_skips": 2,
    "is_spike": False,
    "non_finite": {"weight": ()},
}


@pytest.mark.parametrize(
    ("values", "num_reasons"),
    [
        ({}, 0),
        ({"known": {}}, 0),
        ({"known": KNOWN | {"loss": math.inf}}, 1),
        ({"known": KNOWN | {"consecutive_skips": 3}}, 1),
        ({"is_spike": True}, 1),
        ({"is_spike": True, "known": KNOWN | {"overflow": True}}, 0),
        ({"known": KNOWN | {"embedding_norm": 1.0}}, 1),
        ({"known": KNOWN | {"embedding_norm": NAN}}, 1),
        ({"known": KNOWN | {"embedding_norm": NAN, "overflow": True}}, 0),
        ({"known": KNOWN | {"embedding_norm": 9.0}, "embedding_limit": None}, 0),
        ({"non_finite": {"weight": ("a",), "buffer": ("b", "c")}, "known": {"loss": NAN}}, 3),
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
