"""Fixtures of the tests of the package's structure, documents and distribution."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Build a wheel of the working tree, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("mfwrap", "callbacks", "recipes", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--no-index", "-w", folder, tree], check=True)
    (built,) = folder.glob("*.whl")
    return built
