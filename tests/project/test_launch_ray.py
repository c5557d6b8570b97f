"""docs/how-to/launch/ray_train.py on a local Ray: a training survives the kill of a worker."""

import importlib.util
import shutil
import signal
import sys

import psutil
import pytest

from mfwrap.records.json_lines import read_json_lines
from support.launches import FILES, PAGE, end_of, start, wait_until, write_recipe
from support.pages import commands

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='needs Ray: pip install "mfwrap[ray]"'
    ),
]
NUM_STEPS = 1500


def workers(driver: int) -> list[psutil.Process]:
    """Return the processes of Ray's workers that train."""
    found = psutil.Process(driver).children(recursive=True)
    return [each for each in found if "RayTrainWorker" in each.name() + "".join(each.cmdline())]


def test_a_killed_worker_comes_back(tmp_path):
    """The command of the page trains in two workers; after a SIGKILL of one it resumes and ends."""
    write_recipe(tmp_path, max_steps=NUM_STEPS, save_steps=100, output_dir="mine")
    shutil.copy(FILES / "ray_train.py", tmp_path)
    (words,) = commands(PAGE, "python")
    assert words == ["ray_train.py", "causal_lm.yaml", "--workers", "2"]
    run = tmp_path / "mine"
    variables = {"RAY_USAGE_STATS_ENABLED": "0"}
    with start([sys.executable, *words], tmp_path, **variables) as driver:
        wait_until((run / "checkpoint-100").exists, 600, driver.output.read_text)
        workers(driver.process.pid)[-1].send_signal(signal.SIGKILL)
        printed = end_of([driver])

    records = read_json_lines(run / "metrics.jsonl")
    assert [one["step"] for one in records if "loss" in one] == list(range(1, NUM_STEPS + 1))
    assert printed.count("Started training worker group of size 2") == 2
    assert len([*(run / f"checkpoint-{NUM_STEPS}").glob("rng_state_*")]) == 2
