"""One evaluation of `Model`: batches through a network into metrics."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mfwrap.arguments import check_bool
from mfwrap.model.callback import Callback, CallbackParameters, RunContext
from mfwrap.model.data import Batches, pair_of
from mfwrap.model.metrics import EvaluationMetrics, MeanLoss, Metric, named_metrics
from mfwrap.model.train_network import EvaluationNetwork, TrainNetwork

__all__ = [
    "Evaluation",
    "EvaluationResult",
    "Evaluator",
    "checked_indexes",
    "evaluating",
]


_EVAL_LOSS = "eval_loss"


class EvaluationResult(NamedTuple):
    """What an evaluation has found."""

    metrics: dict[str, Any]
    """The metrics that were asked for."""

    results: dict[str, Any]
    """The same, with ``eval_loss`` where the network's outputs have a loss."""


def checked_indexes(
    eval_indexes: Sequence[int] | None, eval_network: nn.Module | None
) -> tuple[int, int, int] | None:
    """Return where loss, output and label are in an evaluation network's outputs.

    Raises:
        TypeError: If `eval_network` is no module, or an index no int.
        ValueError: If there are not three indexes from 0 on, or there is no `eval_network`.
    """
    if eval_network is not None and not isinstance(eval_network, nn.Module):
        msg = f"`eval_network` must be a torch.nn.Module or None, got {type(eval_network).__name__}"
        raise TypeError(msg)
    if eval_indexes is None:
        return None if eval_network is not None else (0, 1, 2)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in eval_indexes):
        msg = f"`eval_indexes` must be ints, got {eval_indexes!r}"
        raise TypeError(msg)
    if eval_network is None:
        msg = f"`eval_indexes` must go with `eval_network`, got {eval_indexes!r} without one"
        raise ValueError(msg)
    if len(eval_indexes) != 3 or min(eval_indexes) < 0:
        msg = f"`eval_indexes` must be those of loss, output and label, got {eval_indexes!r}"
        raise ValueError(msg)
    loss, output, label = eval_indexes
    return loss, output, label


class evaluating:  # noqa: N801  (a context manager, read as a verb)
    """Hold networks in eval mode and without gradients; afterwards each module is as it was.

    Args:
        networks: Of any number.
    """

    def __init__(self, *networks: nn.Module) -> None:
        self._modules = [module for network in networks for module in network.modules()]
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._were_training = [module for module in self._modules if module.training]
        for module in self._modules:
            module.training = False
        self._no_grad.__enter__()

    def __exit__(self, *error: object) -> None:
        self._no_grad.__exit__(*error)
        for module in self._were_training:
            module.training = True


@final
class Evaluation:
    """A network, data and metrics, to be run any number of times.

    Args:
        network: Called with the columns of each batch.
        batches: The data.
        metrics: By name.
        indexes: Which outputs are loss, output and label; ``None`` gives each metric all of them.
        device: Where metrics are computed.
        takes_pairs: A batch must have two columns.
        facts: What callbacks are told beside.
    """

    def __init__(
        self,
        network: nn.Module,
        batches: Batches,
        metrics: Mapping[str, Metric],
        indexes: tuple[int, int, int] | None,
        device: torch.device,
        *,
        takes_pairs: bool,
        facts: Mapping[str, Any],
    ) -> None:
        self._network = network
        self._batches = batches
        self._asked = tuple(metrics)
        self._metrics = dict(metrics)
        if indexes is not None:
            self._metrics.setdefault(_EVAL_LOSS, MeanLoss())
        self._indexes = indexes
        self._device = device
        self._takes_pairs = takes_pairs
        self._facts = facts

    def run(self, callbacks: Sequence[Callback]) -> EvaluationResult:
        """Evaluate once.

        Args:
            callbacks: Get the ``on_eval_*`` calls.
        """
        told = CallbackParameters(
            mode="eval",
            network=self._network,
            eval_network=self._network,
            valid_dataset=self._batches.dataset,
            batch_num=self._batches.num_batches,
            epoch_num=1,
            cur_epoch_num=1,
            cur_step_num=0,
            list_callback=list(callbacks),
            **self._facts,
        )
        context = RunContext(told)
        metrics = EvaluationMetrics(self._metrics, self._indexes, self._device)
        with evaluating(self._network):
            for callback in callbacks:
                callback.on_eval_begin(context)
            for callback in callbacks:
                callback.on_eval_epoch_begin(context)
            self._pass(callbacks, context, metrics)
            for callback in callbacks:
                callback.on_eval_epoch_end(context)
            values = metrics.compute()
            asked = {name: values[name] for name in self._asked}
            told.update(metrics=asked, eval_results=values)
            for callback in callbacks:
                callback.on_eval_end(context)
        return EvaluationResult(asked, values)

    def _pass(
        self, callbacks: Sequence[Callback], context: RunContext, metrics: EvaluationMetrics
    ) -> None:
        told = context.original_args()
        for call in self._batches.epoch():
            if self._takes_pairs:
                call = pair_of("valid_dataset", call)  # noqa: PLW2901  (the same batch)
            told.cur_step_num += 1
            for callback in callbacks:
                callback.on_eval_step_begin(context)
            told.net_outputs = self._network(*call.arguments, **call.keywords)
            metrics.update(told.net_outputs)
            for callback in callbacks:
                callback.on_eval_step_end(context)
            if context.get_stop_requested():
                break


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
