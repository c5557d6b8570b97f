"""A Slurm cluster of one node, this machine, from Debian's packages ``slurm-wlm`` and ``munge``."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from support.launches import environment, wait_until
from support.ports import free_port

__all__ = ["NO_PREEMPTION", "PREEMPTION", "Slurm", "one_node_slurm", "why_not"]

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
