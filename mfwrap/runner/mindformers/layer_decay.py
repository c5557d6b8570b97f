"""Convert MindFormers' ``layer_scale`` and ``layer_decay``, learning rates by layer."""

from collections.abc import Mapping
from typing import Any

from mfwrap.runner.mindformers.source import SourceFile

_MODEL_TYPES = frozenset({"beit", "swin", "vit"})
"""transformers' types of the networks whose layers MindFormers numbers."""

_DECAYED_IN_SWIN = [".bias", "norm"]
"""Parts of the names of Swin's parameters that have weight decay in MindFormers alone."""


def take_layer_decay(source: SourceFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``layer_decay``; empty if the file has one learning rate.

    Only ViT and Swin have learning rates by layer, and only with a schedule. MindFormers 1.6
    ignores ``layer_scale``, but it has neither network: files for them are of earlier releases.

    Source: MindFormers 1.5, ``get_optimizer_grouped_parameters``.

    Args:
        source: File, whose keys are taken.
        config: Section ``model.config`` of the recipe.

    Raises:
        RecipeError: If a value has a wrong type.
    """
    decay = source.number("layer_decay", default=1.0) or 1.0
    if not source.flag("layer_scale") or config.get("model_type") not in _MODEL_TYPES:
        return {}
    if ("lr_schedule",) not in source:
        source.notes.append("layer_scale: no effect in MindFormers, because lr_schedule is missing")
        return {}
    if config.get("use_absolute_embeddings"):
        says = "MindFormers gives absolute position embeddings the rate of the head"
        source.lose("layer_decay", ("layer_scale",), f"{says}; the recipe, that of the patches")
    says = "as in MindFormers up to 1.5, the last release with this network"
    source.notes.append(f"layer_decay: {says}; leave it out for the rule of 1.6, one learning rate")
    says = "as in MindFormers, weight decay ends at the first parameter that has none"
    source.notes.append(f"layer_decay.weight_decay: {says}; set all_layers for all")
    return {"factor": decay, "weight_decay": "first_layers"}


def decay_rules(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return keys of ``optimizer`` for a network whose biases have weight decay in MindFormers.

    Source: MindFormers 1.5, ``SwinBaseModel.no_weight_decay``: a network with this method has
    weight decay for all other parameters.

    Args:
        config: Section ``model.config`` of the recipe.
    """
    is_swin = config.get("model_type") == "swin"
    return {"weight_decay_include": list(_DECAYED_IN_SWIN)} if is_swin else {}
