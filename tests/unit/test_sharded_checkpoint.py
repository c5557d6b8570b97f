"""Any number of ranks can resume from a sharded checkpoint."""

import functools
import json
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, MultiStepLR, SequentialLR

from mfwrap import MFTrainOneStepCell, WithLossCell, sharded_checkpoint
from mfwrap.checkpoints.manifest import write_manifest
from mfwrap.checkpoints.verification import verify
from mfwrap.sharded_checkpoint import ShardedSaver, load_sharded, save_sharded
from support.fsdp.checkpoints import (
    end_the_group_first,
    load,
    load_damaged,
    load_into_another,
    refuse_folders,
    save,
    save_by_torch_alone,
    save_later,
    save_later_in_vain,
    tied,
)
from support.ranks.pipelines import save_and_load
from support.ranks.pool import RankPool
from support.training_state import assert_same_state

OPTIMIZERS = ["fused AdamW", "fused SGD"]
FOREIGN = ["layers", "root", "replicas", "ddp"]


def assert_same(actual, expected):
    """Assert that two states have the same names and bitwise equal values."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.fixture(scope="module", params=OPTIMIZERS)
def optimizer(request) -> str:
    """Return the name of each optimizer in turn."""
    return request.param


@pytest.fixture(scope="module", params=["layers", "ddp"])
def checkpoint(request, optimizer, two_ranks, tmp_path_factory):
    """Save a checkpoint on two ranks, of a sharded or a replicated network.

    Returns:
        The folder, the layout, and the states that `save` returns.
    """
    folder = str(tmp_path_factory.mktemp("checkpoint") / "four steps")
    saved, other = two_ranks.run(save, folder, request.param, optimizer)
    assert_same(other["saved"], saved["saved"])
    return {"folder": folder, "layout": request.param, **saved}


@pytest.mark.parametrize("layout", FOREIGN)
def test_two_ranks_resume_with_any_layout(two_ranks, checkpoint, optimizer, layout):
    """The loaded state is bitwise the saved state; with the same layout, the final states agree."""
    for rank in two_ranks.run(load, checkpoint["folder"], layout, optimizer):
        assert_same(rank["loaded"], checkpoint["saved"])
        if layout == checkpoint["layout"]:
            assert_same(rank["end"], checkpoint["end"])


@pytest.mark.parametrize("layout", ["layers", "ddp"])
def test_saved_in_the_background(two_ranks, optimizer, tmp_path, layout):
    """A checkpoint that is written two steps later holds the state of the step of `save`."""
    folder = str(tmp_path / "checkpoint")
    saved, _ = two_ranks.run(save_later, folder, layout, optimizer)
    loaded, _ = two_ranks.run(load, folder, layout, optimizer)

    assert_same(loaded["loaded"], saved["saved"])
    assert_same(loaded["end"], saved["end"])


def test_saved_in_the_background_by_one_process(optimizer, tmp_path):
    """Without a process group, one process saves and loads the same state."""
    folder = str(tmp_path / "checkpoint")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        saved = save_later(0, folder, "plain", optimizer)

    assert_same(load(0, folder, "plain", optimizer)["loaded"], saved["saved"])


def test_a_save_in_the_background_that_fails(two_ranks, tmp_path):
    """All ranks raise the error of one, where they wait; the folder is no checkpoint."""
    full = "OSError: [Errno 28] No space left on device"
    for errors in two_ranks.run(save_later_in_vain, str(tmp_path)):
        assert errors[0] == full
        assert errors[1].startswith("MemoryError: a checkpoint in the background needs a copy of")
        assert errors[1].endswith("are available; use `save_sharded`")
        assert errors[2] == full
        assert errors[3].startswith("FileExistsError: `folder` must be empty")
        assert len(errors) == 4
    whole = {path.parent.name for path in tmp_path.glob("*/mfwrap_manifest.json")}
    assert whole == {"last"}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tied_weights(two_ranks, tmp_path, num_ranks):
    """Tied weights, and a buffer that is not contiguous, are saved and loaded; they stay tied."""
    if num_ranks == 2:
        assert two_ranks.run(tied, str(tmp_path)) == [True, True]
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        assert tied(0, str(tmp_path))


def test_folders_that_ranks_cannot_share(two_ranks, tmp_path):
    """Folders that differ, and an error on one rank, are errors on all ranks."""
    for errors in two_ranks.run(refuse_folders, str(tmp_path)):
        assert errors[0].startswith("ValueError: `folder` must be the same on all ranks, got ")
        assert errors[1].startswith("NotADirectoryError")


def test_the_process_group_ends_before_the_writer(tmp_path):
    """The ranks do not write one half each and call it a checkpoint."""
    with RankPool(2, tmp_path) as ranks:
        for errors in ranks.run(end_the_group_first, str(tmp_path / "checkpoint")):
            assert len(errors) == 1
            assert "close it before `destroy_process_group`" in errors[0]
    assert not list(tmp_path.rglob("mfwrap_manifest.json"))


def test_a_script_that_ends_while_it_is_written(tmp_path):
    """Python waits for the thread, which can still compute checksums: the checkpoint is whole."""
    program = textwrap.dedent(
        f"""
        import threading, torch
        from mfwrap import MFTrainOneStepCell, WithLossCell, sharded_checkpoint
        network = WithLossCell(torch.nn.Linear(2, 1), torch.nn.MSELoss())
        optimizer = torch.optim.SGD(network.parameters(), 0.1, fused=True)
        write = sharded_checkpoint.save_tensors
        def later(*arguments):
            threading.main_thread().join()  # until Python ends
            write(*arguments)
        sharded_checkpoint.save_tensors = later
        saver = sharded_checkpoint.ShardedSaver(MFTrainOneStepCell(network, optimizer))
        saver.save({str(tmp_path / "checkpoint")!r})
        """
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)

    assert (ended.returncode, "could not be written" in ended.stderr) == (0, False), ended.stderr
    assert verify(tmp_path / "checkpoint").caveat is None


def milestones(optimizer):
    """Return schedules whose states have numbers as keys."""
    steps = functools.partial(MultiStepLR, optimizer, [2, 4, 6])
    return {
        "alone": steps,
        "in a sequence": lambda: SequentialLR(optimizer, [ConstantLR(optimizer), steps()], [1]),
        "in a chain": lambda: ChainedScheduler([steps()]),
    }


@pytest.mark.parametrize("version", ["this one", "an earlier one"])
@pytest.mark.parametrize("kind", ["alone", "in a sequence", "in a chain"])
def test_a_schedule_with_numbers_as_keys(tmp_path, monkeypatch, kind, version):
    """Milestones are numbers again, so the rates after a resume are those without one."""
    if version == "an earlier one":
        monkeypatch.setattr(sharded_checkpoint, "_for_json", lambda state: state)

    def new():
        network = WithLossCell(torch.nn.Linear(2, 1), torch.nn.MSELoss())
        optimizer = torch.optim.SGD(network.parameters(), 0.1, fused=True)
        schedule = milestones(optimizer)[kind]()
        return MFTrainOneStepCell(network, optimizer, lr_scheduler=schedule), schedule

    def rates(cell, number):
        batch = torch.ones(1, 2), torch.ones(1, 1)
        return [float(cell(*batch).learning_rate) for _ in range(number)]

    whole, _ = new()
    expected = rates(whole, 7)
    cell, schedule = new()
    assert rates(cell, 3) == expected[:3]
    save_sharded(tmp_path / "checkpoint", cell, schedule)
    cell, schedule = new()
    load_sharded(tmp_path / "checkpoint", cell, schedule)

    assert rates(cell, 4) == expected[3:]
    assert len(set(expected)) > 2


def test_a_closed_saver():
    """It can be closed again, and says so if it is asked to save."""
    network = WithLossCell(torch.nn.Linear(2, 1), torch.nn.MSELoss())
    optimizer = torch.optim.SGD(network.parameters(), 0.1, fused=True)
    with ShardedSaver(MFTrainOneStepCell(network, optimizer)) as saver:
        saver.close()
    with pytest.raises(RuntimeError, match="this ShardedSaver is closed; make a new one"):
        saver.save("folder")


def test_one_process_resumes_from_two(checkpoint, optimizer):
    """One process without a process group loads whole tensors from the shards of two ranks."""
    assert_same(load(0, checkpoint["folder"], "plain", optimizer)["loaded"], checkpoint["saved"])


def test_something_was_learned_before_saving(checkpoint):
    """The saved state differs from the initial one, so that the comparisons mean something."""
    saved = checkpoint["saved"]

    assert (saved["applied_updates"], saved["skipped_updates"]) == (3, 1)
    assert saved["scale"] != 1024
    assert saved["epoch"] == 3
    assert not torch.equal(saved["weight model.first.weight"], saved["average model.first.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 4])
def test_more_ranks_resume_from_two(checkpoint, optimizer, tmp_path, number):
    """Three and four ranks load a checkpoint of two ranks, which was sharded or replicated."""
    with RankPool(number, tmp_path) as ranks:
        for rank in ranks.run(load, checkpoint["folder"], "layers", optimizer):
            assert_same(rank["loaded"], checkpoint["saved"])


def test_a_checkpoint_that_does_not_fit_changes_nothing(two_ranks, tmp_path):
    """The error names the difference, and the training state is unchanged."""
    folder = str(tmp_path / "checkpoint")
    two_ranks.run(save, folder, "layers", "fused AdamW")
    names_differ = (
        "KeyError: \"the checkpoint's names differ from the cell's: the checkpoint lacks "
    )
    expected = {
        "other loss scale": f"{names_differ}[] and has the unknown names ['cell",
        "more buffers": f"{names_differ}['network",
        "fewer parameters": "KeyError: \"the optimizer's parameter groups differ from the saved",
        "other order": (
            "KeyError: \"the optimizer's parameter groups differ from the saved ones: expected "
        ),
        "no schedule": f"ValueError: {folder}/mfwrap_sharded.json holds the state of a schedule",
        "no checkpoint": "FileNotFoundError",
        "not empty": "FileExistsError: `folder` must be empty, got",
    }
    for rank in two_ranks.run(load_into_another, folder):
        assert rank["unchanged"]
        assert rank["messages"].keys() == expected.keys()
        for case, message in rank["messages"].items():
            assert message.startswith(expected[case])


def test_a_checkpoint_without_its_record_is_incomplete(two_ranks, tmp_path):
    """A missing record or manifest, or a record of another version, is refused."""
    folder = tmp_path / "checkpoint"
    two_ranks.run(save, str(folder), "layers", "fused SGD")
    (folder / "mfwrap_manifest.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint: mfwrap_manifest\.json is missing; there is"):
        load(0, str(folder), "plain", "fused SGD")

    record = folder / "mfwrap_sharded.json"
    content = json.loads(record.read_text(encoding="utf-8"))
    record.write_text(json.dumps(content | {"format_version": 0}), encoding="utf-8")
    write_manifest(folder)
    with pytest.raises(ValueError, match=r"mfwrap_sharded\.json: expected format_version 1, got 0"):
        load(0, str(folder), "plain", "fused SGD")

    record.unlink()
    with pytest.raises(FileNotFoundError, match=r"mfwrap_sharded\.json"):
        load(0, str(folder), "plain", "fused SGD")


def test_a_checkpoint_of_an_earlier_version(checkpoint, optimizer, tmp_path):
    """A checkpoint without a manifest, as earlier versions wrote it, loads with a warning."""
    folder = Path(shutil.copytree(checkpoint["folder"], tmp_path / "copy"))
    (folder / "mfwrap_manifest.json").unlink()
    record = json.loads((folder / "mfwrap_sharded.json").read_text(encoding="utf-8"))
    del record["has_manifest"]
    (folder / "mfwrap_sharded.json").write_text(json.dumps(record), encoding="utf-8")

    with pytest.warns(UserWarning, match="because it has no manifest"):
        loaded = load(0, str(folder), "plain", optimizer)["loaded"]

    assert_same(loaded, checkpoint["saved"])


def test_a_flipped_bit_in_a_shard(two_ranks, tmp_path):
    """All ranks raise one error: file, tensor, and the checkpoint before it. Nothing changes."""
    for step in (1, 2):
        two_ranks.run(save, str(tmp_path / f"step-{step}"), "layers", "fused SGD")
    shard = max((tmp_path / "step-2").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    first, second = two_ranks.run(load_damaged, str(tmp_path / "step-2"))

    assert first == second
    assert first["unchanged"]
    assert f"{shard.name} is damaged (checksum of tensor " in first["message"]
    assert first["message"].endswith(f"newest intact checkpoint before it: {tmp_path / 'step-1'}")


def test_nothing_in_a_checkpoint_is_pickled(checkpoint):
    """The files of a checkpoint are safetensors and JSON only."""
    kinds = {path.suffix for path in Path(checkpoint["folder"]).iterdir()}

    assert kinds == {".safetensors", ".json"}


def test_torchs_own_checkpoints_take_a_cell(two_ranks, tmp_path):
    """torch.distributed.checkpoint saves and loads the state of a cell."""
    assert two_ranks.run(save_by_torch_alone, str(tmp_path / "checkpoint")) == [True, True]


@pytest.mark.slow
def test_a_pipeline_resumes_with_the_same_stages(two_ranks, tmp_path):
    """Each rank resumes its own stages bitwise; other stages are refused on all ranks."""
    first, second = two_ranks.run(save_and_load, str(tmp_path))

    for rank in (first, second):
        assert_same_state(*rank["states"])
    assert first["errors"][1:] == second["errors"][1:]
    other_stages, plain, clash = first["errors"]
    assert "expected a checkpoint of stage_0 on this rank, got one of stage_0,stage_2 and of" in (
        other_stages
    )
    assert "expected a checkpoint of a network without a pipeline on this rank" in plain
    assert "'averages/0.0.weight' in stage_0 and stage_1; build the average from" in clash
