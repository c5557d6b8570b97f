"""Write and read the records of a run: files with one JSON object per line."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.records.json_lines import JsonLines, read_json_lines
    from mfwrap.records.run_files import resume_records, save_records
    from mfwrap.records.run_record import RunRecord
    from mfwrap.records.skipped_rows import SkippedRow, read_skipped_rows

__all__ = [
    "JsonLines",
    "RunRecord",
    "SkippedRow",
    "read_json_lines",
    "read_skipped_rows",
    "resume_records",
    "save_records",
]

__getattr__ = package_getattr(
    __name__,
    {
        "JsonLines": "mfwrap.records.json_lines",
        "RunRecord": "mfwrap.records.run_record",
        "SkippedRow": "mfwrap.records.skipped_rows",
        "read_json_lines": "mfwrap.records.json_lines",
        "read_skipped_rows": "mfwrap.records.skipped_rows",
        "resume_records": "mfwrap.records.run_files",
        "save_records": "mfwrap.records.run_files",
    },
)
