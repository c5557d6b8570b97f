"""The section ``reward`` of a recipe: functions that say how good the answers of a model are."""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mfwrap.runner.document import Path, shown
from mfwrap.runner.objects import RecipeObjects, keywords_of, takes_any
from mfwrap.runner.own_code import OwnKind, OwnType

Reward = Callable[..., Any]
"""A reward function of TRL: takes keywords, and returns a number or ``None`` for each answer."""

MakeReward = Callable[[Collection[str]], Reward]
"""Builds a reward function for data with these columns."""

_OWN = OwnKind(
    "a function of completions that returns one number for each, or a class of such functions",
    callable,
)
_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that TRL passes in addition to the columns of the data."""

WITHHELD = frozenset({"prompt", "completion"})
"""Columns that TRL does not pass."""


def read_rewards(
    objects: RecipeObjects, section: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
) -> tuple[MakeReward, ...]:
    """Return functions that build the rewards of a recipe.

    Args:
        objects: Builder for the recipe.
        section: Content of the section ``reward``: one reward or a list, each with ``type`` and its
            arguments. A ``type`` is a function of ``trl.rewards``, or a function or class of the
            user's own.

    Returns:
        The functions; none for a reward whose code may not run.

    Raises:
        RecipeError: If there is no such function or class, or an argument is wrong.
    """
    if section is None:
        return ()
    if isinstance(section, Mapping):
        entries: list[tuple[Path, Mapping[str, Any]]] = [(("reward",), section)]
    else:
        entries = [(("reward", number), each) for number, each in enumerate(section)]
    if not entries:
        raise objects.document.error(("reward",), "expected at least one reward, got an empty list")
    found = [_read_reward(objects, path, entry) for path, entry in entries]
    return tuple(each for each in found if each is not None)


def _read_reward(
    objects: RecipeObjects, path: Path, section: Mapping[str, Any]
) -> MakeReward | None:
    own = objects.own_type(path, section, _OWN)
    if own is not None:
        return None if own.found is None else _own_reward(objects, path, own)
    import trl.rewards  # noqa: PLC0415  (slow; part of an extra)

    endings = ("_reward", "_punishment")
    known = {
        name: getattr(trl.rewards, name) for name in dir(trl.rewards) if name.endswith(endings)
    }
    kind, settings = objects.named_type(path, section, known)
    reward: Reward
    if kind.startswith("get_"):  # TRL's name for a function that builds a reward
        reward = objects.build(path, known[kind], settings)
    else:
        objects.kept(path, settings, ())
        reward = known[kind]

    def make(columns: Collection[str]) -> Reward:
        _check_columns(objects, path, kind, reward, {*_PASSED, *columns} - WITHHELD)
        return reward

    return make


def _own_reward(objects: RecipeObjects, path: Path, own: OwnType) -> MakeReward:
    """Return a function that builds a reward of the user's own."""
    name, found, settings = own
    is_class = isinstance(found, type)
    # Which arguments of a function are columns is known only when the data have been read.
    implied = () if is_class else keywords_of(found)
    settings = objects.checked_arguments(path, found, settings, implied=implied)

    def make(columns: Collection[str]) -> Reward:
        given = {} if is_class else settings
        reward = objects.call(path, found, **settings) if is_class else found
        passed = {*_PASSED, *columns} - WITHHELD - given.keys()
        _check_columns(objects, path, name, reward, passed, given)
        taken = passed if takes_any(reward) else passed & keywords_of(reward).keys()
        return _checked(name, functools.partial(reward, **given), taken)

    return make


def _check_columns(
    objects: RecipeObjects,
    path: Path,
    name: str,
    reward: Reward,
    passed: Collection[str],
    given: Collection[str] = (),
) -> None:
    """Raise `RecipeError` if a reward function needs an argument that it does not get.

    Args:
        objects: Builder for the recipe.
        path: Key of the reward.
        name: Name in the recipe.
        reward: The function.
        passed: What TRL passes: columns of both training and held-out rows, and arguments of its
            own.
        given: Arguments that the recipe sets.
    """
    for argument, is_required in keywords_of(reward).items():
        if is_required and argument not in {*passed, *given}:
            says = f"{name} has the argument {argument!r}, which is neither set here nor one of"
            found = f"{sorted(passed)} (columns must be in the training and the held-out rows)"
            raise objects.document.error((*path, "type"), f"{says} {found}")


def _listed(numbers: Any) -> Any:
    """Return the numbers of a reward function; nothing for a mapping, whose keys they are not."""
    return () if isinstance(numbers, Mapping) else numbers


def _checked(name: str, reward: Reward, taken: Collection[str]) -> Reward:
    """Return a reward function that gets the arguments that it takes, and whose result is checked.

    Args:
        name: Name in the recipe.
        reward: The function.
        taken: Names of the arguments to pass.
    """

    def compute(**passed: Any) -> list[float | None]:
        numbers = reward(**{key: value for key, value in passed.items() if key in taken})
        try:
            found = [None if one is None else float(one) for one in _listed(numbers)]
        except (TypeError, ValueError):
            found = []
        if len(found) != (number := len(passed["completions"])):
            wanted = f"a list of {number} numbers, one for each completion (or None)"
            msg = f"{name} must return {wanted}, got {shown(numbers)}"
            raise TypeError(msg)
        for one, answer in zip(found, passed["completions"], strict=True):
            if one is not None and not math.isfinite(one):
                # TRL takes NaN for None; infinity makes the advantages of all answers NaN.
                msg = f"{name} must return finite numbers (or None), got {one} for {shown(answer)}"
                raise ValueError(msg)
        return found

    compute.__name__ = name.rpartition(".")[2]  # the name in TRL's log
    return compute
