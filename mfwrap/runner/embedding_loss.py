"""The section ``loss`` of a recipe: a loss of sentence-transformers, or one of the user's own."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mfwrap.runner.objects import RecipeObjects
from mfwrap.runner.own_code import OwnKind

MakeLoss = Callable[[Any], nn.Module]
"""Builds a loss for a sentence encoder."""

_OWN = OwnKind(
    "a class of losses of sentence-transformers, whose first argument is the model",
    lambda found: isinstance(found, type) and issubclass(found, nn.Module),
)


def read_loss(objects: RecipeObjects, section: Mapping[str, Any] | None) -> MakeLoss | None:
    """Return a function that builds the loss of a task with sentence-transformers.

    Args:
        objects: Builder for the recipe.
        section: Content of the section ``loss``. ``None`` for ``MultipleNegativesRankingLoss``,
            with its default arguments.

    Returns:
        The function; ``None`` if the recipe may not run code.

    Raises:
        RecipeError: If there is no such loss, or an argument is wrong.
    """
    from sentence_transformers.sentence_transformer import losses  # noqa: PLC0415  (slow; part of an extra)

    path = ("loss",)
    section = {"type": "MultipleNegativesRankingLoss"} if section is None else section
    own = objects.own_type(path, section, _OWN)
    if own is not None:
        if own.found is None:
            return None
        found, settings = own.found, own.settings
    else:
        known = {name: getattr(losses, name) for name in losses.__all__ if name.endswith("Loss")}
        name, settings = objects.named_type(path, section, known)
        found = known[name]
    settings = objects.checked_arguments(path, found, settings, num_passed=1)
    return functools.partial(objects.call, path, found, **settings)
