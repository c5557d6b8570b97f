"""Find the first step at which two recorded runs differ."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.comparison.comparison import Comparison, compare_runs
    from mfwrap.comparison.differences import Difference

__all__ = ["Comparison", "Difference", "compare_runs"]

__getattr__ = package_getattr(
    __name__,
    {
        "Comparison": "mfwrap.comparison.comparison",
        "Difference": "mfwrap.comparison.differences",
        "compare_runs": "mfwrap.comparison.comparison",
    },
)
