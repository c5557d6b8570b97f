"""Write and read the records of a run: files with one JSON object per line."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.records.json_lines import JsonLines, read_json_lines
    from mfwrap.records.run_files import resume_records, save_records
    from mfwrap.records.run_record import RunRecord

__all__ = ["JsonLines", "RunRecord", "read_json_lines", "resume_records", "save_records"]

__getattr__ = package_getattr(
    __name__,
    {
        "JsonLines": "mfwrap.records.json_lines",
        "RunRecord": "mfwrap.records.run_record",
        "read_json_lines": "mfwrap.records.json_lines",
        "resume_records": "mfwrap.records.run_files",
        "save_records": "mfwrap.records.run_files",
    },
)
