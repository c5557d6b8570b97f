"""Show a run as an HTML page or as a picture."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.report.page import RunPage, write_run_page
    from mfwrap.report.picture import draw_run

__all__ = ["RunPage", "draw_run", "write_run_page"]

__getattr__ = package_getattr(
    __name__,
    {
        "draw_run": "mfwrap.report.picture",
        "RunPage": "mfwrap.report.page",
        "write_run_page": "mfwrap.report.page",
    },
)
