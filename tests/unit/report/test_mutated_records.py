"""A page, a picture and a comparison of a damaged run folder: made, or refused in one sentence."""

import random
import shutil

import pytest

from mfwrap.comparison.comparison import compare_runs
from mfwrap.comparison.sentences import sentences
from mfwrap.report.page import page_text
from mfwrap.report.picture import draw_run
from support.mutated_records import mutate, write_full_run

NUM_IN_A_TEST = 20


def faults(folder, seeds):
    """Mutate a run folder again and again; return what fails without naming the folder."""
    full, run = write_full_run(folder / "full"), folder / "run"
    found = []
    for seed in seeds:
        shutil.copytree(full, run)
        what = mutate(run, random.Random(seed))  # noqa: S311  (test data, not cryptography)
        calls = {
            "page": lambda: page_text([run]),
            "picture": lambda: draw_run(run, folder / "run.png"),
            "comparison": lambda: list(sentences(compare_runs(full, run))),
        }
        for name, call in calls.items():
            try:
                call()
            except (OSError, ValueError) as error:
                if str(run) not in str(error):
                    found.append(f"{name}, {what}: {error!r}")
            except Exception as error:  # noqa: BLE001  (listed)
                found.append(f"{name}, {what}: {error!r}")
        shutil.rmtree(run)
    return found


def test_a_few(tmp_path):
    """No value leads to an error of a library."""
    assert faults(tmp_path, range(NUM_IN_A_TEST)) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 40))
def test_many(tmp_path, part):
    """800 folders in all."""
    first = part * NUM_IN_A_TEST
    assert faults(tmp_path, range(first, first + NUM_IN_A_TEST)) == []
