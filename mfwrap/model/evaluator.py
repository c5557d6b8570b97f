"""What `Model` evaluates with, once for all of its datasets."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, final

from accelerate import Accelerator
from torch import Tensor, nn

from mfwrap.arguments import check_bool
from mfwrap.model.data import Batches
from mfwrap.model.evaluation import Evaluation, checked_indexes
from mfwrap.model.metrics import named_metrics
from mfwrap.model.train_network import EvaluationNetwork, TrainNetwork

__all__ = ["Evaluator"]


@final
class Evaluator:
    """The network that an evaluation calls, its metrics, and where its data goes.

    Args:
        trained: Has the network and its device.
        loss_fn: Called with the network's output and the label; ``None`` for none.
        metrics: As of `mfwrap.model.metrics.named_metrics`.
        eval_network: Called in the place of the network with `loss_fn`.
        eval_indexes: Which outputs of `eval_network` are loss, output and label.
        accelerator: Knows the ranks.

    Raises:
        ImportError: If a metric needs torchmetrics, which is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such metric, or indexes do not fit.
    """

    def __init__(
        self,
        trained: TrainNetwork,
        *,
        loss_fn: Callable[..., Tensor] | None,
        metrics: Mapping[str, Any] | Collection[str] | None,
        eval_network: nn.Module | None,
        eval_indexes: Sequence[int] | None,
        accelerator: Accelerator,
    ) -> None:
        self._metrics = named_metrics(metrics)
        self._indexes = checked_indexes(eval_indexes, eval_network)
        self._device = trained.device
        self._accelerator = accelerator
        self.network: nn.Module | None = None
        """What an evaluation calls; ``None`` without a loss function."""
        if eval_network is not None:
            self.network = eval_network.to(trained.device)
        elif loss_fn is not None:
            self.network = EvaluationNetwork(trained.network, loss_fn, trained.precision.dtype)

    def evaluation(
        self, valid_dataset: Iterable[Any], *, sink_mode: bool, facts: Mapping[str, Any]
    ) -> Evaluation:
        """Return the evaluation of a dataset.

        Args:
            valid_dataset: Yields batches.
            sink_mode: Copy batches to the device without waiting for them.
            facts: What callbacks are told beside.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If there are no metrics or nothing to evaluate, or the dataset is empty.
        """
        if not self._metrics:
            msg = "`metrics` must be given to evaluate, got none"
            raise ValueError(msg)
        if self.network is None:
            msg = "`loss_fn` or `eval_network` must be given to evaluate, got neither"
            raise ValueError(msg)
        batches = Batches(
            "valid_dataset",
            valid_dataset,
            self._accelerator,
            self._device,
            sink_mode=check_bool("dataset_sink_mode", sink_mode),
            even=False,
        )
        return Evaluation(
            self.network,
            batches,
            self._metrics,
            self._indexes,
            self._device,
            takes_pairs=isinstance(self.network, EvaluationNetwork),
            facts=facts,
        )
