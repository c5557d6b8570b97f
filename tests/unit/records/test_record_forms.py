"""Records of runs of earlier releases are recognized without a list and without ``run.json``."""

import json
import shutil
import warnings

import pytest
from torch import nn
from transformers import Trainer

from mfwrap import Model, StepConfig
from mfwrap.callbacks import (
    CheckpointMonitor,
    LocalNormMonitor,
    MetricsRecorder,
    TrainingStateMonitor,
)
from mfwrap.checkpoints.manifest import MANIFEST
from mfwrap.checkpoints.written_files import LIST
from mfwrap.records import read_json_lines
from mfwrap.records.record_forms import recognized_names
from mfwrap.trainer import MFTrainer
from support.model_runs import batches, classifier, sgd
from support.trainer_runs import new_trainer

OTHERS = '{"step": 7, "loss": 1.5, "mine": true}\n'


def make_older(folder):
    """Delete what a run of an earlier release does not have."""
    for name in (LIST, "run.json"):
        (folder / name).unlink(missing_ok=True)


def trained(kind, folder, resume=None, *, max_steps=2, **extras):
    """Train with the monitors that any Trainer may have, and save at each step."""
    monitors = [
        CheckpointMonitor(save_checkpoint_steps=1),
        TrainingStateMonitor(local_loss_format="jsonl"),
    ]
    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": max_steps}
    trainer = new_trainer(kind, folder, callbacks=monitors, extras=extras, **saves)
    trainer.train(resume_from_checkpoint=resume)


@pytest.mark.parametrize("resume", [None, True])
@pytest.mark.parametrize("kind", [Trainer, MFTrainer])
def test_a_run_in_progress(tmp_path, kind, resume):
    """A run of an earlier release can be resumed and repeated with its own monitors."""
    trained(kind, tmp_path)
    make_older(tmp_path)
    records = {path.name for path in tmp_path.glob("*.jsonl")}
    assert "checkpoint_health.jsonl" in records

    assert recognized_names(tmp_path) >= records
    if kind is MFTrainer and resume is None:
        for path in tmp_path.glob("checkpoint-*"):
            shutil.rmtree(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # records of the earlier run are renamed
        trained(kind, tmp_path, resume, max_steps=3)

    assert len(read_json_lines(tmp_path / "checkpoint_health.jsonl")) == 3


def test_a_run_of_a_model(tmp_path):
    """`Model` can be trained again in the folder, whose records have no steps."""
    network = classifier()
    model = Model(network, nn.CrossEntropyLoss(), sgd(network))
    (tmp_path / "metrics.jsonl").write_text('{"max_grad_norm": 1.0}\n')

    with pytest.warns(UserWarning, match="records of an earlier run"):
        model.train(1, batches(), [MetricsRecorder(tmp_path)])


def test_the_records_of_all_monitors(tmp_path):
    """Each file of records is recognized by its first line."""
    monitors = [
        *(MetricsRecorder(tmp_path), LocalNormMonitor()),
        TrainingStateMonitor(fingerprints=True, weight_state_format="jsonl"),
    ]
    extras = {"step": StepConfig(local_norm=True)}
    new_trainer(MFTrainer, tmp_path, callbacks=monitors, extras=extras).train()
    make_older(tmp_path)

    records = {path.name for path in tmp_path.glob("*.jsonl")}
    assert len(records) >= 5
    assert recognized_names(tmp_path) == records


def test_files_without_records(tmp_path):
    """An empty file counts beside records of a run only, and other tools' records never do."""
    for name in ("progress.jsonl", "abnormal_global_norm.json", "notes.jsonl"):
        (tmp_path / name).touch()
    for name in ("metrics", "anomalies", "throughput", "training_state", "rank_clock"):
        (tmp_path / f"{name}_rank1.jsonl").write_text(OTHERS)
    (tmp_path / "local_norms.jsonl").write_text("[]\n")
    (tmp_path / "training_state.jsonl").write_text(
        json.dumps({"step": 1, "epoch": 0.5, "loss": 1.0, "learning_rate": 0.1})
    )
    assert recognized_names(tmp_path) == set()

    (tmp_path / "metrics.jsonl").write_text('{"max_grad_norm": 1.0}\n')
    own = {"metrics.jsonl", "progress.jsonl", "abnormal_global_norm.json"}
    assert recognized_names(tmp_path) == own


@pytest.mark.parametrize("is_own", [True, False])
def test_a_checkpoint_that_lists_records(tmp_path, is_own):
    """It counts if it has a manifest, that is, if mfwrap has written it."""
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    if is_own:
        (checkpoint / MANIFEST).touch()
    content = {"files": {"metrics.jsonl": {}, "../other.jsonl": {}, "gone.jsonl": {}}}
    (checkpoint / "mfwrap_records_0.json").write_text(json.dumps(content))
    (checkpoint / "mfwrap_records_1.json").write_text("[]")
    (tmp_path / "metrics.jsonl").write_text(OTHERS)

    assert recognized_names(tmp_path) == ({"metrics.jsonl"} if is_own else set())
