"""Fixtures of the tests of the package's structure, documents and distribution."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.crash.fork_server import ForkServer
from support.paths import ROOT

FOLDERS = ("mfwrap", "callbacks", "recipes", "tests")
FILES = ("pyproject.toml", "MANIFEST.in", "Makefile", "constraints.txt")
FILES += ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Yield a server that runs programs at once. It starts in seconds, so all files share it."""
    with ForkServer() as started:
        yield started


@pytest.fixture(scope="session")
def new_tree(tmp_path_factory) -> Callable[[], Path]:
    """Return a function that copies the working tree to a new folder, as a clone has it."""

    def copied() -> Path:
        tree = tmp_path_factory.mktemp("clone")
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        for name in FILES:
            shutil.copy(ROOT / name, tree)
        return tree

    return copied


@pytest.fixture(scope="session")
def distributions(new_tree) -> Path:
    """Build the sdist and the wheel with `make dist`, without network; return their folder."""
    tree = new_tree()
    # The packages of the tests' environment are there already; `-o` says so.
    command = ["make", "-o", ".venv/.linked", "dist", f"RUN={sys.executable}"]
    subprocess.run(command, cwd=tree, check=True)
    return tree / "dist"


@pytest.fixture(scope="session")
def wheel(distributions) -> Path:
    """Return the wheel, which is built from the sdist."""
    (built,) = distributions.glob("*.whl")
    return built
