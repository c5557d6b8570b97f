"""Write the page of a run again and again while the run goes on."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mfwrap.records.run_record import has_ended
from mfwrap.report.page import write_run_page


def watch_runs(
    folders: Sequence[Path],
    page: Path,
    seconds: int,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Write the page of runs every few seconds until all of them have ended, or until Ctrl-C.

    A browser that shows the page loads it again as often. The last page is not loaded again. A run
    without records is waited for.

    Args:
        folders: Run folders, at least one.
        page: HTML file to write and replace.
        seconds: Time between two pages.
        pause: Waits for a number of seconds.

    Raises:
        FileNotFoundError: If a folder has no records at the end.
        ValueError: If a file in a run folder cannot be read.
    """
    try:
        while not all(map(has_ended, folders)):
            # At its start a run has no records.
            with contextlib.suppress(FileNotFoundError):
                write_run_page(folders, page, watch=seconds)
            pause(seconds)
    except KeyboardInterrupt:
        pass
    write_run_page(folders, page)
