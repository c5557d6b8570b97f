"""docs/how-to/launch/train.slurm on a Slurm of one node: a job that is stopped comes back."""

import shutil
import tempfile
from pathlib import Path

import pytest

from mfwrap.records.json_lines import read_json_lines
from support.launches import FILES, PAGE, wait_until, write_recipe
from support.pages import commands
from support.slurm import NO_PREEMPTION, PREEMPTION, one_node_slurm, why_not

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
