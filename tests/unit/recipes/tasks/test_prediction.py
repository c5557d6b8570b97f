"""Prediction tasks encode labels and images, and compute their metrics."""

import json

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, List
from safetensors.torch import load_file
from sklearn.metrics import mean_squared_error, r2_score
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    EvalPrediction,
    ViTForImageClassification,
)

from mfwrap.recipes.data.built_in import DiabetesSource, DigitsSource, PythonTokensSource
from mfwrap.recipes.data.source import Rows
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.recipes.models.loading import ModelError
from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.recipes.tasks.prediction import (
    accuracy,
    build_image_classification,
    build_regression,
    build_sequence_classification,
    build_token_classification,
    regression_errors,
)
from mfwrap.runner import run_recipe
from support.ranks.recipes import train_recipe
from support.recipe_data import recipe_of
from support.recipe_texts import recipe_text

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


@pytest.mark.parametrize(
    ("build", "saved", "columns"),
    [
        (build_sequence_classification, BertForSequenceClassification, ("text", "label")),
        (build_token_classification, BertForTokenClassification, ("tokens", "labels")),
        (build_image_classification, ViTForImageClassification, ("image", "label")),
    ],
)
@pytest.mark.parametrize("is_typed", [True, False])
@pytest.mark.parametrize("case", [str, str.upper])
def test_a_head_keeps_its_classes(tmp_path, build, saved, columns, is_typed, case):
    """A class of the data has the row of the head that the checkpoint has for its name."""
    sizes = {key: size for key, size in BERT.items() if key != "model_type"}
    if saved is ViTForImageClassification:
        sizes = sizes | {"image_size": 2, "patch_size": 1, "num_channels": 1}
    names = {0: "z", 1: "x", 2: "y"}
    config = saved.config_class(**sizes, vocab_size=261, id2label=names)
    saved(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    inputs = {"text": "a", "tokens": ["a"], "image": [[0.0, 1.0], [0.5, 0.0]]}[columns[0]]
    named = [case(one) for one in "yxz"]
    found = Dataset.from_dict({columns[0]: [inputs] * 3, "label": named})
    if is_typed:
        found = found.cast_column("label", ClassLabel(names=sorted(named)))
    values = found["label"][:]
    if columns[1] == "labels":
        feature = List(found.features["label"])
        found = Dataset.from_dict({"tokens": [inputs] * 3, "labels": [[one] for one in values]})
        found = found.cast_column("labels", feature)
    keywords = build(ModelSettings(path=str(tmp_path)), PythonTokensSource(), Rows(found))

    assert keywords["model"].config.id2label == {at: case(one) for at, one in names.items()}
    batch = keywords["data_collator"](list(keywords["train_dataset"]))
    targets = batch["labels"][batch["labels"] != -100]
    assert [keywords["model"].config.id2label[int(one)] for one in targets] == named
    weights = load_file(tmp_path / "model.safetensors")["classifier.weight"]
    assert torch.equal(keywords["model"].classifier.weight, weights)


@pytest.mark.parametrize(
    "names",
    [
        ["neg", "pos"],  # those of the data
        ["POS", "NEG"],
        ["good", "bad"],
        ["neg", "neu", "pos"],
        ["LABEL_0", "LABEL_1"],
    ],
)
def test_both_tables_of_the_classes_agree(tmp_path, names):
    """A saved classifier has the number of each name, whatever the checkpoint had."""
    sizes = {key: size for key, size in BERT.items() if key != "model_type"}
    numbers = {name: number for number, name in enumerate(reversed(names))}  # contradict the names
    config = BertConfig(**sizes, vocab_size=261, id2label=dict(enumerate(names)), label2id=numbers)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    model = ModelSettings(path=str(tmp_path / "base"), tokenizer="bytes")
    rows = Rows(Dataset.from_dict({"text": ["a", "b"], "label": ["pos", "neg"]}))
    network = build_sequence_classification(model, PythonTokensSource(), rows)["model"]
    network.save_pretrained(tmp_path / "trained")

    saved = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert {name.lower() for name in saved["label2id"]} == {"pos", "neg"}
    assert {str(number): name for name, number in saved["label2id"].items()} == saved["id2label"]


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


def test_a_table_is_standardized():
    """The model takes over the mean and deviation of the training rows, unless told not to."""
    table = {"features": [[1.0, 9.0], [3.0, 9.0]], "target": [10.0, 30.0]}
    rows = Rows(Dataset.from_dict(table), Dataset.from_dict({"features": [[0, 0]], "target": [0]}))

    def network(rows=rows, **config):
        settings = ModelSettings(config={"model_type": "perceptron", **config})
        return build_regression(settings, DiabetesSource(), rows)["model"]

    model = network()
    assert model.feature_scale.mean.tolist() == [2, 9]
    assert model.feature_scale.deviation.tolist() == [1, 1]
    assert (model.target_scale.mean.item(), model.target_scale.deviation.item()) == (20, 10)
    assert network(standardize=False).feature_scale is None
    stream = Rows(rows.train.to_iterable_dataset(), None)
    assert network(stream).feature_scale is None
    with pytest.raises(ModelError, match=r"`config\.standardize` must be false, because streamed"):
        network(stream, standardize=True)


def test_a_trained_table_is_in_its_own_unit(tmp_path, monkeypatch):
    """A regression of large numbers learns; its checkpoint predicts and continues in raw units."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    years, areas = draw.integers(1900, 2024, 64), draw.uniform(20, 250, 64)
    prices = 1000 * areas + 500 * (years - 1900)
    lines = [f"{y},{a},{p}" for y, a, p in zip(years, areas, prices, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["year,area,price", *lines]))
    data = {"path": "rows.csv", "eval_path": "rows.csv"}
    data["columns"] = {"features": ["year", "area"], "target": "price"}
    model = {"config": {"model_type": "perceptron", "num_hidden_layers": 0}}
    training = {"max_steps": 60, "learning_rate": 0.1, "save_steps": 30}
    training |= {"save_strategy": "steps", "lr_scheduler_type": "constant", "output_dir": "run"}
    recipe = recipe_of("regression", data, model=model, **training)
    metrics = run_recipe(recipe).metrics

    assert metrics["eval_r2"] > 0.99
    saved = AutoModel.from_pretrained("run/model")
    rows = torch.tensor(np.stack([years, areas], axis=1)).float()
    error = (saved(rows).logits - torch.tensor(prices).float()).square().mean().item()
    assert metrics["eval_mse"] == pytest.approx(error, rel=1e-4)
    first = load_file("run/model/model.safetensors")
    run_recipe(recipe, resume="run/checkpoint-30")
    again = load_file("run/model/model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in first.items())


def test_a_table_on_two_ranks(tmp_path, two_ranks):
    """Two ranks train and save the same standardized model as one process."""
    settings = {"seed": 5, "output_dir": str(tmp_path / "alone")}
    alone = train_recipe(0, recipe_text(training=settings))
    settings |= {"output_dir": str(tmp_path / "ranks"), "per_device_train_batch_size": 4}
    both = two_ranks.run(train_recipe, recipe_text(training=settings))

    expected, found = (
        load_file(tmp_path / run / "model" / "model.safetensors") for run in ("alone", "ranks")
    )
    assert found.keys() == expected.keys()
    assert "target_scale.mean" in found
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    for metrics in both:
        assert metrics["eval_mse"] == pytest.approx(alone["eval_mse"], rel=1e-4)


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


def test_errors_of_large_targets():
    """Squares are taken in float64, where those of a large float32 are finite."""
    predictions, labels = np.float32([1e30, 3e30]), np.float32([2e30, 2e30 * 2])
    found = regression_errors(EvalPrediction(predictions, labels))

    assert found["mse"] == pytest.approx(1e60, rel=1e-6)
    assert found["r2"] == pytest.approx(0, abs=1e-6)
