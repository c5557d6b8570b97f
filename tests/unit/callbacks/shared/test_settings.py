"""A decorated constructor takes the fields of its settings class as arguments."""

import inspect
import json
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, field

import pytest

from mfwrap.callbacks import MFLossMonitor, TrainingStateMonitor
from mfwrap.callbacks.loss_monitor import LossMonitorSettings
from mfwrap.callbacks.shared.settings import check_bools, saved_settings, takes_settings
from mfwrap.callbacks.training_state import TrainingStateSettings


@dataclass(frozen=True, slots=True)
class Inner:
    depth: int = 3


@dataclass(frozen=True, slots=True)
class Settings:
    size: int = 1
    _: KW_ONLY
    is_on: bool = False
    inner: Inner = Inner()
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)


class Owner:
    @takes_settings(Settings)
    def __init__(self, settings: Settings) -> None:
        """Keep the settings."""
        self.settings = settings


def test_arguments_become_settings():
    """Positional arguments and keywords build the settings, defaults included."""
    assert Owner(5, is_on=True).settings == Settings(5, is_on=True)
    assert Owner().settings == Settings()


@pytest.mark.parametrize(
    ("positional", "keywords"), [((), {"sizes": 1}), ((1, True), {}), ((1,), {"size": 1})]
)
def test_wrong_arguments(positional, keywords):
    """Unknown keywords, too many arguments, and an argument given twice raise a TypeError."""
    with pytest.raises(TypeError):
        Owner(*positional, **keywords)


@pytest.mark.parametrize(
    ("owner", "settings"),
    [
        (Owner, Settings),
        (MFLossMonitor, LossMonitorSettings),
        (TrainingStateMonitor, TrainingStateSettings),
    ],
)
def test_signature(owner, settings):
    """`inspect.signature` shows the fields of the settings class, with types and defaults."""
    shown = inspect.signature(owner).parameters

    assert list(shown.values()) == list(inspect.signature(settings).parameters.values())


def test_the_docstring_of_the_constructor_stays():
    """The decorated function keeps its name and its docstring."""
    assert (Owner.__init__.__name__, Owner.__init__.__doc__) == ("__init__", "Keep the settings.")


def test_saved_settings_build_the_same_settings():
    """Saved settings survive JSON; callables are left out and nested settings are dictionaries."""
    settings = Settings(7, is_on=True, clock=lambda: 0.0)
    saved = json.loads(json.dumps(saved_settings(settings)))

    assert saved == {"size": 7, "is_on": True, "inner": asdict(Inner())}


@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_a_flag_must_be_a_bool(value):
    """A flag that is not a bool, even 0 or 1, raises an error that names the flag."""
    check_bools(Settings(is_on=True))
    with pytest.raises(TypeError, match="`is_on` must be a bool, got"):
        check_bools(Settings(is_on=value))
