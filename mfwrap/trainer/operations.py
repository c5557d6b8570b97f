"""Count the floating-point operations of a training as the Trainer does, but quicker."""

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn
from transformers import Trainer


@final
class OperationCount:
    """Count a model's parameters once in a training.

    The Trainer looks through all modules of the model for each micro-batch, to multiply the number
    of its parameters by the number of elements of the main input. For a small model this takes
    several percent of a step.
    """

    def __init__(self) -> None:
        self._per_element: float | None = None

    def restart(self) -> None:
        """Count the parameters again in the next call."""
        self._per_element = None

    def __call__(
        self, count: Callable[[Any], float], model: nn.Module, inputs: Mapping[str, Any]
    ) -> float:
        """Return the operations of forward and backward of a micro-batch.

        Args:
            count: The trainer's own method. A subclass of the Trainer may have its own formula,
                which is then used for each micro-batch.
            model: Model that is trained.
            inputs: The micro-batch.
        """
        main = inputs.get(str(getattr(model, "main_input_name", "input_ids")))
        is_stock = getattr(count, "__func__", None) is Trainer.floating_point_ops
        if not is_stock or not isinstance(main, Tensor) or main.numel() == 0:
            return count(inputs)
        if self._per_element is None:
            self._per_element = count(inputs) / main.numel()
        return self._per_element * main.numel()
