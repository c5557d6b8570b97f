"""Rows of instructions and answers: a prompt format, targets, and whole texts packed into rows."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Target that the loss of transformers' models ignores."""

PAD = 0
"""Token after the last text of a row, as in MindFormers' ``PackingHandler``."""

Targets = Literal["next_token", "mindformers"]

SEPARATING = frozenset({
    "deepseek_v3", "glm", "glm4", "glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe",
})  # fmt: skip
"""Types of models that keep texts apart whose positions begin at 0 in one row."""

_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)


class Text(NamedTuple):
    """Tokens of an instruction and its answer."""

    ids: list[int]
    """Token ids."""

    targets: list[int]
    """For each token, the token to predict there, or `IGNORED`."""


def alpaca_prompt(row: Mapping[str, Any]) -> str:
    """Return the prompt of a row with the column ``instruction`` and, if it has one, ``input``.

    Source: Stanford Alpaca, ``train.py``. The answer follows without a space.
    """
    return (_WITH_INPUT if row.get("input") else _WITHOUT_INPUT).format_map(row)


def instruction_texts(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    targets: Targets,
    *,
    packing: bool,
) -> Iterator[Text]:
    """Yield the tokens of each row with the columns ``instruction``, ``output`` and ``input``.

    The text has three parts, which the tokenizer takes one by one: who speaks, the instruction
    with its input if it has one, and the answer with ``</s>``. Only tokens of the answer are
    targets.

    Source: MindFormers 1.7 to 2.0, ``AlpacaInstructDataHandler`` and ``PackingHandler``.

    Args:
        rows: Rows of the data.
        tokenizer: Tokenizer; it adds its special tokens to each part.
        length: Maximum number of tokens; the rest of a text is cut off.
        targets: ``next_token`` or ``mindformers``; see `DataSource.targets`.
        packing: Whether the texts will be packed.
    """
    for row in rows:
        parts = [
            (_SYSTEM, False),
            (f"USER: {alpaca_prompt(row)} ", False),
            (f"ASSISTANT: {row['output']}</s>", True),
        ]
        ids: list[int] = []
        labels: list[int] = []
        for part, is_answer in parts:
            tokens = tokenizer(part, truncation=False, verbose=False)["input_ids"]
            ids += tokens
            labels += tokens if is_answer else [IGNORED] * len(tokens)
        found = [*labels[1:], IGNORED][:length]
        if targets == "mindformers" and packing:
            found = [*found[1:], PAD]  # `PackingHandler` shifts the shifted labels once more
        yield Text(ids[:length], found)


def packed_rows(texts: Iterable[Text], length: int) -> Iterator[list[Text]]:
    """Yield the texts of each row: as many whole texts, in order, as fit into `length` tokens."""
    row: list[Text] = []
    size = 0
    for text in texts:
        if row and size + len(text.ids) > length:
            yield row
            row, size = [], 0
        row.append(text)
        size += len(text.ids)
    if row:
        yield row


def model_row(texts: Iterable[Text], length: int, *, separate: bool) -> dict[str, list[int]]:
    """Return the inputs of transformers' models for a row.

    A model predicts ``labels[t + 1]`` from the tokens up to ``t``. So that every token has its
    target, the row has one token more than `length`, whose own result does not count.

    Args:
        texts: Texts of the row.
        length: Number of tokens of the row; padding comes after the texts.
        separate: Whether tokens attend only to tokens of their own text. Positions then begin at 0
            in each text, which tells the model where texts begin; there must be no mask.
    """
    ids: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    for text in texts:
        ids += text.ids
        targets += text.targets
        positions += range(len(text.ids))
    padding = length - len(ids)
    row = {
        "input_ids": ids + [PAD] * (padding + 1),
        "labels": [IGNORED, *targets] + [IGNORED] * padding,
    }
    if separate:
        return row | {"position_ids": [*positions, *range(padding + 1)]}
    return row | {"attention_mask": [1] * (length + 1)}
