"""Find the names of MindSpore and MindFormers in a script, without running it.

Names are followed through imports, aliases and assignments. What an object is, is known if it was
made from a class of MindSpore or from a subclass in the scripts, or if it comes from an attribute
in the table. Otherwise it is taken for an optimizer, for example, only if it is named so, and then
only the attributes in the table count.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, final

from mfwrap.names.attributes import ANYWHERE, KINDS
from mfwrap.names.counterparts import find
from mfwrap.porting.modules import Imported


class Use(NamedTuple):
    """A use of a name or an attribute."""

    line: int
    """Line of the script, from 1."""

    subject: "Imported | Attribute"
    """What is used."""


class Attribute(NamedTuple):
    """An attribute of an object of MindSpore."""

    kind: str
    """Kind of the object: a key of the table of attributes."""

    name: str
    """Name of the attribute; ``__call__`` for a call of the object."""

    shown: str
    """The attribute as the script writes it."""

    is_sure: bool = True
    """Whether the object is known to be of this kind, not only named so."""


class Instance(NamedTuple):
    """An object of a kind that the table knows."""

    kind: str
    """Its kind."""

    is_sure: bool = True
    """Whether the object was followed to a class of MindSpore, not only named like one."""

    is_whole: bool = True
    """Whether it has no other attributes than those of MindSpore and `own`."""

    own: frozenset[str] = frozenset()
    """Attributes that a class of the script gives it."""


class UserClass(NamedTuple):
    """A class of a script."""

    kind: str | None
    """Kind of its objects; None if it derives from none of MindSpore's."""

    own: frozenset[str]
    """Names of its methods, and of the attributes that its methods assign."""

    is_whole: bool
    """Whether all its base classes are known."""


@final
class Other:
    """An object that is known to be none of MindSpore's."""


class UserModule(NamedTuple):
    """A module that is one of the scripts."""

    names: "Mapping[str, Value]"
    """What its names stand for."""


OTHER = Other()
Value = Imported | Instance | UserClass | UserModule | Other | None
"""What a name stands for; None if that is unknown."""
_NO_MODULE = UserModule({})

_NAMED: Mapping[str, str] = {
    "cb_param": "cb_params",
    "cb_params": "cb_params",
    "run_context": "run_context",
}
"""Kinds of the objects with names that only callbacks of MindSpore use, or imitations of them."""

_CLASSES: Mapping[str, str] = {
    "training cell": "MFPipelineWithLossScaleCell MFTrainOneStepCell TrainOneStepCell "
    "TrainOneStepWithLossScaleCell",
    "optimizer": "ASGD AdaFactor AdaMax Adadelta Adagrad Adam AdamOffload AdamW AdamWeightDecay "
    "Came FP32StateAdamWeightDecay FTRL FusedAdamWeightDecay FusedPmaAdamW LARS Lamb LazyAdam "
    "Momentum Muon Optimizer PmaAdamW ProximalAdagrad RMSProp Rprop SGD thor",
    "learning-rate schedule": "ConstantWarmUpLR CosineAnnealingLR CosineAnnealingWarmRestarts "
    "CosineDecayLR CosineWithRestartsAndWarmUpLR CosineWithWarmUpLR ExponentialDecayLR "
    "InverseDecayLR LearningRateSchedule LinearWithWarmUpLR NaturalExpDecayLR PolynomialDecayLR "
    "PolynomialWithWarmUpLR WarmUpLR",
    "loss-scale update cell": "AdaptiveLossScaleUpdateCell DynamicLossScaleUpdateCell "
    "FixedLossScaleUpdateCell",
    "Callback": "Callback CheckpointMonitor EvalCallBack LossMonitor MFLossMonitor "
    "ModelCheckpoint ProfileMonitor TimeMonitor TrainingStateMonitor",
    "PyNative callback": "TrainerCallback",
    "Model": "Model",
    "tensor": "Parameter Tensor tensor",
}
"""Classes of MindSpore and MindFormers, by the kind of their objects."""

_KINDS = {
    (area, name): kind
    for kind, names in _CLASSES.items()
    for name in names.split()
    for area in ("mindspore", "nn", "mindformers")
}

_EVENTS = ("begin", "end", "epoch_begin", "epoch_end", "step_begin", "step_end", "on_")
_KEYED = {"cb_params", "PyNative argument"}
"""Kinds whose attributes are also read as items and by ``get``."""
_STRICT = {"cb_params", "run_context", "training cell"}
"""Kinds without attributes of the user's own: an attribute that the table lacks is reported."""


def kind_of_class(imported: Imported) -> str | None:
    """Return the kind of the objects of a class of MindSpore or MindFormers; None if unknown."""
    name = imported.name or ""
    known = _KINDS.get((imported.area, name))
    if known is None and imported.area == "nn" and name[:1].isupper():
        return "network"
    if known is None and imported.area == "dataset" and name.endswith("Dataset"):
        return "data set"
    return known


@final
class Script(ast.NodeVisitor):
    """Collect the uses in one script.

    Args:
        tree: Syntax tree of the script.
        others: Classes of the other scripts by name.
        modules: The other scripts by the names with which they are imported.
    """

    def __init__(
        self,
        tree: ast.Module,
        others: Mapping[str, UserClass],
        modules: Mapping[str, UserModule] = MappingProxyType({}),
    ) -> None:
        self.uses: list[Use] = []
        """Uses in the order in which they were found."""
        self.classes: dict[str, UserClass] = {}
        """Classes of the script by name."""
        self._others = others
        self._modules = modules
        self._scopes: list[dict[str, Value]] = [{}]
        self._class: UserClass | None = None
        self._attributes: dict[str, Value] = {}
        nodes = list(ast.walk(tree))
        # A callback may keep facts of its own in `cb_params`.
        self._assigned = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        self._is_of_mindspore = any(map(self._imports_mindspore, nodes))
        if self._is_of_mindspore:
            # A function may use what the module imports or defines below it.
            for node in tree.body:
                self._bind_early(node)
            self.visit(tree)

    @property
    def module(self) -> UserModule:
        """The script as a module, without the other scripts that it imports."""
        names = self._scopes[0].items()
        return UserModule({n: one for n, one in names if not isinstance(one, UserModule)})

    # Names

    def visit_Import(self, node: ast.Import) -> None:
        """Bind modules."""
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            imported = Imported(alias.name if alias.asname else name)
            value: Value = self._modules.get(imported.module, OTHER)
            self._bind(name, imported if imported.is_known else value)
            if imported.is_known:
                self._use(node, Imported(alias.name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Bind names of modules."""
        module = self._modules.get(node.module or "")
        for alias in node.names:
            name = alias.asname or alias.name
            value: Value = self._others.get(alias.name)
            if module is not None:
                value = module.names.get(alias.name, value)
                if alias.name == "*":
                    self._scopes[-1].update(module.names)
            elif not node.level and node.module is not None:
                imported = Imported(node.module).attribute(alias.name)
                if imported.is_known:
                    value = imported
                    self._use(node, imported)
                elif value is None:
                    value = OTHER
            self._bind(name, value)

    def _imports_mindspore(self, node: ast.AST) -> bool:
        """Return whether a statement imports MindSpore, or what another script has from it."""
        found: list[Value] = []
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append(Imported(alias.name))
                found.extend(self._modules.get(alias.name, _NO_MODULE).names.values())
        elif isinstance(node, ast.ImportFrom):
            names = self._modules.get(node.module or "", _NO_MODULE).names
            found.extend(names.get(alias.name) for alias in node.names)
            if any(alias.name == "*" for alias in node.names):
                found.extend(names.values())
            if not node.level:
                found.append(Imported(node.module or ""))
        return any(map(_is_of_mindspore, found))

    def visit_Name(self, node: ast.Name) -> None:
        """Report a name that was imported."""
        if isinstance(node.ctx, ast.Load):
            value = self._value(node)
            if isinstance(value, Imported) and value.is_known and value.name is not None:
                self._use(node, value)
        else:
            self._bind(node.id, None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Report an attribute of a module or of an object."""
        value = self._value(node)
        if isinstance(value, Imported):
            if value.name is not None:
                self._use(node, value)
            return
        owner = self._value(node.value)
        if (
            not self._use_of_object(node, owner)
            and node.attr in ANYWHERE
            and not isinstance(owner, (Other, UserModule))
        ):
            self._use(node, Attribute(ANYWHERE[node.attr], node.attr, f".{node.attr}"))
        self.visit(node.value)

    def _use_of_object(self, node: ast.Attribute, owner: Value) -> bool:
        """Report an attribute of an object; return whether its kind is known."""
        is_self = _is_self(node.value) and self._class is not None
        if is_self:
            owner = self._self()
        if not isinstance(owner, Instance) or isinstance(node.ctx, ast.Store):
            return is_self and self._class is not None and node.attr in self._class.own
        kind, is_sure, is_whole, own = owner
        kind = _kind_of_self(kind, node.attr) if is_self else kind
        if node.attr in own or (kind in _KEYED and node.attr == "get"):
            return True
        known = find(kind, node.attr) is not None
        is_public = not node.attr.startswith("_") and node.attr not in self._assigned
        is_missing = is_sure and is_whole and kind in _STRICT and is_public
        if known or is_missing:
            self._use(node, Attribute(kind, node.attr, _shown(node), is_sure))
            return True
        return False

    def _self(self) -> Instance | None:
        """Return what `self` is in a method of the class that is read."""
        if self._class is None or self._class.kind is None:
            return None
        return Instance(self._class.kind, is_whole=self._class.is_whole, own=self._class.own)

    def visit_Call(self, node: ast.Call) -> None:
        """Report a call of an optimizer, and what a PyNative callback reads from its keywords."""
        called = self._value(node.func)
        self._use_of_argument(node, called)
        if isinstance(called, Instance) and called.kind == "optimizer" and node.args:
            shown = f"{_shown(node.func)}(...)"
            self._use(node, Attribute("optimizer", "__call__", shown, called.is_sure))
            for argument in (*node.args, *node.keywords):
                self.visit(argument)
            return
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
            self._use_of_keyword(node, node.func.value, node.args[0])
        self.generic_visit(node)

    def _use_of_argument(self, node: ast.Call, called: Value) -> None:
        """Report an argument of an optimizer's class that torch's optimizers do not have."""
        if not isinstance(called, Imported) or kind_of_class(called) != "optimizer":
            return
        names = [keyword.arg for keyword in node.keywords]
        # `Momentum` takes the loss scale as its fifth argument, and scripts pass it by position.
        if "loss_scale" in names or (called.name == "Momentum" and len(node.args) > 4):
            shown = f"{called.shown}(loss_scale=...)"
            self._use(node, Attribute("optimizer", "loss_scale=", shown))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Report what a callback reads from its keywords."""
        self._use_of_keyword(node, node.value, node.slice)
        self.generic_visit(node)

    def _use_of_keyword(self, node: ast.expr, owner: ast.expr, key: ast.expr) -> None:
        value = self._value(owner)
        if (
            isinstance(value, Instance)
            and value.kind in _KEYED
            and isinstance(key, ast.Constant)
            and isinstance(key.value, str)
        ):
            shown = f"{ast.unparse(owner)}[{key.value!r}]"
            self._use(node, Attribute(value.kind, key.value, shown))

    # Assignments

    def visit_Assign(self, node: ast.Assign) -> None:
        """Follow a value to its name."""
        self.visit(node.value)
        value = self._value(node.value)
        scale = self._of_check(node.value)
        for target in node.targets:
            self._assign(target, value)
            if scale is not None and isinstance(target, ast.Tuple):
                self._assign(target.elts[-1], scale)

    def _of_check(self, node: ast.expr) -> Value:
        """Return the second value of ``start_overflow_check``, which is its last argument."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        is_check = node.func.attr == "start_overflow_check" and node.args
        return self._value(node.args[-1]) if is_check else None

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Follow a value to its name."""
        self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            self._assign(node.target, self._value(node.value))

    def _assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, value)
        elif isinstance(target, ast.Attribute) and _is_self(target.value):
            self._attributes[target.attr] = value
            kind = None if self._class is None else self._class.kind
            if kind is not None and find(kind, f"{target.attr} =") is not None:
                shown = f"{ast.unparse(target)} = ..."
                self._use(target, Attribute(kind, f"{target.attr} =", shown))
        else:
            self.visit(target)

    # Branches

    def visit_If(self, node: ast.If) -> None:
        """Read both branches, and keep what is MindSpore's if they disagree about a name."""
        self.visit(node.test)
        self._visit_branches(node.body, node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        """Read the handlers as branches beside the body."""
        for handler in node.handlers:
            if handler.type is not None:
                self.visit(handler.type)
        bodies = [handler.body for handler in node.handlers]
        self._visit_branches([*node.body, *node.orelse], *bodies)
        for statement in node.finalbody:
            self.visit(statement)

    def _visit_branches(self, *branches: Sequence[ast.stmt]) -> None:
        before = self._scopes[-1]
        merged = dict(before)
        for branch in branches:
            self._scopes[-1] = dict(before)
            for statement in branch:
                self.visit(statement)
            for name, value in self._scopes[-1].items():
                is_new = name not in before or value != before[name]
                if is_new and not _is_of_mindspore(merged.get(name)):
                    merged[name] = value
        self._scopes[-1] = merged

    # Functions and classes

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Read a class whose base classes say what its objects are."""
        for part in (*node.bases, *node.decorator_list, *node.keywords):
            self.visit(part)
        defined = self._user_class(node)
        self._bind(node.name, defined)
        self.classes[node.name] = defined
        outer = self._class, self._attributes
        self._class, self._attributes = defined, {}
        # First the assignments in all methods: a method may come before `__init__`.
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign):
                for target in inner.targets:
                    if isinstance(target, ast.Attribute) and _is_self(target.value):
                        self._attributes[target.attr] = self._value(inner.value)
        self._scopes.append({})
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self._visit_function(statement, is_method=True)
            else:
                self.visit(statement)
        self._scopes.pop()
        self._class, self._attributes = outer

    def _user_class(self, node: ast.ClassDef) -> UserClass:
        own = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
        own |= {
            inner.attr
            for inner in ast.walk(node)
            if isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and _is_self(inner.value)
        }
        own |= {
            target.id
            for one in node.body
            if isinstance(one, (ast.Assign, ast.AnnAssign))
            for target in (one.targets if isinstance(one, ast.Assign) else [one.target])
            if isinstance(target, ast.Name)
        }
        kinds: list[str | None] = []
        is_whole = True
        for base in node.bases:
            value = self._value(base)
            if isinstance(value, UserClass):
                own |= value.own
                kinds.append(value.kind)
                is_whole &= value.is_whole
            elif isinstance(value, Imported) and value.is_known:
                kinds.append(kind_of_class(value))
            else:
                is_whole = False
        kind = next((one for one in kinds if one is not None), None)
        return UserClass(kind, frozenset(own), is_whole)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Read a function with its own names."""
        self._visit_function(node, is_method=False)

    def _visit_function(self, node: ast.FunctionDef, *, is_method: bool) -> None:
        for part in (*node.decorator_list, node.args):
            self.visit(part)
        if node.returns is not None:
            self.visit(node.returns)
        if is_method:
            self._use_of_method(node)
        else:
            self._bind(node.name, None)
        scope: dict[str, Value] = dict.fromkeys(_parameters(node.args))
        scope |= self._values_of_parameters(node) if is_method else {}
        self._scopes.append(scope)
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Read an asynchronous function, which no class of MindSpore has."""
        self._scopes.append(dict.fromkeys(_parameters(node.args)))
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Read a function without a name."""
        self._scopes.append(dict.fromkeys(_parameters(node.args)))
        self.generic_visit(node)
        self._scopes.pop()

    def _use_of_method(self, node: ast.FunctionDef) -> None:
        """Report a method that MindSpore calls by another name or with other arguments."""
        kind = None if self._class is None else self._class.kind
        if kind == "PyNative callback":
            kind = "PyNative event"
        elif node.name != "construct":
            return
        kind = None if kind is None else _kind_of_self(kind, node.name)
        if kind is not None and find(kind, node.name) is not None:
            self._use(node, Attribute(kind, node.name, f"def {node.name}"))

    def _values_of_parameters(self, node: ast.FunctionDef) -> dict[str, Value]:
        """Return what MindSpore passes to a method of a callback."""
        kind = None if self._class is None else self._class.kind
        names = [one.arg for one in node.args.args]
        if kind == "Callback" and node.name.startswith(_EVENTS) and len(names) == 2:
            return {names[1]: Instance("run_context")}
        if kind == "PyNative callback" and node.name.startswith("on_"):
            kinds = ("PyNative settings", "PyNative state")
            values: dict[str, Value] = {
                name: Instance(one) for name, one in zip(names[1:3], kinds, strict=False)
            }
            for name in (*names[3:], *(one.arg for one in node.args.kwonlyargs)):
                self._use(node, Attribute("PyNative argument", name, name))
            if node.args.kwarg is not None:
                values[node.args.kwarg.arg] = Instance("PyNative argument")
            return values
        return {}

    # Values

    def _value(self, node: ast.expr) -> Value:
        """Return what an expression stands for."""
        match node:
            case ast.Name():
                return self._named(node.id, self._lookup(node.id))
            case ast.Attribute():
                return self._of_attribute(node, self._value(node.value))
            case ast.Call():
                return self._of_call(node)
            case ast.IfExp():
                return self._value(node.body) or self._value(node.orelse)
        return None

    def _named(self, name: str, value: Value) -> Value:
        """Return a value, or what an object of this name usually is if the value is unknown."""
        if value is None and name in _NAMED:
            return Instance(_NAMED[name], is_whole=False)
        if value is None and name == "optimizer":
            return Instance("optimizer", is_sure=False)
        return value

    def _lookup(self, name: str) -> Value:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def _of_attribute(self, node: ast.Attribute, owner: Value) -> Value:
        if _is_self(node.value) and self._class is not None:
            return self._named(node.attr, self._of_self(self._class, node.attr))
        if isinstance(owner, Imported):
            return owner.attribute(node.attr) if owner.name is None else None
        if isinstance(owner, Instance):
            kind = KINDS.get((owner.kind, node.attr))
            return None if kind is None else Instance(kind, owner.is_sure)
        if isinstance(owner, UserModule):
            return owner.names.get(node.attr)
        return OTHER if isinstance(owner, Other) else None

    def _of_self(self, owner: UserClass, name: str) -> Value:
        if name in owner.own:
            return self._attributes.get(name)
        kind = KINDS.get((owner.kind or "", name))
        return None if kind is None else Instance(kind)

    def _of_call(self, node: ast.Call) -> Value:
        owner: Value = None
        if isinstance(node.func, ast.Attribute):
            # Each part of a chain of calls is looked at once: twice would be 2**n times.
            owner = self._value(node.func.value)
            called = self._of_attribute(node.func, owner)
        else:
            called = self._value(node.func)
        if isinstance(called, Imported) and called.is_known:
            kind = kind_of_class(called)
            return None if kind is None else Instance(kind)
        if isinstance(called, UserClass):
            if called.kind is None:
                return None
            return Instance(called.kind, is_whole=called.is_whole, own=called.own)
        if isinstance(called, Instance) and called.kind == "cb_params":
            return called  # of `original_args()`
        if isinstance(owner, Instance) and owner.kind == "data set":
            return owner  # each method of a data set that is no iterator returns a data set
        return OTHER if isinstance(called, Other) else None

    def _bind(self, name: str, value: Value) -> None:
        self._scopes[-1][name] = value

    def _bind_early(self, node: ast.stmt, *, is_branch: bool = False) -> None:
        """Bind what a module imports, also in the branches of `if` and `try`."""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found, scope = len(self.uses), self._scopes[-1]
            before = {name: one for name, one in scope.items() if _is_of_mindspore(one)}
            self.visit(node)
            if is_branch:
                scope.update(before)
            del self.uses[found:]
        elif isinstance(node, (ast.If, ast.Try)):
            for inner in ast.iter_child_nodes(node):
                if isinstance(inner, ast.stmt):
                    self._bind_early(inner, is_branch=True)
                elif isinstance(inner, ast.ExceptHandler):
                    for statement in inner.body:
                        self._bind_early(statement, is_branch=True)

    def _use(self, node: ast.AST, subject: Imported | Attribute) -> None:
        self.uses.append(Use(getattr(node, "lineno", 1), subject))


def _is_of_mindspore(value: Value) -> bool:
    if isinstance(value, UserClass):
        return value.kind is not None
    return isinstance(value, Instance) or (isinstance(value, Imported) and value.is_known)


def _kind_of_self(kind: str, name: str) -> str:
    """Return the kind whose rows are for an attribute of `self`, in a class of a kind.

    An optimizer's own ``step`` does what the user of an optimizer leaves to it.
    """
    is_of_class = kind == "optimizer" and find("optimizer class", name) is not None
    return "optimizer class" if is_of_class else kind


def _shown(node: ast.expr) -> str:
    """Return an attribute as it is shown: ``optimizer.get_lr``, or ``.batch`` of a longer value."""
    text = ast.unparse(node)
    is_long = isinstance(node, ast.Attribute) and not text.replace(".", "").isidentifier()
    return f".{node.attr}" if is_long and isinstance(node, ast.Attribute) else text


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    listed = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (one.arg for one in listed)
    yield from (one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None)
