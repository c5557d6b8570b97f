"""The benchmarks run, and write only their own part of the results."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
MARK = re.compile(r"<!-- (\w+) (cpu) -->\n(.*?)\n<!-- end -->", re.DOTALL)


def bodies(path):
    """Return the results of a CPU in a file by section and device."""
    return {(key, device): body for key, device, body in MARK.findall(path.read_text("utf-8"))}


def run(results, *arguments):
    """Run the program that measures, with tiny sizes."""
    command = [sys.executable, BENCHMARKS / "run.py", "--quick", "--results", results, *arguments]
    # The programs import modules of their own folder.
    subprocess.run(command, check=True, env={**os.environ, "PYTHONSAFEPATH": ""})


@pytest.fixture
def results(tmp_path):
    """Return a copy of the results."""
    return Path(shutil.copy(BENCHMARKS / "RESULTS.md", tmp_path))


@pytest.fixture(scope="module")
def sections():
    """Return the sections that are measured."""
    path = BENCHMARKS / "run.py"
    spec = importlib.util.spec_from_file_location("benchmarks_run", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.SECTIONS


def test_each_section_has_its_place_in_the_results(sections):
    """Each section has a mark for the CPU."""
    assert set(bodies(BENCHMARKS / "RESULTS.md")) == {(key, "cpu") for key in sections}


def test_each_result_says_what_was_run(sections):
    """A result has its date, its machine and, for each table, its command."""
    for (key, device), body in bodies(BENCHMARKS / "RESULTS.md").items():
        assert re.match(r"\d{4}-\d\d-\d\d, .*torch \d", body), (key, device)
        programs = {name.split()[0] for name in (*sections[key].usual, *sections[key].full)}
        commands = re.findall(r"^`python benchmarks/(\w+\.py)", body, re.MULTILINE)
        assert commands
        assert set(commands) <= programs


@pytest.mark.slow
def test_a_section_that_is_measured_keeps_the_others(results):
    """Measuring one section replaces its table and nothing else."""
    before = bodies(results)
    run(results, "--only", "host")
    after = bodies(results)

    changed = {key for key in after if after[key] != before[key]}
    assert changed == {("host", "cpu")}
    rows = [line for line in after["host", "cpu"].splitlines() if line.startswith("| mfwrap")]
    assert len(rows) == 4
    for row in rows:
        assert re.fullmatch(
            r"\| [^|]+ \| [\d.]+ \([\d.]+ to [\d.]+\) \| \d+\.\d\d \| \d+ \|", row
        ), row


def table(body):
    """Return the cells of a table's rows by the name in the first column."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in body.splitlines()
        if line.startswith("|")
    ]
    return {cells[0]: cells[1:] for cells in rows[2:]}


@pytest.mark.slow
def test_averaging_every_fourth_update_moves_a_quarter_of_the_bytes(results):
    """Averaging moves 12 bytes a parameter, and 3 of them as the mean of four updates."""
    run(results, "--only", "epilogue")
    rows = table(bodies(results)["epilogue", "cpu"])

    for often, seldom in (
        ("mfwrap, fused AdamW", "mfwrap, average every 4 updates"),
        (
            "torch, fused AdamW, foreach average",
            "torch, fused AdamW, foreach average every 4 updates",
        ),
    ):
        assert int(rows[often][2]) - int(rows[seldom][2]) == 12 - 3
        assert rows[often][3] == rows[seldom][3]
    for cells in rows.values():
        ratio = re.fullmatch(r"([\d.]+) \(([\d.]+) to ([\d.]+)\) of it", cells[1])
        median, least, most = map(float, ratio.groups())
        assert least <= median <= most
    ours = [name for name in rows if name.startswith("mfwrap")]
    assert [rows[name][1] for name in ours] == ["1.00 (1.00 to 1.00) of it"] * 2


@pytest.mark.slow
def test_whole_steps_are_measured_with_their_memory(results):
    """Every contestant holds four tensors a parameter, and one more where it averages."""
    run(results, "--only", "trainer")
    body = bodies(results)["trainer", "cpu"]
    rows = table(body)

    embedding, layer = 512 * 64, 4 * 64**2 + 3 * 64 * 192 + 2 * 64
    megabytes = 4 * (2 * embedding + 4 * layer + 64) / 1e6
    averaging = [name for name in rows if "everything on" in name or "average" in name]
    assert f"Llama of {megabytes / 4:.1f} million" in body
    assert {
        "accelerate loop",
        "accelerate loop, mfwrap attached, everything on",
        "plain loop, as in torchtune's recipes",
        "plain loop, MFTrainOneStepCell, everything on",
    } < set(rows)
    assert len(averaging) in {4, 5}  # Lightning may not be installed
    for name, (_, ratio, peak) in rows.items():
        assert re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", ratio), name
        num_tensors = 5 if name in averaging else 4
        assert num_tensors <= float(peak) / megabytes < num_tensors + 0.9, name


@pytest.mark.slow
def test_the_benchmarks_without_other_libraries_run(results):
    """Programs that need no library beside those of the tests run with tiny sizes."""
    names = ("imports", "checksums", "long_run")
    run(results, "--only", *names)

    found = bodies(results)
    assert all(found[name, "cpu"].count("\n|") >= 4 for name in names)
