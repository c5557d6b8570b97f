"""Build the Trainer's keyword arguments for language models."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerBase,
    default_data_collator,
)

from mfwrap.recipes.data.instructions import SEPARATING, instruction_texts, model_row, packed_rows
from mfwrap.recipes.data.source import SOURCE, DataError, DataSource, Rows
from mfwrap.recipes.data.streams import column_names
from mfwrap.recipes.models.settings import ModelSettings, fitting_length, make_text_model


def build_causal_lm(model: ModelSettings, data: DataSource, rows: Rows) -> dict[str, Any]:
    """Return the Trainer's keyword arguments for predicting the next token in texts."""
    tokenizer = model.make_tokenizer()
    network = make_text_model(model, AutoModelForCausalLM, tokenizer)
    length = fitting_length(data, network)
    if data.template is not None:
        prepare = _instructions(data, network, tokenizer, length)
        return {
            "model": network,
            **rows.prepared(prepare),
            "data_collator": default_data_collator,
            "processing_class": tokenizer,
        }

    cut_texts = _packed if data.packing else _pieces

    def cut_block(texts: Any) -> dict[str, Any]:
        pieces = list(cut_texts(_token_ids(texts, tokenizer), length))
        return {"input_ids": pieces, "labels": pieces}

    def cut(texts: Any) -> Any:
        if isinstance(texts, IterableDataset):
            # A block is 1,000 texts; with packing, an incomplete last piece of each is dropped.
            return texts.map(cut_block, batched=True, remove_columns=column_names(texts))
        if SOURCE in texts.column_names and not data.packing:
            return Dataset.from_dict(_named_pieces(texts, tokenizer, length))
        return _by_source(texts, lambda part: Dataset.from_dict(cut_block(part)))

    return {
        "model": network,
        **rows.prepared(cut),
        # This collator also pads the labels, with -100, which the loss ignores.
        "data_collator": DataCollatorForTokenClassification(tokenizer),
        "processing_class": tokenizer,
    }


def _instructions(
    data: DataSource, network: Any, tokenizer: PreTrainedTokenizerBase, length: int
) -> Callable[[Any], Dataset]:
    """Return a function that makes rows of a model's inputs from instructions and answers.

    Raises:
        DataError: If the model cannot keep the texts of a row apart.
    """
    packing, separate = bool(data.packing), data.separate_texts is not False
    kind = network.config.model_type
    if packing and separate and kind not in SEPARATING:
        says = f"for the model type {kind!r}, which cannot keep texts of a row apart"
        msg = f"`packing` needs `separate_texts: false` {says}, got {data.separate_texts}"
        raise DataError(msg)

    def prepare(rows: Any) -> Dataset:
        if not isinstance(rows, Dataset):
            msg = "`template` needs rows that are not streamed, got a stream"
            raise DataError(msg)
        targets = data.targets or "next_token"
        is_separate = packing and separate

        def of_source(part: Dataset) -> Dataset:
            texts = instruction_texts(part, tokenizer, length, targets, packing=packing)
            groups = packed_rows(texts, length) if packing else ([text] for text in texts)
            found = [model_row(each, length, separate=is_separate) for each in groups]
            return Dataset.from_list(found)

        if SOURCE in rows.column_names and not packing:
            return of_source(rows).add_column(SOURCE, rows[SOURCE])
        return _by_source(rows, of_source)

    return prepare


def _by_source(rows: Dataset, prepare: Callable[[Dataset], Dataset]) -> Dataset:
    """Pack rows, those of each source by themselves, so that no packed row is of several.

    Args:
        rows: Rows, perhaps with the column `SOURCE`.
        prepare: Makes rows of a model's inputs, of another number.

    Returns:
        The rows of all sources, one source after the other, with their column `SOURCE`.
    """
    if SOURCE not in rows.column_names:
        return prepare(rows)
    of_source: dict[str, list[int]] = {}
    for index, name in enumerate(rows[SOURCE]):
        of_source.setdefault(name, []).append(index)
    parts = {name: prepare(rows.select(indices)) for name, indices in of_source.items()}
    return concatenate_datasets(
        [part.add_column(SOURCE, [name] * len(part)) for name, part in parts.items() if len(part)]
    )


def _token_ids(texts: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the token ids of each text, followed by the end-of-text token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts["text"]:
        # Do not truncate, and do not warn about the model's length: the caller cuts the texts.
        encoded = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        yield [*encoded["input_ids"], *end]


def _pieces(texts: Iterator[list[int]], length: int) -> Iterator[Sequence[int]]:
    """Cut each text into pieces and yield them, except pieces of one token: they have no target."""
    for ids in texts:
        for start in range(0, len(ids), length):
            if len(piece := ids[start : start + length]) > 1:
                yield piece


def _named_pieces(
    texts: Dataset, tokenizer: PreTrainedTokenizerBase, length: int
) -> dict[str, list[Any]]:
    """Return pieces of texts in their order, with the source of each."""
    of_texts = zip(_token_ids(texts, tokenizer), texts[SOURCE], strict=True)
    found = [(piece, name) for ids, name in of_texts for piece in _pieces(iter([ids]), length)]
    pieces = [piece for piece, _ in found]
    return {"input_ids": pieces, "labels": pieces, SOURCE: [name for _, name in found]}


def _packed(texts: Iterator[list[int]], length: int) -> Iterator[Sequence[int]]:
    """Concatenate the texts and yield pieces of equal length; drop an incomplete last piece."""
    pending: list[int] = []
    for ids in texts:
        pending += ids
        while len(pending) >= length:
            yield pending[:length]
            pending = pending[length:]
