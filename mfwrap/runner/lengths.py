"""Say which rows of a recipe are left out or cut by their length, or too long for the model."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedConfig

from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.recipes.tasks.prompts import prompt_tokens
from mfwrap.runner.document import shown
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
    known = _trained_positions(recipe.model, network)
    key, length = "training.max_length", getattr(recipe.arguments, "max_length", None)
    if length is None:
        key, length = "data.sequence_length", recipe.data.sequence_length
    if known is None or length is None or length <= known:
        return None
    return _too_long(f"{key}={length}", known, recipe.model)


def _too_long(length: str, known: int, model: ModelSettings) -> str:
    return (
        f"{length} is more than the {known} positions with which {model.path!r} was trained "
        "(max_position_embeddings); longer sequences are trained at positions that are new to it"
    )


def _trained_positions(model: ModelSettings, network: Any) -> int | None:
    """Return the number of rotary positions with which a checkpoint was trained.

    Args:
        model: Section of the model.
        network: The model.

    Returns:
        ``None`` if the model is no checkpoint, has a table of positions, or scales them, or if
        their number is unknown.
    """
    config: Any = getattr(network, "config", None)
    if model.path is None or not isinstance(config, PreTrainedConfig):
        return None
    text = config.get_text_config()
    known: Any = getattr(text, "max_position_embeddings", None)
    rotary: Any = getattr(text, "rope_parameters", None) or {}
    is_known = rotary.get("rope_type") == "default" and num_positions(network) is None
    return known if is_known else None


def check_answers(recipe: Recipe, trainer: Any, say: Callable[[str], None]) -> None:
    """Check that model and teacher have positions for a long prompt and the longest answer.

    Of the training rows and of the held-out rows, the prompt with the most characters is counted in
    tokens: to count those of all prompts would take another pass over the data. Nothing is known of
    the prompts of a stream, and of models without a limit.

    Args:
        recipe: The recipe.
        trainer: The Trainer.
        say: Called in the main process with a warning if a checkpoint was trained with fewer
            positions.

    Raises:
        RecipeError: If a model has a table with fewer positions.
    """
    arguments: Any = recipe.arguments
    most: int | None = getattr(arguments, "max_completion_length", None)
    models = [("model", recipe.model, trainer.model)]
    if recipe.teacher is not None:
        models.append(("teacher", recipe.teacher, trainer.teacher_model))
    limits = [num_positions(network) for _, _, network in models]
    known = [_trained_positions(section, network) for _, section, network in models]
    parts = [
        rows
        for rows in (trainer.train_dataset, trainer.eval_dataset)
        if isinstance(rows, Dataset) and "prompt" in rows.column_names
    ]
    if most is None or not parts or {*limits, *known} == {None}:
        return
    batches = (part for rows in parts for part in rows.select_columns(["prompt"]).iter(_BATCH))
    prompt = max((one for batch in batches for one in batch["prompt"]), key=_num_characters)
    tokenizer, settings = trainer.processing_class, getattr(arguments, "chat_template_kwargs", None)
    tokens = len(prompt_tokens(tokenizer, prompt, **(settings or {})))
    for (name, section, _), limit, trained in zip(models, limits, known, strict=True):
        if limit is not None and tokens + most > limit:
            _refuse_prompt(recipe, prompt, tokens, f"{limit} positions of the {name}", limit)
        if trained is not None and tokens + most > trained and arguments.process_index == 0:
            length = f"a prompt of {tokens} tokens with training.max_completion_length={most}"
            say(f"warning: {_too_long(length, trained, section)}")


def _refuse_prompt(recipe: Recipe, prompt: Any, tokens: int, positions: str, limit: int) -> None:
    """Raise `RecipeError` for a prompt that leaves too few positions for an answer."""
    if tokens >= limit:
        says = f"must have prompts of fewer tokens than the {positions}, got {tokens} tokens in"
        raise recipe.document.error(("data",), f"{says} {shown(prompt)}")
    most = recipe.arguments.max_completion_length  # type: ignore[attr-defined]  # (TRL's has it)
    says = f"expected an integer <= {limit - tokens}, because a prompt has {tokens} of the"
    raise recipe.document.error(
        ("training", "max_completion_length"), f"{says} {positions}, got {most}"
    )


def _num_characters(prompt: Any) -> int:
    return len(prompt if isinstance(prompt, str) else json.dumps(prompt, default=str))


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
