"""Say which rows of a recipe are left out or cut by their length, or too long for the model."""

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedConfig

from mfwrap.runner.recipe import Recipe
from mfwrap.tensors.embedding_tables import num_positions

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


def untrained_positions(recipe: Recipe, network: Any) -> str | None:
    """Say that sequences may reach positions of a checkpoint that were not trained.

    Only rotary positions have no limit. `check_max_length` and the tasks refuse the others.

    Args:
        recipe: The recipe.
        network: Its model.

    Returns:
        One sentence; ``None`` if there are enough positions, if the checkpoint scales them, or if
        their number is unknown.
    """
    config: Any = getattr(network, "config", None)
    if (
        recipe.model.path is None
        or not isinstance(config, PreTrainedConfig)
        or num_positions(network) is not None
    ):
        return None
    key, length = "training.max_length", getattr(recipe.arguments, "max_length", None)
    if length is None:
        key, length = "data.sequence_length", recipe.data.sequence_length
    text = config.get_text_config()
    known: Any = getattr(text, "max_position_embeddings", None)
    rotary: Any = getattr(text, "rope_parameters", None) or {}
    if None in {length, known} or length <= known or rotary.get("rope_type") != "default":
        return None
    return (
        f"{key}={length} is more than the {known} positions with which {recipe.model.path!r} was "
        "trained (max_position_embeddings); longer sequences are trained at positions that are new "
        "to it"
    )


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
