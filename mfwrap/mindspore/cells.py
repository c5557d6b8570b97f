"""MindSpore's plain training cells."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.arguments import described
from mfwrap.config import StepConfig
from mfwrap.loss_scale.cells import LossScaleUpdateCell
from mfwrap.loss_scale.live import LossScale, wrong_type_of_scale
from mfwrap.outputs import LossScaleStepOutput, StepReport
from mfwrap.step.accumulation import GradientAccumulation
from mfwrap.step.calls import NetworkCall
from mfwrap.step.parameters import TrainedParameters, checked_network, checked_optimizer
from mfwrap.step.parts.cell_parts import LossScaleHooks, StepParts
from mfwrap.step.schedules import Schedule, checked_schedule
from mfwrap.step.update import StepUpdate
from mfwrap.tensors.saved_state import check_keys


class WithLossCell(nn.Module):
    """Join a network and a loss function into a network that returns the loss.

    Source: MindSpore, ``nn.WithLossCell``.

    Args:
        backbone: Network, called with the data.
        loss_fn: Loss function, called with the backbone's output and the label.

    Example:
        >>> network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
        >>> network(torch.ones(4, 2), torch.ones(4, 1)).shape
        torch.Size([])
    """

    def __init__(self, backbone: nn.Module, loss_fn: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.loss_fn = loss_fn

    def forward(self, data: Any, label: Any) -> Any:
        """Return ``loss_fn(backbone(data), label)``."""
        return self.loss_fn(self.backbone(data), label)

    @property
    def backbone_network(self) -> nn.Module:
        """The network without the loss function."""
        return self.backbone


class TrainOneStepCell(StepParts):
    """Run a plain training step: forward, backward, optimizer. It does not check for overflow.

    Source: MindSpore, ``nn.TrainOneStepCell``.

    Args:
        network: Network that returns a loss of one element.
        optimizer: Any torch optimizer; accelerate's wrapper is unwrapped.
        sens: Factor by which the loss is multiplied before backward; ``None`` means 1. The
            optimizer gets the scaled gradients: they are not divided by `sens` again.
        return_grad: Whether a call also returns the gradients.
        lr_scheduler: Schedule that is stepped after the optimizer; ``None`` for no schedule.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `sens` is 0, or `optimizer` holds no parameter of `network`.

    Example:
        >>> network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
        >>> cell = TrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1))
        >>> cell(torch.ones(4, 2), torch.ones(4, 1)).shape
        torch.Size([])
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        sens: float | None = 1.0,
        return_grad: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
        *,
        lr_scheduler: Schedule | None = None,
    ) -> None:
        if sens is not None and not isinstance(sens, (int, float)):
            msg = f"`sens` must be a number or None, got {described(sens)}"
            raise TypeError(msg)
        if sens == 0:
            msg = "`sens` must not be 0, got 0"
            raise ValueError(msg)
        optimizer = checked_optimizer(optimizer)
        trained = TrainedParameters.of_network(checked_network(network), optimizer)
        schedule = checked_schedule(lr_scheduler, optimizer)
        super().__init__(network, optimizer, trained, lr_scheduler=schedule)
        self.sens: float = 1.0 if sens is None else sens
        """Factor by which the loss is multiplied before backward."""
        self.return_grad = return_grad
        self.__trained, self.__lr_scheduler = trained, schedule
        self.__accumulate = GradientAccumulation(network, per_token=False)
        self.__sens = torch.full((), self.sens, dtype=torch.float32, device=trained.device)

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Do one update.

        Returns:
            The loss, shape ``()``, float32; with `return_grad` also the gradients by name,
            multiplied by `sens`.
        """
        self.__trained.release_gradients()
        try:
            loss = self.__accumulate([NetworkCall(inputs, keywords)], self.__sens).loss
            gradients = self.__gradients()
            self.optimizer.step()
            if self.__lr_scheduler is not None:
                self.__lr_scheduler.step()
        finally:
            self.__trained.release_gradients()
        return (loss, gradients) if self.return_grad else loss

    def __gradients(self) -> dict[str, Tensor]:
        if not self.return_grad:
            self.__trained.collect_gradients()
            return {}
        # Return copies, because some optimizers change gradients in place.
        named = self.__trained.named_gradients()
        return {name: gradient.clone() for name, gradient in named.items()}


class TrainOneStepWithLossScaleCell(LossScaleHooks):
    """Run a training step with a loss scale, and skip updates with non-finite gradients.

    Source: MindSpore, ``nn.TrainOneStepWithLossScaleCell``.

    Args:
        network: Network that returns a loss of one element.
        optimizer: Any torch optimizer; accelerate's wrapper is unwrapped.
        scale_sense: Loss scale: a tensor of shape ``()`` or ``(1,)``, or a loss-scale update cell.
        lr_scheduler: Schedule that is stepped once for each applied update, just before the next
            update; ``None`` for no schedule.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `scale_sense` has another shape, or `optimizer` holds no parameter of
            `network`.

    Example:
        >>> network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> cell = TrainOneStepWithLossScaleCell(network, optimizer, torch.tensor(1024.0))
        >>> loss, overflow, loss_scale = cell(torch.ones(4, 2), torch.ones(4, 1))
        >>> overflow, loss_scale
        (tensor(False), tensor(1024.))
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        scale_sense: Tensor | LossScaleUpdateCell,
        *,
        lr_scheduler: Schedule | None = None,
    ) -> None:
        if not isinstance(scale_sense, (Tensor, LossScaleUpdateCell)):
            expected = "a tensor or a loss-scale update cell"
            raise wrong_type_of_scale(expected, scale_sense)
        optimizer = checked_optimizer(optimizer)
        trained = TrainedParameters.of_network(checked_network(network), optimizer)
        loss_scale = LossScale(scale_sense, trained.device)
        config = StepConfig(max_consecutive_skips=None)
        schedule = checked_schedule(lr_scheduler, optimizer)
        self.__update = StepUpdate(
            trained,
            optimizer,
            config,
            loss_scale,
            lr_scheduler=schedule,
        )
        super().__init__(network, optimizer, trained, loss_scale, lr_scheduler=schedule)
        self.__loss_scale = loss_scale
        self.__accumulate = GradientAccumulation(network, per_token=False)
        self.__guard = self.__accumulate.guard(optimizer, config)
        self.last_report: StepReport | None = None
        """Report of the last update; ``None`` before the first."""

    def __call__(self, *inputs: Any, **keywords: Any) -> LossScaleStepOutput:
        """Do one update.

        Returns:
            Loss, overflow flag and the loss scale that the next step uses.
        """
        self.__update.release_gradients()
        guard = self.__guard
        try:
            with contextlib.nullcontext() if guard is None else guard.updating(ends=True):
                accumulated = self.__accumulate([NetworkCall(inputs, keywords)], self.scale_sense)
                self.last_report = self.__update(accumulated)
        finally:
            self.__update.release_gradients()
        output = self.last_report.output
        return LossScaleStepOutput(output.loss, output.overflow, output.loss_scale)

    def flush(self) -> None:
        """Step the schedule if the last update was applied. Synchronizes with the device."""
        self.__update.flush()

    def state_dict(self) -> dict[str, Any]:
        """Call `flush`, and return the cell's own state: the loss scale with its counters."""
        self.__update.flush()
        return {"loss_scale": self.__loss_scale.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned, or change nothing if an entry does not fit.

        Results of the last update that are still pending are dropped: the schedule is not stepped
        for that update.

        Raises:
            KeyError: If a key is missing or unknown.
            TypeError: If a value has the wrong type.
            ValueError: If a value has the wrong shape or range.
        """
        check_keys(state_dict, {"loss_scale"}, "cell")
        self.__loss_scale.load_state_dict(state_dict["loss_scale"])
        self.__update.counts.discard_pending()
