"""Evaluate each row of a data set once, on any number of ranks.

A data loader for several ranks repeats rows of the data set until each rank has a whole last batch.
The Trainer cuts the gathered outputs to the rows of the data set, but the loss of a batch is one
number, in which the repeated rows count. It also repeats that number once for each row that a batch
may have, which is wrong where ranks share a batch. So here a rank evaluates its own rows of the
last batch alone, and the mean over all rows is taken over the ranks.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from accelerate import Accelerator
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor

Outputs = tuple[Tensor | None, Any, Any]
"""Loss, logits and labels of a batch."""


@final
class Evaluation:
    """The mean loss over the rows of an evaluation on several ranks."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._num_rows = 0
        self.is_of_training = False
        """Whether the training itself has requested the evaluation that is running."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Begin anew, and end with what was before: a metric may evaluate other data."""
        before = self._sum, self._num_rows
        self._sum, self._num_rows = None, 0
        try:
            yield
        finally:
            self._sum, self._num_rows = before

    def predicted(
        self, accelerator: Accelerator, inputs: Any, predict: Callable[[Any], Outputs]
    ) -> Outputs:
        """Return loss, logits and labels of a batch; the loss is that of rows of the data set.

        Args:
            accelerator: Knows the ranks, and whether the batch is the last one.
            inputs: The batch of this rank.
            predict: Evaluates a batch. It is called once, on all ranks.

        Returns:
            What `predict` returns. In the last batch, logits and labels are followed by repetitions
            of their last row, which the Trainer cuts, so that all ranks have the same number.
        """
        number = find_batch_size(inputs) if isinstance(inputs, Mapping) else None
        if number is None or accelerator.num_processes == 1:
            return predict(inputs)
        own = _own_rows(accelerator, number)
        is_cut = 0 < own < number
        loss, logits, labels = predict(_first(inputs, number, own) if is_cut else inputs)
        if loss is not None:
            of_rows = loss.detach().mean().double() * own
            self._sum = of_rows if self._sum is None else self._sum + of_rows
            self._num_rows += own
        if is_cut:
            logits, labels = (_filled(each, own, number) for each in (logits, labels))
        return loss, logits, labels

    def mean(self, accelerator: Accelerator) -> float | None:
        """Return the mean loss over the rows of all ranks; all ranks must call this.

        Returns:
            The mean; ``None`` on one process, or if there were no losses.
        """
        if accelerator.num_processes == 1:
            return None
        own = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        if self._sum is not None:
            own[0], own[1] = self._sum, self._num_rows
        total, num_rows = accelerator.reduce(own, "sum").tolist()
        return total / num_rows if num_rows else None


def _own_rows(accelerator: Accelerator, number: int) -> int:
    """Return how many of this rank's rows are not repetitions; all of them if it is unknown."""
    state = accelerator.gradient_state
    is_last = state.end_of_dataloader and state.remainder > 0
    # With tensor parallelism, several ranks have the same rows.
    if not is_last or accelerator.parallelism_config is not None:
        return number
    before: int = accelerator.process_index * number
    return min(max(int(state.remainder) - before, 0), number)


def _first(inputs: Mapping[str, Any], number: int, own: int) -> Any:
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
