"""Random generators that samplers, data sets and collators hold, and their states, as JSON."""

import base64
import contextlib
import functools
import itertools
import logging
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from random import Random, SystemRandom
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

_logger = logging.getLogger(__name__)

_Python = Random  # noqa: S311  (not for cryptography)
Generator = torch.Generator | _Python | np.random.Generator | np.random.RandomState

_MOST_ITEMS = 256
"""Items of a list or dict in which generators are looked for."""

_MOST_ROWS = 16
"""Items in which generators are looked for if all are lists or dicts, such as rows of data."""

_MOST_OBJECTS = 4096
"""Objects in which generators are looked for, those nearest to the roots first. Objects that hold
only plain values do not count."""

_PLAIN: tuple[type, ...] = (type(None), bool, int, float, str, bytes, type, types.ModuleType)
_PLAIN += (np.generic, np.ndarray, Tensor)
# The Trainer's collator holds a logger, and a logger holds all loggers of the process.
_PLAIN += (logging.Logger,)
_ROWS = {dict, list, tuple}

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def held_generators(
    roots: Mapping[str, object], *, but: Iterable[object] = (), opaque: type | None = None
) -> dict[str, Generator]:
    """Return the generators of Python, NumPy and torch (on the CPU) that objects hold.

    Attributes, lists, dicts, partial functions, methods, and the defaults and outer variables of
    functions are followed. Sets, classes, modules, loggers and arrays are not. If the objects hold
    too many others, a warning is logged, once in a process.

    Args:
        roots: Objects by name.
        but: Objects that are not followed.
        opaque: A class whose objects are not followed.

    Returns:
        Generators by their paths, such as ``sampler.generator``.
    """
    found: dict[str, Generator] = {}
    # The objects are kept, so that no other one gets the number of one that was seen.
    seen = {id(each): each for each in but}
    waiting = deque(roots.items())
    num_followed = 0
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen or (opaque is not None and _is(value, opaque)):
            continue
        seen[id(value)] = value
        if _is_generator(value):
            found[path] = value
        elif members := _members(value):
            waiting += [(f"{path}.{name}", each) for name, each in members]
            num_followed += 1
            if num_followed == _MOST_OBJECTS:
                _warn_of_many(path.partition(".")[0])
                break
    return found


@functools.cache
def _warn_of_many(root: str) -> None:
    _logger.warning(
        "%s holds too many objects to look for random generators in all of them; a resumed run "
        "draws other random numbers from the rest; put generators in attributes of the data set, "
        "sampler or collator itself",
        root,
    )


def states_of(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Return the states of generators by their paths, as values that JSON can represent."""
    return {path: _state(generator) for path, generator in generators.items()}


def check_states(states: Mapping[str, Any]) -> None:
    """Check states that `states_of` returned.

    Raises:
        AttributeError: If the states are no mapping.
        LookupError: If a part of a state is missing.
        TypeError: If a part of a state has another type.
        ValueError: If a state does not fit its generator.
    """
    for state in states.values():
        _new(state)


def restore_generators(roots: Mapping[str, object], states: Mapping[str, Any]) -> dict[str, Any]:
    """Set the generators that objects hold to states that `states_of` returned.

    A collator of transformers that makes its generator for its first batch makes it now. No
    attribute of any other object is set.

    Args:
        roots: Objects by name, as for `held_generators`.
        states: States by path.

    Returns:
        The states without a generator at their path: the program has changed, or an object makes
        the generator later.
    """
    for path in states:
        _let_collator_make_generator(roots, path)
    found = held_generators(roots)
    for path, state in states.items():
        new, generator = _new(state), found.get(path)
        if generator is not None and _is(generator, type(new)):
            _copy(new, generator)
    return {path: state for path, state in states.items() if path not in found}


def _let_collator_make_generator(roots: Mapping[str, object], path: str) -> None:
    """Let `DataCollatorForLanguageModeling` make the generator at a path, if it has none yet."""
    first, *names = path.split(".")
    owner: Any = roots.get(first)
    for name in names[:-1]:
        owner = dict(_members(owner)).get(name)
    make: Any = getattr(type(owner), "create_rng", None)
    is_of_transformers = getattr(make, "__module__", "").startswith("transformers.")
    if is_of_transformers and owner.seed is not None and owner.generator is None:
        make(owner)


def _is(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a value is of a class; ``isinstance`` would read ``value.__class__``.

    That may be code of the user's own, and raises an error for a dead proxy of ``weakref``.
    """
    return issubclass(type(value), kinds)


def _members(value: Any) -> list[tuple[str, object]]:
    """Return what an object holds, by name; nothing of the user's own code is run."""
    return [
        (_name(name, number), each)
        for number, (name, each) in enumerate(_all_members(value))
        if not _is(each, _PLAIN)
    ]


def _name(name: object, number: int) -> str:
    if type(name) is str:
        return name
    return f"[{name!r}]" if type(name) in {bool, int, float} else f"[key {number}]"


def _all_members(value: Any) -> Iterator[tuple[object, object]]:
    if _is(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif _is(value, types.MethodType):
        yield "self", value.__self__
    elif _is(value, types.FunctionType):
        yield from _closure(value)
        yield from (("defaults", value.__defaults__), ("kwdefaults", value.__kwdefaults__))
    elif not _is(value, _PLAIN):
        # Call the methods of these classes, which a subclass may override.
        for kind in (list, tuple, deque):
            if _is(value, kind):
                yield from enumerate(_first_items(kind.__iter__(value)))
        if _is(value, dict):
            yield from itertools.islice(dict.items(value), _MOST_ITEMS)
        yield from _slots(value)
        attributes = _attributes(value)
        if _is(value, nn.Module):
            # Hooks are not followed: they may hold the whole training.
            yield from nn.Module.named_children(value) if attributes.keys() >= _OF_MODULES else ()
            attributes = {n: each for n, each in attributes.items() if n not in _OF_MODULES}
        yield from attributes.items()


_OF_MODULES = frozenset(vars(nn.Module()))


def _first_items(items: Iterator[object]) -> list[object]:
    found = list(itertools.islice(items, _MOST_ITEMS))
    return found[:_MOST_ROWS] if set(map(type, found)) <= _ROWS else found


def _slots(value: object) -> Iterator[tuple[str, object]]:
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if type(slot) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # the slot is empty
                    yield name, slot.__get__(value)


def _closure(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the variables of an inner function that it takes from its surroundings, by name."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # the variable was deleted
            yield name, cell.cell_contents


def _attributes(value: object) -> dict[str, object]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001  (any error of a property of the user's own)
        return {}
    return found if type(found) is dict else {}


def _is_generator(value: Any) -> TypeGuard[Generator]:
    if _is(value, torch.Generator):
        return bool(value.device.type == "cpu")
    if _is(value, np.random.Generator):
        return type(value.bit_generator).__name__ in _BIT_GENERATORS
    if _is(value, np.random.RandomState):
        return bool(value.get_state(legacy=False)["bit_generator"] == "MT19937")
    return _is(value, _Python) and not _is(value, SystemRandom)


def _state(generator: Generator) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        encoded = base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")
        return {"torch": encoded}
    if isinstance(generator, _Python):
        version, words, gauss = _Python.getstate(generator)  # a subclass may have its own
        return {"python": [version, list(words), gauss]}
    if isinstance(generator, np.random.Generator):
        return {"numpy": _plain(generator.bit_generator.state)}
    return {"numpy_legacy": _plain(generator.get_state(legacy=False))}


def _new(state: Mapping[str, Any]) -> Generator:
    """Return a new generator with a saved state."""
    [(kind, value)] = state.items()
    try:
        if kind == "torch":
            generator = torch.Generator()
            words = bytearray(base64.b64decode(value))
            generator.set_state(torch.frombuffer(words, dtype=torch.uint8))
            return generator
        if kind == "python":
            version, words, gauss = value
            pythons = _Python()
            pythons.setstate((version, tuple(words), gauss))
            return pythons
        if kind == "numpy":
            name = _BIT_GENERATORS[_BIT_GENERATORS.index(value["bit_generator"])]
            bits = getattr(np.random, name)()
            bits.state = _checked_arrays(value)
            return np.random.Generator(bits)
        if kind == "numpy_legacy":
            legacy = np.random.RandomState()
            legacy.set_state(_checked_arrays(value))
            return legacy
    except (OverflowError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    msg = f"expected the state of a generator of torch, Python or NumPy, got one of {kind!r:.80}"
    raise ValueError(msg)


def _copy(source: Any, target: Any) -> None:
    """Give a generator the state of another one of its kind."""
    if isinstance(target, torch.Generator):
        target.set_state(source.get_state())
    elif isinstance(target, _Python):
        _Python.setstate(target, source.getstate())
    elif isinstance(target, np.random.RandomState):
        target.set_state(source.get_state(legacy=False))
    elif type(source.bit_generator) is type(target.bit_generator):
        target.bit_generator.state = source.bit_generator.state


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _checked_arrays(value: Mapping[str, Any]) -> Any:
    position, num_words = value["state"].get("pos", 0), 624
    if type(position) is not int or not 0 <= position <= num_words:  # NumPy does not check it
        msg = f"expected a position from 0 to {num_words}, got {position!r:.80}"
        raise ValueError(msg)
    return _arrays(value)


def _arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _arrays(each) for name, each in value.items()}
    return np.array(value, dtype=np.uint64) if isinstance(value, list) else value
