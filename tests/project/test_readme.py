"""The Python snippets in README.md and docs/ run unchanged."""

import re
import sys
import types
from pathlib import Path

import pytest

from support.pages import PAGES, README, Snippet, snippets
from support.paths import ROOT
from support.versions import COUNTS_SHIFTED, needs

PART = re.compile(r'^--8<-- "README\.md:(\w+)"$', re.MULTILINE)


def shown(page: Path) -> str:
    """Return the text of a page, with the parts of README.md that the site shows in it."""
    readme = README.read_text(encoding="utf-8")
    parts = {
        name: readme.partition(f"[start:{name}] -->\n")[2].partition("<!-- --8<-- [end:")[0]
        for name in re.findall(r"\[start:(\w+)\]", readme)
    }
    return PART.sub(lambda match: parts[match[1]], page.read_text(encoding="utf-8"))


def run(page: Path, blocks: list[Snippet], namespace: dict) -> None:
    """Run blocks in order; tracebacks show the line numbers of the page."""
    for block in blocks:
        exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)  # noqa: S102  (our own documentation)


NEEDED = {
    "loss_by_source.md": COUNTS_SHIFTED,
    "optimize.md": needs("transformers", "5.0", "a module with the experts of a layer"),
}
"""What the snippets of a page need of a library."""


def test_readme_has_snippets():
    """README.md exists and contains Python code that is run."""
    assert README.exists(), "README.md is missing"
    assert snippets(README.read_text(encoding="utf-8")), "README.md has no ```python block"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # TRL's own use
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=NEEDED.get(page.name, []))
        for page in PAGES
        if page.exists()
    ],
)
def test_snippets_run(page, tmp_path, monkeypatch):
    """The blocks of a page run one after the other in one namespace."""
    monkeypatch.chdir(tmp_path)
    # dataclasses and pickle look up the module of a class, so the snippets need a real module.
    module = types.ModuleType("snippets_of_a_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    run(page, snippets(shown(page)), vars(module))


def test_parts_of_the_readme_are_snippets():
    """The page on which the site begins runs the README's loop and Trainer."""
    codes = [one.code for one in snippets(shown(ROOT / "docs" / "index.md"))]

    assert ["MFTrainer(" in codes[0], "MFTrainOneStepCell(" in codes[1]] == [True, True]
    assert len(codes) == 2


def test_snippets_are_found():
    """`snippets` returns each block, dedented and with its line, and leaves out no-test blocks."""
    page = (
        "# Title\n\n```python\na = 1\nb = 2\n```\n\n```bash\nmake\n```\n"
        "<!-- no-test: needs two GPUs -->\n```python\nraise\n```\n"
        "- item\n\n  ```python\n  if a:\n      c = 3\n  ```\n"
    )

    assert snippets(page) == [
        Snippet(line=4, code="a = 1\nb = 2\n"),
        Snippet(line=18, code="if a:\n    c = 3\n"),
    ]


def test_a_wrong_snippet_fails(tmp_path):
    """The traceback of a failing snippet shows its line on the page."""
    page = tmp_path / "page.md"
    blocks = snippets("text\n\n```python\na = 1\n```\n```python\nassert a == 2\n```\n")

    with pytest.raises(AssertionError) as error:
        run(page, blocks, {})
    assert (Path(error.traceback[-1].path), error.traceback[-1].lineno + 1) == (page, 7)
