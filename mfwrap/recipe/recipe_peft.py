"""The adapter of a recipe."""

from collections.abc import Mapping
from typing import Any

from mfwrap.recipe.objects import RecipeObjects

__all__ = ["read_peft"]

_TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "preference_tuning": "CAUSAL_LM",
    "sequence_classification": "SEQ_CLS",
    "supervised_tuning": "CAUSAL_LM",
    "token_classification": "TOKEN_CLS",
}
"""What PEFT calls the tasks that it knows."""


def read_peft(objects: RecipeObjects, section: Mapping[str, Any] | None, task: str) -> Any:
    """Return PEFT's configuration of a section ``peft``; ``None`` without one.

    Args:
        objects: Builds it.
        section: ``type`` and arguments.
        task: Name of the task.

    Raises:
        RecipeError: If it is no adapter, or PEFT is not installed.
    """
    if section is None:
        return None
    try:
        # Takes seconds to import, and is of an extra.
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: PLC0415
    except ImportError as error:
        says = 'needs PEFT; pip install "mfwrap[recipes]"'
        raise objects.document.error(("peft",), says) from error
    settings = dict(section)
    kinds = {str(kind.value).lower(): one for kind, one in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = settings.pop("type", "lora")
    if not isinstance(name, str) or name not in kinds:
        says = f"must be one of {sorted(kinds)}, got {name!r}"
        raise objects.document.error(("peft", "type"), says)
    if task in _TASK_TYPES:
        settings.setdefault("task_type", _TASK_TYPES[task])
    return objects.build(("peft",), kinds[name], settings)
