"""Trackers of a Trainer get what the model says."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mfwrap.callbacks import SampleMonitor
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.records import read_json_lines
from mfwrap.trainer import MFTrainer
from support.trackers import have_wandb_offline, trackio_rows, wandb_rows
from support.trainer_runs import new_trainer, tiny_llama


def run(folder, tracker):
    """Train with a tracker; return the texts by step."""
    tokenizer = byte_tokenizer()
    model = tiny_llama()
    model.resize_token_embeddings(len(tokenizer))
    trainer = new_trainer(
        MFTrainer,
        folder,
        model=model,
        callbacks=[SampleMonitor(["a *b*\n# c"], step_interval=2, max_new_tokens=3)],
        extras={"processing_class": tokenizer},
        report_to=tracker,
        run_name="run",
    )
    trainer.train()
    return {one["step"]: one["text"] for one in read_json_lines(folder / "samples.jsonl")}


def test_tensorboard(tmp_path):
    """TensorBoard has a text for each prompt and step, with its marks as they are."""
    texts = run(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "runs" / "samples"))
    events.Reload()
    [tag] = events.Tags()["tensors"]
    found = {each.step: each.tensor_proto.string_val[0].decode() for each in events.Tensors(tag)}

    assert tag.startswith("samples/0 (raw)")
    assert list(found) == list(texts) == [0, 2, 4]
    assert all(text.startswith("    a *b*\n    # c\n") for text in found.values())


def test_wandb(tmp_path, monkeypatch):
    """The history of wandb has a table at each step."""
    have_wandb_offline(tmp_path, monkeypatch)
    texts = run(tmp_path / "run", "wandb")
    rows = [row for row in wandb_rows(tmp_path) if any("samples" in name for name in row)]

    assert [row["train/global_step"] for row in rows] == list(texts)
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("**/samples_*.table.json")]
    assert sorted(table["data"][0][0] for table in tables) == list(texts)


@pytest.mark.slow
def test_trackio(tmp_path, monkeypatch):
    """The database of trackio has a table at each step."""
    pytest.importorskip("trackio", reason="needs trackio")
    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    texts = run(tmp_path / "run", "trackio")
    rows = [row for row in trackio_rows(tmp_path / "trackio") if "samples" in row]

    assert [row["train/global_step"] for row in rows] == list(texts)
