"""A plugin of pytest that writes each outcome at once, so that a kill loses none.

``DEVICE_OUTCOMES`` names the file. With pytest-xdist only the main process writes.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest


class Outcomes:
    """Write a line of JSON for each test, and for each file that cannot be imported."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the outcome of a test, and errors of its setup and teardown."""
        if report.when == "call" or report.outcome != "passed":
            is_error = report.outcome == "failed" and report.when != "call"
            self._write(report.nodeid, "error" if is_error else report.outcome, report)

    def pytest_collectreport(self, report: Any) -> None:
        """Write that a file cannot be imported, or is skipped as a whole."""
        if report.outcome != "passed":
            outcome = "error" if report.outcome == "failed" else report.outcome
            self._write(report.nodeid, outcome, report)

    def _write(self, test: str, outcome: str, report: Any) -> None:
        line = json.dumps({"test": test, "outcome": outcome, "reason": reason_of(report)})
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def reason_of(report: Any) -> str:
    """Return the last line of a failure, or the reason of a skip; nothing if the test passed."""
    detail = report.longrepr
    if detail is None:
        return ""
    if isinstance(detail, tuple):
        return str(detail[2]).removeprefix("Skipped: ")
    crash = getattr(detail, "reprcrash", None)
    if crash is not None:
        return f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"[:600]
    return "\n".join(str(detail).strip().splitlines()[-3:])[:600]


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin in the main process."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(os.environ["DEVICE_OUTCOMES"])))
