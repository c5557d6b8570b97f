"""Evaluate the network of a `Model`: call it with batches, and give its outputs to metrics."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mfwrap.arguments import check_bool
from mfwrap.mindspore.callback import (
    Callback,
    CallbackParameters,
    RunContext,
    explaining_attributes,
)
from mfwrap.mindspore.data import Batches, pair_of
from mfwrap.mindspore.metrics import EvaluationMetrics, LossMetric, named_metrics
from mfwrap.mindspore.train_network import EvaluationNetwork, TrainNetwork


class EvaluationResult(NamedTuple):
    """Metrics of an evaluation."""

    metrics: dict[str, Any]
    """Value of each metric of the model, by its name."""

    results: dict[str, Any]
    """`metrics`, plus ``eval_loss`` if the evaluator knows which output is the loss."""


@final
class Evaluator:
    """Compute metrics of a network on a data set.

    Args:
        trained: The trained network and its device.
        loss_fn: Called with the network's output and the label; ``None`` if `eval_network` is used,
            or if the model is never evaluated.
        metrics: Metrics; see `mfwrap.mindspore.metrics.named_metrics`.
        eval_network: Called instead of the network with `loss_fn`.
        eval_indexes: Positions of loss, output and label in the outputs of `eval_network`; ``None``
            gives each metric all outputs.
        accelerator: Supplies the rank and the number of ranks.

    Raises:
        ImportError: If a metric needs torchmetrics, which is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If a metric's name is unknown, or `eval_indexes` is invalid; see
            `checked_indexes`.
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
        self._names = tuple(self._metrics)
        self._indexes = checked_indexes(eval_indexes, eval_network)
        if self._indexes is not None:
            self._metrics.setdefault("eval_loss", LossMetric())
        self._device = trained.device
        self._accelerator = accelerator
        self.network: nn.Module | None = None
        """Network that an evaluation calls; ``None`` without `loss_fn` and `eval_network`."""
        if eval_network is not None:
            self.network = eval_network.to(trained.device)
        elif loss_fn is not None:
            self.network = EvaluationNetwork(trained.network, loss_fn, trained.precision.dtype)

    def batches(self, valid_dataset: Iterable[Any], *, sink_mode: bool) -> Batches:
        """Check that an evaluation is possible, and return the batches to pass to `run`.

        Args:
            valid_dataset: Yields batches.
            sink_mode: Copy batches to the device without synchronizing.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If the model has no metrics or no network to evaluate, or the dataset is
                empty.
        """
        if not self._names:
            msg = "`metrics` must be given to evaluate, got none"
            raise ValueError(msg)
        self._checked_network()  # fail before the training, not at its first evaluation
        return Batches(
            "valid_dataset",
            valid_dataset,
            self._accelerator,
            self._device,
            sink_mode=check_bool("dataset_sink_mode", sink_mode),
            even=False,
        )

    def run(
        self, batches: Batches, callbacks: Sequence[Callback], facts: Mapping[str, Any]
    ) -> EvaluationResult:
        """Evaluate the network once on all batches.

        Args:
            batches: Batches that the method `batches` returned.
            callbacks: Callbacks whose ``on_eval_*`` methods are called.
            facts: Further facts of the run for the callbacks.
        """
        network = self._checked_network()
        parameters = CallbackParameters(
            mode="eval",
            network=network,
            eval_network=network,
            valid_dataset=batches.dataset,
            batch_num=batches.num_batches,
            epoch_num=1,
            cur_epoch_num=1,
            cur_step_num=0,
            list_callback=list(callbacks),
            **facts,
        )
        context = RunContext(parameters)
        metrics = EvaluationMetrics(self._metrics, self._indexes, self._device)

        def send(event: str) -> None:
            with explaining_attributes(parameters):
                for callback in callbacks:
                    getattr(callback, event)(context)

        with evaluating(network):
            send("on_eval_begin")
            send("on_eval_epoch_begin")
            takes_pairs = isinstance(network, EvaluationNetwork)
            for batch in batches.epoch():
                call = pair_of("valid_dataset", batch) if takes_pairs else batch
                parameters.cur_step_num += 1
                send("on_eval_step_begin")
                parameters.net_outputs = network(*call.arguments, **call.keywords)
                metrics.update(parameters.net_outputs)
                send("on_eval_step_end")
                if context.get_stop_requested():
                    break
            send("on_eval_epoch_end")
            results = metrics.compute()
            named = {name: results[name] for name in self._names}
            parameters.update(metrics=named, eval_results=results)
            send("on_eval_end")
        return EvaluationResult(named, results)

    def _checked_network(self) -> nn.Module:
        if self.network is None:
            msg = "`loss_fn` or `eval_network` must be given to evaluate, got neither"
            raise ValueError(msg)
        return self.network


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network into eval mode without gradients; afterwards restore each module's mode."""
    were_training = [module for module in network.modules() if module.training]
    # Set the attribute, because a module may override `train` to keep its own mode.
    for module in were_training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in were_training:
            module.training = True


def checked_indexes(
    eval_indexes: Sequence[int] | None, eval_network: nn.Module | None
) -> tuple[int, int, int] | None:
    """Return the positions of loss, output and label in an evaluation network's outputs.

    Returns:
        The positions, or ``None`` if `eval_network` is given without `eval_indexes`.

    Raises:
        TypeError: If `eval_network` is not a module, or an index is not an int.
        ValueError: If `eval_indexes` is not three ints >= 0, or is given without `eval_network`.
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
        msg = f"`eval_indexes` needs `eval_network`, got {eval_indexes!r} without a network"
        raise ValueError(msg)
    if len(eval_indexes) != 3 or min(eval_indexes) < 0:
        msg = (
            "`eval_indexes` must be three ints >= 0, the positions of loss, output and label in "
            f"the outputs of `eval_network`, got {eval_indexes!r}"
        )
        raise ValueError(msg)
    loss, output, label = eval_indexes
    return loss, output, label
