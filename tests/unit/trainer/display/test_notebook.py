"""In a notebook a training is transformers' bar and table, with the numbers of the step."""

import re

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from transformers.utils.notebook import NotebookProgressCallback

from mfwrap import DynamicLossScaleUpdateCell
from mfwrap.trainer import MFTrainer
from support.trainer_runs import new_trainer, spoilt_llama


@pytest.fixture
def notebook(monkeypatch):
    """Let transformers find a notebook, and return a function that runs code in a cell."""
    shell = InteractiveShell.instance()
    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)

    def run(code):
        with capture_output() as captured:
            code()
        return [output.data["text/html"] for output in captured.outputs if output.data]

    yield run
    shell.clear_instance()


def columns(page):
    """Return the columns and the rows of the table of an HTML text."""
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in page.split("<tr")[1:]]
    return rows[0], rows[1:]


def test_a_training(tmp_path, notebook):
    """The table has the norm, the rate and the skips of each log."""
    model = spoilt_llama([1, 1, 1, 1, float("inf"), 1, 1, 1])
    trainer = new_trainer(MFTrainer, tmp_path, model=model, disable_tqdm=False)
    pages = notebook(trainer.train)
    names, rows = columns(pages[-1])
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]

    assert names == ["Step", "Training Loss", "Grad Norm", "Learning Rate", "Skipped"]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert [row[4] for row in rows] == ["0", "1", "1", "1"]
    assert [float(row[2]) for row in rows] == pytest.approx(
        [entry["grad_norm"] for entry in log], abs=1e-6, nan_ok=True
    )


def test_with_evaluations(tmp_path, notebook):
    """Each evaluation is one row, with transformers' columns and ours."""
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        disable_tqdm=False,
        eval_strategy="steps",
        eval_steps=2,
        extras={"scale_sense": DynamicLossScaleUpdateCell(1024.0, 2, 100)},
    )
    names, rows = columns(notebook(trainer.train)[-1])
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]

    assert names[:3] == ["Step", "Training Loss", "Validation Loss"]
    assert set(names[3:]) == {"Grad Norm", "Learning Rate", "Loss Scale", "Skipped"}
    assert [row[0] for row in rows] == ["2", "4"]
    assert [float(row[2]) for row in rows] == pytest.approx(
        [entry["eval_loss"] for entry in evaluations], abs=1e-6
    )
    assert [float(row[names.index("Loss Scale")]) for row in rows] == [1024.0, 1024.0]
