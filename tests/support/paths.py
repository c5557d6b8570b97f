"""The folders of the project and of its tests."""

from pathlib import Path

__all__ = ["ROOT", "TESTS"]

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
