"""Turns of conversations: how data write them, and what is wrong with them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from mfwrap.recipes.data.columns import STRINGS, Columns, Kind, is_text, shown

_ROLES = {role: role for role in ("assistant", "developer", "system", "tool", "user")}
"""Roles in chat templates."""

_SPEAKERS = _ROLES | {"gpt": "assistant", "human": "user"}
"""Role of each speaker that ShareGPT's key ``from`` may name, in any case of letters."""

_BEFORE = frozenset({"developer", "system"})
"""Roles of turns that may precede the first turn of the user."""

_ALTERNATING = frozenset({"assistant", "user"})


def as_messages(turns: Any, role: str) -> list[dict[str, Any]]:
    """Return turns as messages with role and content, as chat templates need them.

    Args:
        turns: A list of turns with from and value (ShareGPT), or with role and content; one such
            turn; or the text of one turn. Their kind has checked them.
        role: Role of a text.
    """
    if isinstance(turns, str):
        return [{"role": role, "content": turns}]
    listed = [turns] if isinstance(turns, dict) else turns
    return [
        {"role": _role(turn), "content": turn["value"]} if turn.get("role") is None else turn
        for turn in listed
    ]


def _speaker(turn: Mapping[str, Any]) -> Any:
    """Return who speaks, as the data name it."""
    return turn.get("from") if turn.get("role") is None else turn["role"]


def _role(turn: Mapping[str, Any]) -> str | None:
    """Return the role of a turn; ``None`` if the turn names none, or an unknown one."""
    speaker = str(_speaker(turn))
    return _SPEAKERS.get(speaker.lower()) if turn.get("role") is None else _ROLES.get(speaker)


def _fault_of_turns(turns: Any, begins: str | None, *, needs_answer: bool) -> str | None:
    """Say what is wrong with turns; ``None`` if they are a conversation, or a part of one.

    Args:
        turns: The value of a row.
        begins: Role of the first turn, apart from those in `_BEFORE`; ``None`` for any role.
        needs_answer: Whether there must be a turn of the assistant.
    """
    turns = [turns] if isinstance(turns, dict) else turns
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return shown(turns)
    roles: list[str | None] = []
    for number, turn in enumerate(turns, start=1):
        role, named = _role(turn), shown(_speaker(turn))
        fault = _fault_of_turn(turn, number)
        if fault is not None:
            return fault
        if roles and role == roles[-1] and role in _ALTERNATING:
            where = f"turns {number - 1} and {number}"
            todo = "join them, or put the missing turn between them"
            return f"two turns of {named} in succession ({where}; {todo})"
        if begins not in {None, role} and role not in _BEFORE and _BEFORE.issuperset(roles):
            todo = "put the missing turn before it, or leave it out"
            return f"{named} in turn {number}, where a turn of the {begins} comes first ({todo})"
        roles.append(role)
    if not roles:
        return "a list without turns"
    return "no turn of the assistant" if needs_answer and "assistant" not in roles else None


def _fault_of_turn(turn: Mapping[str, Any], number: int) -> str | None:
    """Say what is wrong with a turn itself; ``None`` if nothing is."""
    is_sharegpt = turn.get("role") is None
    if _role(turn) is None:
        known = ", ".join(sorted(_SPEAKERS if is_sharegpt else _ROLES))
        return f"the role {shown(_speaker(turn))} in turn {number} (known: {known})"
    content = turn.get("value" if is_sharegpt else "content")
    # A turn that calls a tool has no content. A list has parts, such as texts and images.
    if isinstance(content, (str, list)) or turn.get("tool_calls"):
        return None
    return f"{shown(content)} as the content of turn {number}"


_MESSAGES = "a list of messages with role and content"


def _conversation(turns: str, *, needs_answer: bool) -> Kind:
    """Return the kind of a column of whole conversations.

    Args:
        turns: Describes the turns.
        needs_answer: Whether there must be a turn of the assistant.
    """

    def fault(value: Any) -> str | None:
        return _fault_of_turns(value, "user", needs_answer=needs_answer)

    wanted = f"{turns} (user and assistant in turn)"
    return Kind(
        lambda _: (wanted, lambda value: isinstance(value, list) and fault(value) is None),
        fault=fault,
    )


def _fault_of_prompt(prompt: Any) -> str | None:
    """Say what is wrong with turns that the model shall answer; ``None`` if nothing is."""
    fault = _fault_of_turns(prompt, "user", needs_answer=False)
    if fault is not None:
        return fault
    turns = [prompt] if isinstance(prompt, dict) else prompt
    if _role(turns[-1]) == "user" and not has_content(turns[-1]):
        return f"a last turn without text, {shown(turns[-1])},"
    return None if any(map(has_content, turns)) else "only turns without text"


def has_content(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn says anything: text that is not blank, an image, a call of a tool."""
    content = turn.get("value" if turn.get("role") is None else "content")
    if isinstance(content, list):
        return any(
            not isinstance(part, dict)
            or part.get("type") != "text"
            or bool(str(part.get("text") or "").strip())
            for part in content
        )
    return bool(turn.get("tool_calls")) or _is_filled(content)


def _is_filled(value: Any) -> bool:
    """Return whether a value is a text that is not blank."""
    return is_text(value) and bool(value.strip())


def _part(begins: str | None, *, needs_answer: bool = False, is_asked: bool = False) -> Kind:
    """Return the kind of a column of texts, or of parts of conversations, as in the first row.

    Args:
        begins: Role of the first turn, see `_fault_of_turns`.
        needs_answer: Whether there must be a turn of the assistant.
        is_asked: Whether the model shall answer the part, so that it must not be empty.
    """

    def fault(value: Any) -> str | None:
        if is_asked:
            return _fault_of_prompt(value)
        return _fault_of_turns(value, begins, needs_answer=needs_answer)

    def expect(first: Any) -> tuple[str, Callable[[Any], bool]]:
        if is_text(first):
            if is_asked:
                return "a string (as in row 1) that is not blank", _is_filled
            return "a string (as in row 1)", is_text
        if isinstance(first, (dict, list)):
            kind = type(first)
            wanted = _MESSAGES if kind is list else "a message with role and content"
            return (
                f"{wanted} (as in row 1)",
                lambda value: isinstance(value, kind) and fault(value) is None,
            )
        return f"a string or {_MESSAGES}", lambda _: False

    # Whether a text is blank is not known from its type.
    return Kind(expect, Kind.dtypes if is_asked else STRINGS, use="text", fault=fault)


def _expect_tools(_: Any) -> tuple[str, Callable[[Any], bool]]:
    return "a list of functions, or the JSON of one, or nothing", _are_tools


def _are_tools(value: Any) -> bool:
    if is_text(value):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return value is None or isinstance(value, list)


MESSAGES = _conversation(_MESSAGES, needs_answer=True)
"""A whole conversation."""

SHAREGPT = _conversation("a list of turns with from and value", needs_answer=True)
"""A whole conversation with ShareGPT's keys, or with role and content."""

SHAREGPT_PROMPT = _conversation("a list of turns with from and value", needs_answer=False)
"""A conversation before an answer."""

PROMPT = _part("user")
"""What precedes an answer: a text, or a list of messages."""

PROMPTS: tuple[Columns, ...] = ({"prompt": _part("user", is_asked=True)},)
"""Columns for tasks in which the model itself writes the answers."""

ANSWER = _part("assistant", needs_answer=True)
"""An answer: a text, a message, or a list of messages."""

ANSWERED = _part("user", needs_answer=True)
"""A prompt with its answer: a text, or a list of messages."""

ANY_ANSWER = _part(None, needs_answer=True)
"""An answer, with or without its prompt before it."""

OPTIONAL_TEXT = Kind(
    lambda _: ("a string or nothing", lambda value: value is None or is_text(value)), use="text"
)

TOOLS = Kind(_expect_tools)
"""Tools that the assistant may call: their JSON schemas."""
