"""The section ``reward`` of a recipe: functions that say how good the answers of a model are."""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import pyarrow.compute as pc
from datasets import Dataset

from mfwrap.names import hint
from mfwrap.runner.document import Path, shown
from mfwrap.runner.objects import RecipeObjects, keywords_of, takes_any
from mfwrap.runner.own_code import OwnKind, OwnType

Reward = Callable[..., Any]
"""A reward function of TRL: takes keywords, and returns a number or ``None`` for each answer."""

FindRow = Callable[[Mapping[str, Any]], str | None]
"""Returns file and line of a row with some columns; ``None`` if it is unknown."""


@final
@dataclass(frozen=True)
class MakeReward:
    """Builds a reward function for data with some columns."""

    make: Callable[[Collection[str], FindRow], Reward]
    """Builds the function; takes the names of the columns, and tells rows of errors."""

    takes: frozenset[str]
    """Names of the arguments of the function, which may be columns."""

    check: Callable[[Collection[str]], None]
    """Raises `RecipeError` if the function needs an argument that data with some columns lack."""

    def __call__(self, columns: Collection[str], find: FindRow = lambda _: None) -> Reward:
        """Return the reward function for data with these columns; `find` tells rows of errors."""
        return self.make(columns, find)


_OWN = OwnKind(
    "a function of completions that returns one number for each, or a class of such functions",
    callable,
)
_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that TRL passes in addition to the columns of the data."""

_ANSWERS = frozenset({"completions", "completion_ids"})
"""Those of them that differ between the answers to one prompt."""

WITHHELD = frozenset({"prompt", "completion"})
"""Columns that TRL does not pass."""

_OF_VALUES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Kinds of errors that an answer or a value of its row may cause."""

_LIKE_A_SLIP = 0.85
"""Similarity of two keys above which one is the other with a slip of the pen."""

_NO_ASYNC = "an async function is not supported; call what is to be awaited by asyncio.run"


def read_rewards(
    objects: RecipeObjects,
    section: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    weights: Sequence[float] | None = None,
) -> tuple[MakeReward, ...]:
    """Return functions that build the rewards of a recipe.

    Args:
        objects: Builder for the recipe.
        section: Content of the section ``reward``: one reward or a list, each with ``type`` and its
            arguments. A ``type`` is a function of ``trl.rewards``, or a function or class of the
            user's own.
        weights: ``training.reward_weights``; ``None`` if all rewards count the same.

    Returns:
        The functions; none for a reward whose code may not run.

    Raises:
        RecipeError: If there is no such function or class, an argument is wrong, or there are not
            as many weights as rewards.
    """
    if section is None:
        return ()
    if isinstance(section, Mapping):
        entries: list[tuple[Path, Mapping[str, Any]]] = [(("reward",), section)]
    else:
        entries = [(("reward", number), each) for number, each in enumerate(section)]
    if not entries:
        raise objects.document.error(("reward",), "expected at least one reward, got an empty list")
    if weights is not None and len(weights) != len(entries):
        says = f"expected as many weights as rewards ({len(entries)}), got {len(weights)}"
        raise objects.document.error(("training", "reward_weights"), says)
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

    check = functools.partial(_check_columns, objects, path, kind, reward)
    return MakeReward(lambda *_: reward, frozenset(keywords_of(reward)), check)


def _own_reward(objects: RecipeObjects, path: Path, own: OwnType) -> MakeReward:
    """Return a function that builds a reward of the user's own."""
    name, found, settings = own
    is_class = isinstance(found, type)
    called = found.__call__ if is_class else found
    if inspect.iscoroutinefunction(called):
        raise objects.document.error((*path, "type"), f"{name}: {_NO_ASYNC}")
    # Which arguments of a function are columns is known only when the data have been read.
    implied = () if is_class else keywords_of(found)
    settings = objects.checked_arguments(path, found, settings, implied=implied)
    named = keywords_of(found).keys()
    for key in settings.keys() - named:  # a function that takes any would not miss its own
        if similar := difflib.get_close_matches(key, named - settings.keys(), 1, _LIKE_A_SLIP):
            says = f"unknown key of {name}, which takes any; did you mean {similar[0]!r}?"
            raise objects.document.error((*path, key), says)

    def make(columns: Collection[str], find: FindRow) -> Reward:
        given = {} if is_class else settings
        reward = objects.call(path, found, **settings) if is_class else found
        passed = {*_PASSED, *columns} - WITHHELD - given.keys()
        taken = passed if takes_any(reward) else passed & keywords_of(reward).keys()
        told = functools.partial(_told, {*columns} - WITHHELD, find)
        return _checked(name, functools.partial(reward, **given), taken, told)

    # The columns are checked before an object is built, which may load a model.
    asked = functools.partial(called, None) if is_class else found
    check = functools.partial(
        _check_columns, objects, path, name, asked, given=() if is_class else settings
    )
    return MakeReward(make, frozenset(keywords_of(called)), check)


def _check_columns(
    objects: RecipeObjects,
    path: Path,
    name: str,
    reward: Reward,
    columns: Collection[str],
    given: Collection[str] = (),
) -> None:
    """Raise `RecipeError` if a reward function lacks the answers, or gets no value for an argument.

    Args:
        objects: Builder for the recipe.
        path: Key of the reward.
        name: Name in the recipe.
        reward: The function.
        columns: Columns of both training and held-out rows.
        given: Arguments that the recipe sets.
    """
    passed = {*_PASSED, *columns} - WITHHELD - {*given}
    taken = keywords_of(reward)
    if not takes_any(reward) and not _ANSWERS & taken.keys():
        got = ", ".join(sorted(taken.keys() - {*given})) or "none"
        says = f"{name} must have the argument `completions`, the answers of the model, got {got}"
        raise objects.document.error((*path, "type"), says)
    for argument, is_required in taken.items():
        if is_required and argument not in {*passed, *given}:
            others = passed - taken.keys()  # what it takes already cannot be meant
            says = (
                f"{name} has the argument {argument!r}, which is neither set here nor a column of "
                f"both the training and the held-out rows{hint(argument, others)}"
            )
            if argument in WITHHELD & {*columns}:
                says = (
                    f"{name} has the argument {argument!r}, a column that TRL does not pass to "
                    f"rewards; rename it, as in data.columns: {{answer: {argument}}}, and take "
                    "`answer`"
                )
            raise objects.document.error((*path, "type"), says)


def missing_values(
    rewards: Sequence[MakeReward], rows: Dataset, kind: str, where: Callable[[int], str]
) -> Iterator[str]:
    """Yield a line for each column that a reward takes and that has no value in some rows.

    Args:
        rewards: The rewards.
        rows: Rows whose columns have the task's names.
        kind: What the rows are, such as ``"rows"``.
        where: Returns the place of a row in words, by its number, counted from 1.
    """
    taken = frozenset[str]().union(*(reward.takes for reward in rewards)) - WITHHELD
    for name in filter(taken.__contains__, rows.column_names):
        values = rows.select_columns([name]).with_format("arrow")[:][name]
        if values.null_count:
            row = pc.index(pc.is_null(values), value=True).as_py() + 1
            yield (
                f"`{name}`, which the reward takes, is missing in {values.null_count:,} of "
                f"{len(rows):,} {kind}, first {where(row)}"
            )


def _listed(name: str, numbers: Any, wanted: str) -> list[Any]:
    """Return what a reward function has returned as a list.

    Args:
        name: Name in the recipe.
        numbers: What the function has returned.
        wanted: What it must return.

    Raises:
        TypeError: If it is no list, or cannot be read as one.
    """
    if inspect.iscoroutine(numbers):
        numbers.close()  # otherwise Python warns that nobody has awaited it
        msg = f"{name} must return {wanted}, got a coroutine; {_NO_ASYNC}"
        raise TypeError(msg)
    try:
        # The keys of a mapping and the letters of a text are no rewards.
        each = None if isinstance(numbers, (Mapping, str, bytes)) else iter(numbers)
    except TypeError:
        each = None
    if each is None:
        msg = f"{name} must return {wanted}, got {shown(numbers)}"
        raise TypeError(msg)
    return list(each)


def _told(columns: Collection[str], find: FindRow, passed: Mapping[str, Any], index: int) -> str:
    """Return an answer, its prompt, the row of the data, and the step, for a message.

    Args:
        columns: Names of the columns that TRL passes.
        find: Tells the row.
        passed: What TRL has passed.
        index: Number of the answer, from 0.
    """
    prompt = passed["prompts"][index]
    values = {name: passed[name][index] for name in columns if name in passed}
    row = find({"prompt": prompt, **values})
    said = f"{shown(passed['completions'][index])}, an answer to {shown(prompt)}"
    said += f" ({row})" if row is not None else ""
    step = getattr(passed.get("trainer_state"), "global_step", None)
    return said if step is None else f"{said}, after step {step}"


def _number(name: str, one: Any, told: Callable[[], str]) -> float | None:
    """Return what a reward function has returned for an answer as a float; ``None`` for nothing.

    Args:
        name: Name in the recipe.
        one: What the function has returned for the answer.
        told: Returns the answer for a message.

    Raises:
        TypeError: If it is not a number. A text that looks like one is none.
        ValueError: If it is not finite.
    """
    if one is None:
        return None
    try:
        number = None if isinstance(one, (str, bytes)) else float(one)
    except (RuntimeError, TypeError, ValueError):  # such as a tensor of several numbers
        number = None
    if number is None:
        msg = f"{name} must return numbers (or None), got {shown(one)} for {told()}"
        raise TypeError(msg)
    if not math.isfinite(number):
        # TRL takes NaN for None; infinity makes the advantages of all answers NaN.
        msg = f"{name} must return finite numbers (or None), got {number} for {told()}"
        raise ValueError(msg)
    return number


def _raising(
    reward: Reward, given: Mapping[str, Any], number: int, error: BaseException
) -> int | None:
    """Return the first answer for which alone a reward function raises an error again.

    Args:
        reward: The function, which has failed.
        given: Its arguments.
        number: Number of answers.
        error: What it has raised.

    Returns:
        The number of the answer; ``None`` if all of them are the same in this, or the error is of a
        kind that values do not cause.
    """
    if not isinstance(error, _OF_VALUES):
        return None
    found = []
    for index in range(number):
        alone = {
            key: [value[index]] if isinstance(value, list) and len(value) == number else value
            for key, value in given.items()
        }
        try:
            reward(**alone)
        except _OF_VALUES:
            found.append(index)
        except Exception:  # noqa: BLE001  (the user's own code; the first error is the one to tell)
            return None
    return found[0] if 0 < len(found) < number else None


def _checked(
    name: str,
    reward: Reward,
    taken: Collection[str],
    told: Callable[[Mapping[str, Any], int], str],
) -> Reward:
    """Return a reward function that gets the arguments that it takes, and whose result is checked.

    Args:
        name: Name in the recipe.
        reward: The function.
        taken: Names of the arguments to pass.
        told: Returns an answer for a message; takes what TRL has passed, and the answer's number.
    """

    def compute(**passed: Any) -> list[float | None]:
        answers = passed["completions"]
        wanted = f"a list of {len(answers)} numbers, one for each completion (or None)"
        given = {key: value for key, value in passed.items() if key in taken}
        try:
            numbers = reward(**given)
        except Exception as error:
            if (index := _raising(reward, given, len(answers), error)) is not None:
                error.add_note(f"raised for {told(passed, index)}, but not for each answer")
            raise
        listed = _listed(name, numbers, wanted)
        if len(listed) != len(answers):
            msg = f"{name} must return {wanted}, got {len(listed)}: {shown(listed)}"
            raise TypeError(msg)
        return [
            _number(name, one, functools.partial(told, passed, index))
            for index, one in enumerate(listed)
        ]

    compute.__name__ = name.rpartition(".")[2]  # the name in TRL's log
    compute.__wrapped__ = reward  # type: ignore[attr-defined]  # (where errors are looked for)
    return compute
