"""Prediction tasks encode labels and images, and compute their metrics."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from sklearn.metrics import mean_squared_error, r2_score
from transformers import EvalPrediction

from mfwrap.recipes.data.built_in import DiabetesSource, DigitsSource, PythonTokensSource
from mfwrap.recipes.data.source import Rows
from mfwrap.recipes.models.settings import ModelError, ModelSettings
from mfwrap.recipes.tasks.prediction import (
    accuracy,
    build_image_classification,
    build_regression,
    build_sequence_classification,
    build_token_classification,
    regression_errors,
)

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}


def test_labels_of_texts_are_numbered():
    """Labels are numbered in alphabetical order, and the model gets their names."""
    rows = Rows(Dataset.from_dict({"text": ["a", "b", "c"], "label": ["x", "z", "y"]}), None)
    keywords = build_sequence_classification(
        ModelSettings(config=BERT), PythonTokensSource(sequence_length=8), rows
    )

    assert keywords["train_dataset"]["labels"][:] == [0, 2, 1]
    assert keywords["model"].config.id2label == {0: "x", 1: "y", 2: "z"}
    assert keywords["eval_dataset"] is None


def test_only_the_first_token_of_a_word_has_a_label():
    """All tokens of a word except the first have the label -100, which the loss ignores."""
    rows = Rows(Dataset.from_dict({"tokens": [["ab", "c"]], "labels": [["x", "y"]]}), None)
    keywords = build_token_classification(
        ModelSettings(config=BERT), PythonTokensSource(sequence_length=8), rows
    )

    assert keywords["train_dataset"]["labels"][0] == [0, -100, 1]


def test_images_are_scaled_to_the_range_of_the_model():
    """Pixel values from 0 to 1 become values from -1 to 1, with the channel dimension first."""
    images = [[[0.0, 1.0], [0.5, 0.0]], [[1.0, 0.0], [0.0, 0.0]]]
    rows = Rows(Dataset.from_dict({"image": images, "label": [3, 5]}), None)
    vit = BERT | {"model_type": "vit", "patch_size": 1}
    del vit["max_position_embeddings"]
    keywords = build_image_classification(ModelSettings(config=vit), DigitsSource(), rows)
    batch = keywords["data_collator"](list(keywords["train_dataset"]))

    assert torch.equal(batch["pixel_values"][0], torch.tensor([[[-1.0, 1.0], [0.0, -1.0]]]))
    assert torch.equal(batch["labels"], torch.tensor([0, 1]))


def test_accuracy_ignores_what_is_no_target():
    """Labels of -100 are not counted in the accuracy."""
    logits = np.array([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    labels = np.array([[1, -100], [1, 1]])

    assert accuracy(EvalPrediction(logits, labels)) == {"accuracy": 2 / 3}


def test_a_number_of_features_that_the_data_do_not_have():
    """A perceptron for rows of another length is refused."""
    rows = Rows(Dataset.from_dict({"features": [[1.0, 2.0]], "target": [1.0]}), None)
    model = ModelSettings(config={"model_type": "perceptron", "num_features": 3})

    with pytest.raises(ModelError, match=r"^`config\.num_features` must be 2, .*, got 3$"):
        build_regression(model, DiabetesSource(), rows)


def test_regression_errors_are_those_of_scikit_learn():
    """The metrics are the mean squared error and the coefficient of determination."""
    targets, predictions = np.array([1.0, 2.0, 4.0]), np.array([1.5, 2.0, 3.0])

    assert regression_errors(EvalPrediction(predictions, targets)) == pytest.approx(
        {"mse": mean_squared_error(targets, predictions), "r2": r2_score(targets, predictions)}
    )


def test_whole_numbers_become_floats():
    """Integer features and targets, as in a table, are float32 in a batch, as the model needs."""
    rows = Rows(Dataset.from_dict({"features": [[1, 2], [3, 4]], "target": [5, 6]}), None)
    keywords = build_regression(
        ModelSettings(config={"model_type": "perceptron"}), DiabetesSource(), rows
    )
    batch = keywords["data_collator"](list(keywords["train_dataset"]))
    output = keywords["model"](**batch)

    assert {values.dtype for values in batch.values()} == {torch.float32}
    assert torch.isfinite(output.loss)
