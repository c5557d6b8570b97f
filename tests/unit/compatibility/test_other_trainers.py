"""The listed attributes of other libraries' Trainers are those of the installed releases."""

import importlib.util
import re
from pathlib import Path

import pytest

from mfwrap.compatibility.other_trainers import (
    KEPT,
    OF_RANK,
    kept_attributes,
    synchronized_models,
)

LISTED = [
    (library, name)
    for lists in (KEPT, OF_RANK)
    for library, names in lists.items()
    for name in names
]


def source_of(library):
    """Return the text of all files of a library that define Trainers."""
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        pytest.skip(f"{library} is not installed")
    files = sorted(Path(found.origin).parent.rglob("*trainer.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize(("library", "name"), LISTED)
def test_a_library_sets_the_attribute(library, name):
    """If this fails with a new release: find out what replaces the attribute."""
    assert re.search(rf"self\.{name} = ", source_of(library))


def test_no_name_is_listed_twice():
    """Each name has one entry."""
    assert len(set(LISTED)) == len(LISTED)


class OfUser:
    """A class with names of TRL."""

    def __init__(self) -> None:
        self._step = self._metrics = 1


def test_only_classes_of_the_library_count():
    """A class of a user, which derives from none of the libraries, keeps its attributes."""
    derived = type("Trainer", (OfUser,), {"__module__": "trl.trainer.any"})

    assert kept_attributes(OfUser()) == []
    assert kept_attributes(derived()) == ["_metrics", "_step"]
    assert kept_attributes(derived(), of_rank=False) == ["_metrics"]


def test_callbacks_with_a_model():
    """The models are those of TRL's callbacks, and of callbacks that derive from them."""
    kind = type("SyncRefModelCallback", (), {"__module__": "trl.any", "ref_model": "a model"})
    derived = type("Mine", (kind,), {})
    other = type("SyncRefModelCallback", (), {"__module__": "mine", "ref_model": "a model"})

    assert synchronized_models([derived(), other(), object()]) == ["a model"]
