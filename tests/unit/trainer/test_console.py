"""In a terminal a training is one progress bar, and elsewhere the lines of its monitor."""

import fcntl
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from transformers import TrainerCallback

from mfwrap.trainer import MFTrainer
from support.paths import TESTS
from support.recipe_texts import recipe_text
from support.trainer_runs import new_trainer

COLUMNS = 100


@pytest.fixture
def recipe(tmp_path):
    """Return a recipe of 6 updates over 48 rows, of which one has an infinite loss."""
    rows = [{"features": [n / 48.0, 1.0], "target": 1e25 if n == 20 else 0.5} for n in range(48)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    file = tmp_path / "small.yaml"
    file.write_text(
        recipe_text(
            data=None,
            training={"disable_tqdm": False},
            callbacks=[{"type": "MFLossMonitor"}],
        )
        + "data: {type: json_lines, path: rows.jsonl}\n"
    )
    return file


def shown(recipe, *options):
    """Return what `mfwrap train` writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    words = [sys.executable, "-P", "-m", "mfwrap", "train", str(recipe), *options]
    environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
    with subprocess.Popen(
        words, cwd=recipe.parent, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 4096):
                written += part
        except OSError:  # on Linux, the end of a terminal is an error
            pass
        os.close(ours)
    assert process.returncode == 0, written.decode()
    return written.decode()


def screen(written):
    """Return the lines of a terminal after a text with carriage returns."""
    lines = []
    for line in written.replace("\x1b[A", "").split("\n"):
        parts = [part for part in line.split("\r") if part.strip()]
        lines.append(parts[-1].rstrip() if parts else "")
    return lines


@pytest.mark.parametrize("anomalies", [False, True])
def test_in_a_terminal(recipe, anomalies):
    """There is one bar, one line for the skipped update, no dict, no record, no wrapped line."""
    options = ["--set", "monitor_config.monitor_on=true"] if anomalies else []
    written = shown(recipe, *options)
    parts = re.split(r"[\r\n]+", written)
    bars = [part for part in parts if re.search(r"\d+/6 \[", part)]
    last = bars[-1]

    assert all(len(part) <= COLUMNS for part in parts)
    assert re.search(r"100%\|.*6/6 \[.*loss [\d.e+-]+, norm [\d.e+-]+, lr .*skipped 1\]", last)
    left = [line for line in screen(written) if re.search(r"\d+/\d+ \[", line)]
    assert len(left) == 1, left
    skips = [part for part in parts if "update skipped" in part]
    assert len(skips) == 1
    says = "non-finite loss.*" if anomalies else "update skipped, loss (inf|nan), norm"
    assert re.match(rf"step [1-6]: {says}", skips[0])
    assert "Epoch:[" not in written
    assert "{'loss'" not in written


def test_lines_in_a_terminal(recipe):
    """With ``console="lines"``, the records are printed instead of the bar."""
    written = shown(recipe, "--set", "callbacks.0.console=lines")

    assert written.count("Epoch:[") == 6
    assert not re.search(r"\d+/6 \[", written)
    assert "{'loss'" not in written


def test_in_a_file(recipe):
    """Where standard error is a file, there are the monitor's records, no bar and no dict."""
    log = recipe.parent / "log"
    with log.open("w") as file:
        words = [sys.executable, "-P", "-m", "mfwrap", "train", str(recipe)]
        subprocess.run(words, cwd=recipe.parent, stdout=file, stderr=file, check=True)
    written = log.read_text()

    assert written.count("Epoch:[") == 6
    assert not re.search(r"\d+/6 \[", written)
    assert "\r" not in written
    assert "{'loss'" not in written


PLAIN = """
import sys
from pathlib import Path
from transformers import TrainingArguments
from mfwrap.callbacks import MFLossMonitor
from mfwrap.trainer import MFTrainer
from support.trainer_runs import Counting, tiny_llama

arguments = TrainingArguments(
    "run", per_device_train_batch_size=1, max_steps=3, logging_steps=1, report_to="none",
    per_device_eval_batch_size=1, eval_strategy="steps", eval_steps=3, save_strategy="no",
    use_cpu=True, disable_tqdm=True,
)
callbacks = [MFLossMonitor()] if sys.argv[1] == "with" else []
MFTrainer(
    tiny_llama(), arguments, train_dataset=Counting(8), eval_dataset=Counting(4),
    callbacks=callbacks,
).train()
"""


@pytest.mark.parametrize("monitor", ["with", "without"])
def test_without_a_bar(tmp_path, monitor):
    """With an MFLossMonitor, the Trainer prints no dict of a step; evaluations stay."""
    words = [sys.executable, "-P", "-c", PLAIN, monitor]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    printed = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout

    is_said = monitor == "with"
    assert printed.count("Epoch:[") == (3 if is_said else 0)
    assert printed.count("{'loss'") == (0 if is_said else 3)
    assert printed.count("{'train_runtime'") == (not is_said)
    assert printed.count("{'eval_loss'") == 1


def test_an_error_leaves_the_terminal(tmp_path, monkeypatch):
    """After a training that raised, the logger has no handler of the bar, and the bar is closed."""

    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                msg = "no more"
                raise OSError(msg)

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    before = list(logging.getLogger("mfwrap").handlers)
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=[Failing()], disable_tqdm=False)
    [bar] = [one for one in trainer.callback_handler.callbacks if hasattr(one, "training_bar")]

    with pytest.raises(OSError, match="no more"):
        trainer.train()

    assert logging.getLogger("mfwrap").handlers == before
    assert bar.training_bar is None
