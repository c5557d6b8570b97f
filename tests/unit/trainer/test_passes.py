"""A resume within a later pass over data without a length says which rows are trained on twice."""

import json
import re

import datasets
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import TrainingArguments, default_data_collator

from mfwrap.runner import parse_recipe, run_recipe
from mfwrap.trainer import MFTrainer
from support.recipe_texts import recipe_text
from support.resumed_training import StopAfter

ROWS, BATCH, UPDATES = 10, 2, 12
TWICE = "begins this pass again: the rows of its first"


class Line(nn.Module):
    """A line through the origin, which notes the numbers of the rows that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.seen = []

    def forward(self, x, labels):
        """Return the loss."""
        if self.training:
            self.seen += x.flatten().tolist()
        return {"loss": (self.layer(x / ROWS) - labels).square().mean()}


def row(number):
    """Return a row with its number."""
    return {"x": torch.tensor([float(number)]), "labels": torch.tensor([0.0])}


class Stream(IterableDataset):
    """Rows without a length."""

    def __iter__(self):
        """Yield the rows in order."""
        return map(row, range(ROWS))


class Sized(Stream):
    """The same rows, with a length."""

    def __len__(self):
        """Return the number of rows."""
        return ROWS


def repeated():
    """Return a data set that yields the rows for ever in one pass."""

    def plain():
        yield from ({"x": [float(number)], "labels": [0.0]} for number in range(ROWS))

    return datasets.IterableDataset.from_generator(plain).repeat(None)


def trained(folder, data, *, stop=None, resume=None, **settings):
    """Return the numbers of the rows that a training has seen."""
    args = TrainingArguments(
        folder,
        max_steps=UPDATES,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    trainer = MFTrainer(
        Line(),
        args,
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=[] if stop is None else [StopAfter(stop)],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.seen


def stopped_and_resumed(folder, make, stop, **settings):
    """Return the rows before the stop, those after it, and those of a run without a stop."""
    before = trained(folder / "run", make(), stop=stop, **settings)
    checkpoint = str(folder / "run" / f"checkpoint-{stop}")
    after = trained(folder / "run", make(), resume=checkpoint, **settings)
    return before, after, trained(folder / "whole", make(), **settings)


@pytest.mark.parametrize(("stop", "updates"), [(7, 2), (9, 3), (11, 1)])
def test_within_a_later_pass(tmp_path, stop, updates):
    """The warning says how many updates of the pass are trained on twice, and so they are."""
    message = re.compile(rf"checkpoint-{stop} was .* {TWICE} {updates} update\(s\) are trained")
    with pytest.warns(UserWarning, match=message):
        before, after, _ = stopped_and_resumed(tmp_path, Stream, stop)

    number = updates * BATCH
    assert after[:number] == [float(n) for n in range(number)]
    assert set(after[:number]) <= set(before[ROWS * (stop * BATCH // ROWS) :])


@pytest.mark.parametrize("stop", [1, 4, 5, 10])
def test_nothing_is_said_where_no_row_is_repeated(tmp_path, stop):
    """Within the first pass, and at the ends of passes, the resume continues exactly."""
    before, after, whole = stopped_and_resumed(tmp_path, Stream, stop)

    assert before + after == whole


@pytest.mark.parametrize(("stop", "updates"), [(2, 0), (3, 1), (4, 2), (5, 1)])
def test_passes_that_end_within_an_update(tmp_path, stop, updates):
    """A pass has 2 updates of 2 micro-batches, and a micro-batch for the update that follows."""
    settings = {"gradient_accumulation_steps": 2}
    if updates == 0:
        before, after, whole = stopped_and_resumed(tmp_path, Stream, stop, **settings)
        assert before + after == whole
        return
    with pytest.warns(UserWarning, match=rf"{TWICE} {updates} update\(s\)"):
        before, after, _ = stopped_and_resumed(tmp_path, Stream, stop, **settings)
    number = updates * 2 * BATCH
    assert before[-number:] == after[:number]


@pytest.mark.parametrize("make", [Sized, repeated])
@pytest.mark.parametrize("stop", [7, 10])
def test_what_avoids_it(tmp_path, make, stop):
    """Data with a length, and data that repeat their rows in one pass, continue exactly."""
    before, after, whole = stopped_and_resumed(tmp_path, make, stop)

    assert before + after == whole


def test_data_that_are_not_skipped(tmp_path):
    """With ``ignore_data_skip``, the user has asked for a pass from the start."""
    before, after, _ = stopped_and_resumed(tmp_path, Stream, 7, ignore_data_skip=True)

    assert before[:4] == after[:4]


@pytest.mark.filterwarnings("ignore")  # of datasets
def test_a_recipe_with_streamed_data(tmp_path):
    """`mfwrap train --resume` says it, too."""
    rows = [{"features": [float(n), 1.0], "target": float(n)} for n in range(ROWS)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = {"type": "datasets", "path": "json", "data_files": str(file), "streaming": True}
    text = recipe_text(data=None) + f"data: {json.dumps(data | {'max_eval_samples': 2})}\n"

    def run(*overrides, resume=False):
        settings = [f"training.output_dir={tmp_path / 'run'}", "training.save_strategy=steps"]
        settings += ["training.save_steps=3", "training.per_device_train_batch_size=4", *overrides]
        return run_recipe(parse_recipe(text, "r.yaml", settings), resume=resume)

    run("training.max_steps=3")
    with pytest.warns(UserWarning, match=rf"checkpoint-3 was .* {TWICE} 1 update\(s\)"):
        run("training.max_steps=6", resume=True)
