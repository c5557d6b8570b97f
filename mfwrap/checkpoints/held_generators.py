"""Random generators that samplers, data sets and collators hold, and their states, as JSON."""

import base64
import contextlib
import functools
import itertools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from random import Random, SystemRandom
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn

_Python = Random  # noqa: S311  (not for cryptography)
Generator = torch.Generator | _Python | np.random.Generator | np.random.RandomState

_MOST_ITEMS = 256
"""Items of a list or dict in which generators are looked for; data have more."""

_MOST_OBJECTS = 4096
"""Objects in which generators are looked for, those nearest to the roots first."""

_OPAQUE = (type, types.ModuleType, nn.Module, Tensor, np.ndarray)
_PLAIN = (type(None), bool, int, float, str, bytes)
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def held_generators(
    roots: Mapping[str, object], *, but: Iterable[object] = (), opaque: type | None = None
) -> dict[str, Generator]:
    """Return the generators of Python, NumPy and torch (on the CPU) that objects hold.

    Attributes, lists, partial functions, methods and the variables of inner functions are followed,
    and networks, modules and arrays are not.

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
    num_left = _MOST_OBJECTS
    while waiting and num_left:
        path, value = waiting.popleft()
        if id(value) in seen or (opaque is not None and isinstance(value, opaque)):
            continue
        seen[id(value)] = value
        num_left -= 1
        if _is_generator(value):
            found[path] = value
        else:
            waiting += [(f"{path}.{name}", each) for name, each in _members(value)]
    return found


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
        if generator is not None and isinstance(generator, type(new)):
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


def _members(value: object) -> Iterable[tuple[str, object]]:
    """Return what an object holds, by name; nothing of the user's own code is run."""
    if isinstance(value, _OPAQUE):
        return ()
    if isinstance(value, functools.partial):
        return (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if isinstance(value, types.MethodType):
        return (("self", value.__self__),)
    items: Iterable[tuple[object, object]]
    if isinstance(value, types.FunctionType):
        items = _closure(value)
    elif type(value) in {list, tuple}:
        items = enumerate(cast("list[object]", value)[:_MOST_ITEMS])
    elif type(value) is dict:
        items = itertools.islice(value.items(), _MOST_ITEMS)
    else:
        items = _attributes(value).items()
    return [
        (name if isinstance(name, str) else f"[{name!r}]", each)
        for name, each in items
        if not isinstance(each, _PLAIN)
    ]


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


def _is_generator(value: object) -> TypeGuard[Generator]:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    if isinstance(value, np.random.Generator):
        return type(value.bit_generator).__name__ in _BIT_GENERATORS
    if isinstance(value, np.random.RandomState):
        return bool(value.get_state(legacy=False)["bit_generator"] == "MT19937")
    return isinstance(value, _Python) and not isinstance(value, SystemRandom)


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
