"""docs/trainer_table.md is up to date: each row has the same result when it is compared again."""

import dataclasses
import math
import re
import signal
import subprocess
import sys

import pytest
import torch
from transformers import Seq2SeqTrainingArguments, Trainer
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from mfwrap.trainer import MFTrainer
from support.paths import ROOT
from support.trainer_runs import new_trainer
from support.trainer_table.packages import is_installed
from support.trainer_table.page import PAGE, cell, page, read_cells, versions_of
from support.trainer_table.rows import NOT_COMPARED, ROWS
from support.trainer_table.trainings import Outcome, differences
from support.versions import needs

# The warnings are those of optimizers, optuna and the hub's client about themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

needs_options = needs("transformers", "5.22", "the page lists options of newer releases")

TEXT = PAGE.read_text(encoding="utf-8")
CELLS = read_cells(TEXT)


@pytest.mark.fast_sample(2)
@pytest.mark.timeout(900)  # torch.compile and torchao compile C++
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[] if row.is_fast else [pytest.mark.slow])
        for row in ROWS
    ],
)
def test_a_row(row, tmp_path):
    """A training of each row gives the result that the page states."""
    if not is_installed(row.package):
        pytest.skip(f"needs {row.package}")

    assert cell(row, tmp_path) == CELLS[row.section, row.name]


@needs_options
def test_every_row_of_the_page_is_written_from_its_training():
    """The page has the rows, notes and reasons that `make table` would write now."""
    assert page(CELLS, versions_of(TEXT)) == TEXT, "run `make table`"


@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path):
    """The command compares the rows that it is given, and keeps all other cells of the page."""
    path = tmp_path / "page.md"
    command = [sys.executable, ".ci/trainer_table.py", "adagrad", "--output", str(path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)

    assert "optim: adagrad: equal\n" in done.stdout
    assert path.read_text(encoding="utf-8") == TEXT


@pytest.mark.parametrize("kind", [Trainer, MFTrainer])
def test_just_in_time_checkpoints_leave_no_handler(kind, tmp_path):
    """With ``enable_jit_checkpoint``, SIGTERM has its former handler after the training."""
    before = signal.getsignal(signal.SIGTERM)
    trainer = new_trainer(kind, tmp_path, enable_jit_checkpoint=True, max_steps=1)
    try:
        assert signal.getsignal(signal.SIGTERM) != before
        trainer.train()
        after = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert after == before


@needs_options
def test_no_cell_is_unexplained():
    """Each cell is "equal", links to a documented difference, or says why nothing is compared."""
    link = r"\[.+\]\(.+\)"
    explained = rf"equal|equal but for .+{link}|cannot train here: needs .+|refused: {link}"

    assert len(CELLS) == len(ROWS)
    for name, each in CELLS.items():
        assert re.fullmatch(explained, each), name


@needs_options
def test_every_option_has_a_row_or_a_reason():
    """Each optimizer and schedule has a row, and each other option a row or a reason."""
    names = {section: {r.name for r in ROWS if r.section == section} for section, _ in CELLS}
    assert names["optim"] == {each.value for each in OptimizerNames}
    assert names["lr_scheduler_type"] == {each.value for each in SchedulerType}

    rows = {name for row in ROWS for name in row.arguments}
    reasons = [name for each in NOT_COMPARED.values() for name in each]
    assert len(set(reasons)) == len(reasons)
    assert rows.isdisjoint(reasons)
    options = {each.name for each in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert rows | set(reasons) | BY_ALL_ROWS == options | RENAMED


BY_ALL_ROWS = {
    *("learning_rate", "per_device_eval_batch_size", "per_device_train_batch_size"),
    *("hub_always_push", "hub_model_id", "hub_token", "resume_from_checkpoint"),
}
"""Options that the functions of the rows set."""

RENAMED = {"activation_checkpointing", "activation_checkpointing_kwargs"}
"""Options that transformers before 5.23 only knows as ``gradient_checkpointing``."""


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"log": [{"step": 1, "loss": 2.0001}]}, "`loss` in the log at step 1: 2.0 and 2.0001"),
        ({"log": [{"step": 1}]}, "`loss` in the log at step 1: 2.0 and None"),
        ({"log": []}, "steps of the log: [1] and []"),
        ({"tensors": {"head": torch.tensor([1.0, 100.002])}}, "head by 2.0e-03"),
        ({"tensors": {"head": torch.tensor([1.0, math.nan])}}, "head by nan"),
        ({"tensors": {}}, "names of tensors"),
        ({"facts": {"files": []}}, "None and {'files': []}"),
    ],
)
def test_a_difference_is_found(change, phrase):
    """A number, weight or file that differs is reported; smaller differences and times are not."""
    stock = Outcome([{"step": 1, "loss": 2.0}], {"head": torch.tensor([1.0, 100.0])})
    close = [{"step": 1, "loss": 2.00001, "train_runtime": 1.0}]

    assert differences(stock, stock._replace(**change)) == [phrase]
    assert not differences(stock, stock._replace(log=close))
