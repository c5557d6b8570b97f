"""Two ranks save at the same step, refuse a run folder together, and write on one disk or two."""

import re

import pytest

from support.ranks.monitors import refuse_a_folder, save_an_overflow
from support.ranks.trainer import come_back_on_own_disk, save_on_own_disk


def test_an_overflow_at_a_step_that_is_saved_and_not_logged(two_ranks, tmp_path):
    """All ranks look for the culprit before one rank saves; all records precede the checkpoint.

    A training that resumes from the checkpoint has each step once in the files of all ranks, and
    the monitors of each rank continue with the state of that rank.
    """
    first, second = two_ranks.run(save_an_overflow, str(tmp_path))

    expected = [{"step": 4, "kind": "loss_not_finite", "ranks": [1]}]
    assert first["anomalies"] == second["anomalies"] == expected
    assert first["num_losses"] == 4
    files = [
        "local_norms",
        "local_norms_rank1",
        "metrics",
        "training_state",
        "training_state_rank1",
    ]
    for name, steps in (("steps", [1, 2, 3, 4]), ("resumed", [1, 2, 3, 4, 5, 6])):
        expected_steps = {f"{file}.jsonl": steps for file in files}
        logged = [step for step in steps if step % 3 == 0]
        assert first[name] == {"anomalies.jsonl": [4], "progress.jsonl": logged, **expected_steps}
    for unbroken, resumed in (first["states"], second["states"]):
        assert resumed == unbroken


def test_a_folder_that_one_rank_cannot_write(two_ranks, tmp_path):
    """All ranks raise the same error before the first step, and no rank waits for another."""
    folder = re.escape(str(tmp_path / "file" / "1"))
    message = rf"\[Errno \d+\] cannot write to the folder {folder}: Not a directory; choose .*"
    first, second = two_ranks.run(refuse_a_folder, str(tmp_path))

    assert first == second
    assert re.fullmatch(message, first)


@pytest.mark.parametrize("each_node", [False, True])
def test_nodes_with_disks_of_their_own(two_ranks, tmp_path, each_node):
    """Each node removes what a killed run has left; ``save_on_each_node`` gives each a model."""
    first, second = two_ranks.run(save_on_own_disk, str(tmp_path), each_node)

    assert "left_over" not in [*first, *second]
    assert "model.safetensors" in first
    assert ("model.safetensors" in second) == each_node


def test_nodes_whose_newest_checkpoints_differ(two_ranks, tmp_path):
    """With ``"auto"`` all nodes resume from the newest checkpoint that each of them has."""
    first, second = two_ranks.run(come_back_on_own_disk, str(tmp_path))

    expected = [*(f"checkpoint-{step}" for step in (1, 2, 3, 4)), "3"]
    assert first == ["_abandoned-checkpoint-3", *expected]
    assert second == expected
