"""A wheel in an empty environment, away from the sources, does what README and tutorial say."""

import os
import shutil
import subprocess
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import mfwrap
from support.pages import PAGES, README, commands, shortened, snippets
from support.paths import ROOT

TUTORIAL = ROOT / "docs" / "tutorial.md"
TORCH = next(
    line
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    if line.startswith("torch==")
)


class Environment:
    """An environment that has nothing but pip.

    Args:
        folder: Folder of the environment, which is created.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self._programs = folder / "bin"
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "MFWRAP", "VIRTUAL_ENV", "MAKE"))
        }
        path = f"{self._programs}{os.pathsep}{os.environ['PATH']}"
        # Python compiles what it imports. To compile all packages would take pip half a minute.
        self._variables = {**kept, "PATH": path, "PIP_NO_COMPILE": "1"}

    def run(self, *words: str, folder: Path) -> str:
        """Run a program of the environment in a folder; it must succeed. Return what it prints."""
        result = subprocess.run(
            [self._programs / words[0], *words[1:]],
            cwd=folder,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert result.returncode == 0, (words, result.stdout[-4000:])
        return result.stdout


def names_in(wheel: Path) -> set[str]:
    """Return the names of the files in a wheel."""
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_an_sdist_holds_what_a_build_needs(distributions):
    """An sdist has the sources of the package, the changelog and the tested versions, no tests."""
    (sdist,) = distributions.glob("*.tar.gz")
    root = f"mfwrap-{mfwrap.__version__}/"
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(root) for name in archive.getnames()}

    top = {name.partition("/")[0] for name in names}
    assert top == {
        *(f"mfwrap-{mfwrap.__version__}", "mfwrap", "callbacks", "recipes", "mfwrap.egg-info"),
        *("pyproject.toml", "setup.cfg", "MANIFEST.in", "PKG-INFO", "constraints.txt"),
        *("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"),
    }


def test_all_pages_install_as_readme_does():
    """The install lines of all pages are among those of README, which are run."""
    lines = {tuple(words) for page in PAGES for words in commands(page, "pip")}

    assert lines == {tuple(words) for words in commands(README, "pip")}
    assert len(lines) == 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_installed_wheel_does_what_the_pages_say(wheel, new_tree, tmp_path):
    """README's install lines, and then the commands and code of README and tutorial, succeed."""
    environment, tree = Environment(tmp_path / "environment"), new_tree()
    keep, clone, build, install = (("pip", *words) for words in commands(README, "pip"))
    environment.run("pip", "install", TORCH, folder=tmp_path)

    environment.run(*build, folder=tree)
    (built,) = (tree / "dist").glob("*.whl")
    assert names_in(built) == names_in(wheel)
    environment.run(*install, folder=tree)
    shutil.rmtree(tree)
    empty = new_folder(tmp_path, "empty")
    environment.run("pip", "check", folder=empty)
    place = environment.run("python", "-c", "import mfwrap; print(mfwrap.__file__)", folder=empty)
    assert Path(place.strip()).is_relative_to(tmp_path / "environment")

    environment.run("mfwrap", *shortened(["train", "regression"]), folder=empty)
    for page in (README, TUTORIAL):
        run_page(page, environment, new_folder(tmp_path, page.stem))

    for again in (clone, keep):
        environment.run(*again, folder=new_tree())
        environment.run("pip", "check", folder=empty)
    assert mfwrap.__version__ in environment.run("mfwrap", "--version", folder=empty)


def run_page(page: Path, environment: Environment, folder: Path) -> None:
    """Run the commands of a page, and then its Python blocks."""
    for words in commands(page, "mfwrap"):
        environment.run("mfwrap", *shortened(words), folder=folder)
    for words in commands(page, "torchrun"):
        shutil.rmtree(folder / "runs")  # the line stands for the first `mfwrap train`
        environment.run("torchrun", *shortened(words), folder=folder)
        assert list(folder.glob("runs/*/result.json"))
    code = "\n".join(snippet.code for snippet in snippets(page.read_text(encoding="utf-8")))
    (folder / "page.py").write_text(code, encoding="utf-8")
    environment.run("python", "page.py", folder=folder)


def new_folder(parent: Path, name: str) -> Path:
    """Return a new, empty folder."""
    folder = parent / name
    folder.mkdir()
    return folder
