"""Copies of a module do not have the hooks that were registered for mfwrap."""

import ast
import copy
import copyreg
import io
import pickle

import pytest
import torch
from torch import nn

from mfwrap.tensors.module_hooks import keep_out_of_copies
from support.paths import ROOT


def pickled(module):
    """Return what is left of a module after pickle."""
    return pickle.loads(pickle.dumps(module))  # noqa: S301  (our own bytes)


def saved(module):
    """Return what is left of a module after ``torch.save``."""
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": saved,
}


class Own(nn.Module):
    """A module whose state is not its dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def __getstate__(self):
        return self.__dict__ | {"was_copied": True}

    def forward(self, inputs):
        """Return the product."""
        return inputs * self.weight


def with_hooks(module, calls):
    """Register hooks of all kinds with a module, and one of the user."""
    handles = [
        module.register_forward_pre_hook(lambda *_: calls.append("before"), with_kwargs=True),
        module.register_forward_hook(lambda *_: calls.append("after"), with_kwargs=True),
        module.register_forward_hook(lambda *_: calls.append("always"), always_call=True),
        module.register_state_dict_pre_hook(lambda *_: calls.append("saving")),
        module.register_load_state_dict_pre_hook(lambda *_: calls.append("loading")),
    ]
    keep_out_of_copies(module, *handles[:2])
    keep_out_of_copies(module, *handles[2:])
    return handles


def double(_module, _inputs, output):
    """Return twice the output, as a hook of the user."""
    return 2 * output


def use(module, inputs):
    """Call a module, and save and load its weights."""
    output = module(inputs)
    module.load_state_dict(module.state_dict())
    return output


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("kind", ["whole", "part", "own state"])
def test_a_copy_has_the_hooks_of_the_user_alone(copied, kind):
    """The original keeps all hooks, and the copy is what a copy without our hooks would be."""
    torch.manual_seed(0)
    module = Own() if kind == "own state" else nn.Linear(2, 2)
    module.register_forward_hook(double)
    whole = nn.Sequential(module) if kind == "part" else module
    stock = copied(whole)
    calls, inputs = [], torch.randn(3, 2)
    with_hooks(module, calls)
    made = copied(whole)

    assert torch.equal(use(made, inputs), use(stock, inputs))
    assert calls == []
    ours = made[0] if kind == "part" else made
    theirs = stock[0] if kind == "part" else stock
    assert type(ours) is type(theirs)
    assert vars(ours).keys() == vars(theirs).keys()
    hooks = [name for name in vars(ours) if name.endswith(("hooks", "kwargs", "called"))]
    assert len(hooks) > 5
    for name in hooks:
        assert len(vars(ours)[name]) == len(vars(theirs)[name]), name
    use(whole, inputs)
    assert calls == ["before", "after", "always", "saving", "loading"]


def test_a_shallow_copy_has_none_of_our_hooks():
    """It shares everything else with the original."""
    module, calls = nn.Linear(2, 2), []
    with_hooks(module, calls)
    made = copy.copy(module)
    use(made, torch.randn(3, 2))

    assert calls == []
    assert made.weight is module.weight


def test_removed_hooks_and_later_ones():
    """A hook of the user that comes later is copied, also after ours have been removed."""
    module = nn.Linear(2, 2)
    handles = with_hooks(module, [])
    module.register_forward_hook(double)
    assert list(vars(copy.deepcopy(module))["_forward_hooks"].values()) == [double]
    for handle in handles:
        handle.remove()
    assert list(vars(copy.deepcopy(module))["_forward_hooks"].values()) == [double]


def test_a_function_that_reduced_the_class_before():
    """It is still called."""

    class Reduced(nn.Linear):
        """A class with a function in ``copyreg.dispatch_table``."""

    copyreg.pickle(Reduced, lambda _: (nn.Identity, ()))
    try:
        module = Reduced(2, 2)
        with_hooks(module, [])
        assert isinstance(copy.deepcopy(module), nn.Identity)
    finally:
        del copyreg.dispatch_table[Reduced]


CARRIED = {"mfwrap/step/ranks/backward_reductions.py"}
"""Files whose hooks take the place of hooks of the network, so that copies need them."""


def test_each_hook_of_a_module_is_kept_out_of_copies():
    """A file that registers hooks with modules also keeps them out of copies."""
    found = set()
    for folder in ("mfwrap", "callbacks"):
        for path in (ROOT / folder).rglob("*.py"):
            calls = {
                call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
                for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(call, ast.Call) and isinstance(call.func, (ast.Attribute, ast.Name))
            }
            of_modules = {
                name
                for name in calls
                if name.startswith(("register_forward", "register_full_backward"))
                or (name.startswith("register_") and "state_dict" in name)
            }
            if of_modules and "keep_out_of_copies" not in calls:
                found.add(str(path.relative_to(ROOT)))
    # The hook of a captured step is one of the optimizer, whose copies have no hooks.
    assert found == CARRIED | {"mfwrap/step/captured.py"}
