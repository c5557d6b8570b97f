"""What the rows of a recipe are that TRL trains on, and what of them counts in the loss."""

import copy
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainingArguments

from mfwrap.recipes.data.forms import Form, form_of
from mfwrap.recipes.data.source import SOURCE, Rows
from mfwrap.recipes.data.streams import column_names
from mfwrap.recipes.models.chat_templates import CHOICES, template_text
from mfwrap.runner.document import one_line
from mfwrap.runner.objects import RecipeObjects
from mfwrap.runner.recipe import Recipe, data_errors

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begins an answer in a chat template; transformers makes the mask of the loss of these marks."""


class Tuning(NamedTuple):
    """How a recipe's rows are trained on."""

    arguments: TrainingArguments
    """Arguments of the training."""

    line: str
    """What the rows are, and what of them counts in the loss; of prompts that the model answers
    itself, that no chat template is applied to them."""


def rows_line(recipe: Recipe, rows: Rows, tables: Sequence[Dataset]) -> str | None:
    """Return what the rows of a recipe are; ``None`` if its task has one form of rows.

    Args:
        recipe: The recipe.
        rows: Its rows, checked.
        tables: All rows that were read, and those of a held-out file, see `checked_rows`; empty for
            a stream.
    """
    if not recipe.task.forms or rows.are_inputs:
        return None
    found = column_names(rows.train)
    form = form_of(recipe.task.forms, found, recipe.data.columns)
    used = {*form.columns_in(found), SOURCE, recipe.data.source_column}
    # A source of mfwrap's own has columns for several tasks.
    used |= recipe.data.known_columns or set()
    unused = ", ".join(sorted(set(found) - used))
    unused = f"columns not used: {unused:.100}" if unused else ""
    if left := form.unused_in_turns(tables):
        unused = "; ".join(filter(None, [unused, f"not used: {', '.join(left)}"]))
    said = f"{numbered_rows(rows, tables)} of {form.name}{f' ({unused})' if unused else ''}"
    return said + _empty(recipe, form, tables)


def numbered_rows(rows: Rows, tables: Sequence[Dataset]) -> str:
    """Return the number of rows, and how many of them are trained on and held out.

    Args:
        rows: Rows of a recipe, checked.
        tables: As of `rows_line`.
    """
    if not tables:
        return "streamed rows"
    number = sum(map(len, tables))
    said = f"{number:,} row{'' if number == 1 else 's'}"
    held_out = 0 if rows.evaluation is None else len(rows.evaluation)
    # Neither `max_train_samples` nor `max_eval_samples` may have left out any.
    if not held_out or number != len(rows.train) + held_out:
        return said
    return f"{said} ({len(rows.train):,} to train on, {held_out:,} held out)"


def _empty(recipe: Recipe, form: Form, tables: Sequence[Dataset]) -> str:
    """Return how many answers to be learned are empty, in a clause; empty without one."""
    found = [
        (row, number > 0) for number, table in enumerate(tables) for row in form.unanswered(table)
    ]
    if not found:
        return ""
    row, is_held_out = found[0]
    first = recipe.data.where(row, held_out=is_held_out)
    return f", {len(found):,} with an empty answer (the first {first})"


def tuning_of(recipe: Recipe, rows: Rows, tables: Sequence[Dataset]) -> Tuning | None:
    """Return how the rows of a recipe are trained on; ``None`` if nothing is to be said of them.

    Of conversations, only the assistant's turns count in the loss, unless the recipe says otherwise
    by ``training.assistant_only_loss``.

    Args:
        recipe: The recipe.
        rows: Its rows, checked.
        tables: As of `rows_line`.

    Raises:
        RecipeError: If the rows need a chat template and there is none, or if only the assistant's
            turns shall count, but TRL cannot tell them in the text of the template.
    """
    if not recipe.task.takes_conversations or rows.are_inputs:
        return None
    tokenizer = _checked_tokenizer(recipe, rows)
    found, forms = column_names(rows.train), recipe.task.forms
    form = form_of(forms, found, recipe.data.columns) if forms else None
    raw = None
    if tokenizer is None and (form is None or "prompt" in form.columns):
        raw = _without_template(recipe)
    if form is None:
        return None if raw is None else Tuning(recipe.arguments, raw)
    line = rows_line(recipe, rows, tables)
    arguments: Any = recipe.arguments
    if tokenizer is not None and form.is_of_turns and hasattr(arguments, "assistant_only_loss"):
        arguments = _with_answers_only(recipe, tokenizer)
    key = "assistant_only_loss" if form.is_of_turns else "completion_only_loss"
    is_all = getattr(arguments, key, None) is False
    line = f"{line}; {'all tokens' if is_all else form.learned} count in the loss"
    return Tuning(arguments, line if raw is None else f"{line}; {raw}")


def _without_template(recipe: Recipe) -> str | None:
    """Return that prompts which are texts get no chat template, and how they would get one.

    Returns:
        The sentence; ``None`` if there is no template, or the data are mfwrap's own.
    """
    if recipe.data.known_columns is not None or _tokenizer(recipe).chat_template is None:
        return None
    says = "no chat template is applied to prompts that are texts"
    if not recipe.task.forms:
        return f"{says}; lists of messages would get it"
    ours = {"prompt": "instruction", "completion": "output"}
    if recipe.task.needs_reference:
        del ours["completion"]
    given = recipe.data.columns
    named = ", ".join(f"{other}: {given.get(name, name)}" for name, other in ours.items())
    return f"{says}; data.columns={{{named}}} would apply it"


def _checked_tokenizer(recipe: Recipe, rows: Rows) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer if the rows are conversations; ``None`` if they are texts.

    Raises:
        RecipeError: If the rows are conversations, and the tokenizer has no chat template.
    """
    found = column_names(rows.train)
    forms = recipe.task.forms
    used = form_of(forms, found, recipe.data.columns).columns if forms else recipe.task.needs[0]
    first: dict[str, Any] = next(iter(rows.train), {})
    if not any(isinstance(first.get(name), (dict, list)) for name in used):
        return None
    tokenizer = _tokenizer(recipe)
    if tokenizer.chat_template is None:
        says = "expected a chat template, because the data are conversations and the tokenizer"
        says = f"{says} has none; set it to {CHOICES}"
        raise recipe.document.error(("model", "chat_template"), says)
    return tokenizer


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the chat template that it will have in the training."""
    with data_errors(RecipeObjects(recipe.document)):
        tokenizer = recipe.model.make_tokenizer()
    path = getattr(recipe.arguments, "chat_template_path", None)
    if path is not None:
        if recipe.model.chat_template is not None:
            says = "must be left out, because model.chat_template is set"
            raise recipe.document.error(("training", "chat_template_path"), says)
        try:
            tokenizer.chat_template = template_text(tokenizer, path)  # as TRL will do
        except (OSError, ValueError) as error:
            says = f"must name what can be loaded, got {path!r:.80}: {one_line(str(error))}"
            raise recipe.document.error(("training", "chat_template_path"), says) from error
    return tokenizer


def _with_answers_only(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> TrainingArguments:
    """Return arguments with which only the assistant's turns count, unless the recipe refuses."""
    from trl import get_training_chat_template  # noqa: PLC0415  (slow; part of an extra)

    given = (recipe.document.data.get("training") or {}).get("assistant_only_loss")
    if given is False:
        return recipe.arguments
    if not _MARK.search(tokenizer.get_chat_template()):
        try:
            get_training_chat_template(tokenizer)
        except ValueError as error:
            says = (
                "cannot be true, its default for conversations: the tokenizer's chat template does "
                "not mark the turns of the assistant ({% generation %}), and TRL does not know it; "
                "set model.chat_template to chatml or to another template that marks them, or this "
                "key to false to train on all turns"
            )
            raise recipe.document.error(("training", "assistant_only_loss"), says) from error
    arguments = copy.copy(recipe.arguments)
    arguments.assistant_only_loss = True  # type: ignore[attr-defined]  # (SFTConfig has it)
    return arguments
