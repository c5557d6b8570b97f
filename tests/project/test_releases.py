"""Runs and checkpoints that released versions have written are read, resumed and shown."""

import base64
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mfwrap
from mfwrap.cli import main
from mfwrap.records import read_json_lines
from support.paths import ROOT, TESTS
from support.release_data import RECIPE, CellTraining, LoopTraining, kept_batches

RELEASES = TESTS / "releases"
KEPT = sorted(path.name for path in RELEASES.iterdir() if path.is_dir())

TOLERANCE = 1e-4
"""Relative difference that another version of torch may make."""

# Other libraries may warn of older files.
pytestmark = pytest.mark.filterwarnings("ignore")


def version(name: str) -> tuple[int, ...]:
    """Return a version as numbers, which compare as versions do."""
    return tuple(int(part) for part in name.split("."))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Write the data of this version, with the command in CONTRIBUTING.md."""
    folder = tmp_path_factory.mktemp("releases") / "written"
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ *PYTHONPATH=tests .venv/bin/python (.*)$", text, re.MULTILINE)
    *words, named = shlex.split(line)
    assert named == f"tests/releases/{mfwrap.__version__}"
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *words, str(folder)]
    subprocess.run(command, cwd=TESTS, env=environment, check=True)
    return folder


@pytest.fixture(params=[*KEPT, pytest.param("written", marks=pytest.mark.slow)])
def release(request, tmp_path, monkeypatch) -> Path:
    """Make a copy of the data of a release, or of this version, the current folder."""
    is_kept = request.param in KEPT
    kept = RELEASES / request.param if is_kept else request.getfixturevalue("written")
    monkeypatch.chdir(shutil.copytree(kept, tmp_path / "release"))
    return Path()


def run(*words: str) -> None:
    """Run a command of mfwrap, which must succeed."""
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0, words


def unlike(expected: Any, found: Any, place: str = "") -> list[str]:
    """Return the places at which nested values differ; `found` may have additional keys."""
    if isinstance(expected, dict) and isinstance(found, dict):
        pairs = [(f"{place}.{name}", one, found.get(name)) for name, one in expected.items()]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [(f"{place}.{i}", one, found[i]) for i, one in enumerate(expected)]
    elif isinstance(expected, float) and isinstance(found, float):
        close = found == pytest.approx(expected, rel=TOLERANCE, abs=1e-6)
        return [] if close else [f"{place}: {expected} and {found}"]
    else:
        return [] if expected == found else [f"{place}: {expected!r} and {found!r}"]
    return [where for name, one, other in pairs for where in unlike(one, other, name)]


def test_each_release_has_its_data():
    """The changelog and the folders have the same releases; the version in work may have data."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = dict(re.findall(r"^## ([\d.]+) - (unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE))
    released = {name for name, date in headings.items() if date != "unreleased"}

    assert KEPT
    assert released <= set(KEPT) <= released | {mfwrap.__version__}
    assert max(headings, key=version) == mfwrap.__version__


@pytest.mark.parametrize("kept", KEPT)
def test_the_data_are_those_of_the_release(kept):
    """The version in run.json is that of the folder's name."""
    facts = json.loads((RELEASES / kept / "run" / "run.json").read_text(encoding="utf-8"))

    assert facts["versions"]["mfwrap"] == kept


def test_the_recipe_trains_the_same_numbers(release):
    """The kept recipe is valid, and each record of its run has the numbers of the kept run."""
    run("train", "recipe.yaml", "--set", "training.output_dir=again")

    for name in ("metrics.jsonl", "training_state.jsonl"):
        kept = read_json_lines(release / "run" / name)
        assert kept
        assert unlike(kept, read_json_lines(release / "again" / name)) == []


def test_a_kept_run_resumes(release):
    """The checkpoint is intact, and the steps after it have the numbers of the kept run."""
    kept = read_json_lines(release / "run" / "metrics.jsonl")
    checkpoint = release / "run" / "checkpoint-4"

    run("verify", "run")
    run("train", "recipe.yaml", "--resume", str(checkpoint))

    assert unlike(kept, read_json_lines(release / "run" / "metrics.jsonl")) == []
    assert (release / "run" / f"checkpoint-{RECIPE['training']['max_steps']}").is_dir()


def test_a_kept_run_is_replaced(release):
    """The folder of a release can be overwritten again and again, and then be resumed."""
    run("train", "recipe.yaml", "--overwrite")
    run("train", "recipe.yaml", "--overwrite")
    run("train", "recipe.yaml", "--resume", "--set", "training.max_steps=12")

    steps = [record.get("step") for record in read_json_lines(release / "run" / "metrics.jsonl")]
    assert max(filter(None, steps)) == 12


def test_a_kept_run_is_shown(release):
    """`mfwrap report` draws the losses and norms of the kept run, and `mfwrap plot` a picture."""
    run("report", "run")
    run("plot", "run")

    kept = read_json_lines(release / "run" / "metrics.jsonl")
    page = (release / "run" / "run.html").read_text(encoding="utf-8")
    (packed,) = re.findall(r'<script id="data" type="text/plain">\s*(\S+)\s*</script>', page)
    panels = json.loads(gzip.decompress(base64.b64decode(packed)))["panels"]
    drawn = {panel["name"]: panel["traces"][0]["y"] for panel in panels if panel.get("traces")}
    for name in ("loss", "global_norm"):
        assert unlike([record[name] for record in kept if name in record], drawn[name]) == []
    assert (release / "run" / "run.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("part", "training"),
    [("cell", CellTraining), ("accelerate", LoopTraining)],
    ids=["cell", "accelerate"],
)
def test_a_checkpoint_of_a_loop_trains_on(release, part, training):
    """The state of a cell, and of an accelerator, load; the next updates have the kept numbers."""
    expected = json.loads((release / part / "updates.json").read_text(encoding="utf-8"))
    loaded = training()
    loaded.load(release / part)

    assert unlike(expected, loaded.train(kept_batches(release / part))) == []


def test_the_comparison_finds_a_difference():
    """`unlike` names what is missing, or differs by more than the tolerance."""
    kept = [{"loss": 1.0, "step": 1, "norms": [2.0, 3.0]}]

    assert unlike(kept, [{"loss": 1.00001, "step": 1, "norms": [2.0, 3.0], "new": 1}]) == []
    assert unlike(kept, [{"loss": 1.001, "step": 1, "norms": [2.0]}]) == [
        ".0.loss: 1.0 and 1.001",
        ".0.norms: [2.0, 3.0] and [2.0]",
    ]
    assert unlike(kept, []) != []
