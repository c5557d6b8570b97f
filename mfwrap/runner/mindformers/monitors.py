"""Convert MindFormers' callbacks, ``monitor_config`` and ``tensorboard``."""

import math
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from mfwrap.runner.document import shown
from mfwrap.runner.expert_bias import BIAS_RATE
from mfwrap.runner.mindformers.source import SourceFile
from mfwrap.runner.sections import (
    BIAS_CALLBACK,
    CALLBACK_KEYS_WITHOUT_MEANING,
    CALLBACKS_WITHOUT_MEANING,
)

_MISSPELLED: Mapping[str, str] = {
    "CheckpointMointor": "CheckpointMonitor",
    "ColdHotExpertMointor": "ColdHotExpertMonitor",
    "ProfileMointor": "ProfileMonitor",
}
"""Names of MindFormers 1.0 and 1.1, and the names of today."""

_HEALTH = "use_checkpoint_health_monitor"
_THRESHOLD = "embedding_local_norm_threshold"
_NAN_CHECK = "check_for_nan_in_loss_and_grad"
_WRITERS = frozenset({"MFLossMonitor", "TrainingStateMonitor"})
_LOSS_FLAGS = frozenset({"log_loss_scale_to_tensorboard", "log_timers_to_tensorboard"})
"""Keys of ``tensorboard`` that are arguments of `MFLossMonitor`."""


def take_monitors(source: SourceFile) -> dict[str, Any]:
    """Return the sections ``callbacks`` and ``monitor_config`` of the recipe.

    Also returns the rate at which a callback moves the biases of experts, ``None`` if none does.

    Args:
        source: File, whose keys about monitors are taken, and whose model has been converted.

    Raises:
        RecipeError: If a section has a wrong type.
    """
    callbacks, rate = _take_callbacks(source)
    source.ignore_keys(("monitor_config",), CALLBACK_KEYS_WITHOUT_MEANING["TrainingStateMonitor"])
    monitor = source.mapping("monitor_config")
    _take_tensorboard(source, callbacks, monitor)
    if source.flag(_NAN_CHECK):
        if monitor.get("monitor_on") is True:
            monitor[_NAN_CHECK] = True
        else:
            callbacks.append({"type": "TrainingStateMonitor", _NAN_CHECK: True})
    return {BIAS_RATE: rate, "callbacks": callbacks, "monitor_config": monitor}


def saves_by_callback(callbacks: list[Any]) -> bool:
    """Return whether a callback of the recipe saves the checkpoints."""
    return any(callback["type"] == "CheckpointMonitor" for callback in _mappings(callbacks))


def _take_callbacks(source: SourceFile) -> tuple[list[Any], float | None]:
    value = source.take("callbacks")
    if not isinstance(value, (list, NoneType)):
        raise source.document.error(("callbacks",), f"expected a list, got {shown(value)}")
    monitors_health = source.take(_HEALTH)
    kept = []
    rate: float | None = None
    for index, callback in enumerate(value or []):
        if not isinstance(callback, dict):
            kept.append(callback)  # an error when the recipe is checked
            continue
        name = callback.get("type")
        callback["type"] = _MISSPELLED.get(str(name), name)
        if callback["type"] == BIAS_CALLBACK:
            rate = _bias_rate(source, index, callback)
        if callback["type"] in {BIAS_CALLBACK, *CALLBACKS_WITHOUT_MEANING}:
            if callback["type"] != BIAS_CALLBACK or rate is None:
                source.without_effect.append(f"callbacks.{index} ({name})")
            continue
        _drop_keys(source, index, callback)
        if callback["type"] == "CheckpointMonitor":
            if isinstance(monitors_health, bool):
                callback[_HEALTH] = monitors_health
            _convert_checkpoints(source, callback)
        kept.append(callback)
    if source.bias_rate and rate is None:
        says = f"the file has no {BIAS_CALLBACK}, so the biases of experts do not move"
        source.notes.append(f"callbacks: {says}")
    return kept, rate


def _bias_rate(source: SourceFile, index: int, callback: dict[str, Any]) -> float | None:
    """Return the rate at which a callback moves biases of experts; ``None`` if it moves none.

    Source: MindFormers, ``TopkBiasBalanceCallback``, which takes the rate of a model of the core,
    and for earlier models has its own.
    """
    key = "balance_via_topk_bias"
    own = callback.get("topk_bias_update_rate", 0.0) if callback.get(key) is True else 0.0
    if source.bias_rate is not None:
        return source.bias_rate or own or None
    if own:
        says = f"the file balances the load of experts by {callback['type']}"
        place = ("callbacks", index, key)
        source.lose("moe", place, f"{says}; the recipe does not balance it")
    return None


def _drop_keys(source: SourceFile, index: int, callback: dict[str, Any]) -> None:
    """Remove the keys of a callback that have no effect."""
    meaningless = CALLBACK_KEYS_WITHOUT_MEANING.get(str(callback.get("type")), frozenset())
    for key in meaningless & callback.keys():
        del callback[key]
        source.without_effect.append(f"callbacks.{index}.{key}")


def _convert_checkpoints(source: SourceFile, callback: dict[str, Any]) -> None:
    if not any(callback.get(f"save_checkpoint_{unit}") for unit in ("steps", "seconds")):
        callback["save_checkpoint_steps"] = 1  # MindFormers' default
    if callback.get("async_save") is False:
        del callback["async_save"]  # the default
    limit = callback.get(_THRESHOLD)
    if isinstance(limit, (int, float)) and limit > 0:
        callback[_THRESHOLD] = math.sqrt(limit)
        source.notes.append(f"callbacks: {_THRESHOLD} converted from the squared norm to the norm")


def _take_tensorboard(source: SourceFile, callbacks: list[Any], monitor: dict[str, Any]) -> None:
    """Pass the settings of the section ``tensorboard`` to the monitors."""
    settings = source.mapping("tensorboard")
    folder = settings.pop("tensorboard_dir", None)
    is_on = settings.pop("tensorboard_on", True)
    writers = [one for one in _mappings(callbacks) if one["type"] in _WRITERS]
    if monitor.get("monitor_on") is True:
        writers.append(monitor)
    if not is_on or not isinstance(folder, str) or not folder or not writers:
        source.without_effect += ["tensorboard"] if ("tensorboard",) in source else []
        return
    for writer in writers:
        writer.setdefault("tensorboard_dir", folder)
        if writer.get("type") == "MFLossMonitor":
            writer |= {key: settings.pop(key) for key in sorted(_LOSS_FLAGS & settings.keys())}
    source.without_effect += [f"tensorboard.{key}" for key in settings]


def _mappings(callbacks: list[Any]) -> Iterator[dict[str, Any]]:
    return (one for one in callbacks if isinstance(one, dict) and "type" in one)
