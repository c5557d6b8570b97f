"""`make device`: its parts, and a whole run on a CPU."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
NAMES = ("command", "plan", "published", "recording", "results", "tables")
MARK = re.compile(r"<!-- (\w+) cuda -->\n(.*?)\n<!-- end -->", re.DOTALL)


@pytest.fixture(scope="module")
def device():
    """Return the modules of the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        modules = {name: importlib.import_module(f"device.{name}") for name in NAMES}
        yield SimpleNamespace(**modules)


def section(status="ok", **changes):
    """Return what a section has recorded."""
    tables = {"a table": [{"what": "a", "ms": {"median": 1.234, "low": 1.0, "high": 20.5}}]}
    empty = {"summary": "", "tables": tables, "failures": [], "left_out": [], "seconds": 3.0}
    return {"status": status, **empty, **changes}


def run_of(name="NVIDIA H100", date="2026-11-26T10:00:00+00:00", kind="cuda", **sections):
    """Return the results of a run."""
    machine = {"kind": kind, "name": name, "versions": {"torch": "2.11.0"}, "revision": "abc"}
    machine["copied_gb_per_second"] = 3000.0
    facts = {"format": 1, "command": "make device", "date": date, "small": False}
    return {**facts, "machine": machine, "sections": sections}


def cuda_parts(file):
    """Return the results of a GPU in RESULTS.md by section."""
    return dict(MARK.findall(file.read_text("utf-8")))


# The plan


def test_sections_are_chosen_by_name(device):
    """Names are separated by spaces or commas; they are run in the order of their worth."""
    assert device.plan.chosen("waits tests") == ["tests", "waits"]
    assert device.plan.chosen("fp16,update") == ["update", "fp16"]
    assert device.plan.chosen(" ") == list(device.plan.SECTIONS)
    with pytest.raises(ValueError, match=r"SECTIONS: expected names among tests, .* got wait"):
        device.plan.chosen("tests wait")


def test_a_section_has_its_time_or_more(device):
    """In a whole run of a GPU each section has its share; few sections share the time of a run."""
    sections = device.plan.SECTIONS
    whole = device.plan.limits(list(sections), device.plan.LIMITS["cuda"])

    assert whole == {name: each.share for name, each in sections.items()}
    assert device.plan.limits(["tests"], 300) == {"tests": 300}
    assert device.plan.limits(["tests", "waits"], 20) == {"tests": 20, "waits": 20}
    long = device.plan.limits(list(sections), 3600)
    assert sum(long.values()) == pytest.approx(3600)


def test_each_section_is_a_module(device):
    """The plan names the modules of the sections, and no others."""
    folder = BENCHMARKS / "device" / "sections"
    assert {file.stem for file in folder.glob("*.py")} - {"__init__"} == set(device.plan.SECTIONS)


# What a section records


def test_a_section_goes_on_after_a_failure(device, tmp_path, capsys):
    """A part that raises is recorded with its error, and its traceback is printed."""
    file = tmp_path / "section.json"
    recording = device.recording.Recording(file)
    with recording.part("first"):
        int("one")
    with recording.part("second"):
        recording.row("numbers", {"n": 1})
    before = json.loads(file.read_text())
    recording.end()
    after = json.loads(file.read_text())

    assert before["status"] == "running"
    assert after["status"] == "failed"
    assert after["failures"] == [{"part": "first", "error": ANY}]
    assert after["failures"][0]["error"].startswith("ValueError: invalid literal for int()")
    assert after["tables"] == {"numbers": [{"n": 1}]}
    assert "Traceback" in capsys.readouterr().err


def test_a_claim_that_does_not_hold_is_a_failure(device, tmp_path):
    """Each claim is in the table of checks."""
    recording = device.recording.Recording(tmp_path / "section.json")
    recording.check("one is one", holds=True, found="1")
    recording.check("one is two", holds=False, found="1")
    recording.end()
    found = json.loads((tmp_path / "section.json").read_text())

    assert [row["holds"] for row in found["tables"]["checks"]] == ["yes", "no"]
    assert found["status"] == "failed"
    assert found["failures"] == [{"part": "one is two", "error": "1"}]


def test_a_section_without_its_package_is_not_run(device, tmp_path):
    """A part that needs an absent package names it; a section of only such parts is not run."""
    recording = device.recording.Recording(tmp_path / "section.json")
    with recording.part("recipes"):
        device.recording.need("json", "no_such_package_1")
    recording.end()
    found = json.loads((tmp_path / "section.json").read_text())

    assert found["status"] == "not run"
    assert found["left_out"] == [{"part": "recipes", "reason": "needs no_such_package_1"}]
    assert found["failures"] == []


# The limits of a section


@pytest.fixture
def run_script(device, tmp_path, monkeypatch):
    """Return a function that runs a shell script as a section; ``$FILE`` is its file of results."""
    monkeypatch.setattr(device.command.environment, "FOLDER", tmp_path / "work")
    run = device.command.Run(tmp_path / "out", {"date": "today"})

    def run_it(script, limit=60.0):
        command = ["sh", "-c", f'FILE="$2"; {script}', "sh"]
        found = device.command.run_section("tests", command, os.environ, limit, run)
        run.keep("tests", found)
        return found, json.loads((tmp_path / "out" / device.results.FILE).read_text())

    run_it.out, run_it.command = tmp_path / "out", device.command
    return run_it


RECORD = f'echo \'{json.dumps(section("running"))}\' > "$FILE.new"; mv "$FILE.new" "$FILE";'


def test_a_section_over_its_limit_is_not_run(run_script, tmp_path):
    """It is cut with what it has started; what it had measured is kept, and its output logged."""
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    started = f"sleep 1000 > {tmp_path / 'alive'} &"
    script = f"{RECORD} echo last words; trap '' USR1; {started} wait; wait"
    found, written = run_script(script, limit=3.0)

    assert found["status"] == "not run"
    assert found["reason"] == "cut at its limit of 3 s; its tables are incomplete"
    assert found["tables"] == section()["tables"]
    assert written["sections"]["tests"] == found
    assert written["date"] == "today"
    assert "last words" in (run_script.out / "failures.log").read_text()
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # no process is left that could write
    os.close(reader)


@pytest.mark.parametrize(
    ("end", "error"),
    [("kill -SEGV $$", "SIGSEGV"), ("exit 3", "exit status 3"), ("exit 0", "exit status 0")],
)
def test_a_section_that_ends_early_has_failed(run_script, end, error):
    """A process that ends without having said so has failed, and keeps what it had measured."""
    found, _ = run_script(f"{RECORD} {end}")

    assert found["status"] == "failed"
    assert found["failures"] == [{"part": "tests", "error": f"the process ended early: {error}"}]
    assert found["tables"] == section()["tables"]


def test_a_kill_of_the_run_leaves_the_log_of_its_section(run_script, monkeypatch):
    """What the running section has printed is among the results."""

    def interrupt(*_):
        if run_script.out.joinpath("running.log").read_text() == "last words\n":
            raise SystemExit

    monkeypatch.setattr(run_script.command, "waited", interrupt)
    with pytest.raises(SystemExit):
        run_script("echo last words; sleep 1000")

    assert (run_script.out / "running.log").read_text() == "last words\n"


def test_the_log_of_failures_has_a_limit(run_script, monkeypatch):
    """The end of each output is kept, and of all outputs together no more than a limit."""
    monkeypatch.setattr(run_script.command, "LOG_TAIL", 30)
    monkeypatch.setattr(run_script.command, "LOG_SIZE", 60)
    for _ in range(3):
        run_script(f"echo {'a' * 50}; echo traceback; exit 1")
    outputs = re.split(r"(?m)^==== .*\n", (run_script.out / "failures.log").read_text())

    assert outputs == ["", f"{'a' * 19}\ntraceback\n\n", "raceback\n\n", "\n"]


def test_a_section_that_ends_well_leaves_no_log(run_script):
    """Only sections that are not ok are logged."""
    done = RECORD.replace('"running"', '"ok"')
    found, _ = run_script(f"{done} echo chatter")

    assert found["status"] == "ok"
    assert [path.name for path in run_script.out.iterdir()] == ["device.json"]


# Waits

FRAMES = {
    "Trainer": "/site-packages/transformers/trainer.py",
    "mfwrap": "TREE/mfwrap/step/update.py",
    "torch": "/site-packages/torch/nn/utils/clip_grad.py",
    "warnings": "/lib/python3.12/warnings.py",
    "program": "/home/me/train.py",
    "mfwrap passes on": "TREE/mfwrap/tensors/attention_logits.py",
}
FUNCTIONS = {"mfwrap passes on": "__torch_function__"}


@pytest.mark.parametrize(
    ("frames", "place", "is_ours"),
    [
        (["program", "Trainer", "mfwrap", "torch", "warnings"], "clip_grad", True),
        (["program", "mfwrap", "Trainer", "torch", "warnings"], "clip_grad", False),
        (["Trainer", "mfwrap", "warnings"], "update", True),
        (["program", "torch"], "clip_grad", False),
        (["program", "Trainer", "mfwrap passes on", "torch", "warnings"], "clip_grad", False),
        (["program", "Trainer", "mfwrap passes on", "warnings"], "trainer", False),
    ],
)
def test_a_wait_has_a_place_and_an_owner(device, frames, place, is_ours):
    """The owner is the innermost of mfwrap, transformers and accelerate that makes the call."""
    waits = importlib.import_module("device.sections.waits")
    stack = [
        traceback.FrameSummary(
            FRAMES[name].replace("TREE", waits.TREE), 7, FUNCTIONS.get(name, "f")
        )
        for name in frames
    ]
    found = waits.wait_at(stack)

    assert f"{place}.py:7" in found.place.split(" < ")[0]
    assert found.is_ours == is_ours


def test_a_warning_of_torch_is_seen_as_a_wait(device):
    """The message is torch's; other warnings are not waits."""
    waits = importlib.import_module("device.sections.waits")
    setup = importlib.import_module("device.setup").Setup("cpu", small=True)
    watched = waits.Waits(setup)
    watched.start()
    warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
    warnings.warn("another one", UserWarning, stacklevel=1)
    watched.stop(2)

    [wait] = watched.found
    assert Path(__file__).name in wait.place
    assert watched.columns("a test")["steps"] == 2


# Joined results


def test_the_newest_result_of_each_section_and_device_wins(device):
    """Runs are joined in any order, with results that were joined before."""
    old = run_of(date="2026-11-25T10:00:00+00:00", waits=section(seconds=1), fp16=section())
    new = run_of(waits=section("failed", seconds=2))
    other = run_of(name="NVIDIA H200", waits=section(seconds=3))
    joined = device.results.joined

    for runs in ([old, new, other], [other, new, old]):
        found = joined({}, runs)
        assert {name: each["seconds"] for name, each in found["waits"].items()} == {
            "NVIDIA H100": 2,
            "NVIDIA H200": 3,
        }
        assert found["fp16"]["NVIDIA H100"]["date"] == old["date"]
    assert joined(joined({}, [new]), [old]) == joined({}, [old, new])


def test_tables_of_a_section_that_was_cut_are_kept(device):
    """They are marked as incomplete, until a section that has ended takes their place."""
    cut = run_of(waits=section("not run", reason="cut at its limit of 3 s", seconds=1))
    killed = run_of(fp16=section("running"))
    ended = run_of(date="2026-11-25T10:00:00+00:00", waits=section(seconds=2))
    incomplete = device.results.joined({}, [cut, killed])
    text = {name: device.tables.published(each) for name, each in incomplete.items()}
    found = device.results.joined(incomplete, [ended])

    assert "Incomplete: cut at its limit of 3 s." in text["waits"]
    assert "Incomplete: the run was killed." in text["fp16"]
    assert "| a | 1.23 (1.00 to 20.5) |" in text["waits"]
    assert found["waits"]["NVIDIA H100"]["seconds"] == 2
    assert "Incomplete" not in device.tables.published(found["waits"])
    for runs in ([cut, ended], [ended, cut]):
        assert device.results.joined({}, runs)["waits"] == found["waits"]


def test_what_says_nothing_of_a_gpu_is_left_out(device):
    """A CPU, tiny sizes, and sections that have measured nothing are not joined."""
    measured = run_of(date="2026-11-25T10:00:00+00:00", waits=section())
    before = device.results.joined({}, [measured])
    runs = [
        run_of(name="a CPU", kind="cpu", waits=section(), fp16=section()),
        {**run_of(fp16=section()), "small": True},
        run_of(waits=section("not run"), fp16=section("running", tables={}), unknown=section()),
    ]

    assert device.results.joined(before, runs) == before


def test_a_folder_of_runs_is_read(device, tmp_path):
    """Files in folders are found; other JSON files are not taken for results."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "device.json").write_text(json.dumps(run_of(waits=section())))
    (tmp_path / "other.json").write_text("[]")

    assert len(device.results.read_runs(tmp_path)) == 2
    assert len(device.results.read_runs(tmp_path / "one" / "device.json")) == 1
    with pytest.raises(ValueError, match=r"other\.json: expected the results of `make device`"):
        device.results.read_runs(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"absent\.json: expected the results of `make device`"):
        device.results.read_runs(tmp_path / "absent.json")


# Tables


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (12345, "12345"),
        (12345.6, "12346"),
        (99.96, "100"),
        (1.2345, "1.23"),
        (0.12345, "0.123"),
        (0.0012345, "0.0012"),
        ({"median": 1.234, "low": 1.0, "high": 20.56}, "1.23 (1.00 to 20.6)"),
        ("a|b\nc", "a\\|b c"),
    ],
)
def test_a_value_is_formatted(device, value, text):
    """Numbers have three digits; a spread is its median and its quartiles."""
    assert device.tables.cell(value) == text


def test_the_overview_has_a_line_for_each_section(device):
    """It names what failed and what was not run."""
    failed = section("failed", failures=[{"part": "a part", "error": "an error"}])
    sections = {"waits": failed, "fp16": section(summary="all well")}
    lines = device.tables.overview(sections, ["tests", "waits", "fp16"]).splitlines()

    assert lines[2] == "| tests | not run | - | not started |"
    assert lines[3] == "| waits | failed | 3.00 | a part: an error |"
    assert lines[4] == "| fp16 | ok | 3.00 | all well |"


# RESULTS.md


def publish(device, monkeypatch, results, *runs):
    """Write results of runs into a copy of RESULTS.md."""
    place = results.parent / "runs"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for number, run in enumerate(runs):
        (place / f"{number}.json").write_text(json.dumps(run))
    monkeypatch.setattr(sys, "argv", ["published", str(place), "--results", str(results)])
    device.published.main()


@pytest.fixture
def results(tmp_path):
    """Return a copy of RESULTS.md without results of a GPU."""
    text = (BENCHMARKS / "RESULTS.md").read_text("utf-8")
    text = MARK.sub(r"<!-- \1 cuda -->\nNot measured on a GPU.\n<!-- end -->", text)
    (tmp_path / "RESULTS.md").write_text(text)
    return tmp_path / "RESULTS.md"


def test_results_of_a_gpu_are_written_between_their_marks(device, monkeypatch, results):
    """A measured section gets device, versions, date, command and tables; the others stay."""
    before = results.read_text()
    publish(device, monkeypatch, results, run_of(waits=section()))
    after = results.read_text()
    parts = cuda_parts(results)

    for part in ("2026-11-26", "NVIDIA H100", "torch 2.11.0", "revision abc", "`make device`"):
        assert part in parts["waits"]
    assert "| a | 1.23 (1.00 to 20.5) |" in parts["waits"]
    unmeasured = {name for name, body in parts.items() if body == "Not measured on a GPU."}
    assert unmeasured == set(device.plan.SECTIONS) - {"waits"}
    assert after.replace(parts["waits"], "Not measured on a GPU.") == before


def test_earlier_results_of_a_gpu_are_kept(device, monkeypatch, results):
    """Results that were joined before need not be given again; an older run changes nothing."""
    publish(device, monkeypatch, results, run_of(waits=section()))
    old = run_of(date="2026-11-01T10:00:00+00:00", waits=section(tables={}), fp16=section())
    publish(device, monkeypatch, results, old)
    parts = cuda_parts(results)

    assert "2026-11-26" in parts["waits"]
    assert "2026-11-01" in parts["fp16"]


def test_results_of_a_cpu_are_never_written(device, monkeypatch, results, capsys):
    """They are named, and no file changes."""
    before = results.read_text()
    publish(device, monkeypatch, results, run_of(kind="cpu", waits=section()))

    assert results.read_text() == before
    assert not results.with_name("device_results.json").exists()
    assert "0.json is left out" in capsys.readouterr().out


def test_each_section_has_its_place_in_the_results(device):
    """RESULTS.md has a mark for each section of a GPU, and its text comes from the joined file."""
    file = BENCHMARKS / "RESULTS.md"
    found = device.published.read_joined(BENCHMARKS / "device_results.json")

    assert set(cuda_parts(file)) == set(device.plan.SECTIONS)
    assert device.published.with_results(file.read_text("utf-8"), found) == file.read_text("utf-8")


# The outcomes of tests

TESTS = """
import pytest

def test_good(): pass

def test_bad(): assert 1 == 2

@pytest.mark.skip(reason="not today")
def test_skipped(): pass

@pytest.fixture
def broken(): raise OSError("no disk")

def test_broken(broken): pass
"""


def test_outcomes_of_tests_are_written_one_by_one(tmp_path):
    """The plugin writes each outcome with its reason, and files that cannot be imported."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import no_such_package_1")
    (tmp_path / "pytest.ini").write_text("[pytest]")
    outcomes = tmp_path / "outcomes.jsonl"
    variables = {
        **os.environ,
        "PYTHONPATH": str(BENCHMARKS),
        "DEVICE_OUTCOMES": str(outcomes),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "device.outcomes"]
    command += ["--continue-on-collection-errors"]
    subprocess.run(command, cwd=tmp_path, env=variables, check=False, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    found = {each["test"].rpartition("::")[2]: each for each in lines}

    assert {name: each["outcome"] for name, each in found.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_skipped": "skipped",
        "test_broken": "error",
        "test_other.py": "error",
    }
    assert "assert 1 == 2" in found["test_bad"]["reason"]
    assert found["test_skipped"]["reason"] == "not today"
    assert "no disk" in found["test_broken"]["reason"]
    assert "no_such_package_1" in found["test_other.py"]["reason"]


def test_outcomes_are_counted_while_tests_run(device, tmp_path):
    """A line that is still being written is left for later; reasons of skips are counted."""
    tests = importlib.import_module("device.sections.tests")
    lines = [
        {"test": "a", "outcome": "passed", "reason": ""},
        {"test": "b", "outcome": "skipped", "reason": "no NCCL"},
        {"test": "c", "outcome": "skipped", "reason": "no NCCL"},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "outcomes").write_text(text + '{"test": "d", "outc')
    found = tests.read_outcomes(tmp_path / "outcomes")

    assert found == lines
    assert tests.read_outcomes(tmp_path / "absent") == []
    counts = {"passed": 1, "failed": 0, "skipped": 2, "error": 0}
    assert tests.summary("all", found) == {
        "tests": "all",
        **counts,
        "reasons for skips": "2 x no NCCL",
    }


def test_the_files_with_tests_of_a_gpu_are_found(device, tmp_path):
    """A file has such tests if it uses the mark, or a helper that does; no other is imported."""
    tests = importlib.import_module("device.sections.tests")
    texts = {
        "support/devices.py": "each_device = pytest.mark.cuda",
        "unit/test_marked.py": "@pytest.mark.cuda",
        "devices/test_each.py": "from support.devices import each_device",
        "unit/test_other.py": "import no_such_package_1",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [file.name for file in tests.files_with_cuda_tests(tmp_path)]

    assert found == ["test_each.py", "test_marked.py"]
    assert tests.files_with_cuda_tests(ROOT / "tests")


# The command as a whole


@pytest.fixture(scope="module")
def checkout(new_tree):
    """Return a copy of the project."""
    tree = new_tree()
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(BENCHMARKS, tree / "benchmarks", ignore=ignored).parent


def make(checkout, *arguments, **variables):
    """Run ``make device`` in a copy of the project with this interpreter."""
    environment = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL"}}
    return subprocess.run(
        ["make", "device", f"PYTHON={sys.executable}", *arguments],
        cwd=checkout,
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unknown_section_is_refused(checkout):
    """The error names the sections, and nothing is run."""
    ended = make(checkout, "SECTIONS=waits tets", "DEVICE=cpu")

    assert ended.returncode != 0
    assert "expected names among tests, waits, update" in ended.stderr
    assert ended.stderr.splitlines()[0].endswith("got tets")


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_refused(checkout, tmp_path):
    """The error names the interpreter, and no results are written."""
    ended = make(checkout, CUDA_VISIBLE_DEVICES="", OUT=str(tmp_path / "out"))

    assert ended.returncode != 0
    assert f"torch of {sys.executable} cannot use the device 'cuda'" in ended.stderr
    assert not (tmp_path / "out").exists()


TABLES = {
    "tests": {"tests"},
    "waits": {"synchronizations", "deferred reads"},
    "update": {"speed of a copy"},
    "host": {"whole steps of a GPT-2, host-bound"},
    "steps": set(),
    "captured": {"checks", "refused", "a capture that fails"},
    "fp16": {"checks", "the two courses", "MFTrainer"},
    "recipes": {"checks", "a planted NaN", "recipes, killed and resumed"},
    "ranks": {"checks", "whole steps of a Llama, 2 micro-batches"},
    "memory": {"checks", "host time of reading the memory"},
    "background": {"checks"},
    "randomness": {"checks", "random states"},
    "recompute": {"checks"},
    "compiled": {"torch.compile"},
    "monitors": set(),
}
"""Tables that each section must have, besides those whose names contain sizes."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_everything_runs_on_a_cpu(checkout, tmp_path):
    """Each section is ok, measures what it has to, and nothing is written to other places."""
    out = tmp_path / "out"
    before = {path.name for path in checkout.iterdir()}
    ended = make(checkout, "DEVICE=cpu", "SMALL=1", OUT=str(out))
    found = json.loads((out / "device.json").read_text())

    assert {name: each["status"] for name, each in found["sections"].items()} == dict.fromkeys(
        TABLES, "ok"
    ), ended.stdout[-6000:]
    assert ended.returncode == 0
    for name, tables in TABLES.items():
        each = found["sections"][name]
        assert tables <= set(each["tables"]), name
        assert each["tables"]
        assert each["failures"] == []
        for check in each["tables"].get("checks", []):
            assert check["holds"] == "yes"
    assert found["machine"]["kind"] == "cpu"
    assert found["command"] == "make device DEVICE=cpu SMALL=1"
    # No number of a CPU may look like one of a GPU.
    for name in ("waits", "update", "host"):
        for rows in found["sections"][name]["tables"].values():
            assert all(row.get("kernels") is None for row in rows)
            assert all(row.get("waits a step") is None for row in rows)
    last = ended.stdout.splitlines()[-len(TABLES) :]
    assert [line.split(" | ")[:2] for line in last] == [[f"| {name}", "ok"] for name in TABLES]
    assert [path.name for path in out.iterdir()] == ["device.json"]
    # hypothesis keeps its examples in the folder of the tests' project.
    assert {path.name for path in checkout.iterdir()} - before <= {"build", ".hypothesis"}
