"""What a MindFormers file says of its monitors outside of their own sections."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["take_over_curves", "take_over_nan_check", "turn_embedding_threshold"]

_LOSS_FLAGS = frozenset({"log_loss_scale_to_tensorboard", "log_timers_to_tensorboard"})
"""Keys of ``tensorboard`` that are arguments of `MFLossMonitor`."""


def turn_embedding_threshold(sections: Mapping[str, Any]) -> list[str]:
    """Turn MindFormers' limit, of the square of a norm, into one of the norm; return notes."""
    key = "embedding_local_norm_threshold"
    notes = []
    for one in _callbacks(sections):
        if isinstance(one.get(key), (int, float)) and one[key] > 0:
            one[key] = math.sqrt(one[key])
            notes.append(f"callbacks: {key} is of the norm here, not of its square")
    return notes


def take_over_curves(sections: dict[str, Any], tensorboard: Mapping[str, Any]) -> list[str]:
    """Give the monitors what MindFormers' section ``tensorboard`` says; return notes.

    Args:
        sections: Of the recipe.
        tensorboard: The section; empty if there is none.
    """
    settings = dict(tensorboard)
    folder = settings.pop("tensorboard_dir", None)
    if not settings.pop("tensorboard_on", True):
        return ["without tensorboard, which is off"]
    if not isinstance(folder, str) or not folder:
        return ["without tensorboard, which names no folder"] if tensorboard else []
    kept: set[str] = set()
    writers = [one for one in _callbacks(sections) if one.get("type") == "TrainingStateMonitor"]
    for one in _callbacks(sections):
        if one.get("type") == "MFLossMonitor":
            kept |= _LOSS_FLAGS & settings.keys()
            one |= {key: settings[key] for key in sorted(kept)}
            writers.append(one)
    if _is_on(sections["monitor_config"]):
        writers.append(sections["monitor_config"])
    if not writers:
        return ["without tensorboard: no monitor is there that writes curves"]
    for one in writers:
        one.setdefault("tensorboard_dir", folder)
    return [f"tensorboard: without {key}" for key in settings if key not in kept]


def take_over_nan_check(sections: dict[str, Any]) -> None:
    """Let the monitor check for nan; add one if there is none."""
    key = "check_for_nan_in_loss_and_grad"
    if _is_on(sections["monitor_config"]):
        sections["monitor_config"] |= {key: True}
    else:
        monitor = {"type": "TrainingStateMonitor", key: True}
        sections["callbacks"] = [*(sections["callbacks"] or []), monitor]


def _callbacks(sections: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (one for one in sections["callbacks"] or [] if isinstance(one, dict))


def _is_on(monitor_config: object) -> bool:
    return isinstance(monitor_config, dict) and bool(monitor_config.get("monitor_on"))
