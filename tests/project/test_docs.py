"""The shell commands and YAML sections in README.md and docs/ are valid and run."""

import re
from pathlib import Path

import pytest
import yaml
from transformers import TrainerCallback

from mfwrap import callbacks
from mfwrap.cli import cli, main
from mfwrap.runner import Recipe, parse_recipe
from support.mindformers_files import mindformers_text
from support.own_parts import write_project
from support.pages import PAGES, blocks, commands, shortened, shown_files, snippets
from support.paths import ROOT
from support.recipe_texts import recipe_text
from support.run_folders import write_run

# Warnings of TRL and datasets must not fail these tests.
pytestmark = pytest.mark.filterwarnings("ignore")


def mfwrap_commands(page: Path) -> list[list[str]]:
    """Return the arguments of each ``mfwrap`` command on a page."""
    return commands(page, "mfwrap")


def write_data(folder: Path) -> None:
    """Write the data files that the pages name."""
    reviews = "".join(f"review {n},{['bad', 'good'][n % 2]}\n" for n in range(40))
    (folder / "reviews.csv").write_text(f"review,stars\n{reviews}")
    answers = "".join(f"what is {n}?,it is {n}\n" for n in range(40))
    (folder / "questions.csv").write_text(f"question,answer\n{answers}")
    write_project(folder)
    (folder / "prompts.jsonl").write_text('{"question": "a?"}\n')
    rewards = snippets((ROOT / "docs" / "how-to" / "reward.md").read_text(encoding="utf-8"))
    (folder / "my_rewards.py").write_text(rewards[0].code)
    (folder / "notes").mkdir()
    (folder / "notes" / "1.txt").write_text("a note\n")
    (folder / "parts").mkdir()
    for name in ("parts/1.jsonl", "check.jsonl"):
        (folder / name).write_text('{"features": [1.0], "target": 2.0}\n')
    for page in PAGES:
        for name, text in shown_files(page).items():
            (folder / name).write_text(text, encoding="utf-8")


def named(pages: list[Path]) -> list:
    """Return pytest parameters for pages, with their paths as ids."""
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.parametrize("page", named([page for page in PAGES if mfwrap_commands(page)]))
def test_commands_are_there(page):
    """Every command on a page exists and has the options that the page uses."""
    for words in mfwrap_commands(page):
        group = cli.commands[words[0]]
        context = group.make_context(words[0], words[1:], resilient_parsing=True)
        known = {option for one in group.params for option in one.opts}
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= known
        context.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", named([page for page in PAGES if mfwrap_commands(page)]))
def test_commands_run(page, tmp_path, monkeypatch):
    """The commands of a page succeed one after the other; long trainings run for two steps only."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain_llama.yaml").write_text(mindformers_text())
    (tmp_path / "finetune_llama.yaml").write_text(mindformers_text({"run_mode": "finetune"}))
    (tmp_path / "bad_rows.jsonl").write_text('{"epoch": 0, "position": 12}\n')
    (tmp_path / "train.py").write_text("from mindspore.nn import Dense\n")
    write_data(tmp_path)
    for name in ("first", "second", "one_gpu", "two_gpus"):
        write_run(tmp_path / "runs" / name)
    for words in mfwrap_commands(page):
        with pytest.raises(SystemExit) as left:
            main(shortened(words))
        assert left.value.code == 0, words


@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "yaml")]))
def test_yaml_is_valid(page, tmp_path, monkeypatch):
    """Every YAML block on a page is a valid recipe, or valid sections of a recipe."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    for text in blocks(page, "yaml"):
        sections = yaml.safe_load(text)
        whole = text if "task" in sections else recipe_text(**sections)
        if "data" in sections and "task" not in sections:
            whole = recipe_text(data=None) + text
        assert isinstance(parse_recipe(whole, "page.yaml"), Recipe)


GUIDES = (ROOT / "docs" / "monitors.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name in callbacks.__all__
        if isinstance(one := getattr(callbacks, name), type)
        and (issubclass(one, TrainerCallback) or one is callbacks.LoopMonitor)
    ),
)
def test_each_monitor_has_a_guide(name):
    """Each monitor has a section: when to use it, its lines, what it writes, and a picture."""
    _, found, rest = GUIDES.partition(f"\n## {name}\n")
    section = rest.partition("\n## ")[0]
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", section)

    assert found
    assert section.startswith("\n**When.** ")
    assert re.search(rf"```python\n[^`]*{name}\(", section)
    assert "\n**It writes** " in section
    assert pictures
    assert all((ROOT / "docs" / picture).is_file() for picture in pictures)
    assert f"](#{name.lower()})" in GUIDES.partition("\n\n##")[0]
