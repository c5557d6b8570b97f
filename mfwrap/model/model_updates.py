"""Updates of `Model`: the training cell, and what its loss-scale manager needs beside it."""

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.mindspore.managers import LossScaleManager
from mfwrap.model.train_network import TrainNetwork
from mfwrap.step.cell import MFTrainOneStepCell
from mfwrap.step.micro_batches import NetworkCall
from mfwrap.step.mindspore_cells import TrainOneStepWithLossScaleCell
from mfwrap.tensors.deferred import DeferredReads
from mfwrap.tensors.wrappers import unwrapped_optimizer

__all__ = ["Updates"]


@final
class Updates:
    """Does updates, as long as the context lasts; what is pending then is brought up to date.

    Args:
        trained: Has a cell.
    """

    def __init__(self, trained: TrainNetwork) -> None:
        self._cell = trained.checked_cell()
        self._follower = _ManagerFollower(trained.manager, trained.device)
        self._dividing = _dividing(unwrapped_optimizer(self._cell.optimizer), trained.divisor)

    def __call__(self, call: NetworkCall) -> Any:
        """Do one update; return what the cell returns.

        Raises:
            RuntimeError: If a dynamic manager has heard of too many overflows in a row.
        """
        outputs = self._cell(*call.arguments, **call.keywords)  # type: ignore[operator]
        self._follower.follow(outputs)
        return outputs

    def flush(self) -> None:
        """Wait for the last update: step the schedule, tell the manager.

        Raises:
            RuntimeError: If too many updates in a row were skipped.
        """
        if isinstance(self._cell, (TrainOneStepWithLossScaleCell, MFTrainOneStepCell)):
            self._cell.flush()
        self._follower.flush()

    def __enter__(self) -> Self:
        self._dividing.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._dividing.__exit__(kind, error, traceback)
        # The schedule's last step is due, whatever else went wrong.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(RuntimeError):
            self.flush()


@final
class _ManagerFollower:
    """Keeps a manager on the host in step with the update cell on the device.

    The manager hears of a step when the device does the next one.

    Args:
        manager: Is told of overflows; ``None``, or one that drops no update, is told nothing.
        device: The training device.
    """

    def __init__(self, manager: LossScaleManager | None, device: torch.device) -> None:
        drops = manager is not None and manager.get_drop_overflow_update()
        self._manager = manager if drops else None
        self._reads = DeferredReads(device)

    def follow(self, outputs: Any) -> None:
        """Take a cell's outputs."""
        if self._manager is None:
            return
        self._reads.flush()
        manager, overflow = self._manager, outputs.overflow
        self._reads.submit(
            overflow.float().reshape(1), lambda values: manager.update_loss_scale(bool(values[0]))
        )

    def flush(self) -> None:
        """Wait for what is pending, and tell it."""
        self._reads.flush()


@contextlib.contextmanager
def _dividing(optimizer: Optimizer, divisor: float) -> Iterator[None]:
    """Divide gradients just before the optimizer runs, as long as the context lasts.

    Source: MindSpore, the argument ``loss_scale`` of its optimizers.
    """
    if divisor == 1:
        yield
        return

    def divide(*_: Any) -> None:
        held: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        torch._foreach_mul_([p.grad for p in held if p.grad is not None], 1 / divisor)

    handle = optimizer.register_step_pre_hook(divide)
    try:
        yield
    finally:
        handle.remove()
