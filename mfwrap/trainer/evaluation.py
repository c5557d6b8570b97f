"""Evaluate each row of a data set once, on any number of ranks, and each target alike.

A data loader for several ranks repeats rows of the data set until each rank has a whole last batch.
The Trainer cuts the gathered outputs to the rows of the data set, but the loss of a batch is one
number, in which the repeated rows count. It also repeats that number once for each row that a batch
may have, which is wrong where ranks share a batch. So here a rank computes the loss of its own rows
of the last batch alone, and the mean over all rows is taken over the ranks.

The mean over rows weighs the mean loss of a batch by its rows, also if the rows have different
numbers of targets. `Evaluation` can weigh it by its targets instead.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, final

import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput

from mfwrap.accelerate.attributes import replaced
from mfwrap.arguments import check_bool
from mfwrap.compatibility.transformers import COUNT_ITEMS, method_of
from mfwrap.records.evaluations import note_results
from mfwrap.tensors.samples import sampled_hash, tensors_of
from mfwrap.trainer.view import TrainerView

Outputs = tuple[Tensor | None, Any, Any]
"""Loss, logits and labels of a batch."""


@final
class Evaluation:
    """The mean loss of an evaluation: over the rows on several ranks, or over the targets.

    Args:
        trainer: The trainer that evaluates.
        per_token: Whether the loss is the mean over the targets of all batches on all ranks.
    """

    def __init__(self, trainer: TrainerView, *, per_token: bool) -> None:
        self._trainer = trainer
        self._per_token = check_bool("eval_per_token_loss", per_token)
        self._sums: Tensor | None = None
        self.is_of_training = False
        """Whether the training itself has requested the evaluation that is running."""
        self.is_due = False
        """Whether the callbacks of a step or an epoch have requested an evaluation, and no callback
        of another event has been called since, except those of an evaluation and of a log."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Begin anew, and end with what was before: a metric may evaluate other data."""
        with replaced(self, _sums=None):
            yield

    def noted(self, metrics: Any) -> Any:
        """Return the metrics of the training's own evaluation; note them if it was the last one.

        Call it while the model has the weights that were evaluated.
        """
        trainer = self._trainer
        if trainer.control.should_training_stop and isinstance(metrics, dict):
            note_results(trainer.state, metrics, sampled_hash(tensors_of(trainer.model)))
        return metrics

    def predicted(
        self,
        inputs: Any,
        predict: Callable[[Any, bool], Outputs],
        *,
        loss_only: bool,
        may_gather: bool,
    ) -> Outputs:
        """Return loss, logits and labels of a batch; the loss is that of rows of the data set.

        The loss of the last batch is computed without the repeated rows of this rank, in a forward
        of its own if logits are needed, too. The repeated rows count, as in a stock Trainer, if it
        is unknown which entries of the batch's tensors belong to a row (`_first`), or if `predict`
        may gather rows of all ranks.

        Args:
            inputs: The batch of this rank.
            predict: Evaluates a batch, and gets whether only its loss is needed. It is called
                equally often on all ranks.
            loss_only: Whether only the loss is needed.
            may_gather: Whether a method or function of the user's own computes the loss, which may
                gather rows of all ranks. The loss over the targets of a rank must not depend on
                them.

        Returns:
            What `predict` returns for the whole batch, with the loss of this rank's own rows.

        Raises:
            ValueError: If the loss is the mean over the targets, and the batch has no ``labels``.
        """
        trainer = self._trainer
        accelerator = trainer.accelerator
        has_ranks = accelerator.num_processes > 1
        if not self._per_token and not has_ranks:
            return predict(inputs, loss_only)
        dealt = _dealt_rows(trainer) or find_batch_size(inputs) or 1
        left = _rows_left(trainer)
        own = (
            dealt if left is None else min(max(left - accelerator.process_index * dealt, 0), dealt)
        )
        may_gather = may_gather and not self._per_token
        names = trainer.label_names
        has_labels = isinstance(inputs, MutableMapping) and {*names} <= {*inputs}
        cuts = left is not None and bool(names) and has_labels and not may_gather
        counted = _first(inputs, own, dealt, names) if cuts and 0 < own < dealt else None
        # Of data with labels, the Trainer divides a sum by the number of targets on all ranks. The
        # mean over the targets of this rank is needed, of which ranks may have different numbers.
        # A method of the user's own relies on the number of all ranks.
        keeps_number = may_gather or not has_ranks or accelerator.parallelism_config is not None
        averages = trainer.args.average_tokens_across_devices and keeps_number
        rows = inputs if counted is None else counted
        with replaced(trainer.args, average_tokens_across_devices=averages):
            weight = self._num_targets(rows) if self._per_token else own
            loss, logits, labels = predict(rows, loss_only or cuts)
            if cuts and not loss_only:
                _, logits, labels = predict(inputs, loss_only)
        if isinstance(weight, Tensor) and counted is None:
            weight = weight * (own / dealt)
        if loss is not None:
            self._add(loss.detach().mean().double(), weight, inputs, counts=own != 0)
        return loss, logits, labels

    def _num_targets(self, inputs: Any) -> Tensor | None:
        """Return how many targets a batch has, as the Trainer counts them in a training."""
        device = self._trainer.args.device
        with replaced(self._trainer, model_accepts_loss_kwargs=True):
            found = method_of(self._trainer, COUNT_ITEMS)([inputs], device)
        # With DataParallel, the number is repeated for each device.
        return None if found is None else torch.as_tensor(found, device=device).reshape(-1)[0]

    def _add(self, mean: Tensor, weight: Tensor | int | None, inputs: Any, *, counts: bool) -> None:
        if weight is None:
            got = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
            msg = (
                "`eval_per_token_loss` needs a tensor `labels` in each batch of an evaluation, to "
                f"count its targets, got {got}; leave the argument out"
            )
            raise ValueError(msg)
        self._sums = mean.new_zeros(4) if self._sums is None else self._sums
        if counts:
            if not isinstance(weight, Tensor):
                weight = mean.new_full((), weight)
            weighted = (mean * weight).where(weight > 0, 0.0)  # the mean over no targets is NaN
            of_batch = torch.stack([weighted, weight.double()])
            self._sums = self._sums + torch.cat([of_batch, of_batch.where(mean.isfinite(), 0.0)])

    def corrected(
        self, result: EvalLoopOutput, name: str, *, is_overridden: bool
    ) -> EvalLoopOutput:
        """Return the result of an evaluation with the mean loss in its metrics; call on all ranks.

        Args:
            result: Result of the Trainer.
            name: Name of the loss in its metrics.
            is_overridden: Whether a subclass has a `prediction_step` of its own, which may return
                another loss than MFTrainer's, or call it several times. Then the loss stays that
                of the Trainer, which gets the subclass's loss.

        Raises:
            ValueError: If the loss must be the mean over the targets, but a method of the user's
                own has evaluated the batches.
        """
        metrics: Any = result.metrics
        loss = None if is_overridden else self._mean()
        if name not in metrics:
            return result
        if loss is not None:
            metrics[name] = loss
        elif self._per_token:
            msg = (
                "`eval_per_token_loss` needs the method `prediction_step` of MFTrainer, got a "
                f"`prediction_step` of {type(self._trainer).__name__}; remove one of the two"
            )
            raise ValueError(msg)
        return result

    def _mean(self) -> float | None:
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1 and not self._per_token:
            return None
        own = torch.zeros(5, dtype=torch.float64, device=accelerator.device)
        if self._sums is not None:
            own[:4], own[4] = self._sums, 1
        *sums, num_ranks = accelerator.reduce(own, "sum").tolist()
        # As in the Trainer, losses that are not finite count only if there are no others.
        leaves_out = self._trainer.args.logging_nan_inf_filter and sums[3]
        total, number = sums[2:] if leaves_out else sums[:2]
        if number:
            return float(total / number)
        return math.nan if self._per_token and num_ranks else None


def _dealt_rows(trainer: TrainerView) -> int | None:
    """Return how many rows the sampler deals to each rank for a batch; None if it is unknown.

    The batch may have other rows: a collator may make several of each row of the data set.
    """
    loader: Any = trainer.callback_handler.eval_dataloader
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSamplerShard):
        return None
    size: int = sampler.batch_size
    return size // sampler.num_processes if sampler.split_batches else size


def _rows_left(trainer: TrainerView) -> int | None:
    """Return how many rows of the data set the last batch of all ranks has, without repetitions.

    Returns ``None`` for any other batch, and if it is unknown.
    """
    accelerator = trainer.accelerator
    state = accelerator.gradient_state
    # A loader that accelerate has not prepared is not the active one; that of a training may be.
    is_prepared = state.active_dataloader is trainer.callback_handler.eval_dataloader
    is_last = is_prepared and state.end_of_dataloader and state.remainder > 0
    # With tensor parallelism, several ranks have the same rows.
    return int(state.remainder) if is_last and accelerator.parallelism_config is None else None


def _first(inputs: Any, own: int, dealt: int, labels: Collection[str]) -> Any:
    """Return the first rows of a batch; None if it is unknown which entries belong to a row.

    A tensor has rows if it has an entry for each row and two dimensions, or is one of the labels.
    Another one, such as weights of classes, may have as many entries only by accident.

    Args:
        inputs: A batch, or a mapping in it.
        own: Number of rows to return.
        dealt: Number of rows of the batch.
        labels: Names of the labels.
    """
    kept = copy.copy(inputs)
    for name, value in inputs.items():
        if isinstance(value, MutableMapping):
            kept[name] = _first(value, own, dealt, labels)
            if kept[name] is None:
                return None
        elif isinstance(value, Tensor):
            has_rows = value.dim() >= (1 if name in labels else 2) and len(value) == dealt
            # Positions of rotary embeddings may have the shape (3, rows, tokens).
            has_positions = value.dim() == 3 and value.shape[0] == value.shape[1]
            if not has_rows or (has_positions and not value.is_floating_point()):
                return None
            kept[name] = value[:own]
        elif not isinstance(value, _SCALARS):
            return None
    return kept


_SCALARS = (bool, int, float, str, type(None))
