"""The generators that objects hold are found, and go on from their saved states."""

import collections
import dataclasses
import functools
import json
import logging
import random
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch

from mfwrap.checkpoints.held_generators import (
    _warn_of_many,
    check_states,
    held_generators,
    restore_generators,
    states_of,
)
from support.versions import needs


class Holder:
    """An object with a generator."""

    def __init__(self, rng=None):
        self.rng = rng

    def draw(self, *_):
        """Return four numbers, the last of which takes a part of a number that is left over."""
        if isinstance(self.rng, torch.Generator):
            return torch.rand(4, generator=self.rng).tolist()
        normal = getattr(self.rng, "gauss", None) or self.rng.normal
        return [self.rng.random(), normal(0, 1), normal(0, 1), normal(0, 1)]


BITS = [np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64]
MAKERS = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "Python": lambda: random.Random(1),  # noqa: S311  (not for cryptography)
    "old NumPy": lambda: np.random.RandomState(1),
    **{
        kind.__name__: functools.partial(lambda kind: np.random.Generator(kind(1)), kind)
        for kind in BITS
    },
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_generator_goes_on(make):
    """After a way through JSON, the same numbers follow."""
    holder = Holder(make())
    holder.draw()
    states = json.loads(json.dumps(states_of(held_generators({"dataset": holder}))))
    check_states(states)
    expected = holder.draw()
    other = Holder(make())
    left = restore_generators({"dataset": other}, states)

    assert list(states) == ["dataset.rng"]
    assert left == {}
    assert other.draw() == expected


@dataclasses.dataclass(frozen=True)
class Frozen:
    """An object whose attributes cannot be set."""

    rng: object = None


@pytest.mark.parametrize("kind", [Holder, Frozen])
def test_an_object_without_a_generator_gets_none(kind):
    """A program that resumes without the generator stays without it; its state is returned."""
    states = states_of({"dataset.rng": GENERATOR})
    holder = kind()

    assert restore_generators({"dataset": holder}, states) == states
    assert vars(holder) == {"rng": None}


def inner_function(generator):
    """Return a function that uses a generator of its surroundings."""
    return lambda rows: (rows, generator)


GENERATOR = random.Random(1)  # noqa: S311  (not for cryptography)


class Named(NamedTuple):
    """A tuple with names."""

    rng: object


class OwnItems(list):
    """A list with an attribute."""


@dataclasses.dataclass(slots=True)
class Slots:
    """An object without a dictionary of attributes."""

    rng: object
    empty: object = dataclasses.field(init=False)


def network_with(generator):
    """Return a network whose inner module has a generator."""
    network = torch.nn.Sequential(torch.nn.Linear(2, 2))
    network[0].rng = generator
    return network


def with_defaults(rows, first=GENERATOR, *, second=GENERATOR):
    """Return the arguments."""
    return rows, first, second


WAYS = {
    "root": GENERATOR,
    "root.rng.rng": Holder(Holder(GENERATOR)),
    "root.[1].args.[0]": [1, functools.partial(print, GENERATOR)],
    "root.keywords.rng": functools.partial(print, rng=GENERATOR),
    "root.func.self.rng": functools.partial(Holder(GENERATOR).draw),
    "root.generator": inner_function(GENERATOR),
    "root.rng.transforms.[0]": Holder({"transforms": (GENERATOR,)}),
    "root.rng.[0]": Holder(Named(GENERATOR)),
    "root.a": collections.OrderedDict(a=GENERATOR),
    "root.[1]": collections.defaultdict(list, {1: GENERATOR}),
    "root.[0]": OwnItems([GENERATOR]),
    "root.[2]": collections.deque([1, 2, GENERATOR]),
    "root.rng": Slots(GENERATOR),
    "root.0.rng": network_with(GENERATOR),
    "root.defaults.[0]": with_defaults,
    "root.[key 0]": {(1, 2): GENERATOR},
}


@pytest.mark.parametrize("path", WAYS)
def test_where_generators_are_found(path):
    """Attributes, containers, partial functions, methods, functions and networks are followed."""
    assert held_generators({"root": WAYS[path]}) == {path: GENERATOR}


def test_what_is_not_followed():
    """Hooks, modules, classes, generators of the system and given objects are left alone."""
    network = torch.nn.Linear(2, 2)
    network.register_forward_hook(Holder(GENERATOR).draw)
    itself = Holder()
    itself.rng = itself
    held = Holder(GENERATOR)
    # NumPy's old generator can neither be read nor set in one way with another source of bits.
    odd = np.random.RandomState(np.random.PCG64(1))
    roots = [network, random, Holder, random.SystemRandom(), itself, held, None, odd]

    assert held_generators({"root": roots}, but=[held]) == {}


class OwnList(list):
    """A data set that is a list with rows of its own."""

    def __getitem__(self, index):
        message = "a row was read"
        raise AssertionError(message)

    __iter__ = __getitem__


class OwnDict(dict):
    """A data set that is a dictionary with items of its own."""

    def items(self):
        """Raise an error."""
        message = "an item was read"
        raise AssertionError(message)


class Key:
    """A key of a dictionary."""

    def __repr__(self):
        message = "a key was shown"
        raise AssertionError(message)


class Proxy:
    """An object that has attributes in some threads only."""

    @property
    def __dict__(self):
        message = "not in this thread"
        raise RuntimeError(message)


class OwnRandom(random.Random):  # noqa: S311  (not for cryptography)
    """A generator that describes its state in its own way."""

    def getstate(self):
        """Return one number."""
        return (1,)


def collating():
    """Return an inner function one of whose variables was deleted."""
    big = [1]

    def collate(rows):
        return rows, big, GENERATOR  # noqa: F821  (deleted below)

    del big
    return collate


def test_no_code_of_the_user_is_run():
    """Containers, attributes and closures of any kind are read without calling their methods."""
    rows, items, own = OwnList([1]), OwnDict(a=1), OwnRandom(1)
    rows.rng = items.rng = GENERATOR
    dead = weakref.proxy(Holder())  # its class cannot be asked for
    roots = {"a": rows, "b": Proxy(), "c": collating(), "d": own, "e": [dead], "f": {Key(): Key()}}
    assert held_generators({"b": items}) == {"b.rng": GENERATOR}
    assert held_generators({"e": dead}, opaque=Holder) == {}
    states = states_of(found := held_generators(roots))
    assert found == {"a.rng": GENERATOR, "d": own}
    expected = own.random()
    restore_generators(roots, json.loads(json.dumps(states)))

    assert own.random() == expected


def test_how_far_generators_are_looked_for():
    """A generator deep inside wrappers is found, and large data take little time."""
    nested = Holder(GENERATOR)
    for _ in range(20):
        nested = Holder(nested)
    image = [[[0.0] * 64 for _ in range(64)] for _ in range(64)]
    rows = [{"image": image, "rng": None} for _ in range(10_000)]
    generators = [random.Random(n) for n in range(40)]  # noqa: S311  (not for cryptography)

    assert list(held_generators({"root": nested}).values()) == [GENERATOR]
    assert len(held_generators({"root": [rows, {0: generators[0], "0": generators[1]}]})) == 2
    assert len(held_generators({"root": generators})) == 40


def data_with(generator):
    """Return a data set whose generator is behind rows, tensors and lists of numbers."""
    rows = [{"ids": [1, 2], "x": torch.ones(2), "pairs": ((1, 2),)} for _ in range(1000)]
    lists = {number: [number] * 3 for number in range(1000)}
    arrays = [np.zeros(2)] * 200 + [[torch.ones(1)] for _ in range(200)]
    return Holder([rows, lists, arrays, Holder(Holder(generator))])


def test_plain_data_do_not_hide_a_generator(caplog):
    """Generators in several large data sets are found."""
    generators = [random.Random(n) for n in range(20)]  # noqa: S311  (not for cryptography)
    data = [data_with(generator) for generator in generators]

    assert list(held_generators({"root": data}).values()) == generators
    assert not caplog.records


def test_a_logger_is_not_followed():
    """The Trainer's collator holds one, from which all loggers of the process are reached."""
    logger = logging.getLogger("of a collator")
    logger.rng = GENERATOR

    assert held_generators({"collate_fn": Holder(logger)}) == {}


def test_too_many_objects(caplog):
    """A warning says once that generators may have been missed."""
    _warn_of_many.cache_clear()
    chain = Holder(GENERATOR)
    for _ in range(5000):
        chain = Holder(chain)
    for _ in range(2):
        assert held_generators({"dataset": chain}) == {}

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("dataset holds too many objects to look for random")


def test_a_program_that_has_changed():
    """States without a generator of their kind at their place change nothing."""
    states = states_of(
        {"dataset.rng": GENERATOR, "dataset.gone": GENERATOR, "other.rng": GENERATOR}
    )
    holder = Holder(np.random.default_rng(2))
    expected = Holder(np.random.default_rng(2)).draw()
    restore_generators({"dataset": holder}, states)
    named = Holder("a name")
    restore_generators({"dataset": named}, states)

    assert holder.draw() == expected
    assert vars(named) == {"rng": "a name"}


PCG64 = states_of({"rng": np.random.default_rng(1)})["rng"]["numpy"]
OLD = states_of({"rng": np.random.RandomState(1)})["rng"]["numpy_legacy"]
DAMAGE = {
    "kind": {"cuda": "AAAA"},
    "torch": {"torch": "AAAA"},
    "Python": {"python": [3, [1, 2], None]},
    "name": {"numpy": PCG64 | {"bit_generator": "seed"}},
    "number": {"numpy": PCG64 | {"state": {"state": -1, "inc": 1}}},
    "part": {"numpy": {"bit_generator": "PCG64"}},
    "position": {"numpy_legacy": OLD | {"state": OLD["state"] | {"pos": 10**6}}},
    "mapping": {},
}


OF_NUMPY_2 = needs("numpy", "2", "an error for a number that does not fit")


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(state, id=name, marks=[OF_NUMPY_2] if name == "number" else [])
        for name, state in DAMAGE.items()
    ],
)
def test_a_damaged_state_is_refused(state):
    """A state that fits no generator raises one of the documented errors."""
    with pytest.raises((AttributeError, LookupError, TypeError, ValueError)):
        check_states({"dataset.rng": state})
