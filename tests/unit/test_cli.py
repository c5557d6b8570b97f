"""The command line: its output, its files and its exit codes."""

import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.shell_completion import ShellComplete
from PIL import Image

from mfwrap.callbacks.metrics_recorder import ThroughputRecorder
from mfwrap.cli import cli, main
from mfwrap.records.row_losses import RowLossFiles
from mfwrap.runner.library import shipped_recipes
from support.checkpoint_folders import write_checkpoint
from support.mindformers_files import mindformers_text
from support.ports import free_port
from support.programs import Program
from support.recipe_texts import PERCEPTRON, recipe_text
from support.run_folders import write_run, write_trainer_run
from support.versions import needs


def call(capsys, *arguments):
    """Return exit code, output and errors of a command."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return left.value.code, output.out, output.err


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Return the file of a small recipe, in a new current folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(recipe_text(training={"save_strategy": "steps", "save_steps": 3}))
    return file


def test_rows(tmp_path, capsys):
    """`rows` prints three tables, or a JSON object per row; a run without rows is an error."""
    files = RowLossFiles(tmp_path / "run")
    files.begin(0, sets_aside=True)
    places = {"step": [1, 1, 2, 2], "epoch": [0, 0, 1, 1], "position": [0, 1, 0, 1]}
    losses = {"index": [5, 3, 3, 5], "loss": [1.5, 0.25, 0.125, np.nan], "targets": [2, 1, 1, 2]}
    files.write(places | losses | {"source": ["web", "\x1b[2J", "\x1b[2J", "web"]})
    code, out, _ = call(capsys, "rows", tmp_path / "run", "--number", 1)
    code_of_json, lines, _ = call(capsys, "rows", tmp_path / "run", "--json")

    assert (code, code_of_json) == (0, 0)
    heads = ["2 rows, trained on 4 times", "highest: 1", "lowest: 1", "never fell: 1"]
    assert [line for line in out.splitlines() if line in heads] == heads
    assert "\x1b" not in out
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [(row["list"], row["index"]) for row in rows] == [
        ("highest", 5),
        ("highest", 3),
        ("lowest", 3),
        ("lowest", 5),
        ("never fell", 5),
    ]
    assert rows[0]["loss"] == "nan"
    code, _, error = call(capsys, "rows", tmp_path)
    assert code == 2
    assert error.startswith(f"mfwrap: {tmp_path} has no losses of rows: ")


def test_train_and_plot(recipe, capsys):
    """`train` prints results, writes a run folder and exits with 0; `plot` writes a picture."""
    code, out, _ = call(capsys, "train", recipe, "--set", "ema.decay=0.5")
    folder = Path("runs/small")

    assert code == 0
    result, *rest = out.splitlines()[-3:]
    number = r"[\d.e+-]+"
    assert re.fullmatch(rf"result: eval_loss {number}, .*ema_eval_loss {number}.*", result)
    assert rest == [f"run folder: {folder}", f"run page: mfwrap report {folder}"]
    assert call(capsys, "plot", folder)[:2] == (0, f"wrote {folder / 'run.png'}\n")
    with Image.open(folder / "run.png") as picture:
        assert picture.format == "PNG"


def test_the_best_checkpoint_is_said(recipe, capsys):
    """`train` says once which checkpoint the model and the result are of, also when it repeats."""
    keys = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    keys |= {"greater_is_better": True}
    settings = [word for key, one in keys.items() for word in ("--set", f"training.{key}={one}")]
    code, out, err = call(capsys, "train", recipe, *settings)

    assert code == 0
    assert err.count("mfwrap: model is that of checkpoint-3, the best by eval_loss\n") == 1
    result = next(line for line in out.splitlines() if line.startswith("result: "))
    assert result.endswith(" (checkpoint-3)")
    code, out, _ = call(capsys, "train", recipe, *settings, "--resume=auto")
    assert (code, out.splitlines()[0]) == (0, result)


def test_an_old_transformers_is_one_sentence():
    """A command that needs the Trainer says which release it needs; others work."""
    old = "import mfwrap.compatibility.foreign as f; f.version = lambda _: '4.57.6'"
    words = f"{old}; from mfwrap.cli import main; main()"
    refused, listed = (
        program("-c", words, *given) for given in (("data", "causal_lm"), ["recipes"])
    )

    assert refused.returncode == 2
    assert refused.stderr.startswith("mfwrap: MFTrainer needs transformers 5.5 or newer, got ")
    assert len(refused.stderr.splitlines()) == 1
    assert listed.returncode == 0


def test_results_are_shown_without_exponents(tmp_path, monkeypatch, capsys):
    """The last lines of `train` show six digits, so that a large metric can be read."""
    monkeypatch.chdir(tmp_path)
    Path("prices.csv").write_text("a,price\n1,100000\n2,100500\n3,100250\n4,101000\n")
    columns = {"features": ["a"], "target": "price"}
    data = {"path": "prices.csv", "eval_path": "prices.csv", "columns": columns}
    text = recipe_text(data=None) + f"data: {json.dumps(data)}\n"
    Path("prices.yaml").write_text(text)
    code, out, _ = call(capsys, "train", "prices.yaml", "--set", "training.max_steps=1")
    mse = json.loads(Path("runs/prices/result.json").read_text())["metrics"]["eval_mse"]

    assert code == 0
    assert 10_000 < mse < 1_000_000
    assert re.search(rf"eval_mse {mse:.6g},", out)
    assert "e+" not in out.splitlines()[-3]


def test_plot_of_a_stock_trainer(tmp_path, monkeypatch, capsys):
    """`plot` writes a picture of a Trainer's run folder, which has no metrics.jsonl."""
    monkeypatch.chdir(tmp_path)
    write_trainer_run(Path("run"))

    assert call(capsys, "plot", "run")[:2] == (0, "wrote run/run.png\n")


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("module", ["click", "yaml"])
def test_without_the_recipes_extra(module):
    """Without the extra ``recipes``, the command line prints how to install it and exits with 1."""
    words = f"import sys; sys.modules['{module}'] = None; import mfwrap.cli"
    result = program("-c", words)

    assert result.returncode == 1
    assert result.stderr == (
        f'mfwrap: the command line needs {module}; pip install "mfwrap[recipes]"\n'
    )


def test_resume(recipe, capsys):
    """A run resumes from its newest checkpoint, or from a given one."""
    call(capsys, "train", recipe, "--set", "training.max_steps=3")
    code, _, _ = call(capsys, "train", recipe, "--resume")
    steps = [json.loads(line) for line in Path("runs/small/metrics.jsonl").read_text().splitlines()]

    assert code == 0
    assert [one["step"] for one in steps if "loss" in one] == [1, 2, 3, 4, 5, 6]
    assert call(capsys, "train", recipe, "--resume", "runs/small/checkpoint-3")[0] == 0


def test_resume_after_a_kill_between_two_renames(recipe, capsys):
    """A run resumes if it was killed while it replaced its only checkpoint."""
    call(capsys, "train", recipe, "--set", "training.max_steps=3")
    folder = Path("runs/small")
    staging = folder / "_checkpoint-3.partial"
    replaced = staging / "replaced" / "checkpoint-3"
    shutil.copytree(folder / "checkpoint-3", replaced)
    (folder / "checkpoint-3").rename(staging / "checkpoint-3")

    assert call(capsys, "train", recipe, "--resume")[0] == 0
    assert not replaced.exists()


@pytest.fixture
def owner():
    """Start a program that owns the run folder, and end it after the test."""
    program = (
        "import sys; from pathlib import Path; from mfwrap.checkpoints.locks import *\n"
        "with owning(Path('runs/small') / RUN_LOCK): print(flush=True); sys.stdin.read()"
    )
    with Program(program) as started:
        started.stdout.readline()
        yield started


@pytest.mark.parametrize("words", [(), ("--resume=auto",), ("--overwrite",), ("--resume",)])
def test_a_second_program_in_the_run_folder(recipe, capsys, request, words):
    """It is refused in one line, and nothing in the folder has changed; readers are not refused."""
    call(capsys, "train", recipe, "--set", "training.max_steps=3")
    Path("runs/small/result.json").unlink()
    owner = request.getfixturevalue("owner")
    before = {path: path.stat().st_mtime_ns for path in Path("runs/small").rglob("*")}

    code, out, err = call(capsys, "train", recipe, *words)

    assert (code, out) == (2, "")
    assert err.startswith(f"mfwrap: runs/small is in use: process {owner.pid} on ")
    assert err.count("\n") == 1
    after = {path: path.stat().st_mtime_ns for path in Path("runs/small").rglob("*")}
    assert after == before
    assert call(capsys, "verify", "runs/small")[0] == 0


def test_one_command_that_comes_back(recipe, capsys):
    """``--resume=auto`` starts the run, then reports its result without training again."""
    short = ("train", recipe, "--resume=auto", "--set", "training.max_steps=3")
    code, first, err = call(capsys, *short)
    assert (code, err) == (0, "")

    code, again, err = call(capsys, *short)

    assert code == 0
    assert first.endswith(again)
    assert err == "mfwrap: runs/small: this run has finished before; --overwrite runs it again\n"


@pytest.mark.parametrize(
    ("number", "event", "saved"),
    [
        (signal.SIGTERM, "on_step_end", [3]),
        (signal.SIGUSR1, "on_train_end", [3, 6]),
        (signal.SIGINT, "on_step_end", [3]),
    ],
)
def test_a_signal_stops_a_run(recipe, capsys, monkeypatch, number, event, saved):
    """A run that gets a signal after its second step or at its end saves and exits."""

    def tell_to_end(_recorder, _args, state, _control, **_):
        if state.global_step in {2, 6}:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as planted:
        planted.setattr(ThroughputRecorder, event, tell_to_end)
        options = ["--set", "training.run_name=of two words", "--skip-rows", "bad.jsonl"]
        Path("bad.jsonl").write_text('{"epoch": 0, "position": 1}\n')
        code, _, err = call(capsys, "train", recipe, *options)

    assert code == (130 if number == signal.SIGINT else 75)
    again = f"mfwrap train {recipe} {shlex.join(options)} --resume=auto"
    who = "Ctrl-C" if number == signal.SIGINT else "a signal"
    newest = Path("runs/small") / f"checkpoint-{saved[-1]}"
    line = f"mfwrap: stopped by {who} after step {saved[-1]}, checkpoint {newest}; continue with: "
    assert [each for each in err.splitlines() if "stopped" in each] == [line + again]
    found = sorted(int(path.name[11:]) for path in Path("runs/small").glob("checkpoint-*"))
    assert found == saved
    assert not Path("runs/small/result.json").exists()
    assert call(capsys, *shlex.split(err.rpartition("continue with: mfwrap ")[2]))[0] == 0


def test_a_rollback(recipe, capsys, caplog):
    """The weights are bitwise those of a run with ``--skip-rows``, and the page tells the story."""
    rows = [
        {"features": [math.sin(n), math.cos(n)], "target": 1e3 if n == 150 else math.sin(n + 1)}
        for n in range(400)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe.write_text(
        recipe_text(
            data=None,
            # The deviation of the targets would be that of the one bad row.
            model={"config": PERCEPTRON["config"] | {"standardize": False}},
            monitor_config={"monitor_on": True},
            training={"max_steps": 40, "save_strategy": "steps", "save_steps": 5},
        )
        + "data: {type: json_lines, path: rows.jsonl, eval_fraction: 0.1}\n"
    )
    code, _, err = call(capsys, "train", recipe, "--set", "rollback={max_rollbacks: 2}")
    assert code == 0, err
    run, fresh = Path("runs/small"), Path("runs/fresh")
    (done,) = json.loads((run / "rollbacks.json").read_text())["rollbacks"]
    options = ["--skip-rows", run / "skip_rows.jsonl", "--set", f"training.output_dir={fresh}"]

    assert done["kind"] == "spike"
    assert f"going back to {done['checkpoint']} and leaving out 8 rows" in caplog.text
    assert call(capsys, "train", recipe, *options)[0] == 0
    (weights,) = (run / "model").glob("*.safetensors")
    assert weights.read_bytes() == (fresh / "model" / weights.name).read_bytes()
    assert call(capsys, "report", run)[0] == 0
    page = (run / "run.html").read_text()
    assert f"went back to {done['checkpoint']} and left out 8 rows of the data" in page


def test_a_signal_before_the_training(recipe, capsys, monkeypatch):
    """A run that gets a signal while it starts exits with 75 and leaves nothing behind."""
    monkeypatch.setattr(
        "mfwrap.runner.run.set_seed", lambda _: os.kill(os.getpid(), signal.SIGTERM)
    )

    assert call(capsys, "train", recipe)[0] == 75
    assert not Path("runs").exists()


def test_a_second_run_into_one_folder(recipe, capsys):
    """A second run into a folder is refused; with ``--overwrite`` it prints what it has removed."""
    short = ("train", recipe, "--set", "training.max_steps=3")
    call(capsys, *short)
    code, out, err = call(capsys, *short)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "got runs/small with checkpoint-3; resume that run with --resume" in err
    code, _, err = call(capsys, *short, "--overwrite")
    assert (code, err.count("\n")) == (0, 1)
    assert (
        err == "mfwrap: removed from runs/small: checkpoint-3, memory.jsonl, metrics.jsonl, "
        "model, progress.jsonl, result.json, run.json, throughput.jsonl, trainer_state.json\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train"], "Missing argument 'RECIPE'"),
        (["frob"], "No such command 'frob'"),
        (["train", "RECIPE", "--sett", "a=1"], "--sett"),
        (["train", "missing.yaml"], "missing.yaml: expected a file or the name of a shipped"),
        (["validate", "causal_lmm"], "did you mean 'causal_lm'?"),
        (["validate", "RECIPE", "--set", "training.max_step=1"], "did you mean 'max_steps'?"),
        (["validate", "RECIPE", "--set", "ema.decay=2"], "ema.decay: must be in [0, 1), got 2"),
        (["train", "RECIPE", "--resume"], "--resume: no checkpoint in runs/small"),
        (["train", "RECIPE", "--resume", "nowhere"], "--resume: no such folder: nowhere"),
        (
            ["train", "RECIPE", "--resume", "--overwrite"],
            "--overwrite deletes the checkpoints that --resume needs",
        ),
        (["train", "RECIPE", "--skip-rows", "no.jsonl"], "no.jsonl: cannot be read (No such file"),
        (["train", "RECIPE", "--skip-rows", "RECIPE"], "small.yaml:1: expected an object such as"),
        (["plot", "nowhere"], "nowhere is not a run folder"),
        (["verify", "nowhere"], "nowhere: no checkpoint found; expected the folder of a run or of"),
        (["init", "causal_lmm"], "did you mean 'causal_lm'?"),
        (["import-mindformers", "nowhere"], "'FILE': File 'nowhere' does not exist"),
    ],
)
def test_bad_input(recipe, capsys, arguments, says):
    """Bad input prints one line on standard error, without a traceback, and exits with 2."""
    words = [str(recipe) if word == "RECIPE" else word for word in arguments]
    code, out, err = call(capsys, *words)

    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("mfwrap: ")
    assert err.count("\n") == 1


def test_a_rank_that_cannot_join(recipe, capsys, monkeypatch):
    """A rank that cannot join the others ends with 1, one sentence, and without a run folder."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}
        for name, value in (launched | {"MASTER_ADDR": "localhost"}).items():
            monkeypatch.setenv(name, value)
        code, _, err = call(capsys, "train", recipe)

    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"mfwrap: rank 0 of 2 could not join the other ranks at localhost:{port}")
    assert not Path("runs").exists()


@needs("accelerate", "1.13", "a Trainer on a CPU joins the processes of a launch by itself")
def test_a_process_that_would_train_alone(recipe, capsys, monkeypatch):
    """A recipe that keeps the launched processes apart is refused before anything is written."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = call(capsys, "train", recipe, "--set", "training.use_cpu=false")

    assert (code, err.count("\n")) == (2, 1)
    assert "training: this process would train alone, but its launcher started 2 processes" in err
    assert not Path("runs").exists()


def test_a_run_that_fails(recipe, capsys):
    """A failed run exits with 1, prints one line, and writes the traceback to its folder."""
    first = call(capsys, "train", recipe, "--set", "training.learning_rate=1e38",
                 "--set", "runner_wrapper.max_consecutive_skips=1")  # fmt: skip
    code, _, err = first

    assert code == 1
    assert err.count("\n") == 1
    assert "the run failed: RuntimeError" in err
    assert "Traceback" in Path("runs/small/error_rank_0.txt").read_text()
    assert "continues from" not in err


def test_a_run_that_fails_after_a_checkpoint(recipe, capsys):
    """The line says from where it continues."""
    code, _, err = call(capsys, "train", recipe, "--set", "training.learning_rate=1e38",
                        "--set", "training.save_steps=1",
                        "--set", "runner_wrapper.max_consecutive_skips=1")  # fmt: skip
    (saved,) = Path("runs/small").glob("checkpoint-*")

    assert code == 1
    assert f"; once it is mended, --resume=auto continues from {saved.name}; traceback in" in err


def test_validate(recipe, capsys):
    """A valid recipe is reported as valid, and nothing is written."""
    assert call(capsys, "validate", recipe) == (0, f"{recipe}: valid\n", "")
    assert list(Path.cwd().iterdir()) == [recipe]


def test_a_warning_about_a_recipe_takes_one_line(recipe, capsys):
    """A warning of the check names the recipe, not a line of mfwrap's code."""
    entries = ("training.max_steps=2", "lr_schedule={type: LinearWithWarmUpLR, warmup_steps: 9}")
    options = [word for entry in entries for word in ("--set", entry)]

    code, _, err = call(capsys, "validate", recipe, *options)

    says = "the warm-up has 9 updates, the run 2: no update has the full learning rate"
    assert (code, err) == (0, f"mfwrap: warning: {recipe}: {says}\n")


def test_keys_without_meaning_are_one_line(recipe, capsys):
    """Keys that only MindFormers uses are listed on standard error, and the recipe is valid."""
    entry = "callbacks=[{type: MFLossMonitor, micro_batch_num: 2}, {type: SummaryMonitor}]"
    code, _, err = call(capsys, "validate", recipe, "--set", entry)

    assert (code, err.count("\n")) == (0, 1)
    assert "callbacks.0.micro_batch_num, callbacks.1 (SummaryMonitor)" in err


def test_recipes_lists_all(capsys):
    """The command prints one line for each shipped recipe."""
    _, out, _ = call(capsys, "recipes")

    assert [line.split()[0] for line in out.splitlines()] == list(shipped_recipes())


def test_init(recipe, capsys):
    """A shipped recipe is copied unchanged, and an existing file is not overwritten."""
    assert call(capsys, "init", "regression")[0] == 0
    assert Path("regression.yaml").read_text() == shipped_recipes()["regression"].text
    code, _, err = call(capsys, "init", "regression")
    assert code == 2
    assert err == "mfwrap: cannot write regression.yaml: File exists\n"
    assert call(capsys, "init", "regression", "--output", "b.yaml")[0] == 0


def test_init_on_a_full_disk(recipe, capsys):
    """A recipe that cannot be written whole is not written at all, so init can be repeated."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        code, _, err = call(capsys, "init", "regression")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert (code, err) == (2, "mfwrap: cannot write regression.yaml: File too large\n")
    assert not list(Path().glob("regression*"))
    assert call(capsys, "init", "regression")[0] == 0


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return two run folders in the current folder."""
    monkeypatch.chdir(tmp_path)
    return [write_run(Path("first")), write_run(Path("second"))]


def test_one_run(runs, capsys):
    """The page of one run is written to the run folder, and can be written again."""
    for _ in range(2):
        assert call(capsys, "report", runs[0]) == (0, "wrote first/run.html\n", "")
    page = (runs[0] / "run.html").read_text(encoding="utf-8")

    assert "<h1>first</h1>" in page
    assert sorted(path.name for path in Path().iterdir()) == ["first", "second"]


def test_a_watched_run(runs, capsys):
    """A run that has ended has its page written once; the number of seconds is checked."""
    (runs[0] / "run.json").write_text('{"state": "finished"}')

    code, out, err = call(capsys, "report", runs[0], "--watch")
    says = "writing first/run.html every 10 s until the end of the run; Ctrl-C ends this earlier\n"
    assert (code, out, err) == (0, f"{says}wrote first/run.html\n", "")
    assert call(capsys, "report", runs[0], "--watch", "0")[0] == 2
    (runs[0] / "run.json").write_text("{")
    code, _, err = call(capsys, "report", runs[0])
    assert (code, err.count("\n")) == (2, 1)
    assert "first/run.json: invalid JSON" in err


@pytest.mark.parametrize(("command", "name"), [("report", "run.html"), ("plot", "run.png")])
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_file_of_somebody_else_is_not_replaced(runs, capsys, command, name, kind):
    """A page or picture that another tool has written stays; ``--output`` says where to write."""
    usual = runs[0] / name
    if kind == "file":
        usual.write_text("of another tool")
    elif kind == "link":
        usual.symlink_to("nothing")
    else:
        usual.mkdir()
    before = usual.lstat().st_ino, usual.lstat().st_mtime_ns

    code, out, err = call(capsys, command, runs[0])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"mfwrap: first/{name} is in the way: mfwrap has not written it; ")
    assert (usual.lstat().st_ino, usual.lstat().st_mtime_ns) == before
    assert call(capsys, command, runs[0], "--output", "other")[0] == 0


def test_several_runs(runs, capsys):
    """The page of several runs is written to the current folder, or to ``--output``."""
    assert call(capsys, "report", *runs)[:2] == (0, "wrote run.html\n")
    assert call(capsys, "report", *runs, "--output", "new/both.html")[:2] == (
        0,
        "wrote new/both.html\n",
    )
    assert "first, second</h1>" in Path("new/both.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "mfwrap: none is not a run folder: there is no such folder\n"),
        (["."], "trainer_state.json in it has the numbers of a step\n"),
        ([], "Missing argument 'RUN...'. See mfwrap --help.\n"),
        (["first", "--output", "second"], "File 'second' is a directory. See mfwrap --help.\n"),
        (
            ["first", "--output", "first/metrics.jsonl/page.html"],
            "page.html: [Errno 17] File exists: 'first/metrics.jsonl'",
        ),
    ],
)
def test_report_refuses(arguments, message, runs, capsys):
    """A missing run or an unwritable page prints a one-line error and exits with 2."""
    code, out, err = call(capsys, "report", *arguments)

    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--learning_rate", "1"],
            "It is a key of the recipe: write --set training.learning_rate=VALUE.",
        ),
        (
            ["--sequence-length", "8"],
            "A value of the recipe is set by --set SECTION.sequence_length=VALUE.",
        ),
        (
            ["--set", "training.max_steps", "3"],
            "--set: expected section.key=value, got 'training.max_steps'",
        ),
        (["model.path=mine", "a=1"], "Values of the recipe are set by --set KEY=VALUE."),
        (["hello"], "Got unexpected extra argument (hello) See mfwrap --help."),
        (["--rows", "1"], "It is an option of mfwrap data."),
        (["--overwrit"], "Did you mean '--overwrite'? See mfwrap --help."),
    ],
)
def test_train_with_wrong_words(words, says, capsys):
    """A training argument as an option, and a value without "=", are told how to set a value."""
    code, out, err = call(capsys, "train", "regression", *words)

    assert (code, out) == (2, "")
    assert says in err


def test_import_mindformers(recipe, capsys):
    """The recipe goes to standard output or a file; losses are accepted by name."""
    Path("mf.yaml").write_text(mindformers_text({"run_mode": "finetune"}))
    code, out, err = call(capsys, "import-mindformers", "mf.yaml")
    assert (code, out) == (2, "")
    assert err.startswith("mfwrap: mf.yaml:1: run_mode: the file finetunes weights")
    assert err.endswith("--accept weights\n")
    assert err.count("\n") == 1

    accept = ("--accept", "weights")
    code, out, err = call(capsys, "import-mindformers", "mf.yaml", *accept)

    assert code == 0
    assert "runner_wrapper:\n  type: MFTrainOneStepCell\n" in out
    assert "mfwrap: mf.yaml:\n  warning: lost (weights): the file finetunes weights" in err
    assert err.count("mf.yaml:") == 1
    assert "\n  launch: mfwrap train" in err
    output = ("--output", "r.yaml")
    assert call(capsys, "import-mindformers", "mf.yaml", *accept, *output)[0] == 0
    assert Path("r.yaml").read_text() == out


@pytest.mark.parametrize("command", ["", *sorted(cli.commands)])
def test_help_has_examples(capsys, command):
    """The help of each command with arguments has an example."""
    code, out, _ = call(capsys, *filter(None, [command, "--help"]))

    assert code == 0
    assert ("Example" in out) == (command != "recipes")


def test_without_arguments(capsys):
    """The bare command prints its help alone to standard error, and exits with click's code 2."""
    help_text = call(capsys, "--help")[1]

    assert call(capsys) == (2, "", help_text)


def test_completion():
    """A shell completes commands and recipe names."""
    complete = ShellComplete(cli, {}, "mfwrap", "_MFWRAP_COMPLETE")
    commands = [item.value for item in complete.get_completions([], "")]
    names = [item.value for item in complete.get_completions(["train"], "reg")]

    assert set(commands) >= set(cli.commands)
    assert "regression" in names


def program(*words, env=None, **options):
    """Run Python in a new process, and return the completed process."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_as_a_module(recipe):
    """``python -m mfwrap`` runs the command line and returns its exit code."""
    result = program("-m", "mfwrap", "plot", "nowhere")

    assert result.returncode == 2
    assert result.stderr.startswith("mfwrap: ")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"],
        # accelerate's launcher for CPUs needs MPI to start several processes. Use accelerate's
        # launcher for GPUs, which starts the same program without MPI.
        ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
         "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
         "--main_process_port"],
    ],
    ids=["torchrun", "accelerate"],
)  # fmt: skip
def test_on_two_processes(recipe, launcher, tmp_path):
    """Under a launcher, two processes train one model, each on half of every batch."""
    text = recipe.read_text()
    assert "  use_cpu: true\n" in text
    # The processes are connected on any machine, also if the recipe does not name the device.
    recipe.write_text(text.replace("  use_cpu: true\n", ""))
    result = program(
        *launcher, free_port(), "-m", "mfwrap", "train", recipe,
        "--set", "training.per_device_train_batch_size=4", timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("run folder: ") == 1
    alone = program(
        "-m", "mfwrap", "train", recipe, "--set", f"training.output_dir={tmp_path / 'alone'}"
    )
    assert alone.returncode == 0, alone.stderr
    weights = [
        torch.cat([p.flatten() for p in _weights(folder).values()])
        for folder in (Path("runs/small"), tmp_path / "alone")
    ]

    assert torch.allclose(*weights, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_no_thread_of_the_ranks_is_left(recipe, tmp_path):
    """When Python ends, gloo has no thread any more, which could abort the process."""
    (tmp_path / "named.py").write_text(
        """
import atexit, os
from pathlib import Path
from mfwrap.cli import main

def note():
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    Path(f"threads_{os.environ['RANK']}").write_text(" ".join(names))

atexit.register(note)
main()
"""
    )
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    result = program(*launcher, free_port(), tmp_path / "named.py", "train", recipe, timeout=200)

    assert result.returncode == 0, result.stderr
    for rank in range(2):
        names = (tmp_path / f"threads_{rank}").read_text()
        assert "python" in names
        assert "gloo" not in names


@pytest.mark.slow
def test_an_imported_float16_file_trains(tmp_path, monkeypatch):
    """A MindFormers file in float16 is imported and trained; its loss scale settles by halving."""
    monkeypatch.chdir(tmp_path)
    dynamic = {
        "type": "DynamicLossScaleUpdateCell",
        "loss_scale_value": 2**32,
        "scale_factor": 2,
        "scale_window": 1000,
    }
    changes = {
        "runner_wrapper.scale_sense": dynamic,
        "optimizer.type": "FP32StateAdamWeightDecay",
        "model.model_config.compute_dtype": "float16",
        "model.model_config.param_init_type": "float16",
    }
    Path("mf.yaml").write_text(mindformers_text(changes))
    rows = [json.dumps({"text": "one word after another"}) for _ in range(80)]
    Path("rows.jsonl").write_text("\n".join(rows))

    imported = program("-m", "mfwrap", "import-mindformers", "mf.yaml", "--output", "r.yaml")
    assert imported.returncode == 0, imported.stderr
    settings = (
        "data={type: json_lines, path: rows.jsonl, sequence_length: 16}",
        "training.use_cpu=true",
        "training.max_steps=20",
        "training.output_dir=run",
    )
    sets = [word for setting in settings for word in ("--set", setting)]
    trained = program("-m", "mfwrap", "train", "r.yaml", *sets, timeout=200)
    assert trained.returncode == 0, trained.stderr

    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    steps = [each for each in steps if "loss_scale" in each]
    assert [each["step"] for each in steps] == list(range(1, 21))
    scale = 2.0**32
    for each in steps:
        assert each["skipped"] == each["overflow"]
        scale /= 2 if each["overflow"] else 1
        assert each["loss_scale"] == scale
    applied = [each for each in steps if not each["skipped"]]
    assert 0 < len(applied) < 20
    assert applied[-1]["loss"] < applied[0]["loss"]
    for name, weight in _weights(Path("run")).items():
        assert weight.dtype == (torch.float32 if "norm" in name else torch.float16), name


def _weights(folder):
    from safetensors.torch import load_file  # noqa: PLC0415  (only this test needs it)

    return load_file(folder / "model" / "model.safetensors")


def test_verify(tmp_path, capsys):
    """`verify` prints a line for each checkpoint, and exits with 1 if one of them is damaged."""
    for step in (2, 10):
        write_checkpoint(tmp_path / f"checkpoint-{step}")
    write_checkpoint(tmp_path / "checkpoint-11", listed=False)
    intact = f"{tmp_path / 'checkpoint-2'}: intact (4 files, "
    code, out, err = call(capsys, "verify", tmp_path)

    lines = out.splitlines()
    assert (code, len(lines), err) == (0, 3, "")
    assert lines[0].startswith(intact)
    assert lines[1].startswith(f"{tmp_path / 'checkpoint-10'}: intact (")
    assert lines[2] == f"{tmp_path / 'checkpoint-11'}: no damage found, but it has no manifest"

    weights = tmp_path / "checkpoint-10" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, out, err = call(capsys, "verify", tmp_path)

    assert (code, err) == (1, "")
    assert out.splitlines()[0].startswith(intact)
    assert out.splitlines()[1] == (
        f"{weights.parent}: damaged: model.safetensors is damaged (checksum of tensor weight "
        "differs)"
    )
    assert call(capsys, "verify", weights.parent)[0] == 1
    assert call(capsys, "verify", tmp_path / "checkpoint-2")[0] == 0
