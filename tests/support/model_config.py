"""Convert the ``model_config`` of a MindFormers file that a test writes."""

import yaml

from mfwrap.runner.mindformers.architectures import ConvertedModel, convert_model

__all__ = ["converted"]


def converted(text: str, task: str = "causal_lm", **model: object) -> ConvertedModel:
    """Convert a YAML text.

    Args:
        text: The keys of ``model_config``; those of ``moe_config`` below a key of this name.
        task: Task of the recipe.
        model: Other keys of the section ``model``.
    """
    settings = yaml.safe_load(text)
    experts = settings.pop("moe_config", None)
    return convert_model(settings, model, task, experts)
