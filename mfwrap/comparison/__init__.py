"""Find the first step at which two recorded runs differ."""

from mfwrap.comparison.comparison import Comparison, compare_runs
from mfwrap.comparison.differences import Difference

__all__ = ["Comparison", "Difference", "compare_runs"]
