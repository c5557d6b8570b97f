"""Notice when a setting of the program changes: of the optimizer, of a module, or a mode."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.compatibility.torch import not_compiled
from mfwrap.tensors.wrappers import unwrapped_network, unwrapped_optimizer

_QUIET = 3
"""Number of steps without a change after which one is unusual: a schedule changes a setting from
the start on."""

_RECENT = 20
"""Number of steps for which a change may explain an anomaly."""

_OF_STEPS = frozenset({"params", "lr", "initial_lr", "step"})
"""Entries of a parameter group that are no settings, or judged elsewhere."""

_MODE = "training"

_UNKNOWN = object()
"""Value of an attribute that is no number now, such as a tensor that a forward has left there."""


class SettingChange(NamedTuple):
    """A setting that has changed for the first time."""

    name: str
    before: Any
    now: Any
    step: int
    """First step with the new value."""

    def __str__(self) -> str:
        """Say what has changed, in a clause."""
        return f"{self.name} changed from {self.before} to {self.now} in step {self.step}"


@final
class SettingWatch:
    """Compare the settings of each step with those of the step before, on the host.

    Settings are the numbers in the parameter groups but for the learning rate, and the mode and all
    attributes of type float of each module, such as the probability of a dropout, also those in a
    dictionary or a configuration that it holds. Reads no tensor.

    Args:
        network: Network; ``None`` if unknown.
    """

    @not_compiled  # a network that is compiled in place is called in its first forward
    def __init__(self, network: nn.Module | None) -> None:
        self._places = [] if network is None else list(_places(unwrapped_network(network)))
        self._of_modules: list[Any] | None = None
        self._of_optimizer: dict[str, Any] = {}
        self.began_in_evaluation = False
        """Whether the network was in evaluation mode in the first step."""
        self._first_step = 0
        self._known: set[str] = set()
        self._recent: list[SettingChange] = []

    def look(self, step: int, optimizer: Any) -> None:
        """Compare the settings of a step with those before.

        Args:
            step: Number of the step.
            optimizer: Optimizer with or without wrappers; ``None`` if unknown.
        """
        now = [place.value() for place in self._places]
        before, self._of_modules = self._of_modules, now
        groups_before, groups = self._of_optimizer, _of_groups(optimizer)
        self._of_optimizer = groups
        if before is None:
            self._first_step = step
            # The first place is the mode of the network itself.
            self.began_in_evaluation = now[:1] == [False]
            return
        if now != before:
            for place, old, new in zip(self._places, before, now, strict=True):
                if new != old and old == old and new == new and _UNKNOWN not in {old, new}:  # noqa: PLR0124  (false for NaN)
                    name = f"`{place.name}` of {place.module}"
                    self._note(SettingChange(name, old, new, step))
        if groups != groups_before:
            for name, new in groups.items():
                old = groups_before.get(name, new)
                if new != old:
                    self._note(SettingChange(name, old, new, step))

    def _note(self, change: SettingChange) -> None:
        if change.name in self._known:
            return
        self._known.add(change.name)
        if change.step - self._first_step >= _QUIET:
            self._recent = [one for one in self._recent if change.step - one.step < _RECENT]
            self._recent.append(change)

    def changes(self, step: int, num_steps: int = _RECENT) -> tuple[SettingChange, ...]:
        """Return the changes in the last steps, which may explain an anomaly, the first one first.

        Args:
            step: Last step.
            num_steps: Number of steps, at most 20.
        """
        return tuple(one for one in self._recent if 0 <= step - one.step < num_steps)


def listed(changes: Sequence[SettingChange]) -> str:
    """Say the first of several changes, and how many there are, in a clause."""
    others = f", and {len(changes) - 1} more settings" if len(changes) > 1 else ""
    return f"{changes[0]}{others}"


class _Place(NamedTuple):
    """Where a setting of a module is."""

    module: str
    attributes: dict[str, Any]
    """All attributes of the module."""

    holder: str | None
    """Attribute that has the setting among its entries; ``None`` for an attribute of its own."""

    name: str

    def value(self) -> Any:
        """Return the number that is there now."""
        found: Any = self.attributes
        if self.holder is not None:
            # Code may put another dictionary in its place.
            found = _settings_in(self.attributes.get(self.holder))
        value = _UNKNOWN if found is None else found.get(self.name, _UNKNOWN)
        return value if value is None or _is_number(value) else _UNKNOWN


def _places(network: nn.Module) -> Iterator[_Place]:
    """Yield the places of all settings; the first one is the mode of the network."""
    seen = set()
    for name, module in network.named_modules():
        where, own = name or "the network", vars(module)
        yield _Place(where, own, None, _MODE)
        for holder in (None, *own):
            owner = own if holder is None else _settings_in(own[holder])
            if owner is None or id(owner) in seen:
                continue
            seen.add(id(owner))
            for key, value in owner.items():
                if type(key) is str and type(value) is float:
                    yield _Place(where, own, holder, key)


def _settings_in(value: Any) -> dict[str, Any] | None:
    """Return the entries of a dictionary, or the attributes of a configuration."""
    if isinstance(value, dict):
        return value
    try:
        is_other = isinstance(value, (nn.Module, Tensor)) or callable(value)
        return None if is_other else getattr(value, "__dict__", None)
    # An object of the user's may raise any error, such as a weak reference to what is gone.
    except Exception:  # noqa: BLE001  (see above)
        return None


def _of_groups(optimizer: Any) -> dict[str, Any]:
    """Return the numbers in the parameter groups of an optimizer, by a name that can be shown."""
    inner = unwrapped_optimizer(optimizer)
    if not isinstance(inner, Optimizer):
        return {}
    found = {}
    for number, group in enumerate(inner.param_groups):
        of = "the optimizer" if len(inner.param_groups) == 1 else f"parameter group {number}"
        for key, value in group.items():
            numbers = value if isinstance(value, tuple) else (value,)
            if key not in _OF_STEPS and all(map(_is_number, numbers)):
                found[f"`{key}` of {of}"] = value
    return found


def _is_number(value: Any) -> bool:
    return type(value) in {float, int, bool}
