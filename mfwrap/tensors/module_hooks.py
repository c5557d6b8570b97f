"""Register hooks with modules of a user, and keep these hooks out of copies of the modules.

A hook is part of a module's state, so ``copy.deepcopy``, ``pickle`` and ``torch.save`` take it
along. A copy would call the hook of the original, and a function that is defined in another one
cannot be pickled at all. `keep_out_of_copies` makes ``copy`` and ``pickle`` leave a hook out, by a
function in ``copyreg.dispatch_table``, Python's table for the classes of others. The module itself
is not changed, and its calls cost nothing more.
"""

import copyreg
from collections.abc import Callable
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

_own_hooks: "WeakKeyDictionary[nn.Module, list[RemovableHandle]]" = WeakKeyDictionary()
"""Hooks that copies of a module must not have."""

_own_items: "WeakKeyDictionary[nn.Module, set[tuple[int, int]]]" = WeakKeyDictionary()
"""Identities of a list in a module's state, and of the item that copies must not have."""


def keep_out_of_copies(module: nn.Module, *handles: RemovableHandle) -> None:
    """Leave hooks of a module out of its copies, also if it is copied as a part of another module.

    If the module's class defines ``__deepcopy__``, this method decides about copies.

    Args:
        module: Module that has the hooks.
        handles: What torch returned when the hooks were registered with the module.
    """
    present = [handle for handle in _own_hooks.get(module, ()) if _is_registered(handle)]
    _own_hooks[module] = [*present, *handles]
    _reduce_without_own(type(module))


def keep_item_out_of_copies(module: nn.Module, items: list[Any], item: object) -> None:
    """Leave an item of a list out of a module's copies; see `keep_out_of_copies`.

    Args:
        module: Module whose state has the list as an attribute.
        items: The list.
        item: The item, which stays in the list as long as the module exists.
    """
    _own_items.setdefault(module, set()).add((id(items), id(item)))
    _reduce_without_own(type(module))


def _reduce_without_own(kind: type[nn.Module]) -> None:
    reduce = copyreg.dispatch_table.get(kind)
    if not isinstance(reduce, _WithoutOwnHooks):
        copyreg.pickle(kind, _WithoutOwnHooks(reduce))


@final
class _WithoutOwnHooks:
    """Reduce a module for ``copy`` and ``pickle``, without the hooks that copies must not have.

    Args:
        reduce: Function that was in ``copyreg.dispatch_table`` before, or ``None``.
    """

    def __init__(self, reduce: Callable[[Any], Any] | None) -> None:
        self._reduce = reduce

    def __call__(self, module: nn.Module) -> Any:
        """Return what ``module.__reduce_ex__`` returns, but for the hooks in its state."""
        reduced = module.__reduce_ex__(2) if self._reduce is None else self._reduce(module)
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        create, arguments, state, *rest = reduced
        if isinstance(state, dict):
            state = _without_own(module, state)
        elif isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
            state = (_without_own(module, state[0]), state[1])  # a class with slots
        return create, arguments, state, *rest


def _without_own(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a module without our hooks; its own dictionaries and lists are kept."""
    left_out: dict[int, set[int]] = {}
    for handle in _own_hooks.get(module, ()):
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks = reference()
            if hooks is not None:
                left_out.setdefault(id(hooks), set()).add(handle.id)
    for of_list, of_item in _own_items.get(module, ()):
        left_out.setdefault(of_list, set()).add(of_item)
    return {
        name: _reduced(value, left_out[id(value)]) if id(value) in left_out else value
        for name, value in state.items()
    }


def _reduced(value: Any, left_out: set[int]) -> Any:
    if isinstance(value, list):
        return [item for item in value if id(item) not in left_out]
    return type(value)((key, hook) for key, hook in value.items() if key not in left_out)


def _is_registered(handle: RemovableHandle) -> bool:
    hooks = handle.hooks_dict_ref()
    return hooks is not None and handle.id in hooks
