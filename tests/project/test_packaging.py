"""mfwrap/, callbacks/ and recipes/ form one package, in the working tree and in a wheel."""

import re
import sys
import tomllib
import zipfile
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
import yaml

import mfwrap
import mfwrap.callbacks
import mfwrap.recipes
from support.pages import README
from support.paths import ROOT

CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def project() -> dict:
    """Return the content of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("package", "folder"),
    [(mfwrap, "mfwrap"), (mfwrap.callbacks, "callbacks"), (mfwrap.recipes, "recipes")],
    ids=["mfwrap", "callbacks", "recipes"],
)
def test_packages_come_from_this_tree(package, folder):
    """The tests import the code of this working tree, not another installed copy."""
    assert Path(package.__file__).resolve() == ROOT / folder / "__init__.py"


@pytest.mark.parametrize("folder", ["callbacks", "recipes"])
def test_folders_are_no_packages_of_their_own(folder):
    """The packages are not imported a second time, as top-level ``callbacks`` or ``recipes``."""
    assert folder not in sys.modules


def test_version_is_one():
    """The package, the citation, the newest changelog entry and documented commands agree on it."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, date = re.findall(r"^## (\S+) - (\S+)$", changelog, re.MULTILINE)[0]
    pages = README.read_text(encoding="utf-8") + CONTRIBUTING.read_text(encoding="utf-8")
    named = re.findall(r"(?:mfwrap[ -]|releases/|\bv)(\d+\.\d+\.\d+)\b", pages)

    assert mfwrap.__version__ == metadata.version("mfwrap") == citation["version"] == newest
    assert set(named) == {mfwrap.__version__}
    assert str(citation.get("date-released", "unreleased")) == date
    assert "version" in project()["project"]["dynamic"]


def test_contributors_find_what_is_named():
    """Each path and each target of make that CONTRIBUTING.md names exists."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./]+/[\w./]*|[\w/]+\.(?:py|md|yaml|json))`", text))
    made_by_the_reader = {name for name in named if "my_" in name or name.startswith("build/")}
    targets = set(re.findall(r"make ([a-z-]+)", text))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    assert {name for name in named - made_by_the_reader if not (ROOT / name).exists()} == set()
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()
    modules = {name.rpartition(".")[0] for name in re.findall(r"`(mfwrap\.[\w.]+)`", text)}
    assert {name for name in modules if find_spec(name) is None} == set()


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    """Each relative link of a page outside of the site leads to a file, and to a heading in it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", text)

    assert links or page == "CONTRIBUTING.md"
    for path, heading in links:
        assert (ROOT / path).is_file(), path
        if heading:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text("utf-8"), re.MULTILINE)
            assert heading in map(anchor, headings), (path, heading)


def anchor(heading: str) -> str:
    """Return the name of a heading in links."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_every_dependency_has_a_tested_version():
    """constraints.txt pins each dependency, those of the extras included, to one version."""
    settings = project()["project"]
    required = chain(settings["dependencies"], *settings["optional-dependencies"].values())
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in required} - {"mfwrap"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pinned = {line.split("==")[0] for line in lines if "==" in line}

    assert names - pinned == set()


@pytest.mark.slow
def test_a_wheel_holds_the_package_and_nothing_else(wheel):
    """A wheel has all files of the package, with types, recipes and run page, and no tests."""
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        (path if path.parts[0] == "mfwrap" else "mfwrap" / path).as_posix()
        for folder in ("mfwrap", "callbacks", "recipes")
        for kind in ("*.py", "*.yaml", "*.css", "*.js", "*.gz", "*.md", "py.typed")
        for path in (p.relative_to(ROOT) for p in (ROOT / folder).rglob(kind))
    }

    assert {name for name in names if ".dist-info/" not in name} == files
    assert {"mfwrap/py.typed", "mfwrap/recipes/causal_lm.yaml", "mfwrap/report/page.js"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
