"""Forms of the rows that TRL trains on, recognized by their columns."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from datasets import Dataset

from mfwrap.recipes.data.columns import TEXT, Columns
from mfwrap.recipes.data.conversations import (
    ANSWER,
    ANSWERED,
    ANY_ANSWER,
    MESSAGES,
    OPTIONAL_TEXT,
    PROMPT,
    SHAREGPT,
    SHAREGPT_PROMPT,
    TOOLS,
    as_messages,
    has_content,
)
from mfwrap.recipes.data.instructions import alpaca_prompt
from mfwrap.recipes.data.source import DataError

Row = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of rows, and how it becomes a form that TRL documents."""

    name: str
    """What the rows are, for messages."""

    columns: Columns
    """Columns that each row must have."""

    optional: Columns = field(default_factory=dict)
    """Columns that are used if the data have them."""

    learned: str
    """What of a row counts in the loss, for messages."""

    rank: int = 1
    """Of several forms that fit the columns, the one of the lowest rank is used."""

    convert: Callable[[Row], Row] | None = None
    """Makes the columns that TRL knows of those of a row; ``None`` if they are the same."""

    convert_plain: Callable[[Row], Row] | None = None
    """Used in place of `convert` if the tokenizer has no chat template."""

    is_of_turns: bool = False
    """Whether a row is a conversation of which each turn of the assistant is to be learned."""

    def unanswered(self, rows: Dataset) -> list[int]:
        """Return the rows, counted from 1, in which an answer to be learned has no text."""
        names = [name for name in self.columns if name in _LEARNED]
        table = rows.select_columns(names) if names else ()
        numbered = enumerate(table, start=1)
        return [n for n, row in numbered if any(_is_unanswered(row[name]) for name in names)]

    def unused_in_turns(self, tables: Sequence[Dataset]) -> list[str]:
        """Return what of the turns, or for them, is not used, such as a key that weights a turn."""
        unused: set[str] = set()
        for name in self.columns:
            keys = {key for rows in tables for key in _keys_of_turns(rows, name)}
            # Of ShareGPT's turns, only these are kept; others are passed to the chat template.
            is_sharegpt = "from" in keys and "role" not in keys
            unused |= keys - {"from", "value"} if is_sharegpt else keys & _WEIGHTS
        said = [f"{key!r} of turns" for key in sorted(unused)]
        pair = ["conversations", "system"]
        if pair[0] in self.columns:
            both = [rows.select_columns(pair) for rows in tables if pair[1] in rows.column_names]
            if number := sum(_has_two_systems(row) for rows in both for row in rows):
                said.append(f"system of {number:,} rows, whose turns begin with one")
        return said

    def columns_in(self, found: Collection[str]) -> Columns:
        """Return the columns of this form that the data have."""
        optional = {name: kind for name, kind in self.optional.items() if name in found}
        return {**self.columns, **optional}


def form_of(forms: Sequence[Form], found: Collection[str], named: Collection[str] = ()) -> Form:
    """Return the form of rows.

    Args:
        forms: Forms to choose from; at least one must fit.
        found: Names of the columns of the data.
        named: Names of columns that the recipe names. A form with more of them is preferred.

    Raises:
        DataError: If the columns fit several forms equally well.
    """
    fitting = [form for form in forms if form.columns.keys() <= set(found)]

    def order(form: Form) -> tuple[int, int]:
        return -len(form.columns.keys() & set(named)), form.rank

    best = [form for form in fitting if order(form) == min(map(order, fitting))]
    if len(best) > 1:
        fits = " and ".join(f"{form.name} ({', '.join(form.columns)})" for form in best)
        own = next(iter(best[0].columns))
        msg = f"`data` must have the columns of one form of rows, got those of {fits}; name the"
        msg = f"{msg} columns of the one to use, as in data.columns: {{{own}: {own}}}"
        raise DataError(msg)
    return best[0]


_WEIGHTS = frozenset({"loss", "mask", "train", "training", "weight"})
"""Keys by which data of other tools leave a turn out of the loss, or weight it."""


def _keys_of_turns(rows: Dataset, name: str) -> set[str]:
    """Return the keys of the turns in a column of conversations; none for another column."""
    inner = getattr(rows.features[name], "feature", None)
    if isinstance(inner, dict):
        return set(inner)
    if not len(rows) or not isinstance(rows[0][name], list):
        return set()
    # Turns with different keys may have no common type.
    return {key for row in rows.select_columns(name) for turn in row[name] for key in turn}


def _has_two_systems(row: Row) -> bool:
    first = as_messages(row["conversations"], "user")[0]
    return bool(row["system"]) and first["role"] == "system" and first["content"] != row["system"]


def _is_unanswered(value: Any) -> bool:
    """Return whether a text is blank, or a turn of the assistant in a conversation."""
    turns = as_messages(value, "assistant")
    return any(turn["role"] == "assistant" and not has_content(turn) for turn in turns)


def _completion(row: Row) -> Row:
    """Return a row whose prompt and answers are all texts, or all lists of messages."""
    parts = {"prompt": row["prompt"]} | {name: row[name] for name in _ANSWERS if name in row}
    if all(isinstance(part, str) for part in parts.values()):
        return row
    roles = {"prompt": "user"}
    turns = {name: as_messages(part, roles.get(name, "assistant")) for name, part in parts.items()}
    if "chosen" in turns and turns["chosen"][0]["role"] != "assistant":
        # The answers begin with their prompt, which is also in a column of its own.
        from trl import extract_prompt  # noqa: PLC0415  (slow; part of an extra)

        turns = extract_prompt({name: turns[name] for name in ("chosen", "rejected")})
    return row | turns


def _messages(row: Row) -> Row:
    """Return a row whose turns have a role and a content; they may have ShareGPT's keys."""
    return row | {"messages": as_messages(row["messages"], "user")}


def _sharegpt(row: Row) -> Row:
    turns = as_messages(row["conversations"], "user")
    if row.get("system") and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": row["system"]}, *turns]  # as LLaMA-Factory
    if "chosen" not in row:
        return {"messages": turns}
    answers = {name: as_messages(row[name], "assistant") for name in ("chosen", "rejected")}
    return {"prompt": turns, **answers}


def _alpaca(row: Row) -> Row:
    """Return an instruction and its answers as messages.

    Source: LLaMA-Factory, ``data/README.md``: the input is a line after the instruction.
    """
    prompt = "\n".join(filter(None, [row["instruction"], row.get("input")]))
    turns = {name: as_messages(text, "assistant") for name, text in _answers(row).items()}
    return {"prompt": as_messages(prompt, "user"), **turns}


def _alpaca_text(row: Row) -> Row:
    return {"prompt": alpaca_prompt(row), **_answers(row)}


def _answers(row: Row) -> Row:
    return {name: row[ours] for name, ours in _ANSWERS.items() if ours in row}


_ANSWERS = {"completion": "output", "chosen": "chosen", "rejected": "rejected"}
"""Columns of answers that TRL knows, and what Alpaca's form calls them."""

_LEARNED = frozenset({"messages", "conversations", *_ANSWERS, *_ANSWERS.values()})
"""Columns of which a part is to be learned; a conversation before an answer may have no answer."""

_PAIR = " with a chosen and a rejected answer"
_BOTH = "both answers"

TUNING: tuple[Form, ...] = (
    Form(
        name="prompts and completions",
        learned="the completions",
        columns={"prompt": PROMPT, "completion": ANSWER},
        optional={"tools": TOOLS},
        rank=0,
        convert=_completion,
    ),
    Form(
        name="chat messages",
        learned="the assistant's turns",
        columns={"messages": MESSAGES},
        optional={"tools": TOOLS},
        convert=_messages,
        is_of_turns=True,
    ),
    Form(
        name="ShareGPT conversations",
        learned="the assistant's turns",
        columns={"conversations": SHAREGPT},
        optional={"system": OPTIONAL_TEXT, "tools": TOOLS},
        convert=_sharegpt,
        is_of_turns=True,
    ),
    Form(
        name="Alpaca instructions",
        learned="the outputs",
        columns={"instruction": TEXT, "output": TEXT},
        optional={"input": OPTIONAL_TEXT},
        convert=_alpaca,
        convert_plain=_alpaca_text,
    ),
    Form(name="texts", columns={"text": TEXT}, learned="all tokens", rank=2),
)
"""Forms for supervised tuning. A text beside another form is often the same in one string."""

PREFERENCES: tuple[Form, ...] = (
    Form(
        name=f"prompts{_PAIR}",
        learned=_BOTH,
        columns={"prompt": PROMPT, "chosen": ANY_ANSWER, "rejected": ANY_ANSWER},
        optional={"tools": TOOLS},
        convert=_completion,
    ),
    Form(
        name=f"ShareGPT conversations{_PAIR}",
        learned=_BOTH,
        columns={"conversations": SHAREGPT_PROMPT, "chosen": ANSWER, "rejected": ANSWER},
        optional={"system": OPTIONAL_TEXT, "tools": TOOLS},
        convert=_sharegpt,
    ),
    Form(
        name=f"Alpaca instructions{_PAIR}",
        learned=_BOTH,
        columns={"instruction": TEXT, "chosen": TEXT, "rejected": TEXT},
        optional={"input": OPTIONAL_TEXT},
        convert=_alpaca,
        convert_plain=_alpaca_text,
    ),
    Form(
        name="pairs of a chosen and a rejected conversation",
        learned=_BOTH,
        columns={"chosen": ANSWERED, "rejected": ANSWERED},
        optional={"tools": TOOLS},
        rank=2,
    ),
)
"""Forms for tuning to preferred answers."""
