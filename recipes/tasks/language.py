"""Language models: from the first byte, fine-tuned, and tuned to preferences."""

from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerBase,
)

from mfwrap.recipes.data.columns import tuning_columns
from mfwrap.recipes.data.source import DataSource, Rows
from mfwrap.recipes.models.settings import ModelSettings, fitting_length, vocabulary_of

__all__ = ["build_causal_lm", "build_preference_tuning", "build_supervised_tuning"]


def build_causal_lm(model: ModelSettings, data: DataSource, rows: Rows) -> dict[str, Any]:
    """Return what a Trainer needs to predict each next token of texts."""
    tokenizer = model.make_tokenizer()
    network = model.make_model(AutoModelForCausalLM, **vocabulary_of(tokenizer))
    length = fitting_length(data, network)

    def cut(texts: Dataset) -> Dataset:
        pieces = (_packed if data.packing else _pieces)(_token_ids(texts, tokenizer), length)
        return Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in pieces])

    return {
        "model": network,
        "train_dataset": cut(rows.train),
        "eval_dataset": None if rows.evaluation is None else cut(rows.evaluation),
        # Pads labels with what is no target; the other collators do not pad labels at all.
        "data_collator": DataCollatorForTokenClassification(tokenizer),
        "processing_class": tokenizer,
    }


def build_supervised_tuning(model: ModelSettings, data: DataSource, rows: Rows) -> dict[str, Any]:
    """Return what TRL's ``SFTTrainer`` needs: conversations, prompts and completions, or texts."""
    del data
    return _tuning(model, rows, tuning_columns(rows.train))


def build_preference_tuning(model: ModelSettings, data: DataSource, rows: Rows) -> dict[str, Any]:
    """Return what TRL's ``DPOTrainer`` needs: a chosen and a rejected answer."""
    del data
    kept = [name for name in ("prompt", "chosen", "rejected") if name in rows.train.column_names]
    return _tuning(model, rows, kept)


def _tuning(model: ModelSettings, rows: Rows, columns: list[str]) -> dict[str, Any]:
    tokenizer = model.make_tokenizer()
    evaluation = rows.evaluation
    return {
        "model": model.make_model(AutoModelForCausalLM, **vocabulary_of(tokenizer)),
        "train_dataset": rows.train.select_columns(columns),
        "eval_dataset": None if evaluation is None else evaluation.select_columns(columns),
        "processing_class": tokenizer,
    }


def _token_ids(texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the tokens of each text, and the end of it."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts["text"]:
        # Not the model's own limit, of which a tokenizer warns: what follows cuts.
        encoded = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        yield [*encoded["input_ids"], *end]


def _pieces(texts: Iterator[list[int]], length: int) -> Iterator[Sequence[int]]:
    """Yield each text in pieces; a single token has nothing to predict."""
    for ids in texts:
        for start in range(0, len(ids), length):
            if len(piece := ids[start : start + length]) > 1:
                yield piece


def _packed(texts: Iterator[list[int]], length: int) -> Iterator[Sequence[int]]:
    """Yield all texts behind each other, in pieces of one length; what is left over is dropped."""
    pending: list[int] = []
    for ids in texts:
        pending += ids
        while len(pending) >= length:
            yield pending[:length]
            pending = pending[length:]
