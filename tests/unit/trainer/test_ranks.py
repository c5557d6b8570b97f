"""Several ranks write a checkpoint together, resume from it, and stop after the same step."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from torch import multiprocessing

from mfwrap.checkpoints.verification import check_checkpoint
from mfwrap.records import read_json_lines
from support.paths import TESTS
from support.ports import free_port
from support.recipe_texts import recipe_text
from support.resumed_training import files, resume
from support.trainer_ranks import (
    ENDINGS,
    NUM_RANKS,
    NUM_STEPS,
    RESUMED,
    SETTINGS,
    run_rank,
    told_twice,
)
from support.training_state import assert_same_state

pytestmark = pytest.mark.slow

RANKS = range(NUM_RANKS)
OF_ALL = {
    "config.json",
    "generation_config.json",
    "mfwrap_manifest.json",
    "mfwrap_step.json",
    "mfwrap_step.safetensors",
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
}
OF_EACH = [{f"mfwrap_position_{rank}.json", f"rng_state_{rank}.pth"} for rank in RANKS]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train on all ranks; return the folder of the trainings and the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run_rank, args=(str(folder), free_port()), nprocs=NUM_RANKS)
    return folder, [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in RANKS]


def test_files_of_a_checkpoint(run):
    """A checkpoint has two files per rank and the shared files; no temporary files are left.

    The manifest lists all files except the manifest itself.
    """
    folder = run[0] / "alone"

    assert {path.name for path in folder.iterdir()} == {
        f"checkpoint-{step}" for step in range(1, NUM_STEPS + 1)
    }
    for checkpoint in folder.iterdir():
        assert set(files(checkpoint)) == OF_ALL.union(*OF_EACH)
        listed = json.loads((checkpoint / "mfwrap_manifest.json").read_text())["files"]
        assert set(listed) == set(files(checkpoint)) - {"mfwrap_manifest.json"}
        check_checkpoint(checkpoint)


def test_ranks_stand_at_different_places(run):
    """Random states and losses differ between ranks, so each rank needs its own files."""
    folder = run[0] / "alone" / "checkpoint-5"
    first, last = (json.loads((folder / f"mfwrap_position_{r}.json").read_text()) for r in RANKS)

    assert first["loss_since_last_log"] != last["loss_since_last_log"]
    assert first["epoch_random_states"]["cpu"] != last["epoch_random_states"]["cpu"]


def since(step, end):
    """Return the part of a final state that a run resumed after `step` must reproduce.

    A checkpoint holds the log of rank 0, with rank 0's local norms, so only later entries can be
    compared. A run resumed after its last step does not load random states.
    """
    log = [entry for entry in json.loads(end["/_Rest/log"]) if entry["step"] > step]
    end = {name: value for name, value in end.items() if step < NUM_STEPS or "genera" not in name}
    return end | {"/_Rest/log": json.dumps(log)}


@pytest.mark.parametrize("step", RESUMED)
@pytest.mark.parametrize("rank", RANKS)
def test_resumed(run, rank, step):
    """On each rank a resumed run is bit-identical to one that was never stopped."""
    results = run[1][rank]

    assert_same_state(since(step, results["alone"]), since(step, results["resumed"][step]))


@pytest.mark.parametrize("name", ENDINGS)
def test_told_to_end(run, name):
    """A SIGTERM to any rank stops all ranks after the same step; they save and exit with 75."""
    first, last = (results["told"][name] for results in run[1])

    assert first["step"] == last["step"]
    assert first["step"] in ENDINGS[name].stopped
    assert [first["status"], last["status"]] == [75, 75]
    assert first["handler is back"]
    assert last["handler is back"]


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("rank", RANKS)
def test_told_to_end_and_resumed(run, rank, name):
    """A run resumed after a SIGTERM ends like a run that was never stopped."""
    expected, told = run[1][rank]["alone"], run[1][rank]["told"][name]

    assert_same_state(since(told["step"], expected), since(told["step"], told["end"]))


def test_refused_on_all_ranks(run):
    """All ranks raise the error for a checkpoint that does not fit; no rank hangs."""
    for results in run[1]:
        [said] = results["refused"]
        assert "it holds an average of the weights, but `ema` is None" in said


@pytest.mark.parametrize("rank", RANKS)
def test_nodes_with_disks_of_their_own(run, rank):
    """Without ``save_on_each_node``, only the first node has the files that all ranks share.

    Each node also has the files of its own ranks. No temporary files are left.
    """
    found = run[1][rank]["nodes"]["False"]
    expected = OF_EACH[rank] | (OF_ALL if rank == 0 else set())

    assert set(found) == {f"checkpoint-{step}/{name}" for step in (1, 2) for name in expected}


@pytest.mark.parametrize("rank", RANKS)
def test_saved_on_each_node(run, rank):
    """With ``save_on_each_node``, each node has a complete checkpoint with its ranks' files."""
    found = run[1][rank]["nodes"]["True"]

    assert set(found) == {
        f"checkpoint-{step}/{name}" for step in (1, 2) for name in OF_ALL | OF_EACH[rank]
    }
    check_checkpoint(run[0] / f"node {rank}, True" / "checkpoint-2")


def test_resumed_by_another_number_of_ranks(run, tmp_path, caplog):
    """One process can resume a checkpoint of two ranks; it accumulates twice as often."""
    trainer = resume(run[0] / "alone" / "checkpoint-2", tmp_path, SETTINGS)

    assert "gradient_accumulation_steps is 8 instead of 4" in caplog.text
    assert trainer.state.global_step > 2
    checkpoint = tmp_path / "checkpoint-3"
    assert "mfwrap_position.json" in files(checkpoint)
    check_checkpoint(checkpoint)


def test_told_to_end_twice(tmp_path):
    """A repeated SIGTERM ends a rank at once, without waiting for other ranks."""
    ranks = multiprocessing.spawn(
        told_twice, args=(str(tmp_path), free_port()), nprocs=NUM_RANKS, join=False
    )
    first, last = ranks.processes
    last.join()
    first.kill()
    first.join()

    assert last.exitcode == -signal.SIGTERM
    left = {name.partition(".")[0] for name in files(tmp_path)}  # by the rank that was killed
    assert left <= {"_mfwrap", "_mfwrap_ready"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_told_to_end_by_torchrun(tmp_path, number):
    """A signal to torchrun reaches its workers, which save and exit; one line says how to go on.

    A terminal sends a Ctrl-C to torchrun only: each worker has a session of its own.
    """
    script = TESTS / "support" / "trainer_ranks.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(NUM_RANKS), f"--signals-to-handle={number.name}"]
    launcher += [str(script), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(
            launcher,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout.readline() == "step 1\n"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        told = process.stdout.readlines()
        process.wait()

    saved = [line for line in told if line.startswith("saved ")]
    assert len(saved) == NUM_RANKS
    [checkpoint] = (tmp_path / "run").glob("checkpoint*")
    assert saved == [f"saved {checkpoint.name}\n"] * NUM_RANKS
    check_checkpoint(checkpoint)
    said = (tmp_path / "errors").read_text().splitlines()
    who = "Ctrl-C" if number == signal.SIGINT else "a signal"
    step = checkpoint.name.removeprefix("checkpoint-")
    line = f"mfwrap: stopped by {who} after step {step}, checkpoint {checkpoint}; continue with: "
    again = 'trainer.train(resume_from_checkpoint="auto")'
    assert [each for each in said if "mfwrap: " in each] == [line + again]
    assert not [each for each in said if each.startswith("[rank") and "Traceback" in each]


def test_a_recipe_goes_on_with_as_many_ranks(tmp_path):
    """After a Ctrl-C under torchrun, the line names the command that continues on all ranks."""
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        recipe_text(
            training={"max_steps": 10**6, "save_strategy": "no"},
            callbacks=[{"type": "MFLossMonitor", "per_print_times": 1}],
        )
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(NUM_RANKS)]
    words = [*launcher, "-m", "mfwrap", "train", str(recipe)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    errors = tmp_path / "errors"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        assert "Epoch:[" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate()

    [last] = [line for line in errors.read_text().splitlines() if "mfwrap: " in line]
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "mfwrap", "train"]
    again = shlex.join([*words, str(recipe), "--resume=auto"])
    assert last.endswith(f"; continue with: {again}")
    [checkpoint] = (tmp_path / "runs" / "small").glob("checkpoint-*")
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    # Only `--resume` takes another value.
    words = [*launcher, *shlex.split(again)[4:-1], "--resume"]
    words += ["--set", f"training.max_steps={step + 2}"]
    going = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert going.returncode == 0, going.stderr
    record = read_json_lines(tmp_path / "runs" / "small" / "metrics.jsonl")
    steps = [one["step"] for one in record if "loss" in one]
    assert steps == list(range(1, step + 3))
