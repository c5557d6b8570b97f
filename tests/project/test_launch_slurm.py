"""docs/how-to/launch/train.slurm on a Slurm of one node: a job that is stopped comes back."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import pytest

from mfwrap.records.json_lines import read_json_lines
from support.launches import FILES, PAGE, environment, wait_until, write_recipe
from support.pages import commands
from support.ports import free_port

CONFIGURATION = """\
ClusterName=one
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={num_cpus} State=UNKNOWN
"""
NO_PREEMPTION = """\
PreemptType=preempt/none
PartitionName=all Nodes=ALL Default=YES
"""
PREEMPTION = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
"""Jobs of the partition ``low`` are requeued as soon as one of ``high`` needs the node."""


def why_not() -> str:
    """Return why Slurm cannot run here; an empty string if it can."""
    programs = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        return f"needs Slurm ({', '.join(missing)}): apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "needs root, as which slurmd starts jobs"


@final
class Slurm:
    """A running cluster.

    Args:
        configuration: Its slurm.conf.
    """

    def __init__(self, configuration: Path) -> None:
        self._variables = environment() | {"SLURM_CONF": str(configuration)}

    def call(self, *command: str, folder: Path | None = None) -> str:
        """Run a command of Slurm, which must succeed, and return what it prints."""
        ended = subprocess.run(
            command, cwd=folder, env=self._variables, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, f"{command}: {ended.stderr}"
        return ended.stdout.strip()

    def is_idle(self) -> bool:
        """Return whether the node is up and no job runs on it."""
        return self.call("sinfo", "--noheader", "--states=idle", "--format=%N") != ""

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until their processes have ended."""
        self.call("scancel", "--user=root")
        wait_until(self.is_idle, 120, lambda: self.call("squeue"))

    def job(self, number: str) -> dict[str, str]:
        """Return Slurm's record of a job."""
        words = self.call("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextmanager
def one_node_slurm(folder: Path, partitions: str) -> Iterator[Slurm]:
    """Run a cluster within the block.

    Args:
        folder: Folder for its files, with a short path: munge's socket is in it.
        partitions: Lines of slurm.conf for partitions and preemption.
    """
    folder.chmod(0o755)  # munged refuses a socket that other users cannot reach
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    configuration = folder / "slurm.conf"
    text = CONFIGURATION.format(
        host=socket.gethostname().split(".")[0],
        folder=folder,
        controller_port=free_port(),
        node_port=free_port(),
        # train.slurm takes its port from the job's id, which another cluster must not have, too.
        first_job=free_port(),
        num_cpus=os.cpu_count(),
    )
    configuration.write_text(text + partitions, encoding="utf-8")
    munge = folder / "munge"
    subprocess.run(["mungekey", "--create", f"--keyfile={munge}/key"], check=True)
    daemons = [
        [
            *("munged", "--foreground", f"--socket={munge}/socket", f"--key-file={munge}/key"),
            *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        ],
        ["slurmctld", "-D", "-f", str(configuration)],
        ["slurmd", "-D", "-f", str(configuration)],
    ]
    started: list[subprocess.Popen[bytes]] = []
    slurm = Slurm(configuration)
    try:
        for command in daemons:
            started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            if len(started) == 1:
                wait_until((munge / "socket").exists, 30, lambda: "munged does not start")
        wait_until(slurm.is_idle, 60, lambda: slurm.call("sinfo", "--long"))
        try:
            yield slurm
        finally:
            slurm.cancel_all()
    finally:
        for daemon in reversed(started):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
NUM_STEPS = 1000


@pytest.fixture(params=[PREEMPTION, NO_PREEMPTION], ids=["preemption", "no-preemption"])
def slurm(request):
    """Yield a running cluster, with preemption and without it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        one_node_slurm(Path(folder), request.param) as cluster,
    ):
        yield cluster


def steps_of(folder: Path) -> list[int]:
    """Return the steps that a run has recorded so far."""
    if not (folder / "metrics.jsonl").exists():
        return []
    records = read_json_lines(folder / "metrics.jsonl")
    return [record["step"] for record in records if "loss" in record]


def preempt(slurm, job):
    """Start a job that takes the node from another one."""
    del job
    slurm.call("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=true")


def signal_script(slurm, job):
    """Do what Slurm does when the time of a job is nearly up, with ``--signal=B:USR1@300``."""
    slurm.call("scancel", "--batch", "--signal=USR1", job)


@pytest.mark.parametrize("slurm", [PREEMPTION], indirect=True, ids=["preemption"])
@pytest.mark.parametrize("stop", [signal_script, preempt])
def test_a_stopped_job_is_requeued_and_resumes(slurm, tmp_path, stop):
    """A job that Slurm stops saves and is requeued; the second start resumes and finishes."""
    write_recipe(tmp_path, max_steps=NUM_STEPS, save_strategy="no")
    shutil.copy(FILES / "train.slurm", tmp_path)
    ((*options, script, recipe),) = commands(PAGE, "sbatch")
    assert options == ["--nodes", "4", "--gpus-per-node", "8", "--cpus-per-task", "64"]
    # This machine is one node without GPUs.
    job = slurm.call(
        *("sbatch", "--parsable", "--nodes", "1", "--cpus-per-task", "1", "--output=log.txt"),
        *(script, recipe),
        folder=tmp_path,
    )
    run, log = tmp_path / "runs" / "causal_lm", tmp_path / "log.txt"

    def printed() -> str:
        return log.read_text(encoding="utf-8")[-6000:] if log.exists() else "no output"

    wait_until(lambda: bool(steps_of(run)), 300, printed)
    stop(slurm, job)
    wait_until(lambda: slurm.job(job)["Restarts"] == "1", 120, printed)
    (checkpoint,) = run.glob("checkpoint-*")
    assert 0 < int(checkpoint.name.removeprefix("checkpoint-")) < NUM_STEPS

    # Slurm waits for two minutes before it starts a requeued job. Start it soon after the node is
    # free: slurmd refuses to start a job in the same second in which it has killed it.
    wait_until(lambda: slurm.is_idle() and slurm.job(job)["JobState"] == "PENDING", 120, printed)
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    wait_until(lambda: slurm.job(job)["JobState"] not in {"PENDING", "RUNNING"}, 480, printed)

    assert slurm.job(job)["JobState"] == "COMPLETED", printed()
    assert slurm.job(job)["ExitCode"] == "0:0"
    assert steps_of(run) == list(range(1, NUM_STEPS + 1))
    assert (run / "model" / "model.safetensors").exists()


def test_a_failed_job_is_not_requeued(slurm, tmp_path):
    """A recipe that is wrong fails the job at once."""
    (tmp_path / "causal_lm.yaml").write_text("task: none\n", encoding="utf-8")
    script = str(FILES / "train.slurm")
    job = slurm.call("sbatch", "--parsable", script, "causal_lm.yaml", folder=tmp_path)

    def has_ended() -> bool:
        return slurm.job(job)["JobState"] == "FAILED" or slurm.job(job)["Restarts"] != "0"

    wait_until(has_ended, 600, lambda: str(slurm.job(job)))
    assert slurm.job(job)["Restarts"] == "0"
    assert slurm.job(job)["ExitCode"] == "1:0"


@pytest.mark.parametrize("slurm", [NO_PREEMPTION], indirect=True, ids=["no-preemption"])
def test_two_jobs_share_a_node(slurm, tmp_path):
    """The end of a job does not disturb a job that has started later on the same node."""
    jobs, runs = [], []
    for name, num_steps in (("first", 100_000), ("second", NUM_STEPS)):
        folder = tmp_path / name
        folder.mkdir()
        write_recipe(folder, max_steps=num_steps, save_strategy="no")
        options = ("--parsable", "--cpus-per-task", "1", "--output=log.txt")
        script = str(FILES / "train.slurm")
        jobs.append(slurm.call("sbatch", *options, script, "causal_lm.yaml", folder=folder))
        runs.append(folder / "runs" / "causal_lm")
        wait_until(lambda: bool(steps_of(runs[-1])), 300, (folder / "log.txt").read_text)
    slurm.call("scancel", jobs[0])

    wait_until(lambda: slurm.job(jobs[1])["JobState"] != "RUNNING", 480, lambda: str(jobs))
    log = (tmp_path / "second" / "log.txt").read_text(encoding="utf-8")
    assert slurm.job(jobs[1])["JobState"] == "COMPLETED", log[-6000:]
    assert steps_of(runs[1]) == list(range(1, NUM_STEPS + 1))
