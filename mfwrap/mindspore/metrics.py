"""Metrics of an evaluation, by MindSpore's names or as objects of torchmetrics."""

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, final, runtime_checkable

import torch
from accelerate.utils import reduce
from torch import Tensor, nn

from mfwrap.arguments import described


@runtime_checkable
class Metric(Protocol):
    """An object that is updated batch by batch, such as any ``torchmetrics.Metric``."""

    def update(self, *args: Any) -> None:
        """Add a batch: the network's output and the label."""

    def compute(self) -> Any:
        """Return the value over all batches of all ranks since the last reset."""

    def reset(self) -> None:
        """Forget all batches."""


def named_metrics(metrics: Mapping[str, Any] | Collection[str] | None) -> dict[str, Metric]:
    """Return metric objects by name.

    Args:
        metrics: A set of MindSpore's names, or a dict. The dict's keys are names of your choice;
            its values are MindSpore's names, or objects with ``update``, ``compute`` and ``reset``.
            MindSpore's names are ``"accuracy"`` (or ``"acc"``), ``"top_1_accuracy"``,
            ``"top_5_accuracy"``, ``"mae"``, ``"mse"`` and ``"loss"``, which give one number;
            ``"precision"``, ``"recall"`` and ``"F1"``, which give one number per class; and
            ``"confusion_matrix"``, which gives one row per class.

    Raises:
        ImportError: If a metric needs torchmetrics, which is not installed.
        TypeError: If `metrics`, or a metric in it, has the wrong type.
        ValueError: If a name is unknown.

    Example:
        >>> named_metrics({"loss"})["loss"].__class__.__name__
        'LossMetric'
    """
    if metrics is None:
        return {}
    if isinstance(metrics, str) or not isinstance(metrics, Collection):
        msg = (
            "`metrics` must be a set of metric names, or a dict from names to metrics, got "
            f"{described(metrics)}"
        )
        raise TypeError(msg)
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    else:
        # The order of a set differs between processes, but `compute` is a collective: all ranks
        # must compute the metrics in the same order.
        names = sorted(metrics, key=str) if isinstance(metrics, (set, frozenset)) else metrics
        named = {name: name for name in names}
    return {name: _metric(metric) for name, metric in named.items()}


def _metric(metric: object) -> Metric:
    if isinstance(metric, str):
        if metric not in _NAMED:
            msg = (
                f"`metrics` must have names among {sorted(_NAMED)}, got {metric!r}; pass any "
                "other metric as an object, for example a metric of torchmetrics"
            )
            raise ValueError(msg)
        return _NAMED[metric]()
    if isinstance(metric, type) or not isinstance(metric, Metric):
        msg = f"a metric must have update, compute and reset, got {described(metric)}"
        raise TypeError(msg)
    return metric


@final
class EvaluationMetrics:
    """Update metrics with the outputs of one evaluation, and compute their values.

    Args:
        metrics: Metrics by name. The constructor resets them.
        indexes: Positions of loss, output and label in the outputs of the evaluation network;
            ``None`` gives each metric all outputs.
        device: Device on which the metrics are computed.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        indexes: tuple[int, int, int] | None,
        device: torch.device,
    ) -> None:
        self._metrics = metrics
        self._indexes = indexes
        for metric in metrics.values():
            metric.reset()
            if isinstance(metric, nn.Module):
                metric.to(device)

    def update(self, outputs: Any) -> None:
        """Add the outputs of the evaluation network for a batch.

        Raises:
            TypeError: If the metric ``loss`` is used, but the network's output is neither a tensor
                nor has an attribute or key ``loss``.
            ValueError: If there are fewer outputs than the indexes need.
        """
        values = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        if self._indexes is None:
            for metric in self._metrics.values():
                if isinstance(metric, LossMetric) and len(values) == 1:
                    metric.update(_loss_of(values[0]))
                else:
                    metric.update(*values)
            return
        if len(values) <= max(self._indexes):
            msg = (
                f"`eval_network` must return an output for each of `eval_indexes` "
                f"{list(self._indexes)}, got {len(values)} outputs"
            )
            raise ValueError(msg)
        loss, output, label = (values[index] for index in self._indexes)
        for metric in self._metrics.values():
            if isinstance(metric, LossMetric):
                metric.update(loss, _num_samples(label))
            else:
                metric.update(output, label)

    def compute(self) -> dict[str, Any]:
        """Return the values as Python numbers and lists; synchronizes with the device."""
        return {name: _number(metric.compute()) for name, metric in self._metrics.items()}


def _loss_of(output: Any) -> Tensor:
    """Return the network's output if it is a tensor, otherwise its attribute or key ``loss``."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor):
        msg = (
            "`eval_network` must return a loss, or an output with `loss`, for the metric `loss`, "
            f"got {type(output).__name__} without a loss (a Hugging Face model computes a loss if "
            "its batch has `labels`)"
        )
        raise TypeError(msg)
    return loss


def _num_samples(label: Any) -> int:
    if isinstance(label, Tensor) and label.dim() > 0:
        return label.shape[0]
    return 1


def _number(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


@final
class LossMetric:
    """Mean loss over all samples of all ranks.

    Source: MindSpore, ``train.Loss``, which gives a smaller last batch the weight of a full one.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._sum: Tensor | None = None
        self._num_samples = 0

    def update(self, loss: Tensor, num_samples: int = 1) -> None:
        """Add the mean loss of a batch; does not synchronize with the device."""
        part = loss.detach().double().mean() * num_samples
        self._sum = part if self._sum is None else self._sum + part
        self._num_samples += num_samples

    def compute(self) -> Tensor:
        """Return the mean, shape ``()``, float64."""
        if self._sum is None:
            msg = "the mean loss needs at least one batch, got none"
            raise RuntimeError(msg)
        weight = torch.full_like(self._sum, self._num_samples)
        total: Tensor = reduce(torch.stack((self._sum, weight)))
        return total[0] / total[1]


@final
class _ClassMetric:
    """Compute a metric that needs the number of classes; the first batch determines the number.

    Args:
        make: Called with the number of classes; returns the metric of torchmetrics.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._metric: Any = None

    def update(self, scores: Tensor, label: Tensor) -> None:
        """Add a batch.

        Args:
            scores: Scores of the classes, shape ``(N, C, ...)``.
            label: Class indices, or one-hot labels in the shape of `scores`.
        """
        if scores.dim() < 2:
            msg = f"scores must have shape (N, C, ...), got {tuple(scores.shape)}"
            raise ValueError(msg)
        if self._metric is None:
            self._metric = self._make(scores.shape[1]).to(scores.device)
        self._metric.update(scores, label.argmax(dim=1) if label.shape == scores.shape else label)

    def compute(self) -> Any:
        return self._metric.compute()

    def reset(self) -> None:
        if self._metric is not None:
            self._metric.reset()


def _of_classes(kind: str, **settings: Any) -> Callable[[], Metric]:
    def make() -> Metric:
        metric = getattr(_torchmetrics("classification"), kind)
        return _ClassMetric(lambda num_classes: metric(num_classes, **settings))

    return make


def _torchmetrics(part: str) -> Any:
    try:
        return importlib.import_module(f"torchmetrics.{part}")
    except ImportError as error:
        msg = "every named metric but 'loss' needs torchmetrics; run pip install 'mfwrap[metrics]'"
        raise ImportError(msg) from error


_NAMED: Mapping[str, Callable[[], Metric]] = {
    "loss": LossMetric,
    "accuracy": _of_classes("MulticlassAccuracy", average="micro"),
    "acc": _of_classes("MulticlassAccuracy", average="micro"),
    "top_1_accuracy": _of_classes("MulticlassAccuracy", average="micro"),
    "top_5_accuracy": _of_classes("MulticlassAccuracy", average="micro", top_k=5),
    "precision": _of_classes("MulticlassPrecision", average=None),
    "recall": _of_classes("MulticlassRecall", average=None),
    "F1": _of_classes("MulticlassF1Score", average=None),
    "confusion_matrix": _of_classes("MulticlassConfusionMatrix"),
    "mae": lambda: _torchmetrics("regression").MeanAbsoluteError(),
    "mse": lambda: _torchmetrics("regression").MeanSquaredError(),
}
