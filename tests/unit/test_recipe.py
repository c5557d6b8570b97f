"""The former name of `mfwrap.runner` still works, with a warning."""

import pytest

from mfwrap import recipe, runner


def test_the_former_names():
    """Each public name is there, and says where it is now."""
    for name in runner.__all__:
        with pytest.warns(DeprecationWarning, match=f"from mfwrap.runner import {name}"):
            assert getattr(recipe, name) is getattr(runner, name)
    with pytest.raises(AttributeError, match=r"'mfwrap\.recipe' has no attribute 'steps'"):
        _ = recipe.steps
