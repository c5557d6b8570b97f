"""One command of torchrun, whose workers are killed again and again, ends like an unkilled run."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import yaml

from support.crash.contents import contents, differences
from support.crash.recipe import RECIPE, write_rows
from support.paths import ROOT, TESTS

NUM_RANKS = 2
_SECONDS_BETWEEN_LOOKS = 0.001
_RESTART, _RANK = "TORCHELASTIC_RESTART_COUNT", "RANK"

Moment = Callable[[psutil.Process], bool]
"""Whether to kill a worker now."""


class Moments:
    """Random moments of a training that writes into a folder.

    Args:
        run: Run folder.
        draw: Random numbers.
        start_seconds: CPU time in which a worker starts, about.
        record_bytes: Growth of the records between two checkpoints, about; 1 without records.
    """

    def __init__(
        self, run: Path, draw: random.Random, start_seconds: float, record_bytes: float
    ) -> None:
        self._run, self._draw = run, draw
        self._start_seconds, self._record_bytes = start_seconds, record_bytes

    def any(self) -> Moment:
        """Return a random moment of a random kind; most are in the middle of the training."""
        kinds = [self.starting, *[self.training] * 4, self.saving]
        return self._draw.choice(kinds)()

    def starting(self) -> Moment:
        """Return a moment before the first step."""
        seconds = self._draw.uniform(0, self._start_seconds)
        return lambda worker: sum(worker.cpu_times()[:2]) >= seconds

    def training(self) -> Moment:
        """Return a moment after some steps of the worker."""
        growth = self._draw.uniform(0, 2 * self._record_bytes)
        before, least = self._progress(), None

        def has_grown(_worker: psutil.Process) -> bool:
            # A resumed worker first cuts off the records after its checkpoint.
            nonlocal least
            now = self._progress()
            if least is None and now == before:
                return False
            least = now if least is None else min(least, now)
            return now >= least + growth

        return has_grown

    def saving(self) -> Moment:
        """Return the moment at which a checkpoint begins to be written."""
        return lambda _worker: any(self._run.glob("_checkpoint-*.partial"))

    def ending(self) -> Moment:
        """Return a moment after the training, while models are evaluated and saved."""
        return lambda _worker: (self._run / "model").exists()

    def _progress(self) -> int:
        """Return the size of all records, plus the number of checkpoints."""
        sizes = [1 for path in self._run.glob("*_*") if path.is_dir()]
        for path in self._run.glob("*.jsonl"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:  # removed meanwhile
                continue
        return sum(sizes)


def launch_and_kill(
    folder: Path,
    program: Sequence[str],
    kills: Sequence[tuple[int, Callable[[], Moment]]] = (),
    **environment: str,
) -> tuple[int, int]:
    """Run a program under one command of torchrun, and kill one worker of each of its starts.

    Args:
        folder: Current folder of the program; gets ``output.txt``.
        program: Arguments of torchrun that name the program, and the program's own arguments.
        kills: For each start of the workers, the rank to kill with SIGKILL, and a function that
            makes the moment. torchrun may start the workers once more than there are kills.
        environment: Further variables for torchrun.

    Returns:
        Exit code of torchrun, and number of workers that were killed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={NUM_RANKS}", f"--max-restarts={len(kills)}", *program]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", **environment}
    with (
        (folder / "output.txt").open("w") as output,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        ) as launcher,
    ):
        num_killed = 0
        for number, (rank, make) in enumerate(kills):
            worker = _worker(launcher, number, rank)
            num_killed += worker is not None and _kill_at(worker, make())
        return launcher.wait(), num_killed


def _worker(launcher: "subprocess.Popen[bytes]", restart: int, rank: int) -> psutil.Process | None:
    """Wait for a worker of one of the launcher's starts; None if the launcher has ended."""
    wanted = {_RESTART: str(restart), _RANK: str(rank)}
    while launcher.poll() is None:
        for child in psutil.Process(launcher.pid).children():
            try:
                if wanted.items() <= child.environ().items():
                    return child
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended
                continue
        _look_again()
    return None


def _kill_at(worker: psutil.Process, is_now: Moment) -> bool:
    """Kill a worker at a moment; return False if it ends before."""
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        if is_now(worker):
            worker.send_signal(signal.SIGKILL)
            return True
        _look_again()
    return False


def _look_again() -> None:
    threading.Event().wait(_SECONDS_BETWEEN_LOOKS)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

NUM_STEPS, SAVE_STEPS = 160, 4
NUM_KILLS, NUM_KILLS_OF_SCRIPT = 20, 5
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Variable that a script's restarts need; see docs/how-to/resume.md."""


def write_recipe(folder):
    """Write a longer form of the recipe of the other crash tests into a new folder."""
    folder.mkdir()
    training = RECIPE["training"] | {"max_steps": NUM_STEPS, "eval_steps": 20}
    *callbacks, monitor = RECIPE["callbacks"]
    saving = monitor | {"save_checkpoint_steps": SAVE_STEPS, "keep_checkpoint_max": 2}
    recipe = RECIPE | {"training": training, "callbacks": [*callbacks, saving]}
    (folder / "crash.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def record_bytes(run):
    """Return the growth of the records between two checkpoints."""
    return sum(path.stat().st_size for path in run.glob("*.jsonl")) * SAVE_STEPS / NUM_STEPS


def kills_in(moments, draw, number):
    """Return kills of random ranks: while they start, at random moments, and at the end."""
    kinds = [moments.starting, *[moments.any] * (number - 1)]
    return [(draw.randrange(NUM_RANKS), make) for make in kinds]


def cpu_seconds_of_children():
    """Return the CPU time of all processes that were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def output(folder):
    """Return the end of what torchrun and its workers have printed."""
    return (folder / "output.txt").read_text()[-4000:]


def test_mfwrap_train(tmp_path):
    """``mfwrap train --resume=auto`` starts, resumes and finishes by one command."""
    program = ["-m", "mfwrap", "train", "crash.yaml", "--resume=auto"]
    write_rows(tmp_path)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    write_recipe(alone)
    assert launch_and_kill(alone, program) == (0, 0), output(alone)

    write_recipe(killed)
    draw = random.Random(0)  # noqa: S311  (test data, not cryptography)
    moments = Moments(killed / "run", draw, 6.0, record_bytes(alone / "run"))
    kills = [*kills_in(moments, draw, NUM_KILLS - 1), (draw.randrange(NUM_RANKS), moments.ending)]
    ended = launch_and_kill(killed, program, kills)

    assert ended == (0, NUM_KILLS), output(killed)
    assert differences(contents(alone / "run"), contents(killed / "run")) == []
    # A run that has finished says so.
    assert launch_and_kill(killed, program) == (0, 0)
    assert "this run has finished before" in (killed / "output.txt").read_text()


def check_script(folder, script, num_kills):
    """Run a script without and with kills, and compare everything that it leaves."""
    for name in ("alone", "killed"):
        (folder / name).mkdir()
        (folder / name / "script.py").write_text(script, encoding="utf-8")
    alone, killed = folder / "alone", folder / "killed"
    before = cpu_seconds_of_children()
    assert launch_and_kill(alone, ["script.py"], **OWN_STORE) == (0, 0), output(alone)
    # torchrun itself takes about as long as a worker takes to start.
    start_seconds = (cpu_seconds_of_children() - before) / (NUM_RANKS + 1)

    draw = random.Random(0)  # noqa: S311  (test data, not cryptography)
    size = sum(path.stat().st_size for path in (alone / "run").glob("*.jsonl"))
    moments = Moments(killed / "run", draw, start_seconds / 2, max(size / 6, 1))
    kills = kills_in(moments, draw, num_kills)
    ended = launch_and_kill(killed, ["script.py"], kills, **OWN_STORE)

    # The last worker may have ended before its moment.
    assert ended[0] == 0, output(killed)
    assert ended[1] >= num_kills - 1, output(killed)
    found = [contents(each / "run") | contents(each / "end") for each in (alone, killed)]
    assert differences(*found) == []


def test_a_trainer(tmp_path):
    """A script with ``train(resume_from_checkpoint="auto")`` comes back."""
    script = "from support.crash.loops import trainer\n\ntrainer()\n"
    check_script(tmp_path, script, NUM_KILLS_OF_SCRIPT)


def test_the_documented_loop(tmp_path):
    """The accelerate loop of the documentation comes back."""
    page = (ROOT / "docs" / "how-to" / "resume.md").read_text(encoding="utf-8")
    [script] = re.findall(r"^```python\n([^`]*newest_checkpoint[^`]*)^```$", page, re.MULTILINE)
    check_script(tmp_path, script, NUM_KILLS_OF_SCRIPT)
