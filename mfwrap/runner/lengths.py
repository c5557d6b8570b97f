"""Say which rows of a recipe TRL leaves out, or cuts, because of ``training.max_length``."""

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset

from mfwrap.runner.recipe import Recipe

_BATCH = 10_000
"""Number of rows whose lengths are read at once."""


def check_lengths(
    recipe: Recipe, given: Mapping[str, Any], trainer: Any, say: Callable[[str], None]
) -> None:
    """Say in the main process how many rows `training.max_length` leaves out or cuts.

    Nothing is said about packed rows, because a prepared sequence then has several of them, about
    streams, and about tasks whose Trainer does not prepare rows of several forms.

    Args:
        recipe: The recipe.
        given: Keywords of the Trainer, with the rows before it has prepared them.
        trainer: The Trainer, whose rows are prepared.
        say: Called with a line about the training rows, and with another about the held-out rows.

    Raises:
        RecipeError: If no training row is left.
    """
    arguments: Any = trainer.args
    rows, prepared = given["train_dataset"], trainer.train_dataset
    if isinstance(prepared, Dataset) and not len(prepared) and len(rows):
        path, got = ("training", "max_length"), getattr(arguments, "max_length", None)
        says = "expected a length that leaves a token of an answer in some row, because no other"
        raise recipe.document.error(path, f"{says} token counts in the loss, got {got}; raise it")
    if not recipe.task.forms or arguments.max_length is None or arguments.process_index != 0:
        return
    packs = getattr(arguments, "packing", False)
    packs_held_out = getattr(arguments, "eval_packing", None)
    packs_held_out = packs if packs_held_out is None else packs_held_out
    for key, kind, most, is_packed in (
        ("train_dataset", "training", recipe.data.max_train_samples, packs),
        ("eval_dataset", "held-out", recipe.data.max_eval_samples, packs_held_out),
    ):
        before, after = given[key], getattr(trainer, key)
        if isinstance(before, Dataset) and isinstance(after, Dataset) and not is_packed:
            # `mfwrap validate` and `mfwrap data` prepare only the first rows.
            first = "the first " if most == len(before) else ""
            line = _line(before, after, arguments.max_length, f"{first}{len(before):,} {kind} rows")
            if line is not None:
                say(line)


def _line(before: Dataset, after: Dataset, max_length: int, rows: str) -> str | None:
    """Return what is said about one data set; ``None`` if no row is left out or cut.

    Args:
        before: Rows that the Trainer got.
        after: Rows that it has prepared.
        max_length: Largest number of tokens.
        rows: Describes all rows.
    """
    left_out = len(before) - len(after)
    if "input_ids" in after.column_names:
        # TRL has cut the rows and keeps no former length, so a row that fits exactly counts, too.
        cuts, why = "cuts up to", "no token of an answer would be left"
        num_cut = _count(after, ["input_ids"], lambda ids: pc.greater_equal(ids, max_length))
    elif set(_PAIR) <= set(after.column_names):
        # The collator cuts the rows of preferences, in each batch.
        cuts, why = "cuts", "the prompt alone fills it"
        num_cut = _count(
            after,
            _PAIR,
            lambda prompt, *answers: pc.greater(
                pc.add(prompt, pc.max_element_wise(*answers)), max_length
            ),
        )
    else:
        return None
    said = f"training.max_length={max_length}"
    if not left_out:
        return f"{said} {cuts} {num_cut:,} of {rows}" if num_cut else None
    said = f"{said} leaves out {left_out:,} of {rows}, because {why}"
    return f"{said}, and {cuts} {num_cut:,} more" if num_cut else said


_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
"""Columns of TRL with the tokens of a prompt and its two answers."""


def _count(rows: Dataset, columns: Any, are_counted: Callable[..., Any]) -> int:
    """Count rows by the lengths of their lists, in Arrow.

    Args:
        rows: The rows.
        columns: Names of columns with lists.
        are_counted: Returns which rows count, of the lengths of the lists in each column.
    """
    batches = rows.select_columns(list(columns)).with_format("arrow").iter(_BATCH)
    return sum(
        pc.sum(are_counted(*(pc.list_value_length(batch[name]) for name in columns))).as_py() or 0
        for batch in batches
    )
