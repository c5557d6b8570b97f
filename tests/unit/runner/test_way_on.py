"""A run that has failed or diverged says from which checkpoint it can go on."""

import re

import pytest
import torch

from mfwrap.callbacks.culprit.causes.rate import LOWER_RATE
from mfwrap.records.run_record import read_run
from mfwrap.report.episodes import headline
from mfwrap.runner import parse_recipe
from mfwrap.runner.run import run_recipe
from mfwrap.runner.way_on import warn_of_divergence
from support.recipe_texts import recipe_text
from support.run_folders import write_lines

# Ignore the warnings that datasets emits.
pytestmark = pytest.mark.filterwarnings("ignore")


class Steep(torch.nn.Module):
    """A regression whose loss grows without end once a rate is too high."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, features, labels=None):
        """Return the mean squared error, which is as steep as the features are large."""
        output = self.scale * features.squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(output, labels), "logits": output}


def failed(folder, num_good: int) -> str:
    """Return the last note of a run that fails after 15 skips; the rate is too high at the end."""
    rows = [{"features": [1.0 if n < num_good else 1e3], "target": 0.5} for n in range(64)]
    training = {
        "output_dir": str(folder),
        "max_steps": 64,
        "save_strategy": "steps",
        "save_steps": 10,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "train_sampling_strategy": "sequential",
    }
    text = recipe_text(
        training=training,
        monitor_config={"monitor_on": True},
        runner_wrapper={"max_consecutive_skips": 15},
    )
    with pytest.raises(RuntimeError, match="15 updates in a row were skipped") as error:
        run_recipe(parse_recipe(text, "r.yaml"), model=Steep(), data=(rows, rows[:1]))
    return error.value.__notes__[-1]


def test_all_checkpoints_of_a_failed_run_have_ruined_weights(tmp_path):
    """Then the run is to start anew; its page says that it has diverged and that it has failed."""
    note = failed(tmp_path, 4)
    page = headline([read_run(tmp_path)])

    step = int(re.search(r"went wrong at step (\d+):", note)[1])
    assert 5 <= step <= 8
    assert note.startswith("no checkpoint has good weights, as it went wrong at step")
    assert note.endswith("by a lower learning rate, start anew with --overwrite")
    assert f"Diverged at step {step}; no checkpoint is good." in page
    assert "The run failed after step" in page


def test_a_failed_run_goes_on_from_before_the_divergence(tmp_path):
    """The newest checkpoint, which --resume=auto takes, is from after it."""
    note = failed(tmp_path, 34)

    said = rf"once it is mended, --resume={tmp_path}/checkpoint-30 continues from before step 3\d,"
    assert re.match(said, note)
    assert (tmp_path / "checkpoint-50").is_dir()


def test_a_run_that_could_not_continue(tmp_path):
    """Its page begins with the error, though the training before it had finished."""
    training = {"output_dir": str(tmp_path), "max_steps": 4, "save_strategy": "steps"}
    training |= {"save_steps": 2, "report_to": "none"}
    run_recipe(parse_recipe(recipe_text(training=training), "r.yaml"))
    schedule = {"type": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts", "T_0": 4}
    text = recipe_text(training=training | {"max_steps": 6}, lr_schedule=schedule)
    recipe = parse_recipe(text, "r.yaml", allow_code=True)

    with pytest.raises(ValueError, match="the state of another schedule"):
        run_recipe(recipe, resume=True)
    page = headline([read_run(tmp_path)])
    assert "The run failed to continue (ValueError)" in page
    assert "Its error: <code>ValueError: the checkpoint has the state of another schedule" in page
    run_recipe(parse_recipe(recipe_text(training=training | {"max_steps": 6}), "r"), resume=True)
    assert "The training finished at step 6" in headline([read_run(tmp_path)])


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ((20, 40, 60), "checkpoint-20 is the newest from before"),
        ((39, 40, 60), "checkpoint-39 is the newest from before"),
        ((40, 60), "no checkpoint has good weights: start anew with --overwrite"),
        ((), "no checkpoint has good weights: start anew with --overwrite"),
    ],
)
def test_where_a_training_has_diverged(tmp_path, saved, said):
    """The checkpoint of the step before has the weights that the bad step had."""
    first = {"step": 43, "since": 41, "kind": "loss_shift", "cause": "unknown"}
    end = {"step": 43, "kind": "loss_shift", "last_step": 60, "num_steps": 18, "diverged": "it is"}
    write_lines(tmp_path / "anomalies.jsonl", [first, end])
    for step in saved:
        (tmp_path / f"checkpoint-{step}").mkdir()
    lines = []
    warn_of_divergence(tmp_path, lines.append)

    start = "warning: the training diverged at step 43 (it is); "
    assert lines == [f"{start}{said}; see the run page"]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            34,
            "no checkpoint has good weights: start anew with --overwrite and a lower learning rate",
        ),
        (5034, "checkpoint-25 is the newest from before"),
    ],
)
def test_a_rate_that_was_too_high_from_the_start(tmp_path, step, said):
    """The checkpoints from before the loss rose have weights that it has moved too far."""
    first = {"step": step, "since": step - 5, "kind": "loss_shift", "cause": "learning_rate"}
    first |= {"explanation": "too high", "suggestion": LOWER_RATE}
    end = {"step": step, "kind": "loss_shift", "last_step": step + 31, "num_steps": 29}
    write_lines(tmp_path / "anomalies.jsonl", [first, {**end, "diverged": "it is"}])
    (tmp_path / "checkpoint-25").mkdir()
    lines = []
    warn_of_divergence(tmp_path, lines.append)

    assert f"; {said}; see the run page" in lines[0]


def test_a_run_that_has_come_back(tmp_path):
    """It has not diverged, so that nothing is said."""
    first = {"step": 43, "since": 41, "kind": "loss_shift", "cause": "unknown"}
    end = {"step": 43, "kind": "loss_shift", "last_step": 60, "num_steps": 18, "diverged": "it is"}
    write_lines(tmp_path / "anomalies.jsonl", [first, end, {**end, "back": 90}])
    lines = []
    warn_of_divergence(tmp_path, lines.append)

    assert lines == []
