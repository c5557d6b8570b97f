"""Say that the tokenizer of a recipe does not know a part of the training rows."""

import re
from collections.abc import Callable
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_LEAST_SHARE = 0.01
"""Smallest share of the tokens that is told. A rare letter that is unknown is ordinary."""

_BATCH = 10_000
"""Number of rows that are read at once."""

_MARK = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{1,20}\]")
"""A mark of a chat template, such as ``<|im_start|>`` or ``[INST]``."""


def check_known(trainer: Any, say: Callable[[str], None]) -> None:
    """Warn in the main process if more than 1% of the tokens of the training rows are unknown.

    A tokenizer with bytes as its last resort knows everything. Nothing is said about streams, and
    about rows that the Trainer has not turned to tokens.

    Args:
        trainer: The Trainer, whose rows are prepared.
        say: Called with the warning.
    """
    rows, tokenizer = trainer.train_dataset, trainer.processing_class
    if (
        trainer.args.process_index != 0
        or not isinstance(rows, Dataset)
        or not isinstance(tokenizer, PreTrainedTokenizerBase)
        or "input_ids" not in rows.column_names
    ):
        return
    unknown = tokenizer.unk_token_id
    # Some tokenizers have one token for several purposes, as GPT-2's, which knows all bytes.
    if unknown is None or unknown in {tokenizer.eos_token_id, tokenizer.pad_token_id}:
        return
    number, total = 0, 0
    for batch in rows.select_columns(["input_ids"]).with_format("arrow").iter(_BATCH):
        tokens = pc.list_flatten(batch["input_ids"])
        number += pc.sum(pc.equal(tokens, unknown)).as_py() or 0
        total += len(tokens)
    if number > _LEAST_SHARE * total:
        name, share = tokenizer.unk_token, number / total
        says = f"{share:.1%} of the tokens of the training rows are {name!r}"
        marks = _unknown_marks(tokenizer, unknown)
        say(f"warning: {says}, {_WITH_MARKS.format(', '.join(marks)) if marks else _OTHERWISE}")


_OTHERWISE = (
    "which stands for all that the tokenizer does not know, so the model cannot learn it; name "
    "a tokenizer that was trained on such texts, or on bytes; `mfwrap data` shows the tokens"
)

_WITH_MARKS = (
    "because the tokenizer does not know {} of the chat template, so the model cannot tell turns "
    "apart; set model.chat_template to one whose marks the tokenizer has, or add them to the "
    "tokenizer as special tokens; `mfwrap data` shows the tokens"
)


def _unknown_marks(tokenizer: PreTrainedTokenizerBase, unknown: int) -> list[str]:
    """Return the marks of the tokenizer's chat template that are unknown to it."""
    if tokenizer.chat_template is None:
        return []
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except TemplateError:  # it takes other turns
        return []
    marks = dict.fromkeys(_MARK.findall(text))
    return [
        mark for mark in marks if unknown in tokenizer(mark, add_special_tokens=False)["input_ids"]
    ]
