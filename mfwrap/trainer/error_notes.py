"""After an error of a Trainer's training, say what the cause is likely to be, and what to do."""

import contextlib
import functools
import inspect
import re
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from transformers import EvalPrediction

from mfwrap.step.error_notes import IGNORED
from mfwrap.tensors.wrappers import unwrapped_network
from mfwrap.trainer.view import TrainerView

_WITHOUT_LOSS = "did not return a loss"
_UNEQUAL = re.compile(r"expected sequence of length \d+ at dim \d+|Unable to create tensor")
"""Texts of the errors of collators that do not pad."""

_NO_CLASS = re.compile(
    r"row \d+ of the batch has the label -?\d+(?:, and the model has (\d+) classes)?"
)
"""Text of the note about a label that is no class; see `mfwrap.step.error_notes`."""

_OF_LABELS = "`labels` in this case"
"""Text of the error if only the labels were not padded."""

_PADDING_OF_LABELS = (
    "the labels of a batch have different lengths, and the collator pads only the tokens; pass "
    "data_collator=DataCollatorForTokenClassification(tokenizer) or "
    "DataCollatorForSeq2Seq(tokenizer), which pad the labels, too"
)
_PADDING = (
    "rows of a batch have different lengths, and the collator does not pad them all; pass "
    "`processing_class=tokenizer` or `data_collator=DataCollatorWithPadding(tokenizer)`, and if "
    "each token has a label, DataCollatorForTokenClassification or DataCollatorForSeq2Seq, which "
    "pad the labels, too"
)

OF_MESSAGES = (
    "the completions are lists of messages here, because the prompts are messages, so the text of "
    'one is completion[0]["content"]'
)
"""What a reward function gets whose prompts are lists of messages."""

_TEXTS = (
    "the completions are plain strings here, because the prompts are texts, so a completion is its "
    'text itself, without [0]["content"]; or write the prompts as lists of messages'
)


def explain_missing_loss(
    error: BaseException, model: Any, rows: Any, inputs: Mapping[str, Any]
) -> None:
    """Add a note to the Trainer's error for a model that has returned no loss.

    Args:
        error: Any error.
        model: Model that was trained, also wrapped.
        rows: Training data.
        inputs: Batch of the model.
    """
    if _WITHOUT_LOSS not in str(error) or "labels" in inputs:
        return
    inner: Any = unwrapped_network(model)
    kind = type(inner).__name__
    first = _first(rows)
    given = next((name for name in ("labels", "label") if name in first), None)
    if given is not None and isinstance(first[given], str):
        note = (
            f"the batch has no labels, because the column `{given}` holds texts, such as "
            f"{first[given]!r:.40}; replace them by the numbers of the classes, from 0"
        )
    elif given is not None:
        note = (
            f"{kind} takes no labels, so the column `{given}` was left out; use a class with a "
            "head and a loss, such as AutoModelForSequenceClassification"
        )
    else:
        note = (
            f"the data have no column `labels`, only {sorted(map(str, first))}; add it, or for a "
            "language model pass data_collator=DataCollatorForLanguageModeling(tokenizer, "
            "mlm=False), which makes it from the tokens"
        )
    error.add_note(note)


@contextlib.contextmanager
def explaining_training(trainer: TrainerView) -> Iterator[None]:
    """Add a note to an error of a training within the block, if its cause can be told."""
    try:
        yield
    except Exception as error:
        causes = (
            _of_labels,
            _of_rows,
            _of_columns,
            _of_early_stopping,
            _of_own_metric,
            _of_reward,
            _of_missing_loss,
        )
        note = next(filter(None, (cause(error, trainer) for cause in causes)), None)
        if note is not None:
            error.add_note(note)
        raise


def _of_labels(error: BaseException, trainer: TrainerView) -> str | None:
    """Name the rows of the data with labels that are no classes: a batch may be shuffled."""
    found = _NO_CLASS.search("\n".join(getattr(error, "__notes__", ())))
    if found is None:
        return None
    rows: Any = trainer.train_dataset
    number = None if found[1] is None else int(found[1])
    for column in ("labels", "label"):
        # A data set of the user's own may raise any error, and other data may have the label.
        with contextlib.suppress(Exception):
            labels = list(rows[column])
            bad = [
                row
                for row, label in enumerate(labels)
                if (IGNORED != label < 0 if number is None else label >= number)
            ]
            return (
                f"{len(bad)} of {len(labels)} rows of `train_dataset` have such a label, the first "
                f"is row {bad[0]}, counted from 0; repair a wrong label, or leave its row out"
            )
    return None


def _of_rows(error: BaseException, _: TrainerView) -> str | None:
    """Say that a collator cannot make one tensor of several rows."""
    if not isinstance(error, ValueError) or _UNEQUAL.search(str(error)) is None:
        return None
    return _PADDING_OF_LABELS if _OF_LABELS in str(error) else _PADDING


def _of_columns(error: BaseException, trainer: TrainerView) -> str | None:
    """Say that the data are texts, and not the inputs of the model."""
    if "No columns in the dataset match" not in str(error):
        return None
    first, model = _first(trainer.train_dataset), unwrapped_network(trainer.model)
    text = next((name for name, value in first.items() if isinstance(value, str)), "text")
    return (
        f"the data have the columns {sorted(map(str, first))}, and {type(model).__name__} takes "
        f"{getattr(model, 'main_input_name', 'other ones')}; tokenize the texts first, for example "
        f'by `rows.map(lambda row: tokenizer(row["{text}"]))`'
    )


def _of_early_stopping(error: BaseException, _: TrainerView) -> str | None:
    """Say which arguments transformers' `EarlyStoppingCallback` needs."""
    text = str(error)
    if not isinstance(error, AssertionError) or not text.startswith("EarlyStoppingCallback"):
        return None
    if "metric_for_best_model" not in text:
        return "set eval_strategy='steps' or 'epoch' in TrainingArguments"
    return (
        "set load_best_model_at_end=True in TrainingArguments, or metric_for_best_model='eval_loss'"
    )


def _of_own_metric(error: BaseException, trainer: TrainerView) -> str | None:
    """Say what the user's function has got, if it has raised the error."""
    frame = _frame_in(error, trainer.compute_metrics)
    got = frame and next(iter(frame.f_locals.values()), None)
    if not isinstance(got, EvalPrediction):
        return None
    return (
        f"`compute_metrics` got predictions of {_shape(got.predictions)} and labels of "
        f"{_shape(got.label_ids)}; predictions are outputs of the model: of a classifier, they are "
        "logits, and `predictions.argmax(-1)` are the classes"
    )


def _shape(arrays: Any) -> str:
    if isinstance(arrays, tuple | list):
        return f"shapes ({', '.join(_shape(array).partition(' ')[2] for array in arrays)})"
    return f"shape {getattr(arrays, 'shape', None)}"


def _of_reward(error: BaseException, trainer: TrainerView) -> str | None:
    """Say what the completions are, if a reward function takes them for something else."""
    for reward in getattr(trainer, "reward_funcs", None) or ():
        if (frame := _frame_in(error, reward)) is None:
            continue
        names = dict(frame.f_locals)
        for one in list(names.values()):
            names |= one if isinstance(one, dict) else {}  # such as its **kwargs
        lists = {
            key: one
            for key, one in names.items()
            if isinstance(key, str) and isinstance(one, list) and one
        }
        of_rows = sorted(lists.keys() - {"prompts", "completions", "completion_ids"})
        if "NoneType" in str(error):
            empty = [f"`{key}`" for key in of_rows if any(one is None for one in lists[key])]
            verb = "is" if len(empty) == 1 else "are"
            return f"{' and '.join(empty)} {verb} None in some of these rows" if empty else None
        first = lists.get("completions", [None])[0]
        if isinstance(first, str):
            return _TEXTS if _is_about(error, "string|str") else None
        if not (isinstance(first, list) and _is_about(error, "list|dict")):
            return None
        # The error may be about a column of the data whose values are lists, too.
        others = [
            f"`{key}`"
            for key in of_rows
            if isinstance(lists[key][0], list) and lists[key] is not lists.get("completions")
        ]
        too = f"; the values of {' and '.join(others)} are lists, too" if others else ""
        return OF_MESSAGES + too
    return None


def _is_about(error: BaseException, kinds: str) -> bool:
    """Return whether Python's error is about a use that values of some types do not have.

    Args:
        error: The error.
        kinds: Regular expression of the types' names.
    """
    if isinstance(error, KeyError):  # a number in place of the key of a message
        return "dict" in kinds and not isinstance(error.args[0], str)
    if isinstance(error, IndexError):  # the first message of an empty text
        return str(error).startswith("string") and "string" in kinds
    is_of_use = isinstance(error, (AttributeError, TypeError))
    return is_of_use and re.search(rf"\b({kinds})\b", str(error)) is not None


def _frame_in(error: BaseException, function: Any) -> FrameType | None:
    """Return the call of a function, or of an object, in which an error arose; ``None`` if none."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((frame for frame in frames if frame.f_code is code), None)


def _of_missing_loss(error: BaseException, trainer: TrainerView) -> str | None:
    """Say that an evaluation had no loss, by which the best model is chosen, without labels."""
    is_missing = isinstance(error, KeyError) and "metric_for_best_model" in str(error)
    rows = trainer.eval_dataset
    first = _first(next(iter(rows.values()), None) if isinstance(rows, dict) else rows)
    if not is_missing or not first or {"label", *trainer.label_names} & first.keys():
        return None
    return (
        f"the rows of `eval_dataset` have none of the columns {list(trainer.label_names)}, only "
        f"{sorted(map(str, first))}, so an evaluation has no loss; add the labels, or choose a "
        "metric that your `compute_metrics` returns"
    )


def _first(rows: Any) -> Mapping[str, Any]:
    """Return the first row; empty if it cannot be had without side effects."""
    try:
        found = rows[0]
    except Exception:  # noqa: BLE001  (a data set of the user's own, or a stream)
        return {}
    return found if isinstance(found, Mapping) else {}
