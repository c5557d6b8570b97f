"""Built-in data come from Python itself."""

import asyncio.base_events
import inspect

import pytest

from support.recipe_data import recipe_of

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_docstrings_of_packages():
    """Each docstring occurs once, and its label is its package."""
    section = {"type": "package_docstrings", "most_of_a_package": 5, "eval_fraction": 0}
    data = recipe_of("sequence_classification", section, model={"config": {"model_type": "bert"}})
    rows = data.data.rows().train
    found = dict(zip(rows["text"], rows["label"], strict=True))

    assert len(found) == len(rows)
    assert list(found.values()).count("asyncio") == 5
    assert found[inspect.cleandoc(asyncio.base_events.__doc__)] == "asyncio"
