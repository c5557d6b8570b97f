"""Let a callback's constructor take the fields of a settings class as arguments."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from mfwrap.arguments import check_bool

_Arguments = ParamSpec("_Arguments")
_Settings = TypeVar("_Settings")

_Constructor = Callable[[Any, _Settings], None]


def takes_settings(
    make_settings: Callable[_Arguments, _Settings],
) -> Callable[[_Constructor[_Settings]], Callable[Concatenate[Any, _Arguments], None]]:
    """Decorate an ``__init__(self, settings)`` so that it takes each setting as an argument.

    Names, types, defaults and descriptions of the settings are then declared in one place, the
    settings class. Type checkers, editors, `help` and `inspect.signature` see the class's fields as
    arguments of the decorated ``__init__``.

    Args:
        make_settings: The settings class. The decorated ``__init__`` raises its errors.
    """

    def decorate(
        init: _Constructor[_Settings],
    ) -> Callable[Concatenate[Any, _Arguments], None]:
        def init_from_arguments(
            self: Any, /, *arguments: _Arguments.args, **keywords: _Arguments.kwargs
        ) -> None:
            init(self, make_settings(*arguments, **keywords))

        functools.update_wrapper(init_from_arguments, init)
        signature = inspect.signature(make_settings)
        of_self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = signature.replace(parameters=[of_self, *signature.parameters.values()])
        # `inspect.signature` and `help` show `__signature__` if a function has it.
        init_from_arguments.__signature__ = signature  # type: ignore[attr-defined]  # (functions have no such attribute for mypy)
        return init_from_arguments

    return decorate


def saved_settings(settings: Any) -> dict[str, Any]:
    """Return the settings to save in a checkpoint, keyed by field name.

    Callables, such as a clock, are left out: JSON cannot hold them.

    Args:
        settings: Instance of a dataclass. Settings nested in it become a dictionary.
    """
    saved = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if not callable(value):
            saved[field.name] = value
    return saved


def check_bools(settings: Any) -> None:
    """Check that each setting with a bool as default is a bool.

    Args:
        settings: Instance of a dataclass.

    Raises:
        TypeError: If a setting is not a bool, although its default is.
    """
    for field in dataclasses.fields(settings):
        if isinstance(field.default, bool):
            check_bool(field.name, getattr(settings, field.name))
