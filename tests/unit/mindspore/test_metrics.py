"""Metrics with MindSpore's names agree with those of other libraries."""

import sys

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from mfwrap.mindspore.metrics import EvaluationMetrics, LossMetric, named_metrics

CPU = torch.device("cpu")
NAMES = {"accuracy", "acc", "top_1_accuracy", "precision", "recall", "F1", "confusion_matrix"}


@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_metrics_are_those_of_a_count_by_hand(seed, sizes):
    """Metrics over all samples agree with scikit-learn and NumPy, for any batch sizes."""
    Accelerator(cpu=True)
    generator = np.random.default_rng(seed)
    num_classes = 6
    scores = generator.normal(size=(sum(sizes), num_classes)).astype(np.float32)
    labels = generator.integers(num_classes, size=sum(sizes))
    losses = generator.normal(size=sum(sizes))
    metrics = EvaluationMetrics(named_metrics({*NAMES, "top_5_accuracy", "loss"}), (0, 1, 2), CPU)
    parts = zip(*(torch.from_numpy(a).split(sizes) for a in (losses, scores, labels)), strict=True)
    for loss, score, label in parts:
        metrics.update((loss.mean(), score, label))
    found = metrics.compute()

    guesses = scores.argmax(axis=1)
    every = {"labels": list(range(num_classes)), "average": None, "zero_division": 0}
    expected = {
        **dict.fromkeys(("accuracy", "acc", "top_1_accuracy"), np.mean(guesses == labels)),
        "precision": sklearn_metrics.precision_score(labels, guesses, **every),
        "recall": sklearn_metrics.recall_score(labels, guesses, **every),
        "F1": sklearn_metrics.f1_score(labels, guesses, **every),
        "confusion_matrix": sklearn_metrics.confusion_matrix(
            labels, guesses, labels=list(range(num_classes))
        ),
        "top_5_accuracy": np.mean(
            [label in row.argsort()[-5:] for row, label in zip(scores, labels, strict=True)]
        ),
        "loss": losses.mean(),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


class Loss:
    """An output that has the loss only as an attribute."""

    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize(
    "wrapped",
    [lambda loss: loss, lambda loss: (loss,), lambda loss: {"loss": loss, "logits": None}, Loss],
)
def test_a_loss_is_taken_out_of_what_a_network_returns(wrapped):
    """The mean loss accepts any form of output that has a loss, and weighs batches equally."""
    metrics = EvaluationMetrics({"loss": LossMetric()}, None, CPU)
    for loss in (1.0, 4.0):
        metrics.update(wrapped(torch.tensor(loss)))

    assert metrics.compute() == {"loss": 2.5}


@pytest.mark.parametrize("output", [{"logits": torch.zeros(2)}, {"loss": None}, Loss(None), None])
def test_an_output_without_a_loss_has_no_mean_loss(output):
    """The metric ``loss`` refuses an output without a loss; the error names the output's type."""
    metrics = EvaluationMetrics({"loss": LossMetric()}, None, CPU)
    with pytest.raises(TypeError, match=f"`eval_network` must.* got {type(output).__name__} with"):
        metrics.update(output)


def test_errors_are_means_over_elements():
    """`mae` and `mse` divide by the number of elements of the targets."""
    metrics = EvaluationMetrics(named_metrics(["mae", "mse"]), (0, 1, 2), CPU)
    metrics.update((torch.zeros(()), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, 2)))

    assert metrics.compute() == {"mae": 2.5, "mse": 7.5}


def test_one_hot_labels_are_classes():
    """Labels with the shape of the scores are treated as one-hot."""
    metrics = EvaluationMetrics(named_metrics({"a": "accuracy"}), (0, 1, 2), CPU)
    metrics.update((0, torch.eye(3), torch.eye(3).roll(1, 0)))
    metrics.update((0, torch.eye(3), torch.eye(3)))

    assert metrics.compute() == {"a": 0.5}


def test_metrics_have_one_order_in_all_processes():
    """Sets are sorted, because their order differs between processes; lists keep their order."""
    names = ["recall", "loss", "mse", "F1", "top_5_accuracy", "mae", "acc", "precision"]

    for unordered in (set(names), frozenset(names)):
        assert list(named_metrics(unordered)) == sorted(names)
    for ordered in (names, tuple(names), dict.fromkeys(names).keys(), {n: n for n in names}):
        assert list(named_metrics(ordered)) == names


def test_an_evaluation_begins_with_nothing():
    """A metric does not include the batches of an earlier evaluation."""
    Accelerator(cpu=True)
    named = named_metrics({"loss", "accuracy"})
    for right in (1.0, 0.0):
        metrics = EvaluationMetrics(named, (0, 1, 2), CPU)
        metrics.update((torch.tensor(right), torch.eye(2), torch.tensor([0, 1]) * int(right)))
        found = metrics.compute()
        assert found["loss"] == right
        assert found["accuracy"] == (1.0 if right else 0.5)


def test_a_mean_of_no_batches_is_an_error():
    """The mean loss of no batches raises instead of returning NaN."""
    with pytest.raises(RuntimeError, match="at least one batch"):
        LossMetric().compute()


def test_outputs_that_lack_what_indexes_name_are_refused():
    """Too few outputs, and scores without classes, are errors that say what was found."""
    metrics = EvaluationMetrics(named_metrics({"loss"}), (0, 1, 2), CPU)

    with pytest.raises(ValueError, match=r"each of `eval_indexes` \[0, 1, 2\], got 2 outputs"):
        metrics.update((0, 0))
    accuracy = EvaluationMetrics(named_metrics({"accuracy"}), (0, 1, 2), CPU)
    with pytest.raises(ValueError, match=r"shape \(N, C, ...\), got \(3,\)"):
        accuracy.update((0, torch.zeros(3), torch.zeros(3)))


def test_without_torchmetrics_the_loss_is_left(monkeypatch):
    """Only the metric ``loss`` works without torchmetrics; others raise with an install command."""
    monkeypatch.setitem(sys.modules, "torchmetrics.regression", None)

    assert named_metrics({"loss"})
    with pytest.raises(ImportError, match=r"pip install 'mfwrap\[metrics\]'"):
        named_metrics({"mse"})
