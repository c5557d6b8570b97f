"""The records of a run belong to its checkpoints: on several ranks, after a kill, on resuming."""

from support.ranks.monitors import save_an_overflow


def test_an_overflow_at_a_step_that_is_saved_and_not_logged(two_ranks, tmp_path):
    """All ranks look for the culprit before one rank saves; all records precede the checkpoint."""
    first, second = two_ranks.run(save_an_overflow, str(tmp_path))

    expected = [{"step": 4, "kind": "loss_not_finite", "ranks": [1]}]
    assert first["anomalies"] == second["anomalies"] == expected
    assert first["num_losses"] == 4
    assert first["steps"] == {
        "anomalies.jsonl": [4],
        **{
            name: [1, 2, 3, 4]
            for name in (
                "local_norms.jsonl",
                "local_norms_rank1.jsonl",
                "metrics.jsonl",
                "training_state.jsonl",
                "training_state_rank1.jsonl",
            )
        },
    }
