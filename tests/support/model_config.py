"""Convert the ``model_config`` of a MindFormers file that a test writes."""

from typing import Any, NamedTuple

import yaml

from mfwrap.runner.document import RecipeDocument
from mfwrap.runner.mindformers.architectures import convert
from mfwrap.runner.mindformers.architectures.keys import Keys
from mfwrap.runner.mindformers.losses import Loss
from mfwrap.runner.mindformers.source import SourceFile

PLACE = ("model", "model_config")


class Converted(NamedTuple):
    """What became of a ``model_config``."""

    config: dict[str, Any]
    """The section ``model.config`` of a recipe."""

    losses: list[Loss]
    """What changes the numbers, and transformers' network does not have."""

    without_effect: list[str]
    """Dotted names of keys that do not change the numbers."""

    bias_rate: float | None
    """As in `SourceFile`."""


def empty_source() -> SourceFile:
    """Return a file without keys, which collects losses and keys without effect."""
    return SourceFile(RecipeDocument("m.yaml", {}, {}))


def keys_of(section: dict[str, Any], path: tuple[str, ...] = PLACE) -> tuple[Keys, SourceFile]:
    """Return the keys of a section, and the file that gets their losses."""
    source = empty_source()
    return Keys(source, section, path), source


def converted(text: str, task: str = "causal_lm", arch: str | None = None) -> Converted:
    """Convert a YAML text.

    Args:
        text: The keys of ``model_config``; those of ``moe_config`` below a key of this name.
        task: Task of the recipe.
        arch: MindFormers' class of the network.
    """
    settings = yaml.safe_load(text)
    experts = settings.pop("moe_config", None) or {}
    return converted_section(settings, experts, task, arch)


def converted_section(
    settings: dict[str, Any],
    experts: dict[str, Any] | None = None,
    task: str = "causal_lm",
    arch: str | None = None,
) -> Converted:
    """Convert a ``model_config``, and the section ``moe_config`` of the file if it has one."""
    source = empty_source()
    config = convert.convert_model(source, settings, PLACE, arch, task, experts or {})
    return Converted(config, source.losses, source.without_effect, source.bias_rate)


def num_parameters(config: dict[str, Any], task: str) -> int:
    """Return the number of parameters of a converted network."""
    return convert.num_parameters(empty_source(), config, PLACE, task)
