"""Put the objects of a program in the place of sections of a recipe."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from mfwrap.callbacks import Callback, is_pynative_callback
from mfwrap.recipes.data.source import DataSource
from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.recipes.tasks.table import SOURCES
from mfwrap.runner.document import Path, RecipeDocument
from mfwrap.runner.optimizers import KEYS, RATES
from mfwrap.runner.own_code import OBJECT, OwnCode, is_own

_OF_ALL_DATA = frozenset(field.name for field in fields(DataSource))
_OF_SOURCES = {"type", *(field.name for one in SOURCES.values() for field in fields(one))}
_OF_MODELS = {"type", *(field.name for field in fields(ModelSettings))}


class GivenObjects(NamedTuple):
    """Objects that a program passes to `mfwrap.runner.run_recipe`."""

    model: nn.Module | None = None
    data: Any = None
    optimizer: Optimizer | Callable[[list[dict[str, Any]]], Optimizer] | None = None
    callbacks: Sequence[TrainerCallback | Callback] = ()

    def check(self, document: RecipeDocument) -> None:
        """Refuse objects of a wrong type, and sections that contradict them.

        Args:
            document: Recipe as written.

        Raises:
            RecipeError: If a section contradicts an object.
            TypeError: If an object has the wrong type.
            ValueError: If there is an optimizer of the parameters of a model that is not given.
        """
        if self.model is not None and not isinstance(self.model, nn.Module):
            msg = f"`model` must be a torch.nn.Module, got {type(self.model).__name__}"
            raise TypeError(msg)
        if not (self.optimizer is None or callable(self.optimizer) or self._is_built):
            got = type(self.optimizer).__name__
            msg = f"`optimizer` must be a torch.optim.Optimizer or a function, got {got}"
            raise TypeError(msg)
        if not isinstance(self.callbacks, Sequence):
            got = type(self.callbacks).__name__
            msg = f"`callbacks` must be a list of transformers.TrainerCallback, got {got}"
            raise TypeError(msg)
        for callback in self.callbacks:
            is_known = isinstance(callback, (Callback, TrainerCallback))
            if not (is_known or is_pynative_callback(callback)):
                got = type(callback).__name__
                msg = f"`callbacks` must be objects of transformers.TrainerCallback, got {got}"
                raise TypeError(msg)
        if self._is_built and self.model is None:
            msg = (
                "`optimizer` must be a function of the parameter groups, because the recipe builds "
                "the model, got an optimizer of other parameters; pass `model`, too"
            )
            raise ValueError(msg)
        self._check_keys(document)
        self._check_sections(document)

    def document(self, document: RecipeDocument) -> RecipeDocument:
        """Return a recipe whose sections say which objects have replaced them."""
        data = dict(document.data)
        # An optimizer's section that names no other optimizer is for the object.
        of_optimizer = _settings(document) if _is_of_object(document) else ()
        kept_keys: dict[str, Collection[str]]
        kept_keys = {
            "model": {"tokenizer", "chat_template"},
            "data": _OF_ALL_DATA,
            "optimizer": of_optimizer,
        }
        for name, kept in kept_keys.items():
            if (found := getattr(self, name)) is not None:
                former = data.get(name)
                former = former if isinstance(former, Mapping) else {}
                others = {key: value for key, value in former.items() if key in kept}
                data[name] = {"type": _name(found), **others}
        if self.callbacks:
            added = [{"type": _name(one)} for one in self.callbacks]
            data["callbacks"] = [*(data.get("callbacks") or ()), *added]
        return RecipeDocument(document.name, data, document.places)

    def without_effect(self, document: RecipeDocument) -> list[str]:
        """Return the dotted names of settings of the optimizer that an object replaces.

        Only of the optimizer: its settings, such as a learning rate, may be meant for the object.

        Args:
            document: Recipe as written.
        """
        if self.optimizer is None or _is_of_object(document):
            return []
        return [f"optimizer.{key}" for key in _settings(document)]

    def code(self, code: OwnCode, document: RecipeDocument) -> OwnCode:
        """Return a copy of a recipe's code that has the objects.

        Args:
            code: The recipe's code.
            document: Recipe as written.
        """
        made = copy.copy(code)
        given: dict[Path, Callable[..., Any]] = {}
        if self.model is not None:
            given["model",] = lambda: self.model
        if self.data is not None:
            given["data",] = lambda: self.data
        if self.optimizer is not None:
            make: Any = self.optimizer
            given["optimizer",] = (lambda _: self.optimizer) if self._is_built else make
        number = len(document.data.get("callbacks") or ())
        for index, callback in enumerate(self.callbacks, number):
            given["callbacks", index] = lambda callback=callback: callback
        made.given = given
        return made

    def _check_keys(self, document: RecipeDocument) -> None:
        """Refuse unknown keys in sections that objects replace."""
        tables: dict[str, AbstractSet[str]] = {"model": _OF_MODELS, "data": _OF_SOURCES}
        if not _is_of_object(document):
            tables["optimizer"] = KEYS
        for name, known in tables.items():
            section = document.data.get(name)
            if getattr(self, name) is None or not isinstance(section, Mapping):
                continue
            kind = section.get("type")
            if is_own(kind) and not str(kind).startswith(OBJECT):
                continue  # the class of the user's own that is replaced may have any key
            for key in section.keys() - known:
                raise document.unknown_key((name, key), known)

    def _check_sections(self, document: RecipeDocument) -> None:
        if self.model is not None and document.data.get("peft") is not None:
            raise document.error(("peft",), _contradicts("model"))
        if self._is_built and document.data.get("grouped_lr_schedule") is not None:
            raise document.error(("grouped_lr_schedule",), _contradicts("optimizer"))
        decay = ("training", "weight_decay")
        if self._is_built and (document.data.get("training") or {}).get("weight_decay") is not None:
            raise document.error(decay, _contradicts("optimizer"))
        if self._is_built and _is_of_object(document):
            for key in _settings(document):
                raise document.error(("optimizer", key), _contradicts("optimizer"))
        if self._is_built or {*RATES} & {*getattr(self.optimizer, "keywords", ())}:
            places = [("training", "learning_rate"), ("lr_schedule", "learning_rate")]
            if _is_of_object(document):
                places += [("optimizer", key) for key in RATES]
            for section, key in places:
                if (document.data.get(section) or {}).get(key) is not None:
                    raise document.error((section, key), _contradicts("optimizer"))

    @property
    def _is_built(self) -> bool:
        return isinstance(self.optimizer, Optimizer)


def _section(document: RecipeDocument) -> Mapping[str, Any]:
    """Return the section ``optimizer``; an empty one if it is missing or no mapping."""
    section = document.data.get("optimizer")
    return section if isinstance(section, Mapping) else {}


def _settings(document: RecipeDocument) -> list[str]:
    """Return the keys of the section ``optimizer`` that are set, without ``type``."""
    section = _section(document)
    return [key for key, value in section.items() if key != "type" and value is not None]


def _is_of_object(document: RecipeDocument) -> bool:
    """Return whether the section ``optimizer`` names no other optimizer than the object."""
    kind = _section(document).get("type")
    return not kind or str(kind).startswith(OBJECT)


def _contradicts(name: str) -> str:
    return f"must be left out, because run_recipe got the object `{name}`"


def _name(found: Any) -> str:
    # A generator has a __qualname__, but no __module__.
    is_named = hasattr(found, "__qualname__") and hasattr(found, "__module__")
    named = found if is_named else type(found)
    return f"{OBJECT}{named.__module__}.{named.__qualname__}"
