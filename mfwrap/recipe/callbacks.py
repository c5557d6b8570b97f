"""The callbacks of a recipe, by their public names."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

import mfwrap.callbacks
from mfwrap.callbacks import Callback, as_trainer_callback
from mfwrap.recipe.document import Path, nearest
from mfwrap.recipe.objects import RecipeObjects
from mfwrap.recipe.sections import (
    CALLBACK_KEYS_WITHOUT_MEANING,
    CALLBACKS_WITHOUT_MEANING,
    MONITOR_KEYS_WITHOUT_MEANING,
)

__all__ = ["MakeCallback", "needs_tensorboard_dir", "read_callbacks", "read_monitor"]

MakeCallback = Callable[[], TrainerCallback]
"""Makes a callback anew: it has the state of one run."""

_MONITOR = "TrainingStateMonitor"


def read_callbacks(
    objects: RecipeObjects, section: Sequence[Mapping[str, Any]]
) -> list[MakeCallback]:
    """Return what makes the callbacks of a section ``callbacks``, in its order.

    Raises:
        RecipeError: If one is unknown, or refuses its arguments.
    """
    makers = []
    for index, entry in enumerate(section):
        path: Path = ("callbacks", index)
        settings = dict(entry)
        name = settings.pop("type", None)
        if name in CALLBACKS_WITHOUT_MEANING and name not in mfwrap.callbacks.__all__:
            objects.without_meaning.append(f"callbacks.{index} ({name})")
            continue
        makers.append(_maker(objects, path, name, settings))
    return makers


def read_monitor(
    objects: RecipeObjects, section: Mapping[str, Any] | None, **also: Any
) -> list[MakeCallback]:
    """Return what makes the monitor of a section ``monitor_config``, if it is on.

    Args:
        objects: Builds it once.
        section: What it says.
        also: Arguments that come from elsewhere, left out where they are ``None`` or the monitor
            does not take them.

    Raises:
        RecipeError: If the monitor refuses its arguments.
    """
    if section is None:
        return []
    settings = dict(section)
    is_on = settings.pop("monitor_on", False)
    if not isinstance(is_on, bool):
        says = f"must be a bool, got {is_on!r}"
        raise objects.document.error(("monitor_config", "monitor_on"), says)
    if not is_on:
        _check_monitor_keys(objects, settings)
        return []
    monitor = _callback_class(objects, ("monitor_config",), _MONITOR)
    known = inspect.signature(monitor).parameters
    settings |= {key: value for key, value in also.items() if key in known and value is not None}
    return [_maker(objects, ("monitor_config",), _MONITOR, settings)]


def needs_tensorboard_dir(section: Mapping[str, Any] | None) -> bool:
    """Return whether a section ``monitor_config`` asks for curves and names no folder."""
    settings = section or {}
    if settings.get("tensorboard_dir") is not None:
        return False
    formats = [value for key, value in settings.items() if key.endswith("_format")]
    stable_rank = settings.get("stable_rank_config")
    if isinstance(stable_rank, Mapping):
        formats.append(stable_rank.get("format"))
    return any(isinstance(one, (str, list)) and "tensorboard" in one for one in formats)


def _check_monitor_keys(objects: RecipeObjects, settings: Mapping[str, Any]) -> None:
    """Refuse unknown keys of a monitor that is off, too: it may be on tomorrow."""
    monitor = _callback_class(objects, ("monitor_config",), _MONITOR)
    known = set(inspect.signature(monitor).parameters)
    objects.kept(("monitor_config",), settings, known, MONITOR_KEYS_WITHOUT_MEANING)


def _maker(
    objects: RecipeObjects, path: Path, name: object, settings: Mapping[str, Any]
) -> MakeCallback:
    callback = _callback_class(objects, (*path, "type"), name)
    known = set(inspect.signature(callback).parameters)
    meaningless = CALLBACK_KEYS_WITHOUT_MEANING.get(str(name), frozenset())
    if name == _MONITOR:
        meaningless = MONITOR_KEYS_WITHOUT_MEANING
    if path[0] == "callbacks":
        known.add("type")  # taken out above; a misspelt one is told
    kept = objects.kept(path, settings, known, meaningless)
    made = objects.build(path, callback, kept)
    if isinstance(made, TrainerCallback):
        return functools.partial(callback, **kept)
    return lambda: as_trainer_callback(callback(**kept))


def _callback_class(objects: RecipeObjects, path: Path, name: object) -> Callable[..., Any]:
    known = [one for one in mfwrap.callbacks.__all__ if _is_usable(getattr(mfwrap.callbacks, one))]
    if name not in known:
        guess = nearest(str(name), known)
        hint = f"; did you mean {guess!r}?" if guess else f"; known are {known}"
        raise objects.document.error(path, f"must be a callback, got {name!r}{hint}")
    callback: Callable[..., Any] = getattr(mfwrap.callbacks, str(name))
    return callback


def _is_usable(callback: object) -> bool:
    return isinstance(callback, type) and issubclass(callback, (Callback, TrainerCallback))
