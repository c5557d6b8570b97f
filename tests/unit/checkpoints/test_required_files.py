"""A checkpoint without the files that its kind must have is incomplete."""

import json

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from mfwrap import StepConfig
from mfwrap.accelerate import attach
from mfwrap.checkpoints import manifest
from mfwrap.checkpoints.file_formats import DamagedFileError
from mfwrap.checkpoints.manifest import MANIFEST, write_manifest
from mfwrap.checkpoints.required_files import missing_part
from mfwrap.checkpoints.verification import verify
from support.checkpoint_folders import write_checkpoint
from support.paths import TESTS

TRAINER = ["mfwrap_position.json", "model.safetensors", "trainer_state.json"]
STEP = ["mfwrap_step.json", "mfwrap_step.safetensors"]


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ([], "files"),
        (TRAINER, None),
        ([*TRAINER, *STEP], "a file of the optimizer"),
        ([*TRAINER, *STEP, "optimizer.pt"], None),
        ([*TRAINER, STEP[0], "optimizer.pt"], STEP[1]),
        (["mfwrap_position_0.json", "model.safetensors"], "trainer_state.json"),
        (["trainer_state.json", "config.json", "tokenizer.model", "rng_state_0.pth"], "weights"),
        (["trainer_state.json", "optimizer_0/__0_0.distcp", "scheduler.pt"], "weights"),
        (["trainer_state.json", "global_step2/mp_rank_00_model_states.pt", *STEP], None),
        (["trainer_state.json", "pytorch_model_fsdp_0/__0_0.distcp"], None),
        (["trainer_state.json", "encoder/weights.npz"], None),
        (STEP, "files of accelerate"),
        ([*STEP, "unet/own.ckpt"], None),
        (["mfwrap_sharded.json"], "tensors"),
        (["mfwrap_sharded.json", "shard-00001.safetensors"], None),
        (["state.pt", "mfwrap_records_0.json"], None),
    ],
)
def test_what_is_missing(names, missing):
    """Each kind of checkpoint has files without which no training can resume from it."""
    assert missing_part(names) == missing


@pytest.mark.parametrize("name", ["accelerate/checkpoint", "run/checkpoint-4"])
def test_a_checkpoint_of_a_release(name):
    """Checkpoints of earlier releases have all of them."""
    entries = json.loads((TESTS / "releases" / "0.1.0" / name / MANIFEST).read_text())["files"]

    assert missing_part(entries) is None


def test_an_empty_folder_gets_no_manifest(tmp_path):
    """A folder whose files somebody has deleted does not become a checkpoint."""
    with pytest.raises(DamagedFileError, match="is incomplete: it has no files"):
        write_manifest(tmp_path)

    assert not list(tmp_path.iterdir())


def test_a_manifest_that_lists_nothing(tmp_path):
    """A checkpoint is not intact because nothing in it is damaged."""
    (tmp_path / MANIFEST).write_text(manifest._text({}))

    with pytest.raises(ValueError, match=rf"^{MANIFEST} lists no files: the checkpoint is inc"):
        verify(tmp_path)


@pytest.mark.parametrize("listed", [False, True])
def test_a_checkpoint_without_weights(tmp_path, listed):
    """A Trainer's checkpoint without weights is refused, with or without a manifest."""
    folder = write_checkpoint(tmp_path / "checkpoint-1", listed=False)
    (folder / "model.safetensors").unlink()
    if listed:
        with pytest.raises(DamagedFileError, match="checkpoint-1 is incomplete: it has no weights"):
            write_manifest(folder)
    with pytest.raises(ValueError, match=r"^it has no weights$"):
        verify(folder)


def test_a_save_whose_folder_is_emptied(tmp_path):
    """A save of a loop fails if somebody deletes what it has written."""
    accelerator = Accelerator(cpu=True)
    attach(accelerator, StepConfig())
    network = nn.Linear(2, 1)
    accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))

    class Deleting:
        """Delete the files of the checkpoint; accelerate saves this object last."""

        def state_dict(self):
            for path in tmp_path.rglob("*"):
                if path.is_file():
                    path.unlink()
            return {}

        def load_state_dict(self, state):
            """Do nothing."""

    accelerator.register_for_checkpointing(Deleting())
    with pytest.raises(DamagedFileError, match=r"is incomplete"):
        accelerator.save_state(tmp_path / "a")

    assert not (tmp_path / "a").exists()
