"""A run that has failed says from which checkpoint it can go on."""

import re

import pytest
import torch

from mfwrap.records.run_record import read_run
from mfwrap.report.episodes import headline
from mfwrap.runner import parse_recipe
from mfwrap.runner.run import run_recipe
from support.recipe_texts import recipe_text

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
