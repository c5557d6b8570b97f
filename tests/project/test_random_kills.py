"""A training that is killed at random moments and resumed ends with the same files and states.

One rank of each run is killed after a random CPU time, again and again, and the run is resumed
until it ends. Then a new run begins, until the number of kills is reached.
"""

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from support.crash.contents import contents, differences
from support.crash.fork_server import Ended, ForkServer, Task
from support.crash.recipe import write_recipe, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LOOPS = (
    *("loops:recipe", "loops:trainer", "own_loops:attached", "own_loops:cell"),
    *("loops:recipe_in_background", "loops:trainer_in_background"),
    *("own_loops:attached_in_background", "own_loops:sharded", "own_loops:sharded_in_background"),
)
NUM_KILLS = 25
"""Number of kills for each loop and number of ranks; 450 in all."""


class Runs:
    """Runs of one kind of training.

    Args:
        server: Server that runs the processes.
        loop: Name in `LOOPS`.
        num_ranks: Number of ranks.
    """

    def __init__(self, server: ForkServer, loop: str, num_ranks: int) -> None:
        self._server = server
        self._task = {"program": f"support.crash.{loop}", "arguments": (), "num_ranks": num_ranks}

    def run(self, folder: Path, **kill: Any) -> list[Ended]:
        """Run in a folder, from its newest checkpoint if there is one; return how ranks ended."""
        return self._server.run(Task(**self._task, folder=str(folder), **kill))


def output(folder: Path) -> str:
    """Return the last lines that each rank has printed."""
    return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("output_*.txt")))


def result(folder: Path) -> dict[str, Any]:
    """Return the contents of all files of a run, and the states of all ranks at its end."""
    return contents(folder / "run") | contents(folder / "end")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_killed(fork_server, tmp_path, loop, num_ranks):
    """A run that is killed again and again ends like a run that is never killed."""
    runs = Runs(fork_server, loop, num_ranks)
    write_rows(tmp_path)
    alone = tmp_path / "alone"
    write_recipe(alone)
    ended = runs.run(alone)
    assert [each.status for each in ended] == [0] * num_ranks, output(alone)
    expected = result(alone)

    draw = random.Random(f"{loop} {num_ranks}")  # noqa: S311  (test data, not cryptography)
    num_kills = num_runs = 0
    while num_kills < NUM_KILLS:
        folder = tmp_path / str(num_runs)
        write_recipe(folder)
        has_ended = False
        while not has_ended:
            rank = draw.randrange(num_ranks)
            # A resumed run takes less time than a whole one, so some runs end before the kill.
            seconds = draw.uniform(0, ended[rank].cpu_seconds)
            kill = {"rank": rank, "cpu_seconds": seconds} if num_kills < NUM_KILLS else {}
            again = runs.run(folder, **kill)
            has_ended = all(each.status == 0 for each in again)
            if not has_ended:
                assert again[rank].status == -signal.SIGPROF, output(folder)
                num_kills += 1
        num_runs += 1
        assert differences(expected, result(folder)) == []
