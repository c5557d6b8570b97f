"""The numbers of each step, a JSON line each."""

import json
from typing import Any, TextIO

from mfwrap import StepReport

__all__ = ["MetricsFile"]


class MetricsFile:
    """Write one JSON line a step, reading the device once in a while.

    Args:
        file: Open for writing; ``None`` on the processes that write nothing.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._reports: list[StepReport] = []

    def add(self, report: StepReport | None) -> None:
        """Keep the report of a step; its numbers stay on the device."""
        if report is not None and self._file is not None:
            self._reports.append(report)

    def write_steps(self) -> None:
        """Write all steps that were added since the last time."""
        for report in self._reports:
            step = int(report.applied_updates + report.skipped_updates)
            values = {k: v.tolist() for k, v in report.output._asdict().items() if k != "size"}
            local_norms = zip(report.local_norm_names, values["local_norm"], strict=True)
            self.write({"step": step, **values, "local_norm": dict(local_norms)})
        self._reports.clear()

    def write(self, record: dict[str, Any]) -> None:
        """Write one record."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
