"""The tutorial's script runs into its NaN, and the terminal and the page show what is promised."""

import json
import re

import pytest

from support.pages import blocks
from support.tutorial import PAGE, RUN, find_the_nan, shown

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a reader who has followed the part about the NaN."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "lines.txt").write_text("\n".join(find_the_nan(folder)), encoding="utf-8")
    return folder


def without_times(line):
    """Return a line; of a bar, only the number of its steps and of its skipped updates."""
    bar = re.search(r"(\d+/\d+) \[.*?(skipped \d+),", line)  # the terminal cuts it
    return " ".join(bar.groups()) if bar else line


def test_the_terminal_shows_what_the_page_shows(folder):
    """Each line of the block is a line of the terminal; times and losses may differ."""
    lines = (folder / "lines.txt").read_text(encoding="utf-8").splitlines()

    promised = [without_times(line) for line in shown()]
    assert len(promised) == 7
    assert [line for line in map(without_times, lines) if line in promised] == promised


def test_the_page_names_the_sample(folder):
    """Every episode is that of the blank image, in the module that divides by zero."""
    records = (folder / RUN / "anomalies.jsonl").read_text(encoding="utf-8").splitlines()
    episodes = [json.loads(line) for line in records]
    page = (folder / RUN / "run.html").read_text(encoding="utf-8")

    assert [one["name"] for one in episodes] == ["standardize"] * 3
    assert {sample["index"] for one in episodes for sample in one["samples"]} == {700}
    assert "standardize made a non-finite output from finite inputs and weights" in page
    assert "data set index 700" in page


def test_these_are_the_commands_of_the_page():
    """The commands that are left to this test are those that it runs."""
    text = PAGE.read_text(encoding="utf-8")
    left = re.findall(
        r"<!-- no-test: tests/project/test_tutorial.py .*-->\n```bash\n(.*)\n```", text
    )

    assert left == ["python blank_image.py", f"mfwrap report {RUN}"]
    assert not any(command in text for text in blocks(PAGE, "bash") for command in left)
