"""The section ``metric`` of a recipe: numbers about each evaluation, by code of the user's own."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from mfwrap.arguments import described
from mfwrap.runner.document import shown
from mfwrap.runner.objects import RecipeObjects
from mfwrap.runner.own_code import OwnKind

ComputeMetrics = Callable[..., dict[str, Any]]
"""The Trainer's ``compute_metrics``: returns numbers by name for an ``EvalPrediction``."""

_OWN = OwnKind(
    "a function of transformers.EvalPrediction that returns numbers by name, or a class of such "
    "functions",
    callable,
)


def read_metric(
    objects: RecipeObjects, section: Mapping[str, Any] | None
) -> Callable[[ComputeMetrics | None], ComputeMetrics] | None:
    """Return a function that adds the recipe's metric to that of its task.

    Args:
        objects: Builder for the recipe.
        section: Content of the section ``metric``.

    Returns:
        The function; ``None`` if the recipe has no metric, or may not run code.

    Raises:
        RecipeError: If the section names no class or function, or an argument is wrong.
    """
    if section is None:
        return None
    path = ("metric",)
    own = objects.own_type(path, section, _OWN)
    if own is None:
        says = f"expected module.Name of {_OWN.says}, got {shown(section.get('type'))}"
        raise objects.document.error((*path, "type"), says)
    if own.found is None:
        return None
    name, found, settings = own
    is_class = isinstance(found, type)
    settings = objects.checked_arguments(path, found, settings, num_passed=0 if is_class else 1)

    def added_to(others: ComputeMetrics | None) -> ComputeMetrics:
        metric = functools.partial(found, **settings)
        if is_class:
            metric = objects.call(path, found, **settings)

        def compute(*prediction: Any, **keywords: Any) -> dict[str, Any]:
            numbers = metric(*prediction, **keywords)
            if not isinstance(numbers, Mapping):
                msg = f"{name} must return numbers by name, got {described(numbers)}"
                raise TypeError(msg)
            return {**({} if others is None else others(*prediction, **keywords)), **numbers}

        return compute

    return added_to
