"""Log and run page name the checkpoint that a run that has diverged can return to."""

import json
import re

import pytest

from mfwrap.callbacks.culprit.causes.rate import BEFORE_STEP, LOWER_RATE, MUCH_LOWER_RATE
from mfwrap.callbacks.culprit.good_checkpoints import divergence_in
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

    assert page.startswith(f"Diverged at step {step - 2}{said}")


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


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ((20, 40, 60), "checkpoint-20 is the newest from before"),
        ((39, 40, 60), "checkpoint-39 is the newest from before"),
        ((40, 60), "no checkpoint has good weights: start anew"),
        ((), "go back to a checkpoint from before this step"),
    ],
)
def test_where_a_training_has_diverged(tmp_path, saved, said):
    """The checkpoint of the step before has the weights that the bad step had."""
    first = {"step": 43, "since": 41, "kind": "loss_shift", "cause": "unknown"}
    end = {"step": 43, "kind": "loss_shift", "last_step": 60, "num_steps": 18, "diverged": "it is"}
    write_lines(tmp_path / "anomalies.jsonl", [first, end])
    for step in saved:
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert divergence_in(tmp_path) == f"the training diverged at step 41 (it is); {said}"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (34, "no checkpoint has good weights: start anew with a lower learning rate"),
        (5034, "checkpoint-25 is the newest from before"),
    ],
)
@pytest.mark.parametrize("advice", [LOWER_RATE, MUCH_LOWER_RATE])
def test_a_rate_that_was_too_high_from_the_start(tmp_path, step, said, advice):
    """The checkpoints from before the loss rose have weights that it has moved too far."""
    first = {"step": step, "since": step - 5, "kind": "loss_shift", "cause": "learning_rate"}
    first |= {"explanation": "too high", "suggestion": advice}
    end = {"step": step, "kind": "loss_shift", "last_step": step + 31, "num_steps": 29}
    write_lines(tmp_path / "anomalies.jsonl", [first, {**end, "diverged": "it is"}])
    (tmp_path / "checkpoint-25").mkdir()
    assert divergence_in(tmp_path).endswith(f"; {said}")


@pytest.mark.parametrize(
    ("resumed", "said"),
    [
        ([40], "the checkpoint of step 40 that it was resumed from is from before"),
        ([40, 60], "the checkpoint of step 40 that it was resumed from is from before"),
        ([60], "no checkpoint has good weights: start anew with a lower learning rate"),
    ],
)
def test_a_run_that_was_resumed_from_another_folder(tmp_path, resumed, said):
    """Its own checkpoints are all from after a rate was raised, and that one is not."""
    first = {"step": 41, "kind": "learning_rate_spike", "cause": "learning_rate"}
    first |= {"explanation": "it rose", "suggestion": f"correct it, and {BEFORE_STEP} 41"}
    end = {"step": 41, "kind": "learning_rate_spike", "last_step": 80, "num_steps": 40}
    write_lines(tmp_path / "anomalies.jsonl", [first, {**end, "diverged": "it is"}])
    (tmp_path / "run.json").write_text(json.dumps({"resumed": resumed}))
    (tmp_path / "checkpoint-60").mkdir()

    assert divergence_in(tmp_path).endswith(f"; {said}")
    write_lines(tmp_path / "metrics.jsonl", [{"step": 60, "loss": 1.0}])
    on_page = "no checkpoint is good" if "start anew" in said else said
    assert f"Diverged at step 41; {on_page}. " in headline([read_run(tmp_path)])


def test_a_run_that_has_come_back(tmp_path):
    """It has not diverged, so that nothing is said."""
    first = {"step": 43, "since": 41, "kind": "loss_shift", "cause": "unknown"}
    end = {"step": 43, "kind": "loss_shift", "last_step": 60, "num_steps": 18, "diverged": "it is"}
    write_lines(tmp_path / "anomalies.jsonl", [first, end, {**end, "back": 90}])
    assert not divergence_in(tmp_path)


@pytest.mark.parametrize(
    ("step", "said"),
    [(143, "step_100 is the newest from before"), (43, "no checkpoint has good weights: start")],
)
def test_checkpoints_of_a_loop(tmp_path, step, said):
    """Log and page know them by the monitor's state, whatever their names are."""
    first = {"step": step, "kind": "loss_shift", "suggestion": LOWER_RATE, "since": step - 3}
    end = {"step": step, "kind": "loss_shift", "last_step": 170, "num_steps": 9, "diverged": "so"}
    write_lines(tmp_path / "metrics.jsonl", [{"step": n, "loss": 2.0} for n in range(1, 171)])
    write_lines(tmp_path / "anomalies.jsonl", [first, end])
    states = {"step_20": {"global_step": 20}, "step_100": {"global_step": 100}, "mine": {}, "x": 3}
    for name, state in {**states, "late": {"global_step": 160}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "mfwrap_monitor.json").write_text(json.dumps(state))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "mfwrap_monitor.json").write_text("{")

    assert f"; {said}" in divergence_in(tmp_path)
    page = re.sub("<.*?>", "", headline([read_run(tmp_path)]))
    assert page.startswith(
        f"Diverged at step {step - 3}; {said.partition(' ha')[0].partition(':')[0]}"
    )
