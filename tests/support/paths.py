"""Where the project and its tests are."""

from pathlib import Path

__all__ = ["ROOT", "TESTS"]

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
