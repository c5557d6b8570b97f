"""Say that a few values of a table make the scale by which a model standardizes the others."""

from collections.abc import Callable

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from mfwrap.recipes.models.perceptron import PerceptronConfig
from mfwrap.runner.document import shown
from mfwrap.runner.recipe import Recipe

_LIMIT = 100
"""Largest ordinary ratio of the standard deviation to the one that the middle half of the values
suggests. It is 1 for normal values, 2 for the exponential of normal ones, 20 for that of normal
ones with the deviation 2; one value of 1e5 among 400 normal ones makes it 5,000."""

_NORMAL = 1.349
"""Width of the middle half of normal values with the standard deviation 1."""


def far_values(recipe: Recipe, table: Dataset, say: Callable[[str], None]) -> None:
    """Warn of each column of numbers whose scale is made by values far from the rest.

    A model with random weights divides by the standard deviation, so that all other values of the
    column become nearly equal. A column that mostly has one value is left out: there, the rare
    values are what it tells.

    Args:
        recipe: The recipe; nothing is said unless its model standardizes these rows.
        table: Training rows, checked, in the order of the source.
        say: Called with each warning.
    """
    config = recipe.model.config or {}
    is_scaled = config.get("model_type") == PerceptronConfig.model_type
    is_scaled &= {"features", "target"} <= set(table.column_names)
    if not is_scaled or config.get("standardize") is False or not len(table):
        return
    rows, given = table.with_format(None), recipe.data.columns.get("features", "features")
    columns = {
        _feature(given, index): values
        for index, values in enumerate(np.asarray(rows["features"][:], np.float64).T)
    }
    target = recipe.data.column_labels.get("target", "target")
    columns[f"target {target!r}"] = np.asarray(rows["target"][:], np.float64)
    for name, values in columns.items():
        if fault := _fault(recipe, name, values):
            say(f"warning: {fault}")


def _fault(recipe: Recipe, name: str, values: NDArray[np.float64]) -> str | None:
    low, middle, high = np.percentile(values, [25, 50, 75])
    deviation, spread = float(values.std()), float(high - low) / _NORMAL
    if not 0 < spread * _LIMIT < deviation:
        return None
    distances = np.abs(values - middle)
    row = int(distances.argmax()) + 1
    others = int((distances > deviation).sum()) - 1
    more = f" (and {others:,} more rows have such values)" if others > 0 else ""
    place = recipe.data.place(row, held_out=False)
    at = f"row {row}" if place is None else place
    return (
        f"{name} is {shown(float(values[row - 1]))} at {at}{more}, but half of its values are "
        f"between {low:.4g} and {high:.4g}; the model divides by the standard deviation, "
        f"{deviation:.4g}, which makes the other values nearly equal: correct or remove the value"
    )


def _feature(given: str | list[str], index: int) -> str:
    """Return the name of a feature, which has a column of its own or a place in lists."""
    return f"feature {given[index]!r}" if isinstance(given, list) else f"{given}[{index}]"
