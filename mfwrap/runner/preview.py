"""Show rows of a recipe's data as the model will see them."""

import itertools
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from datasets import Dataset, disable_progress_bars, enable_progress_bars, is_progress_bar_enabled
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments, default_data_collator

from mfwrap.recipes.data.columns import needed_columns
from mfwrap.recipes.data.source import Rows
from mfwrap.recipes.data.streams import column_names
from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.recipes.tasks.prompts import prompt_tokens
from mfwrap.runner.document import RecipeError, shown
from mfwrap.runner.objects import RecipeObjects
from mfwrap.runner.own_code import is_own
from mfwrap.runner.recipe import Recipe, data_errors
from mfwrap.runner.rehearsal import failure, limited, quiet
from mfwrap.runner.reward import WITHHELD
from mfwrap.runner.run import build_trainer, checked_rows, task_keywords
from mfwrap.runner.tuning import numbered_rows, tuning_of

_MAX_ROWS = 1_000
"""Number of rows to prepare, enough to fill packed sequences. All rows are checked."""

_MAX_PARTS = 8
"""Number of parts of a sequence to show: for a conversation, four turns."""

_LAST_PARTS = 2
"""Number of these parts that are the last ones, where a conversation may have an odd end."""

_MAX_CHARACTERS = 400
"""Number of characters of a part to show."""

_WIDTH = 100

_SPACE = "\N{OPEN BOX}"
"""Stands for a space at the beginning or at the end of a text."""

_PACKED = "seq_lengths"
"""Column in which TRL keeps the lengths of the rows that a packed sequence has."""

_NO_ROWS = "expected held-out rows to show, got none"

_STAND_IN = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
"""A small model. The trainers of TRL need a model to prepare their data, but do not use it."""


class _Prepared(NamedTuple):
    """What a task has prepared for the Trainer."""

    rows: Any
    """The data set whose rows go to `collate`."""

    collate: Any
    """Makes a batch of rows."""

    tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer of the texts; ``None`` for a task without text."""

    names: Mapping[int, str]
    """Name of each class, by its number."""


def preview(recipe: Recipe, num_rows: int = 5, *, held_out: bool = False) -> list[str]:
    """Return lines that show the first rows of a recipe as the model will see them.

    The first lines warn of numbers far from the others, and say what the rows were recognized as,
    if the task takes several forms of rows.
    The rows are prepared as for the training: tokenized, cut, packed and collated to a batch. For a
    text, the lines have its tokens as text again, and which of them count in the loss. The weights
    of the model are neither built nor loaded.

    Args:
        recipe: Checked recipe.
        num_rows: Number of rows to show. With fewer rows in the data, all of them are shown.
        held_out: Whether to show held-out rows instead of training rows.

    Raises:
        RecipeError: If the data do not fit the task, or there are no held-out rows to show.
    """
    said: list[str] = []
    bars = is_progress_bar_enabled()
    disable_progress_bars()
    try:
        with quiet(), recipe.code.importable():
            if recipe.task.gets_texts:
                return list(_texts(recipe, num_rows, held_out=held_out))
            prepared = _prepare(recipe, held_out=held_out, say=said.append)
            shown = [row for row, _ in zip(iter(prepared.rows), range(num_rows), strict=False)]
            batch = prepared.collate(shown)
    except RecipeError:
        raise
    except Exception as error:
        raise failure(recipe, "the data cannot be prepared", error) from error
    finally:
        if bars:
            enable_progress_bars()
    parts = ([said] if said else []) + list(_shown(recipe, prepared, shown, batch))
    return [line for lines in parts for line in (*lines, "")] + [_shapes(batch)]


def _prepare(recipe: Recipe, *, held_out: bool, say: Callable[[str], None]) -> _Prepared:
    key = "eval_dataset" if held_out else "train_dataset"
    if recipe.task.arguments() is TrainingArguments:
        with data_errors(RecipeObjects(recipe.document)):
            model = recipe.model.weightless()
        keywords = task_keywords(recipe, model, checked_rows(recipe, say=say))
        rows, collate = keywords[key], keywords.get("data_collator", default_data_collator)
        tokenizer = keywords.get("processing_class")
        names = getattr(getattr(keywords["model"], "config", None), "id2label", {})
    else:
        rows, collate, tokenizer = _of_trainer(recipe, key, say)
        names = {}
    if rows is None:
        raise recipe.document.error(("data",), _NO_ROWS)
    return _Prepared(rows, collate, tokenizer, names)


def _texts(recipe: Recipe, num_rows: int, *, held_out: bool) -> Iterator[str]:
    """Yield the lines of texts that the Trainer tokenizes itself in each step."""
    said: list[str] = []
    tables: list[Dataset] = []
    found = checked_rows(recipe, tables.append, said.append)
    if not recipe.task.forms:
        said.append(numbered_rows(found, tables))
    rows = found.evaluation if held_out else found.train
    if rows is None:
        raise recipe.document.error(("data",), _NO_ROWS)
    if (tuning := tuning_of(recipe, found, tables)) is not None:
        said.append(tuning.line)
    names = column_names(rows)
    needed = needed_columns(recipe.task.needs_of(recipe.data), names) or {}
    others = [name for name in names if name not in {*needed, *WITHHELD}]
    tokenizer: Any = recipe.model.make_tokenizer()
    length = recipe.data.sequence_length
    yield from [*said, ""] if said else ()
    for number, row in enumerate(itertools.islice(rows, num_rows), start=1):
        tokens: dict[str, list[int]] = {}
        for name in needed:
            if isinstance(text := row[name], str):
                ids = tokenizer(text, truncation=length is not None, max_length=length)["input_ids"]
            else:
                ids = prompt_tokens(tokenizer, text)
            tokens[name] = ids
        counts = ", ".join(f"{name} {len(ids)} tokens" for name, ids in tokens.items())
        yield f"row {number}: {counts}"
        for name, ids in tokens.items():
            yield from _field(name, str(tokenizer.decode(ids)))
        if "reward" in recipe.task.sections:
            for name in others:
                yield from _field("for the reward", f"{name}: {shown(row[name])}")
        yield ""


def _of_trainer(
    recipe: Recipe, key: str, say: Callable[[str], None]
) -> tuple[Any, Any, PreTrainedTokenizerBase]:
    """Return rows, collator and tokenizer of a trainer of TRL, which prepares the data itself."""
    tokenizer = recipe.model.tokenizer or recipe.model.path or "bytes"
    with data_errors(RecipeObjects(recipe.document)):
        recipe.model.make_tokenizer()  # the stand-in would name another key in an error
    stand_in = ModelSettings(
        config=_STAND_IN,
        tokenizer=tokenizer,
        chat_template=recipe.model.chat_template,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    with tempfile.TemporaryDirectory(prefix="mfwrap-") as folder:
        small = limited(recipe, folder, _MAX_ROWS, _MAX_ROWS)
        trainer, _ = build_trainer(
            replace(small, model=stand_in, peft=None, make_average=None, make_callbacks=()), say=say
        )
        loader = trainer.get_train_dataloader()
        rows = loader.dataset if key == "train_dataset" else trainer.eval_dataset
        if isinstance(rows, Dataset) and _PACKED in rows.column_names:
            number = sum(map(len, rows[_PACKED]))
            kind = "first " if number >= _MAX_ROWS else ""
            length = f"{trainer.args.max_length} tokens"
            say(f"the {kind}{number:,} rows fill {len(rows):,} sequences of {length}")
        return rows, loader.collate_fn, trainer.processing_class


def _shown(
    recipe: Recipe,
    prepared: _Prepared,
    rows: Sequence[Mapping[str, Any]],
    batch: Mapping[str, Any],
) -> Iterator[list[str]]:
    """Yield the lines of each row."""
    if Rows(prepared.rows).are_inputs or is_own(recipe.document.data["task"]):
        yield from _inputs(batch)
        return
    if "input_ids" not in batch:
        yield from _numbers(prepared, batch)
        return
    if len(batch["input_ids"]) < len(rows) or _PACKED in rows[0]:
        yield from _joined(prepared, rows)
        return
    tokens, kept = batch["input_ids"], batch.get("attention_mask")
    kept = torch.ones_like(tokens) if kept is None else kept
    is_of_pairs = "completion_mask" in batch  # first all preferred answers, then all rejected ones
    half = len(tokens) // 2
    order: Iterable[int] = range(len(tokens))
    if is_of_pairs:
        order = [at for index in range(half) for at in (index, half + index)]
    for index in order:
        ids = tokens[index]
        sequence = _Sequence(prepared.tokenizer, ids, kept[index].bool())
        title = f"sequence {index + 1}"
        if is_of_pairs:
            kind = "preferred" if index < half else "rejected"
            yield sequence.language(
                f"pair {index % half + 1}, {kind}", batch["completion_mask"][index].bool()
            )
        elif recipe.task.classes is None:
            yield sequence.language(title, batch["labels"][index].ne(-100))
        elif recipe.task.classes == "labels":
            yield sequence.words(title, batch["labels"][index], prepared.names)
        else:
            label = int(batch["labels"][index])
            yield [*sequence.language(title, None), *_field("label", prepared.names[label])]


def _joined(prepared: _Prepared, sequences: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the lines of each row of sequences that the collator joins to a single one."""
    for number, sequence in enumerate(sequences, start=1):
        batch = prepared.collate([sequence])
        tokens, targets = batch["input_ids"][0], batch["labels"][0].ne(-100)
        lengths = sequence.get(_PACKED) or [len(tokens)]
        ends = list(itertools.accumulate(lengths))
        for at, (end, length) in enumerate(zip(ends, lengths, strict=True), start=1):
            ids = tokens[end - length : end]
            row = _Sequence(prepared.tokenizer, ids, torch.ones_like(ids).bool())
            title = f"sequence {number}, row {at} of {len(lengths)}"
            yield row.language(title, targets[end - length : end])


class _Sequence:
    """A tokenized text.

    Args:
        tokenizer: Tokenizer that makes text of tokens.
        ids: Tokens, shape ``(T,)``.
        kept: Which tokens are no padding, shape ``(T,)``.
    """

    def __init__(self, tokenizer: Any, ids: Tensor, kept: Tensor) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._kept = kept

    def language(self, title: str, targets: Tensor | None) -> list[str]:
        """Return lines with parts of the text, by whether their tokens count in the loss.

        Args:
            title: Beginning of the first line.
            targets: Which tokens are targets, shape ``(T,)``; ``None`` for a text with a class.
        """
        if targets is None:
            return [self._title(title, None), *_field("text", self._text(self._kept))]
        inside = targets & self._kept
        # The first token is no target: there is no token before it to predict it from.
        lines = [self._title(title, int(inside[1:].sum()))]
        parts = [
            (is_target, [at for at, _ in part])
            for is_target, part in itertools.groupby(
                ((at, bool(inside[at])) for at in self._kept.nonzero().flatten().tolist()),
                key=lambda pair: pair[1],
            )
        ]
        left_out = max(0, len(parts) - _MAX_PARTS)
        first = len(parts) - left_out - _LAST_PARTS
        for number, (is_target, positions) in enumerate(parts):
            if first <= number < first + left_out:
                if number == first:
                    lines.append(f"  ... {left_out} more part{'' if left_out == 1 else 's'}")
                continue
            name = "in the loss" if is_target else "not in the loss"
            lines += _field(name, self._text(torch.tensor(positions)))
        return lines

    def words(self, title: str, labels: Tensor, names: Mapping[int, str]) -> list[str]:
        """Return lines with the words of a text and their classes.

        A word begins with a token that has a class; its other tokens have none.
        """
        words: list[tuple[list[int], str]] = []
        for at in self._kept.nonzero().flatten().tolist():
            label = int(labels[at])
            if label != -100 or not words:
                words.append(([], "not in the loss" if label == -100 else names[label]))
            words[-1][0].append(at)
        said = [f"{self._text(torch.tensor(word)).strip()} [{name}]" for word, name in words]
        num_targets = int((labels.ne(-100) & self._kept).sum())
        return [self._title(title, num_targets), *_field("words", ", ".join(said))]

    def _title(self, title: str, num_targets: int | None) -> str:
        num_tokens = int(self._kept.sum())
        said = [f"{num_tokens} tokens"]
        if num_targets is not None:
            said.append(f"{num_targets} of them count in the loss")
        if num_tokens < len(self._ids):
            said.append(f"{len(self._ids) - num_tokens} tokens of padding")
        return f"{title}: {', '.join(said)}"

    def _text(self, positions: Tensor) -> str:
        return str(self._tokenizer.decode(self._ids[positions].tolist()))


def _inputs(batch: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of each row of inputs that no task of mfwrap has prepared."""
    tensors = {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() > 0
    }
    for index in range(min((len(value) for value in tensors.values()), default=0)):
        lines = [f"row {index + 1}"]
        for name, values in tensors.items():
            row = values[index]
            said = f"{tuple(row.shape)} {str(row.dtype).removeprefix('torch.')}"
            if row.numel():
                said += f", values from {row.min():.6g} to {row.max():.6g}"
            lines += _field(name, said)
        yield lines


def _numbers(prepared: _Prepared, batch: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of rows of numbers: images with a class, or features with a target."""
    name = "pixel_values" if "pixel_values" in batch else "features"
    for index, (values, label) in enumerate(zip(batch[name], batch["labels"], strict=True)):
        numbers = torch.as_tensor(values, dtype=torch.float32)
        if name == "features":
            listed = ", ".join(f"{one:.6g}" for one in numbers.tolist())
            fields = [*_field("features", listed), *_field("target", f"{float(label):.6g}")]
        else:
            size = " x ".join(map(str, numbers.shape))
            low, high, mean = numbers.min(), numbers.max(), numbers.mean()
            said = f"{size} values from {low:.3g} to {high:.3g}, mean {mean:.3g}"
            fields = [*_field("image", said), *_field("label", prepared.names[int(label)])]
        yield [f"row {index + 1}", *fields]


def _field(name: str, text: str) -> list[str]:
    """Return lines with a name and a text, which is cut, wrapped and indented.

    Spaces at the ends, and several at the end of a line, which would not be seen, are marked.
    """
    inner = text.strip(" ")
    begin = len(text) - len(text.lstrip(" ")) if inner else 0
    text = _SPACE * begin + inner + _SPACE * (len(text) - begin - len(inner))
    escaped = text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")
    if len(escaped) > _MAX_CHARACTERS:
        left = len(escaped) - _MAX_CHARACTERS
        escaped = f"{escaped[:_MAX_CHARACTERS]}... ({left:,} more characters)"
    first = f"  {name:<15}  "
    lines = textwrap.wrap(escaped, _WIDTH - len(first), drop_whitespace=False) or [""]
    indents = [first, *[" " * len(first)] * (len(lines) - 1)]
    return [f"{each}{_marked(line)}".rstrip() for each, line in zip(indents, lines, strict=True)]


def _marked(line: str) -> str:
    """Return a line with marks for several spaces at its ends, and without a single one."""
    inner = line.strip(" ")
    ends = (len(line) - len(line.lstrip(" ")), len(line) - len(line.rstrip(" ")))
    begin, end = (_SPACE * number if number > 1 else "" for number in ends)
    return f"{begin}{inner}{end}" if inner else _SPACE * len(line)


def _shapes(batch: Mapping[str, Any]) -> str:
    shapes = [
        f"{name} {tuple(value.shape)}" for name, value in batch.items() if isinstance(value, Tensor)
    ]
    return f"as one batch: {', '.join(shapes)}"
