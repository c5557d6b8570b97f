"""The run page names the checkpoint that a run that has diverged can return to."""

import re

import pytest

from mfwrap.callbacks.culprit.causes.rate import LOWER_RATE
from mfwrap.records.run_record import read_run
from mfwrap.report.episodes import headline
from support.run_folders import write_lines


@pytest.mark.parametrize(
    ("step", "saved", "said"),
    [
        (143, (120, 140, 160), "; checkpoint-120 is the newest from before. "),
        (143, (141, 160), "; no checkpoint is good. "),
        (43, (20, 40), "; no checkpoint is good. "),
        (143, (), ". "),
    ],
)
def test_the_page_of_a_run_that_has_diverged(tmp_path, step, saved, said):
    """Large updates in the first 100 steps spoil all weights; a run may save no checkpoints."""
    first = {"step": step, "since": step - 2, "kind": "loss_shift", "suggestion": LOWER_RATE}
    end = {"step": step, "kind": "loss_shift", "last_step": 170, "num_steps": 9, "diverged": "so"}
    write_lines(tmp_path / "metrics.jsonl", [{"step": n, "loss": 2.0} for n in range(1, 171)])
    write_lines(tmp_path / "anomalies.jsonl", [first, end])
    for each in saved:
        (tmp_path / f"checkpoint-{each}").mkdir()
    page = re.sub("<.*?>", "", headline([read_run(tmp_path)]))

    assert page.startswith(f"Diverged at step {step}{said}")


def test_weights_from_before_a_jump_of_the_rate(tmp_path):
    """The step of the jump has made the first bad update, from weights that were good."""
    advice = "correct the schedule, and go back to a checkpoint from before step 31"
    first = {"step": 33, "since": 32, "kind": "loss_shift", "suggestion": advice}
    last = {"step": 33, "kind": "loss_shift", "last_step": 50, "num_steps": 9, "diverged": "so"}
    write_lines(tmp_path / "metrics.jsonl", [{"step": n, "loss": 2.0} for n in range(1, 51)])
    write_lines(tmp_path / "anomalies.jsonl", [first, last])
    for each in (20, 30, 31):
        (tmp_path / f"checkpoint-{each}").mkdir()

    assert "checkpoint-30 is the newest from before" in headline([read_run(tmp_path)])
