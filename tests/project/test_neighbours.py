"""Runs beside each other end as if they were alone, or are refused before they write.

Each seed draws two programs that run at the same time: trainings in sibling folders with one parent
folder for their checkpoints, trainings in the same folder, a training that begins from a checkpoint
of the other, or commands that read the other's folder. In every second pair one of them is killed,
and started again afterwards.
"""

import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.crash.contents import contents, differences
from support.crash.fork_server import Ended, ForkServer, Task
from support.crash.recipe import write_recipe, write_rows

NUM_PAIRS, FAST = 100, 2
"""Number of pairs, and of those that the fast tests run."""

TRAININGS = ("recipe", "trainer", "attached", "model")
FIRST, SECOND = "run_a", "run_b"
REFUSED = re.compile(
    r"is in use: |in use by|has finished before|must be a folder without|was (deleted|changed) by"
    r"|no such folder|cannot resume from|no checkpoint in|Can't find a valid checkpoint|"
    r"cannot load"
)
"""What a training says that has been refused, or whose checkpoint is gone."""

NOTHING_YET = re.compile(
    r"is not a run folder: |the run has recorded no step|no checkpoint found|nothing to plot"
)
"""What a command says of a run that has not begun."""

COMMANDS = (("report", FIRST), ("plot", FIRST), ("verify", FIRST), ("compare", FIRST, "reference"))


@pytest.fixture(scope="module")
def servers(fork_server):
    """Yield two servers, which run two programs at the same time."""
    with ForkServer() as second:
        yield fork_server, second


def arguments(kind: str, run: str, *, origin: str = "", words: tuple[str, ...] = ()) -> tuple:
    """Return the arguments of a training: its run folder and where its checkpoints are.

    Args:
        kind: One of `TRAININGS`.
        run: Run folder.
        origin: Checkpoint to begin from; empty to begin from the start, or to continue the run.
        words: Further words of the command line, for a recipe.
    """
    if kind == "recipe":
        resume = ("--resume", origin) if origin else words or ("--resume=auto",)
        return (run, *resume)
    if kind == "trainer":
        return (run, origin) if origin else (run,)
    if kind == "attached":
        return (run, f"checkpoints/{run}", *([origin] if origin else []))
    return (run, "checkpoints")


class Pair:
    """Run two programs at the same time in one current folder.

    Args:
        servers: Servers that run them.
        folder: New current folder, beside the rows of the recipe.
    """

    def __init__(self, servers: Any, folder: Path) -> None:
        self._servers = servers
        self.folder = folder
        write_recipe(folder)
        (folder / "checkpoints").mkdir()

    def run(self, number: int, program: str, given: tuple, **kill: Any) -> Ended:
        """Run a program to its end; the number of its server also names its output."""
        task = Task(
            program=f"support.crash.neighbours:{program}",
            arguments=given,
            folder=str(self.folder),
            name=f"output{number}",
            **kill,
        )
        return self._servers[number].run(task)[0]

    def both(self, *starts: Callable[[], Ended]) -> list[Ended]:
        """Call two functions at the same time; return what they return."""
        ended: dict[int, Ended] = {}

        def call(number: int) -> None:
            ended[number] = starts[number]()

        threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [ended[number] for number in range(2)]

    def output(self, number: int) -> str:
        """Return what a program has printed."""
        return (self.folder / f"output{number}_0.txt").read_text(encoding="utf-8")

    def wait_for(self, name: str, thread_ended: threading.Event) -> None:
        """Wait until a file is in the folder, or the other program has ended."""
        while not (self.folder / name).exists() and not thread_ended.is_set():
            time.sleep(0.002)


def normal(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return contents in which all runs and all prefixes of checkpoints have the same name."""

    def renamed(text: Any) -> Any:
        return re.sub(r"run_[ab]|CKP(_\d+)?(?=-)", "run", text) if isinstance(text, str) else text

    return {renamed(name): renamed(value) for name, value in found.items()}


def result(kind: str, folder: Path, run: str) -> dict[str, Any]:
    """Return the contents of all files that a training has left, with usual names."""
    left_out = re.compile(r"run\.(html|png).*|.*\.csv\.\d+|.*\.partial")
    found = {
        name: value
        for name, value in contents(folder / run).items()
        if not left_out.fullmatch(name.partition("/")[0])
    }
    end = contents(folder, f"end_{run}.pt")
    prefix = end.pop(f"end_{run}.pt/prefix", "")
    found |= {name: value for name, value in end.items() if not name.endswith("/prefix")}
    if kind == "attached":
        own = contents(folder / "checkpoints" / run)
        found |= {f"checkpoint/{name}": value for name, value in own.items()}
    elif kind == "model":
        saved = contents(folder / "checkpoints", f"{prefix[1:-1]}-*")
        found |= {f"checkpoint/{name}": value for name, value in saved.items()}
    return normal(found)


@pytest.fixture(scope="module")
def alone(servers, tmp_path_factory):
    """Return a function that gives the result of a training that runs alone, and its folder."""
    base = tmp_path_factory.mktemp("alone")
    write_rows(base)
    found: dict[tuple, tuple[dict[str, Any], Path]] = {}

    def result_of(kind: str, origin: str = "") -> tuple[dict[str, Any], Path]:
        if (kind, origin) not in found:
            pair = Pair(servers, base / str(len(found)))
            if origin:
                keeping = {"recipe": ("--set", "callbacks.2.keep_checkpoint_max=9")}
                first = arguments(kind, FIRST, words=keeping.get(kind, ()))
                first += ("auto", 9) if kind == "trainer" else ()
                assert pair.run(0, kind, first).status == 0, pair.output(0)
            run = SECOND if origin else FIRST
            ended = pair.run(0, kind, arguments(kind, run, origin=origin))
            assert ended.status == 0, pair.output(0)
            found[kind, origin] = result(kind, pair.folder, run), pair.folder / run
        return found[kind, origin]

    return result_of


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return a folder with the rows of the recipe."""
    folder = tmp_path_factory.mktemp("pairs")
    write_rows(folder)
    return folder


def kills_of(draw: random.Random) -> tuple[dict, dict]:
    """Return what kills the first and the second program; in half of all pairs nothing."""
    kill = {"cpu_seconds": 10 ** draw.uniform(-1.5, 0.3)}
    return draw.choice([({}, {}), ({}, {}), (kill, {}), ({}, kill)])


def check_finished(pair: Pair, number: int, kind: str, run: str, expected: Mapping, ended: Ended):
    """Check a training that has ended well; start it again if it was killed or refused."""
    if ended.status != 0:
        said = pair.output(number)
        assert ended.status < 0 or REFUSED.search(said), said[-3000:]
        if kind == "model" and ended.status < 0:
            return
        again = pair.run(number, kind, arguments(kind, run))
        assert again.status == 0, pair.output(number)[-3000:]
    assert differences(expected, result(kind, pair.folder, run)) == []


def siblings(pair: Pair, draw: random.Random, alone: Callable) -> None:
    """Train in two folders, whose checkpoints have the same parent folder."""
    kinds = [draw.choice(TRAININGS), draw.choice(TRAININGS)]
    kills = kills_of(draw)
    runs = (FIRST, SECOND)
    ended = pair.both(
        *(
            lambda n=n: pair.run(n, kinds[n], arguments(kinds[n], runs[n]), **kills[n])
            for n in range(2)
        )
    )
    for number, kind in enumerate(kinds):
        assert ended[number].status == 0 or kills[number], pair.output(number)[-3000:]
        check_finished(pair, number, kind, runs[number], alone(kind)[0], ended[number])


def same_folder(pair: Pair, draw: random.Random, alone: Callable) -> None:
    """Train twice in one folder."""
    kind = draw.choice(TRAININGS)
    kills = kills_of(draw)
    words = [draw.choice([("--resume=auto",), ("--overwrite",), ()]) for _ in range(2)]
    begun, is_over = (
        draw.choice(["checkpoints", FIRST, f"{FIRST}/metrics.jsonl"]),
        threading.Event(),
    )

    def first() -> Ended:
        try:
            return pair.run(0, kind, arguments(kind, FIRST, words=words[0]), **kills[0])
        finally:
            is_over.set()

    def second() -> Ended:
        pair.wait_for(begun, is_over)
        return pair.run(1, kind, arguments(kind, FIRST, words=words[1]), **kills[1])

    ended = pair.both(first, second)
    for number, each in enumerate(ended):
        said = pair.output(number)
        assert each.status == 0 or kills[number] or REFUSED.search(said), said[-3000:]
    if kind == "model" and all(each.status for each in ended):
        return
    last = next((number for number, each in enumerate(ended) if each.status == 0), 0)
    check_finished(pair, last, kind, FIRST, alone(kind)[0], ended[last])


def resumes_from(pair: Pair, draw: random.Random, alone: Callable) -> None:
    """Train, and begin another training from a checkpoint of the first, which is soon deleted."""
    kind = draw.choice(TRAININGS[:3])
    kills = kills_of(draw)
    step = 2 if kind == "recipe" else draw.choice([2, 4, 6])
    origin = "checkpoints/run_a" if kind == "attached" else f"{FIRST}/checkpoint-{step}"
    is_over = threading.Event()

    def first() -> Ended:
        try:
            return pair.run(0, kind, arguments(kind, FIRST), **kills[0])
        finally:
            is_over.set()

    def second() -> Ended:
        pair.wait_for(origin, is_over)
        return pair.run(1, kind, arguments(kind, SECOND, origin=origin), **kills[1])

    ended = pair.both(first, second)
    assert ended[0].status == 0 or kills[0], pair.output(0)[-3000:]
    check_finished(pair, 0, kind, FIRST, alone(kind)[0], ended[0])
    if ended[1].status == 0 and kind == "attached":
        name = "end_run.pt/"
        expected = {k: v for k, v in alone(kind)[0].items() if k.startswith(name)}
        found = result(kind, pair.folder, SECOND)
        assert differences(expected, {k: v for k, v in found.items() if k.startswith(name)}) == []
    elif ended[1].status == 0:
        found = result(kind, pair.folder, SECOND)
        assert differences(alone(kind, origin)[0], found) == []
    else:
        said = pair.output(1)
        assert kills[1] or REFUSED.search(said), said[-3000:]


def is_read(pair: Pair, draw: random.Random, alone: Callable) -> None:
    """Train while commands read the run folder."""
    kind = draw.choice(TRAININGS[:2])
    kills = kills_of(draw)
    (pair.folder / "reference").symlink_to(alone(kind)[1])

    def first() -> Ended:
        try:
            return pair.run(0, kind, arguments(kind, FIRST), **kills[0])
        finally:
            (pair.folder / "over").touch()

    def second() -> Ended:
        return pair.run(1, "reads", (draw.randrange(2**32), "over", COMMANDS), **kills[1])

    ended = pair.both(first, second)
    assert ended[0].status == 0 or kills[0], pair.output(0)[-3000:]
    assert ended[1].status == 0 or kills[1], pair.output(1)[-3000:]
    said = pair.output(1)
    assert "Traceback" not in said, said[-3000:]
    assert "damaged" not in said, said[-3000:]
    assert set(re.findall(r"^status (\S+) of", said, re.MULTILINE)) <= {"0", "2"}, said[-3000:]
    errors = re.findall(r"^mfwrap: (.*)$", said, re.MULTILINE)
    assert [line for line in errors if not NOTHING_YET.search(line)] == []
    check_finished(pair, 0, kind, FIRST, alone(kind)[0], ended[0])


MEETINGS = (siblings, same_folder, resumes_from, is_read)


def check(servers: Any, rows: Path, alone: Callable, seed: int) -> None:
    """Check the pair of a seed."""
    draw = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    meeting = MEETINGS[seed % len(MEETINGS)]
    meeting(Pair(servers, rows / str(seed)), draw, alone)


@pytest.mark.timeout(1200)
@pytest.mark.fast_sample(FAST)
@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_pairs(servers, rows, alone, seed):
    """Each of two programs leaves the files that it leaves alone, or none."""
    check(servers, rows, alone, seed)
