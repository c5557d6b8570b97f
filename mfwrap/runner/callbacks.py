"""The callbacks of a recipe, by their public names."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

import mfwrap.callbacks
from mfwrap.callbacks import (
    Callback,
    adapt_pynative,
    as_trainer_callback,
    is_pynative_callback,
)
from mfwrap.runner.document import Path
from mfwrap.runner.expert_bias import BIAS_RATE
from mfwrap.runner.objects import RecipeObjects, without_nulls
from mfwrap.runner.own_code import OwnKind, OwnType
from mfwrap.runner.sections import (
    BIAS_CALLBACK,
    CALLBACK_KEYS_WITHOUT_MEANING,
    CALLBACKS_WITHOUT_MEANING,
)

MakeCallback = Callable[[], TrainerCallback]
"""Builds a new callback for each run, because a callback holds the state of its run."""

_MONITOR = "TrainingStateMonitor"

_OWN = OwnKind(
    "a subclass of transformers.TrainerCallback, or of Callback or PyNativeCallback of "
    "mfwrap.callbacks",
    lambda found: (
        isinstance(found, type)
        and (issubclass(found, (Callback, TrainerCallback)) or is_pynative_callback(found))
    ),
)

FOLDER_KEYS = frozenset({"directory", "folder", "output_path", "tensorboard_dir"})
"""Arguments of callbacks that are folders to write to."""


def read_callbacks(
    objects: RecipeObjects, section: Sequence[Mapping[str, Any]]
) -> list[MakeCallback]:
    """Return a list of functions, each of which builds one callback of a section ``callbacks``.

    A class of the user's own is not called before the run: its arguments are compared with its
    signature. It may open files when it is built.

    Raises:
        RecipeError: If a callback is unknown, or raises an error about its arguments.
    """
    makers = []
    for index, entry in enumerate(section):
        path = ("callbacks", index)
        if (own := objects.own_type(path, entry, _OWN)) is not None:
            makers += [] if own.found is None else [_own_maker(objects, path, own)]
            continue
        if entry.get("type") == BIAS_CALLBACK:
            says = f"write {BIAS_RATE}, with the rate, at the top of the recipe instead"
            raise objects.document.error((*path, "type"), f"{BIAS_CALLBACK} is no callback: {says}")
        known = _callback_classes()
        name, settings = objects.named_type(path, entry, {*known, *CALLBACKS_WITHOUT_MEANING})
        if name in known:
            makers.append(_maker(objects, path, name, settings))
        else:
            objects.without_meaning.append(f"callbacks.{index} ({name})")
    return makers


def read_monitor(
    objects: RecipeObjects, section: Mapping[str, Any] | None, **others: Any
) -> list[MakeCallback]:
    """Return a list with a function that builds the monitor; an empty list if the monitor is off.

    Args:
        objects: Builder for the recipe. It builds the monitor once, to check the arguments.
        section: Section ``monitor_config``; ``None`` if it is missing.
        others: Arguments from other sections, which replace those of this section. An argument is
            ignored if it is ``None``, or if the monitor does not have it.

    Raises:
        RecipeError: If a key is unknown, or the monitor raises an error about its arguments.
    """
    if section is None:
        return []
    path = ("monitor_config",)
    settings = dict(section)
    is_on = settings.pop("monitor_on", False)
    if not isinstance(is_on, bool):
        raise objects.document.error(
            (*path, "monitor_on"), f"expected true or false, got {is_on!r}"
        )
    monitor = _callback_classes()[_MONITOR]
    known = inspect.signature(monitor).parameters
    if not is_on:
        # Check the keys although the monitor is off. Otherwise a wrong key would raise only after
        # the user has turned the monitor on.
        objects.kept(path, settings, known, CALLBACK_KEYS_WITHOUT_MEANING[_MONITOR])
        return []
    settings |= {key: v for key, v in others.items() if key in known and v is not None}
    return [_maker(objects, path, _MONITOR, settings)]


def needs_tensorboard_dir(section: Mapping[str, Any] | None) -> bool:
    """Return whether a section ``monitor_config`` writes to TensorBoard and sets no folder."""
    settings = section or {}
    if settings.get("tensorboard_dir") is not None:
        return False
    formats = [value for key, value in settings.items() if key.endswith("_format")]
    stable_rank = settings.get("stable_rank_config")
    if isinstance(stable_rank, Mapping):
        formats.append(stable_rank.get("format"))
    return any(isinstance(each, (str, list)) and "tensorboard" in each for each in formats)


def _maker(
    objects: RecipeObjects, path: Path, name: str, settings: Mapping[str, Any]
) -> MakeCallback:
    callback = _callback_classes()[name]
    known = set(inspect.signature(callback).parameters)
    if path[0] == "callbacks":
        known.add("type")  # already taken from `settings`; added so that errors can suggest it
    meaningless = CALLBACK_KEYS_WITHOUT_MEANING.get(name, frozenset())
    kept = without_nulls(callback, objects.kept(path, settings, known, meaningless))
    made = objects.build(path, callback, kept)
    for key in FOLDER_KEYS & kept.keys():
        objects.check_folder((*path, key), kept[key])
    if isinstance(made, TrainerCallback):
        return functools.partial(callback, **kept)
    return lambda: as_trainer_callback(callback(**kept))


def _own_maker(objects: RecipeObjects, path: Path, own: OwnType) -> MakeCallback:
    settings = without_nulls(own.found, own.settings)
    settings = objects.checked_arguments(path, own.found, settings)
    for key in FOLDER_KEYS & settings.keys():
        objects.check_folder((*path, key), settings[key])

    def make() -> TrainerCallback:
        made = objects.call(path, own.found, **settings)
        if isinstance(made, TrainerCallback):
            return made
        adapt = as_trainer_callback if isinstance(made, Callback) else adapt_pynative
        return adapt(made)

    return make


def _callback_classes() -> dict[str, Callable[..., Any]]:
    """Return the classes of `mfwrap.callbacks` that a recipe can name."""
    found = {name: getattr(mfwrap.callbacks, name) for name in mfwrap.callbacks.__all__}
    return {
        name: one
        for name, one in found.items()
        if isinstance(one, type) and issubclass(one, (Callback, TrainerCallback))
    }
