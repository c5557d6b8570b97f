"""Check the batches of a pipeline before its schedule splits and sends them."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from mfwrap.compatibility.pipelining import num_micro_batches, splits_by_rows
from mfwrap.step.calls import tensors_in


@final
class PipelineBatches:
    """Refuse a batch that a schedule would split unevenly, or that differs from the first one.

    In the first step, torch allocates the buffers in which a rank receives activations and their
    gradients, and all later batches must fit into them. A rank that receives less would compute
    with old rows; one that receives more aborts its process with gloo.

    Args:
        schedule: Schedule of ``torch.distributed.pipelining``.
        has_buffers: Whether other ranks run stages, so that there are buffers.
    """

    def __init__(self, schedule: Any, *, has_buffers: bool) -> None:
        self._schedule = schedule
        self._has_buffers = has_buffers
        self._first: dict[str, list[tuple[int, ...]]] | None = None
        self._last: dict[str, list[tuple[int, ...]]] = {}

    def check(self, inputs: Sequence[Any], keywords: Mapping[str, Any], target: Any | None) -> None:
        """Check the arguments that this rank was given, whether or not it uses them.

        Args:
            inputs: Positional arguments of the schedule's step.
            keywords: Keyword arguments of the stages.
            target: Argument of the loss function; ``None`` if this rank was given none.

        Raises:
            ValueError: If a first dimension is no multiple of the number of micro-batches, or
                shapes differ from those of the first batch: all dimensions of `inputs`, and the
                first dimension of the others.
        """
        splits_inputs, splits_keywords = splits_by_rows(self._schedule)
        if splits_inputs:
            self._check_rows("inputs", inputs)
        if splits_keywords:
            self._check_rows("keywords", keywords)
        self._check_rows("target", target)
        self._last = {
            "inputs": [tuple(each.shape) for each in tensors_in(inputs)],
            "keywords": [tuple(each.shape[:1]) for each in tensors_in(keywords)],
            "target": [tuple(each.shape[:1]) for each in tensors_in(target)],
        }
        if self._first is None:
            return
        for name, shapes in self._last.items():
            first = self._first[name]
            # A rank may be given arguments that it does not use in some of its steps only.
            if first and shapes and shapes != first:
                msg = (
                    "the batches of a pipeline must have the same shapes in all steps, got "
                    f"`{name}` of {_listed(shapes)} after {_listed(first)} in the first step; "
                    "use drop_last=True in the data loader, and pad to one length"
                )
                raise ValueError(msg)

    def keep_shapes(self) -> None:
        """Note that the batch that was checked last was the first one that trained."""
        if self._first is None and self._has_buffers:
            self._first = self._last

    def _check_rows(self, name: str, value: Any) -> None:
        # torch would split such a batch unevenly. The ranks that receive a smaller micro-batch into
        # a buffer for the largest one would compute with old rows.
        number = num_micro_batches(self._schedule)
        for tensor in tensors_in(value):
            if tensor.dim() > 0 and (tensor.shape[0] == 0 or tensor.shape[0] % number):
                msg = (
                    f"the first dimension of `{name}` must be a multiple of the schedule's "
                    f"{number} micro-batches, got shape {tuple(tensor.shape)}"
                )
                raise ValueError(msg)


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    # Only the first dimension is compared for keywords and targets.
    return ", ".join(
        f"{shape[0]} rows" if len(shape) == 1 else f"shape {shape}" for shape in shapes
    )
