"""Recipes are found by the path of a file or by their name."""

import pytest

from mfwrap.runner import RecipeError
from mfwrap.runner.library import find_recipe, shipped_recipes


def test_shipped_recipes_have_a_summary():
    """The summary is the comment in the first line."""
    recipe = shipped_recipes()["regression"]

    assert recipe.text.startswith(f"# {recipe.summary}\n")


def test_a_file_takes_precedence(tmp_path, monkeypatch):
    """A file with the name of a shipped recipe is found before the recipe."""
    monkeypatch.chdir(tmp_path)
    shipped = find_recipe("regression")[0]
    (tmp_path / "regression").write_text("task: mine\n")

    assert shipped == shipped_recipes()["regression"].text
    assert find_recipe("regression") == ("task: mine\n", "regression")


def test_an_unknown_name_gets_a_suggestion():
    """A misspelled name is an error that suggests the most similar recipe."""
    with pytest.raises(RecipeError, match="shipped recipe; did you mean 'regression'"):
        find_recipe("regresion")


def test_a_file_that_is_no_text(tmp_path):
    """A file that is not UTF-8 is an error that names it."""
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RecipeError, match=r"r\.yaml:1: expected UTF-8, got the byte 0xff"):
        find_recipe(str(tmp_path / "r.yaml"))
