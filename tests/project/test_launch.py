"""Recipe scripts and the commands of docs/how-to/launch.md train with two processes, as written."""

import json
import shutil
import socket
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from mfwrap.records.json_lines import read_json_lines
from mfwrap.records.run_record import read_run
from support.crash.contents import contents, differences
from support.launches import FILES, PAGE, end_of, is_served, start, wait_until, write_recipe
from support.pages import commands
from support.paths import ROOT
from support.ports import free_port

pytestmark = pytest.mark.slow

SMALL = ["--micro_batch_size=2", "--sequence_length=32", "--warmup_steps=2"]
TIMEOUT_SECONDS = 480
"""Time limit of one training; long enough for a slow machine."""


def launch(recipe, folder, *settings):
    """Run a recipe with torchrun on two processes, and return their output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--standalone", "-m", f"mfwrap.recipes.{recipe}", f"--output_dir={folder}"]
    ended = subprocess.run(
        [*command, *SMALL, *settings],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def test_the_cells_recipe(tmp_path):
    """Only the main process logs and saves the model; local norms of both ranks are recorded."""
    printed = launch("causal_lm", tmp_path, "--max_steps=6", "--logging_steps=2")
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if "loss" in record]
    record = read_run(tmp_path)

    assert steps == [1, 2, 3, 4, 5, 6]
    assert printed.count("{ Epoch") == 3
    assert printed.count("loss on held-out text") == 1
    assert list(record.local_norms) == [0, 1]
    assert list(record.rank_losses) == [0, 1]
    # The two ranks train on different data, so their norms differ.
    for group, own in record.local_norms[0].items():
        other = record.local_norms[1][group]
        assert own.steps == other.steps == [1, 2, 3, 4, 5, 6]
        assert all(ours != theirs for ours, theirs in zip(own.values, other.values, strict=True))
    assert (tmp_path / "run.png").exists()
    for name in ("model", "model_ema"):
        weights = LlamaForCausalLM.from_pretrained(tmp_path / name).parameters()
        assert all(torch.isfinite(weight).all() for weight in weights)


def test_accelerates_loop(tmp_path):
    """Two processes need half as many updates; a checkpoint has the random states of both."""
    settings = ["--num_train_epochs=1", "--max_samples=48", "--per_print_times=2"]
    printed = launch("accelerate_loop", tmp_path, *settings, "--checkpointing_steps=3")
    names = {path.name for path in (tmp_path / "step_6").iterdir()}

    # 48 texts make 24 micro-batches, 12 on each process. 12 micro-batches make 6 updates, and every
    # second update is printed.
    assert printed.count("{ Epoch") == 3
    assert printed.count("loss on held-out text") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "step_3", "step_6"]
    assert {"mfwrap_step.json", "mfwrap_step.safetensors", "model.safetensors"} <= names
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= names
    weights = LlamaForCausalLM.from_pretrained(tmp_path / "model").parameters()
    assert all(torch.isfinite(weight).all() for weight in weights)


TWO_MACHINES = {
    "--nproc-per-node": "1",
    "--num_processes": "2",
    "--rdzv-endpoint": "127.0.0.1:{port}",
    "--main_process_ip": "127.0.0.1",
    "--main_process_port": "{port}",
    "--machine_rank": "{machine}",
}
"""What a command for several machines gets instead, to run as two machines on this one."""


def listens(port):
    """Return whether a process of this machine listens at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def on_two_machines(words, machine, port):
    """Return a command with host, port and counts put in; any other command stays as it is."""
    if "first-machine" not in " ".join(words):
        return words
    return [
        TWO_MACHINES[before].format(port=port, machine=machine) if before in TWO_MACHINES else word
        for before, word in pairwise(["", *words])
    ]


def exports():
    """Return the variables that the page exports before the commands for several machines."""
    return dict(word.split("=") for words in commands(PAGE, "export") for word in words)


def launches():
    """Return the launchers' commands on the page, with the launcher and the line as ids."""
    return [
        pytest.param([program, *words], id=f"{program}-{number}")
        for program in ("torchrun", "accelerate")
        for number, words in enumerate(commands(PAGE, program), 1)
    ]


@pytest.mark.parametrize("words", launches())
def test_commands_of_the_page(words, tmp_path):
    """Each command of the page, as written, is one training of two processes, and ends with 0."""
    write_recipe(tmp_path)
    shutil.copy(FILES / "accelerate.yaml", tmp_path)
    port = free_port()
    num_machines = 2 if "first-machine" in " ".join(words) else 1
    variables = exports() if num_machines > 1 else {}
    machines = [on_two_machines(words, machine, port) for machine in range(num_machines)]
    launched = [start(machines[0], tmp_path, **variables)]
    if num_machines > 1:
        # Here both machines are localhost. If the second one hosted the rendezvous, accelerate
        # would refuse to start the first.
        wait_until(lambda: is_served(port), TIMEOUT_SECONDS, launched[0].output.read_text)
        launched.append(start(machines[1], tmp_path, **variables))
    printed = end_of(launched)

    run = tmp_path / "runs" / "causal_lm"
    records = read_json_lines(run / "metrics.jsonl")
    assert [each["step"] for each in records if "loss" in each] == [1, 2, 3, 4, 5, 6]
    assert len([*(run / "checkpoint-6").glob("rng_state_*")]) == 2
    assert printed.count("run folder: runs/causal_lm") == 1


@pytest.mark.timeout(900)
def test_a_machine_that_dies_comes_back(tmp_path):
    """A machine that has died and starts the command again ends the training with its bits."""
    one_machine, two_machines = commands(PAGE, "torchrun")
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    for folder in (alone, killed):
        folder.mkdir()
        write_recipe(folder, max_steps=1000, save_steps=100)
    end_of([start(["torchrun", *one_machine], alone)])

    port = free_port()
    command = ["torchrun", *on_two_machines(two_machines, 1, port)]
    variables = exports()
    run = killed / "runs" / "causal_lm"
    with start(command, killed, **variables) as first:
        # The first machine, which stays, is the one that listens at the port.
        wait_until(lambda: listens(port), 120, first.output.read_text)
        with start(command, killed, **variables):
            wait_until((run / "checkpoint-100").exists, 300, first.output.read_text)
        end_of([first, start(command, killed, **variables)])

    assert differences(contents(alone / "runs" / "causal_lm"), contents(run)) == []


def test_the_page_has_a_command_of_each_kind():
    """The page starts one and several machines; README.md starts torchrun in the same way.

    Where a machine that has died may come back, each start needs an address of its own.
    """
    several = ["first-machine" in " ".join(each.values[0]) for each in launches()]

    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert several == [False, True, False, True]
    assert commands(PAGE, "export") == [[f"{variable}=1"]] * 2
    assert f"export {variable}=1\n" in (FILES / "train.slurm").read_text(encoding="utf-8")
    assert skypilot()["envs"][variable] == "1"
    assert commands(ROOT / "README.md", "torchrun") == commands(PAGE, "torchrun")[:1]


def test_the_lines_of_the_readme(tmp_path):
    """README.md's lines for a recipe run in order; the second training has finished before.

    A small recipe takes the place of the one that ``mfwrap init`` writes.
    """
    page = ROOT / "README.md"
    write_recipe(tmp_path)
    init, *others = commands(page, "mfwrap")
    (launched,) = commands(page, "torchrun")
    lines = [*(["mfwrap", *words] for words in others), ["torchrun", *launched]]
    printed = [end_of([start(line, tmp_path)]) for line in lines]

    assert [words[0] for words in (init, *others)] == ["init", "train", "report"]
    assert printed[-1].count("runs/causal_lm: this run has finished before") == 1


def skypilot():
    """Return the job for SkyPilot."""
    return yaml.safe_load((FILES / "skypilot.yaml").read_text(encoding="utf-8"))


def test_the_run_of_skypilots_job(tmp_path):
    """The shell script of the job trains on two nodes of one process."""
    write_recipe(tmp_path)
    job = skypilot()
    script = job["run"].replace("/runs/", f"{tmp_path}/runs/").replace(":29500", f":{free_port()}")
    variables = {
        **job["envs"],
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_NODES": str(job["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_TASK_ID": "sky-managed-1",
    }
    nodes = range(job["num_nodes"])
    printed = end_of([start(["bash", "-c", script], tmp_path, **variables) for _ in nodes])

    assert list(job["volumes"]) == ["/runs"]
    assert printed.count(f"run folder: {tmp_path}/runs/sky-managed-1") == 1
    assert len([*(tmp_path / "runs/sky-managed-1/checkpoint-6").glob("rng_state*")]) == 2


def test_skypilot_accepts_the_job(tmp_path):
    """SkyPilot's own schema and parser accept the job."""
    pytest.importorskip("sky", reason="needs SkyPilot: pip install skypilot")
    program = "import sky; print(*sky.Task.from_yaml('skypilot.yaml').resources)"
    shutil.copy(FILES / "skypilot.yaml", tmp_path)
    # SkyPilot writes to the home folder.
    printed = end_of([start([sys.executable, "-c", program], tmp_path, HOME=str(tmp_path))])

    assert "Kubernetes" in printed
    assert "H100" in printed
