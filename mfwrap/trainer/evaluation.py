"""Evaluate each row of a data set once, on any number of ranks, and each target alike.

A data loader for several ranks repeats rows of the data set until each rank has a whole last batch.
The Trainer cuts the gathered outputs to the rows of the data set, but the loss of a batch is one
number, in which the repeated rows count. It also repeats that number once for each row that a batch
may have, which is wrong where ranks share a batch. So here a rank evaluates its own rows of the
last batch alone, and the mean over all rows is taken over the ranks.

The mean over rows weighs the mean loss of a batch by its rows, also if the rows have different
numbers of targets. `Evaluation` can weigh it by its targets instead.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from accelerate import Accelerator
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor
from transformers.trainer_utils import EvalLoopOutput

from mfwrap.compatibility.transformers import COUNT_ITEMS, method_of
from mfwrap.trainer.checkpoint import replaced

if TYPE_CHECKING:
    from mfwrap.trainer.mixin import MFTrainerMixin

Outputs = tuple[Tensor | None, Any, Any]
"""Loss, logits and labels of a batch."""


@final
class Evaluation:
    """The mean loss of an evaluation: over the rows on several ranks, or over the targets.

    Args:
        trainer: The trainer that evaluates.
        per_token: Whether the loss is the mean over the targets of all batches on all ranks.
    """

    def __init__(self, trainer: "MFTrainerMixin", *, per_token: bool) -> None:
        self._trainer = trainer
        self._per_token = per_token
        self._sum: Tensor | None = None
        self._number: Tensor | int = 0
        self.is_of_training = False
        """Whether the training itself has requested the evaluation that is running."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Begin anew, and end with what was before: a metric may evaluate other data."""
        before = self._sum, self._number
        self._sum, self._number = None, 0
        try:
            yield
        finally:
            self._sum, self._number = before

    def predicted(self, inputs: Any, predict: Callable[[Any], Outputs]) -> Outputs:
        """Return loss, logits and labels of a batch; the loss is that of rows of the data set.

        Args:
            inputs: The batch of this rank.
            predict: Evaluates a batch. It is called once, on all ranks.

        Returns:
            What `predict` returns. In the last batch, logits and labels are followed by repetitions
            of their last row, which the Trainer cuts, so that all ranks have the same number.

        Raises:
            ValueError: If the loss is the mean over the targets, and the batch has no ``labels``.
        """
        accelerator = self._trainer.accelerator
        number = find_batch_size(inputs) if isinstance(inputs, Mapping) else None
        has_ranks = accelerator.num_processes > 1
        if not self._per_token and (number is None or not has_ranks):
            return predict(inputs)
        own = _own_rows(accelerator, number) if has_ranks and number else number
        cut = (own, number) if own and number and own < number else None
        if cut is not None:
            inputs = _first(inputs, *cut)
        # Of data with labels, the Trainer divides a sum by the number of targets on all ranks. The
        # mean over the targets of this rank is needed, of which ranks may have different numbers.
        is_split = accelerator.parallelism_config is not None
        averages = self._trainer.args.average_tokens_across_devices and (is_split or not has_ranks)
        with replaced(self._trainer.args, average_tokens_across_devices=averages):
            weight = self._num_targets(inputs) if self._per_token else own
            loss, logits, labels = predict(inputs)
        if loss is not None:
            self._add(loss.detach().mean().double(), weight, inputs, counts=own != 0)
        if cut is not None:
            logits, labels = (_filled(each, *cut) for each in (logits, labels))
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
        self._sum = torch.zeros_like(mean) if self._sum is None else self._sum
        if counts:
            of_batch = mean * weight
            if isinstance(weight, Tensor):
                of_batch = of_batch.where(weight > 0, 0.0)  # the mean over no targets is NaN
            self._sum, self._number = self._sum + of_batch, self._number + weight

    def corrected(self, result: EvalLoopOutput, name: str) -> EvalLoopOutput:
        """Return the result of an evaluation with the mean loss in its metrics; call on all ranks.

        Args:
            result: Result of the Trainer.
            name: Name of the loss in its metrics.

        Raises:
            ValueError: If the loss must be the mean over the targets, but a method of the user's
                own has evaluated the batches.
        """
        metrics: Any = result.metrics
        loss = self._mean()
        if name not in metrics:
            return result
        if loss is not None:
            metrics[name] = loss
        elif self._per_token:
            msg = (
                "`eval_per_token_loss` needs the method `prediction_step` of MFTrainer, got a "
                f"`prediction_step` of {type(self._trainer).__name__} that does not call it"
            )
            raise ValueError(msg)
        return result

    def _mean(self) -> float | None:
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1 and not self._per_token:
            return None
        own = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
        if self._sum is not None:
            own[0], own[1], own[2] = self._sum, self._number, 1
        total, number, num_ranks = accelerator.reduce(own, "sum").tolist()
        if number:
            return float(total / number)
        return math.nan if self._per_token and num_ranks else None


def _own_rows(accelerator: Accelerator, number: int) -> int:
    """Return how many of this rank's rows are not repetitions; all of them if it is unknown."""
    state = accelerator.gradient_state
    is_last = state.end_of_dataloader and state.remainder > 0
    # With tensor parallelism, several ranks have the same rows.
    if not is_last or accelerator.parallelism_config is not None:
        return number
    before: int = accelerator.process_index * number
    return min(max(int(state.remainder) - before, 0), number)


def _first(inputs: Mapping[str, Any], own: int, number: int) -> Any:
    """Return the first rows of each tensor and list that has one entry for each row."""
    kept = {
        name: value[:own] if isinstance(value, (Tensor, list)) and len(value) == number else value
        for name, value in inputs.items()
    }
    return kept if type(inputs) is dict else type(inputs)(kept)  # type: ignore[call-arg]  # (BatchEncoding)


def _filled(outputs: Any, own: int, number: int) -> Any:
    """Repeat the last row of each tensor with `own` rows until there are `number` rows."""

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != own:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(number - own, *tensor.shape[1:])])

    return recursively_apply(fill, outputs)
