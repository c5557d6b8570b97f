"""Files that mfwrap has not written stay as they are, whatever it does in their folder.

Each seed draws a program, and files, folders and links that somebody else has put in its folder
under names that mfwrap writes, or under names that only look like them. After the program nothing
of theirs has changed: no byte, mode or target of a link. A program that refuses names what is in
the way, and has written nothing.
"""

import os
import random
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.crash.fork_server import ForkServer, Task
from support.crash.recipe import write_recipe, write_rows

NUM_FOLDERS, FAST = 100, 4
"""Number of folders, and of those that the fast tests run."""

RUN = "run_a"
CHECKPOINT = f"checkpoints/{RUN}"

RECORDS = (
    *("metrics.jsonl", "progress.jsonl", "training_state.jsonl", "local_norms.jsonl"),
    *("anomalies.jsonl", "checkpoint_health.jsonl", "metrics_rank1.jsonl", "metrics.csv"),
    *("throughput.jsonl", "fingerprints.jsonl", "rank_clock.jsonl", "memory.jsonl"),
)
OF_RUNS = (
    *("run.json", "result.json", "recipe.yaml", "run.html", "run.png", "rollbacks.json"),
    *("model", "model_ema", "checkpoint-2", "checkpoint-4", "tensorboard", "error_rank_0.txt"),
    *("_abandoned-checkpoint-4", "_mfwrap.lock", "trainer_state.json"),
)
OF_CHECKPOINTS = (
    *("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"),
    *("mfwrap_step.json", "mfwrap_step.safetensors", "mfwrap_loop.json", "mfwrap_monitor.json"),
)
LIKE_THEM = (
    *("README.md", ".metrics.jsonl", "metrics[1].jsonl", "metrics.jsonl.1", "metrics.jsonl.bak"),
    *(
        "checkpoint-backup",
        "checkpoint-4-copy",
        "checkpoint-4\n",
        "métrics.jsonl",
        "ru\u2028n.json",
    ),
    *("logs", "model.py", "CKP-notes.txt", ".run.json.swp", "result.json~", "anomalies"),
)
KINDS = ("file", "file", "empty", "read-only", "hidden mode", "folder", "link", "broken link")


class Program(NamedTuple):
    """A program that runs in a folder with files of others."""

    name: str
    """``module:function`` of `support.crash`."""

    arguments: tuple[str, ...]
    places: tuple[str, ...]
    """Folders in which others have files."""


TRAIN = ("train", "crash.yaml", "--set", f"training.output_dir={RUN}")
PROGRAMS = (
    *(
        Program("neighbours:recipe", (RUN, *words), (RUN,))
        for words in ((), ("--overwrite",), ("--resume=auto",), ("--resume",))
    ),
    Program("loops:command_line", ("validate", *TRAIN[1:]), (RUN,)),
    Program("loops:command_line", ("report", RUN), (RUN,)),
    Program("loops:command_line", ("plot", RUN), (RUN,)),
    Program("loops:command_line", ("verify", RUN), (RUN,)),
    Program("loops:command_line", ("compare", RUN, RUN), (RUN,)),
    Program("neighbours:trainer", (RUN,), (RUN,)),
    Program("neighbours:trainer", (RUN, ""), (RUN,)),
    Program("neighbours:attached", (RUN, CHECKPOINT), (RUN,)),
    Program("neighbours:attached", (RUN, CHECKPOINT), (CHECKPOINT,)),
    Program("neighbours:model", (RUN, "checkpoints"), (RUN, "checkpoints")),
)


@pytest.fixture(scope="module")
def finished(fork_server, tmp_path_factory):
    """Return a current folder with a run that has finished."""
    base = tmp_path_factory.mktemp("finished")
    write_rows(base)
    write_recipe(base / "one")
    task = Task(
        program="support.crash.neighbours:recipe", arguments=(RUN,), folder=str(base / "one")
    )
    assert fork_server.run(task)[0].status == 0
    return base / "one"


def state_of(path: Path) -> tuple[Any, ...]:
    """Return what of a file, folder or link must not change, without its times."""
    status = path.lstat()
    if path.is_symlink():
        return status.st_ino, path.readlink()
    content = path.read_bytes() if path.is_file() else None
    return status.st_ino, stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), content


def states(paths: list[Path]) -> dict[Path, tuple[Any, ...]]:
    """Return the states of some paths and of everything below them, without following links."""
    found = {}
    for path in paths:
        below = [] if path.is_symlink() or not path.is_dir() else sorted(path.rglob("*"))
        found |= {each: state_of(each) for each in (path, *below) if os.path.lexists(each)}
    return found


def put(path: Path, kind: str, outside: Path) -> None:
    """Put a file, folder or link of somebody else to a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        (path / "inside").mkdir(parents=True)
        (path / "inside" / "notes.txt").write_text("mine")
        (path / "model.safetensors").write_text("mine")
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "broken link":
        path.symlink_to("nothing/here")
    else:
        path.write_text("" if kind == "empty" else '{"step": 7, "loss": 1.5, "mine": true}\n')
        if kind in {"read-only", "hidden mode"}:
            path.chmod(0o444 if kind == "read-only" else 0o600)


def check(server: ForkServer, rows: Path, finished: Path, seed: int) -> None:
    """Check the program and the files of a seed."""
    draw = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    program = PROGRAMS[seed % len(PROGRAMS)]
    folder = rows / str(seed)
    write_recipe(folder)
    (folder / "checkpoints").mkdir()
    outside = folder / "outside.jsonl"
    outside.write_text('{"step": 9}\n')
    is_command = program.arguments[0] in {"report", "plot", "verify", "compare"}
    if is_command or draw.random() < 0.3:
        shutil.copytree(finished / RUN, folder / RUN)
    theirs = [outside]
    for place in program.places:
        names = OF_CHECKPOINTS if place == CHECKPOINT else RECORDS + OF_RUNS
        chosen = draw.sample(names, draw.choice([0, 1, 1, 2, 3]))
        for name in [*chosen, *draw.sample(LIKE_THEM, 3)]:
            path = folder / place / name
            if not os.path.lexists(path):
                put(path, draw.choice(KINDS), outside)
                theirs.append(path)
    before, everything = states(theirs), states([folder])

    task = Task(
        program=f"support.crash.{program.name}",
        arguments=program.arguments,
        folder=str(folder),
        name="output",
    )
    [ended] = server.run(task)

    said = (folder / "output_0.txt").read_text(encoding="utf-8")
    shown = f"{program}\n{sorted(str(path) for path in theirs)}\n{said[-3000:]}"
    assert differing(before, states(theirs)) == [], shown
    if ended.status != 0:
        assert program.name != "neighbours:model" or "FileExistsError" in said, shown
        names = [path.name.strip() for path in theirs]
        refuses = "mfwrap has not written" in said or "replaces no other files" in said
        assert not refuses or any(name in said for name in names), shown
        left_out = {folder, folder / "output_0.txt"}
        after = states([folder])
        changed = [
            path
            for path in differing(everything, after)
            if path not in left_out and not path.name.endswith((".lock", "_mfwrap_files.txt"))
        ]
        assert not refuses or changed == [], shown
        assert "Traceback" not in said or "Error: " in said.rstrip("\n").split("\n")[-1], shown


def differing(before: Mapping[Path, Any], after: Mapping[Path, Any]) -> list[Path]:
    """Return the paths whose state differs, or that one of both lacks."""
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return a folder with the rows of the recipe."""
    folder = tmp_path_factory.mktemp("folders")
    write_rows(folder)
    return folder


@pytest.mark.timeout(1200)
@pytest.mark.fast_sample(FAST)
@pytest.mark.parametrize("seed", range(NUM_FOLDERS))
def test_folders(fork_server, rows, finished, seed):
    """A program leaves what others have in its folder as it is."""
    check(fork_server, rows, finished, seed)
