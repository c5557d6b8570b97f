"""The part of docs/tutorial.md in which a NaN is planted and found, as a reader follows it."""

import re
import sys
from pathlib import Path

from support.paths import ROOT
from support.terminal import screen, written_in_terminal

__all__ = ["PAGE", "RUN", "find_the_nan", "script", "shown"]

PAGE = ROOT / "docs" / "tutorial.md"
RUN = "runs/blank_image"


def _part() -> str:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("\n## Plant a NaN, and find it\n")
    return rest.partition("\n## ")[0]


def _block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", _part(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{PAGE} has no block of {language} about the NaN"
    return found[1]


def script() -> str:
    """Return the script that the reader saves as `blank_image.py`."""
    return _block("python")


def shown() -> list[str]:
    """Return the lines that the terminal shows, by the page."""
    return _block("text").splitlines()


def find_the_nan(folder: Path) -> list[str]:
    """Run the script and write the page of its run; return the lines of the terminal.

    Args:
        folder: Folder in which the reader works; it gets the script and the run folder.
    """
    (folder / "blank_image.py").write_text(script(), encoding="utf-8")
    written = written_in_terminal([sys.executable, "-P", "blank_image.py"], folder)
    words = [sys.executable, "-P", "-m", "mfwrap", "report", RUN]
    return screen(written) + screen(written_in_terminal(words, folder))
