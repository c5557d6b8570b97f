"""The page about your own data shows what its commands print."""

import re

import pytest

from mfwrap.cli import main
from support.pages import commands, shown_files
from support.paths import ROOT

# Warnings of TRL and datasets must not fail these tests.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = ROOT / "docs" / "how-to" / "your_data.md"
SHOWN = re.findall(
    r"^```bash\n(mfwrap data [^\n]*)\n```\n\n```\n(.*?)^```$",
    PAGE.read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the files of the page, which is the current one."""
    for name, text in shown_files(PAGE).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("command", "output"), SHOWN, ids=[re.search(r"path=(\w+)", one)[1] for one, _ in SHOWN]
)
def test_the_page_shows_what_is_printed(command, output, capsys):
    """Each command prints the block below it."""
    with pytest.raises(SystemExit) as left:
        main(command.split()[1:])

    assert left.value.code == 0
    assert capsys.readouterr().out == output


def test_each_file_and_each_command_is_shown(folder):
    """Each file has three rows, and is read by a command whose output is on the page."""
    read = {re.search(r"data\.path=(\S+)", command)[1] for command, _ in SHOWN}

    assert {file.name: len(file.read_text().splitlines()) for file in folder.iterdir()} == (
        dict.fromkeys(sorted(read), 3)
    )
    assert [command.split()[1:] for command, _ in SHOWN] == commands(PAGE, "mfwrap")
