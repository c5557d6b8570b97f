"""One command of torchrun, whose workers are killed again and again, ends like an unkilled run."""

import random
import re
import resource

import pytest
import yaml

from support.crash.contents import contents, differences
from support.crash.recipe import RECIPE, write_rows
from support.crash.restarts import NUM_RANKS, Moments, launch_and_kill
from support.paths import ROOT

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
