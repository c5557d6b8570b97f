"""`make peers` finds each difference that mfwrap makes in the tests of accelerate."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("peers", ROOT / ".ci" / "peers.py")
peers = importlib.util.module_from_spec(SPEC)
# A dataclass looks up its module by name.
sys.modules["peers"] = peers
SPEC.loader.exec_module(peers)

OWN = {"kind": "accelerator", "classes": ["accelerate.accelerator.Accelerator", "object"]}
OURS = {"kind": "accelerator", "classes": ["mfwrap.accelerate.classes.AttachedAccelerator"]}

TESTS = """
import sys

import pytest
import torch
from accelerate import Accelerator, debug_launcher


def train():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()


def test_here():
    train()


def test_two_ranks():
    debug_launcher(train)


def test_that_differs():
    assert type(Accelerator(cpu=True)) is Accelerator


@pytest.mark.skip
def test_skipped():
    pass


if __name__ == "__main__":
    train()
    sys.exit(Accelerator().num_processes - 2)
"""


def run(objects=(), **outcomes):
    """Return a run; each failed test of it has the error "AssertionError: no"."""
    errors = {test: "AssertionError: no" for test, word in outcomes.items() if word == "failed"}
    return peers.Run(outcomes, errors, list(objects), Path("log"))


def difference(test, stock="passed", mfwrap="failed", error="no"):
    """Return an intended difference."""
    return peers.Difference(test, stock, mfwrap, error, "A reason.", "docs/accelerate.md")


def test_differences_are_reported():
    """Tests that end alike are not reported; those that differ or are missing are, both ways."""
    stock = run(a="passed", b="failed", c="passed", d="failed", e="skipped", f="passed")
    ours = run(a="passed", b="failed", c="failed", d="passed", e="passed", g="passed")

    assert [line.partition(": ")[0] for line in peers.differing(stock, ours, [])] == list("cdefg")
    assert peers.differing(run(a="passed"), run(a="failed"), []) == [
        "a: passed with accelerate, failed with mfwrap: AssertionError: no"
    ]


@pytest.mark.parametrize(
    ("stock", "ours", "error"),
    [("passed", "passed", "no"), ("failed", "failed", "no"), ("passed", "failed", "yes")],
)
def test_a_listed_difference_must_be_one(stock, ours, error):
    """A listed difference is not reported; without it, or with another error, the entry is."""
    listed = [difference("a", error=error)]
    [line] = peers.differing(run(a=stock, b="passed"), run(a=ours, b="passed"), listed)

    assert line.endswith("correct or remove the entry")
    assert peers.differing(run(a="passed"), run(a="failed"), [difference("a")]) == []
    [line] = peers.differing(run(a="passed"), run(a="passed"), [difference("removed")])
    assert line.startswith("removed: missing with accelerate, missing with mfwrap")


def test_a_baseline_in_which_nothing_passes_is_reported():
    """A file that fails with accelerate alone, too, does not count as a file without difference."""
    broken = run(a="failed", b="skipped")

    assert peers.differing(broken, broken, []) == ["no test passed with accelerate alone; see log"]


def test_a_run_that_does_not_use_mfwrap_is_reported():
    """Objects that are not attached are reported, and so are missing ones and a spoilt baseline."""
    plain, attached, empty = run([OWN]), run([OURS]), run()

    assert peers.not_substituted("file", plain, attached) == []
    assert peers.not_substituted("file", empty, empty) == [
        "file: no accelerator was attached; accelerate's run used 0"
    ]
    assert peers.not_substituted("file", plain, run([OURS, OWN])) == [
        "file: 1 of 2 accelerators were not attached: accelerate.accelerator.Accelerator"
    ]
    assert peers.not_substituted("file", plain, empty) == [
        "file: no accelerator was attached; accelerate's run used 1"
    ]
    assert peers.not_substituted("file", attached, attached) == [
        "file: the run without mfwrap used an attached accelerator"
    ]


def test_each_listed_difference_is_documented():
    """Each listed difference is of a file that runs, is on the page of tests, and has a reason."""
    files = {peer.name for peer in peers.peers(Path())}
    tests_page = (ROOT / "docs" / "tests.md").read_text(encoding="utf-8")
    for listed in peers.listed_differences():
        assert listed.test.partition("::")[0] in files
        row = f"| `{listed.test.rpartition('::')[2]}` | {listed.stock} | {listed.mfwrap} |"
        assert row in tests_page
        page, _, anchor = listed.page.partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
        assert listed.reason


@pytest.mark.slow
def test_a_file_of_tests(tmp_path):
    """Tests in the file's process and in forks are attached; only the test of a class differs."""
    path = tmp_path / "test_small.py"
    path.write_text(TESTS, encoding="utf-8")
    peer = peers.Peer("tests/test_small.py", path)
    stock, ours = (peer.run(tmp_path / "runs", attach=attach) for attach in (False, True))

    names = ["here", "two_ranks", "that_differs", "skipped"]
    assert [test.rpartition("test_")[2] for test in stock.outcomes] == names
    assert list(stock.outcomes.values()) == ["passed"] * 3 + ["skipped"]
    [line] = peers.differing(stock, ours, [])
    assert "test_that_differs: passed with accelerate, failed with mfwrap: AssertionError" in line
    assert [len(each.objects) for each in (stock, ours)] == [10, 10]
    assert peers.not_substituted(peer.name, stock, ours) == []
    assert len(peers.not_substituted(peer.name, stock, stock)) == 3


@pytest.mark.slow
def test_a_script_on_two_ranks(tmp_path):
    """Both ranks of a script are attached; the exit status tells whether it passed."""
    path = tmp_path / "test_small.py"
    path.write_text(TESTS, encoding="utf-8")
    peer = peers.Peer("scripts/test_small.py", path, ranks=2)
    ours = peer.run(tmp_path / "runs", attach=True)
    path.write_text("raise ValueError('wrong')", encoding="utf-8")
    failed = peer.run(tmp_path / "runs", attach=True)

    assert ours.outcomes == {"scripts/test_small.py": "passed"}
    assert [peers.is_attached(each) for each in ours.objects] == [True] * 8
    assert failed.outcomes == {"scripts/test_small.py": "failed"}
    assert failed.errors == {"scripts/test_small.py": "ValueError: wrong"}
