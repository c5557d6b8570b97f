"""Build the Trainer's keyword arguments for classification and regression."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, IterableDataset, List
from torch import Tensor
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

from mfwrap.recipes.data.source import SOURCE, DataError, DataSource, Rows, kept_columns
from mfwrap.recipes.data.streams import column_names
from mfwrap.recipes.models.image_processor import num_channels_in, pixel_values
from mfwrap.recipes.models.loading import ModelError
from mfwrap.recipes.models.settings import (
    ModelSettings,
    fitting_length,
    make_text_model,
)

_IGNORED = -100


def build_sequence_classification(
    model: ModelSettings, data: DataSource, rows: Rows
) -> dict[str, Any]:
    """Return the Trainer's keyword arguments for classifying texts; the metric is ``accuracy``."""
    tokenizer = model.make_tokenizer()
    labels = _labels(rows, "label", model)
    network = make_text_model(
        model, AutoModelForSequenceClassification, tokenizer, **labels.settings
    )
    length = fitting_length(data, network)

    def encode(batch: Mapping[str, Any]) -> dict[str, Any]:
        tokens = tokenizer(batch["text"], truncation=True, max_length=length)
        return {**tokens, "labels": [labels.index(label) for label in batch["label"]]}

    return {
        "model": network,
        **rows.prepared(lambda texts: _mapped(texts, encode)),
        "data_collator": DataCollatorWithPadding(tokenizer),
        "processing_class": tokenizer,
        "compute_metrics": accuracy,
    }


def build_token_classification(
    model: ModelSettings, data: DataSource, rows: Rows
) -> dict[str, Any]:
    """Return the Trainer's keyword arguments for classifying words; the metric is ``accuracy``.

    The first token of a word has the word's label. The loss ignores its other tokens.
    """
    tokenizer = model.make_tokenizer()
    labels = _labels(rows, "labels", model)
    network = make_text_model(model, AutoModelForTokenClassification, tokenizer, **labels.settings)
    length = fitting_length(data, network)

    def encode(batch: Mapping[str, Any]) -> dict[str, Any]:
        tokens = tokenizer(
            batch["tokens"], is_split_into_words=True, truncation=True, max_length=length
        )
        of_words = [[labels.index(label) for label in row] for row in batch["labels"]]
        of_tokens = [_first_tokens(tokens.word_ids(i), row) for i, row in enumerate(of_words)]
        return {**tokens, "labels": of_tokens}

    return {
        "model": network,
        **rows.prepared(lambda texts: _mapped(texts, encode)),
        "data_collator": DataCollatorForTokenClassification(tokenizer),
        "processing_class": tokenizer,
        "compute_metrics": accuracy,
    }


def build_image_classification(
    model: ModelSettings, data: DataSource, rows: Rows
) -> dict[str, Any]:
    """Return the Trainer's keyword arguments for classifying images; the metric is ``accuracy``.

    An ``image`` is a PIL image, or values in [0, 1] of shape ``(H, W)`` or ``(H, W, C)``. All
    images must have the same size, unless ``data.image_size`` is set. The pixels are scaled as the
    checkpoint's image processor does; without one, the model gets values in [-1, 1].
    """
    labels = _labels(rows, "label", model)
    first = next(iter(rows.train))["image"]
    model.check_channels(num_channels_in(first, data.image_size))
    processor = model.make_image_processor(first, data.image_size)
    _, num_channels, height, _ = pixel_values(processor, [first]).shape

    def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "pixel_values": pixel_values(processor, [one["pixel_values"] for one in examples]),
            "labels": torch.tensor([labels.index(one["labels"]) for one in examples]),
        }

    def renamed(images: Dataset) -> Dataset:
        # Rename the columns, because the Trainer drops those that are not arguments of the model.
        names = {"image": "pixel_values", "label": "labels"}
        return images.select_columns(kept_columns(images, names)).rename_columns(names)

    return {
        "model": model.make_model(
            AutoModelForImageClassification,
            image_size=height,
            num_channels=num_channels,
            **labels.settings,
        ),
        **rows.prepared(renamed),
        "data_collator": collate,
        "processing_class": processor,
        "compute_metrics": accuracy,
    }


def build_regression(model: ModelSettings, data: DataSource, rows: Rows) -> dict[str, Any]:
    """Return the Trainer's keyword arguments for predicting one number from a row's features.

    Features and targets are standardized inside the model, with mean and standard deviation of the
    training rows, unless the rows are streamed or ``model.config.standardize`` is false. A
    checkpoint has its own. Evaluation reports the metrics ``mse`` and ``r2`` in the unit of the
    targets.
    """
    del data
    num_features = len(next(iter(rows.train))["features"])
    given = (model.config or {}).get("num_features", num_features)
    if given != num_features:
        says = f"{num_features}, the number of features of a row, or left out, got {given!r:.80}"
        msg = f"`config.num_features` must be {says}"
        raise ModelError(msg)

    def kept(table: Dataset) -> Dataset:
        kept_ones = kept_columns(table, ["features", "target"])
        return table.select_columns(kept_ones).rename_column("target", "labels")

    is_streamed = isinstance(rows.train, IterableDataset)
    network: Any = model.make_model(None, num_features=num_features, standardize=not is_streamed)
    if model.config is not None and network.config.standardize:
        if is_streamed:
            msg = "`config.standardize` must be false, because streamed rows have no known mean"
            raise ModelError(msg)
        columns = ("features", "target")
        network.standardize(*(np.asarray(rows.train[name][:], np.float64) for name in columns))
    return {
        "model": network,
        **rows.prepared(kept),
        "data_collator": _collate_numbers,
        "compute_metrics": regression_errors,
    }


def _collate_numbers(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return rows as a batch in float32; the rows of a table may be integers."""
    batch = default_data_collator(examples)
    return {name: values.float() for name, values in batch.items()}


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of labels that are predicted correctly.

    Args:
        prediction: ``EvalPrediction`` of transformers with logits of shape ``(..., classes)`` and
            labels. Labels of -100 are ignored.
    """
    logits = prediction.predictions
    targets = prediction.label_ids
    counted = targets != _IGNORED
    hits = (np.argmax(logits, axis=-1) == targets) & counted
    return {"accuracy": float(hits.sum() / max(1, counted.sum()))}


def regression_errors(prediction: Any) -> dict[str, float]:
    """Return the mean squared error and the share of the variance that is explained.

    Args:
        prediction: ``EvalPrediction`` of transformers, shapes ``(N,)``.
    """
    # The square of a large float32 would overflow.
    targets = np.asarray(prediction.label_ids, np.float64)
    mse = float(np.mean((prediction.predictions - targets) ** 2))
    variance = float(np.var(targets))
    return {"mse": mse, "r2": 1 - mse / variance if variance else float("nan")}


class _Labels:
    """The classes of a data set, and the model's index of each class.

    Args:
        names: Names of the classes.
        values: Values of the classes in the rows, in the order of `names`.
    """

    def __init__(self, names: list[str], values: list[Any]) -> None:
        self._numbers = {value: number for number, value in enumerate(values)}
        self.settings = {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
        }

    def index(self, value: Any) -> int:
        """Return the index of a class.

        Raises:
            ValueError: If the class is unknown.
        """
        if value not in self._numbers:
            msg = f"`label` must be one of {list(self._numbers)}, got {value!r}"
            raise ValueError(msg)
        return self._numbers[value]


def _labels(rows: Rows, column: str, model: ModelSettings) -> _Labels:
    """Return the classes of the data, numbered as in the checkpoint if it has the same ones.

    As in transformers' script ``run_glue.py``, the case of the names does not count.
    """
    names, values = _classes(rows, column, model)
    saved = model.class_names()
    for form in (str, str.casefold):
        places = {form(name): place for place, name in enumerate(saved)}
        if len(places) == len(names) and places.keys() == set(map(form, names)):
            order = sorted(range(len(names)), key=lambda at: places[form(names[at])])
            return _Labels([names[at] for at in order], [values[at] for at in order])
    return _Labels(names, values)


def _classes(rows: Rows, column: str, model: ModelSettings) -> tuple[list[str], list[Any]]:
    """Return the name of each class, and its value in the rows."""
    feature = (rows.train.features or {}).get(column)
    inner = feature.feature if isinstance(feature, List) else feature
    if isinstance(inner, ClassLabel):
        return list(inner.names), list(range(len(inner.names)))
    if isinstance(rows.train, IterableDataset):
        if model.num_labels is None:
            msg = (
                "`data` must say its classes, because a stream is not read beforehand; use a "
                "column of type ClassLabel, or numbers from 0 and `model.config.num_labels`"
            )
            raise DataError(msg)
        numbers = range(model.num_labels)
        return [str(number) for number in numbers], list(numbers)
    values = [value for part in rows if part is not None for value in part[column]]
    if isinstance(feature, List):
        values = [value for row in values for value in row]
    found = sorted(set(values))
    return [str(value) for value in found], found


def _mapped(rows: Any, encode: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    removed = [name for name in column_names(rows) if name != SOURCE]
    return rows.map(encode, batched=True, remove_columns=removed)


def _first_tokens(words: list[int | None], labels: list[int]) -> list[int]:
    """Return labels of tokens: the word's label for a word's first token, -100 for all others."""
    before = [None, *words]
    return [
        _IGNORED if word is None or word == last else labels[word]
        for last, word in zip(before, words, strict=False)
    ]
