"""MindSpore's plain training cells, and the methods of its cells for custom training steps."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.arguments import described
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.config import StepConfig
from mfwrap.loss_scale.cells import LossScaleUpdateCell
from mfwrap.loss_scale.live import LossScale, wrong_type_of_scale
from mfwrap.mindspore.forward_reuse import remember_forwards
from mfwrap.mindspore.functional import GradOperation
from mfwrap.outputs import LossScaleStepOutput, StepReport
from mfwrap.step.accumulation import GradientAccumulation
from mfwrap.step.forward import NetworkCall
from mfwrap.step.gradient_reducer import GradientReducer, checked_gradients
from mfwrap.step.parameters import (
    TrainedParameters,
    checked_network,
    checked_optimizer,
    network_parameters,
)
from mfwrap.step.ranks import RankAgreement
from mfwrap.step.schedules import Schedule, checked_schedule
from mfwrap.step.state import check_keys
from mfwrap.step.update import StepUpdate
from mfwrap.tensors.sharded_norms import has_non_finite
from mfwrap.tensors.wrappers import distributed_parts


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


class StepParts:
    """Provide the attributes of MindSpore's cells from which you can build a training step.

    A subclass of a cell writes its own ``__call__`` from them, as MindSpore's documentation does::

        loss = self.network(*inputs)
        sens = torch.full_like(loss, self.sens)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        grads = self.grad_reducer(grads)
        self.apply_gradients(grads)  # in MindSpore: self.optimizer(grads)
        return loss.detach()

    The cells themselves do not use these attributes.

    Source: MindSpore, ``nn.TrainOneStepCell``.

    Args:
        network: Network to train.
        optimizer: Optimizer without accelerate's wrapper.
        parameters: The optimizer's parameters that are in the network.
    """

    lr_scheduler: Schedule | None
    ema: ExponentialMovingAverage | None = None
    _is_custom = False
    """Whether the class defines its step outside of mfwrap."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "__call__" in vars(cls):
            cls._is_custom = cls.__module__.partition(".")[0] != "mfwrap"

    def __init__(
        self, network: nn.Module, optimizer: Optimizer, parameters: TrainedParameters
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.weights: Sequence[Tensor] = _weights(optimizer)
        """The optimizer's parameters, in its order."""
        self.grad = GradOperation(get_by_list=True, sens_param=True)
        """Makes gradient functions: ``grad(network, weights)(*inputs, sens)`` returns a tuple with
        one gradient per weight, zeros for a weight that the loss does not depend on. `sens` is the
        gradient of the loss: a number, or a tensor of the loss's shape. In a subclass with its own
        ``__call__``, the network does not run again if it has just run with the same inputs."""
        self.grad_reducer = GradientReducer(network, self.weights)
        """Averages gradients over the ranks of DistributedDataParallel: takes and returns one
        gradient per weight. Returns all gradients unchanged if there is nothing to average."""
        self.reducer_flag = self.grad_reducer.sends
        """Whether `grad_reducer` averages any gradient over several ranks."""
        self._trained = parameters
        if self._is_custom:
            remember_forwards(network, self.weights)

    def apply_gradients(self, grads: Sequence[Tensor]) -> None:
        """Do one update of the optimizer: MindSpore's ``self.optimizer(grads)``.

        The gradients are neither unscaled nor clipped, and non-finite gradients are not skipped.
        The cell's schedule and its average of the weights follow the update. Afterwards no
        parameter has a gradient.

        Args:
            grads: One gradient for each of `weights`, in that order, with the weight's shape and
                dtype. All ranks must apply the same gradients.

        Raises:
            RuntimeError: If the optimizer's parameters have changed, or a parameter of the network
                has been replaced.
            TypeError: If `grads` is not a list or a tuple, or a gradient is sparse.
            ValueError: If there are more or fewer gradients than weights.
        """
        checked = checked_gradients(grads, len(self.weights))
        try:
            for weight, gradient in zip(self.weights, checked, strict=True):
                weight.grad = gradient
            self._trained.gradients()
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            if self.ema is not None:
                self.ema.update()
        finally:
            self._trained.release_gradients()


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
        present = functools.partial(network_parameters, checked_network(network))
        trained = TrainedParameters(present(), optimizer, None, present=present)
        super().__init__(network, optimizer, trained)
        self.sens: float = 1.0 if sens is None else sens
        """Factor by which the loss is multiplied before backward."""
        self.return_grad = return_grad
        self.lr_scheduler = checked_schedule(lr_scheduler, optimizer)
        """Schedule that the cell steps; ``None`` without one. Save its state separately."""
        self._accumulate = GradientAccumulation(network, per_token=False)
        self._sens = torch.full((), self.sens, dtype=torch.float32, device=trained.device)

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Do one update.

        Returns:
            The loss, shape ``()``, float32; with `return_grad` also the gradients by name,
            multiplied by `sens`.
        """
        self._trained.release_gradients()
        try:
            loss = self._accumulate([NetworkCall(inputs, keywords)], self._sens).loss
            gradients = self._gradients()
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        finally:
            self._trained.release_gradients()
        return (loss, gradients) if self.return_grad else loss

    def _gradients(self) -> dict[str, Tensor]:
        if not self.return_grad:
            self._trained.gradients()
            return {}
        # Return copies, because some optimizers change gradients in place.
        named = self._trained.named_gradients()
        return {name: gradient.clone() for name, gradient in named.items()}


class LossScaleHooks(StepParts):
    """Provide the methods of MindSpore's cells with a loss scale, in addition to `StepParts`.

    `MFTrainOneStepCell` itself calls none of them. Call them from a subclass or from your own loop.

    Args:
        network: Network to train.
        optimizer: Optimizer without accelerate's wrapper.
        parameters: The optimizer's parameters that are in the network.
        loss_scale: Live loss scale.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        parameters: TrainedParameters,
        loss_scale: LossScale,
    ) -> None:
        super().__init__(network, optimizer, parameters)
        self._loss_scale = loss_scale
        parts = distributed_parts(network)
        self._agreement = RankAgreement(parts[0].process_group) if parts else None

    @property
    def scale_sense(self) -> Tensor:
        """The live loss scale, shape ``()``, float32."""
        return self._loss_scale.value

    def set_sense_scale(self, sens: Tensor) -> None:
        """Replace the loss scale from the next step on. Does not synchronize with the device.

        Args:
            sens: New loss scale, shape ``()`` or ``(1,)``, any real dtype.

        Raises:
            TypeError: If `sens` is not a tensor.
            ValueError: If `sens` has another shape.
        """
        self._loss_scale.set(sens)

    def start_overflow_check(self, pre_cond: Any, compute_input: Any) -> tuple[bool, Any]:
        """Return ``(False, compute_input)``, as MindSpore does on GPU.

        Args:
            pre_cond: Ignored; MindSpore computes it before the check starts.
            compute_input: Input of the computation that is checked.
        """
        del pre_cond
        return False, compute_input

    def get_overflow_status(self, status: Any, compute_output: Tensor | Sequence[Any]) -> Tensor:
        """Return whether any element is inf or nan, on any rank of DistributedDataParallel.

        All ranks must call it. They get the same answer, so all of them skip an update or none.

        Args:
            status: First value that `start_overflow_check` returned; ignored.
            compute_output: Gradients: a tensor, or a nested sequence or mapping of tensors.

        Returns:
            Flag of shape ``()``, bool, on the training device. Does not synchronize with the
            device.
        """
        del status
        found = has_non_finite(_tensors_in(compute_output), self.scale_sense.device)
        return found if self._agreement is None else self._agreement.any(found)

    def process_loss_scale(self, overflow: Tensor) -> Tensor:
        """Adjust the loss scale after a step if there is an update cell; return `overflow`.

        Args:
            overflow: Whether the gradients overflowed, shape ``()``, bool, on the training device.
        """
        return self._loss_scale.update(overflow)


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
        present = functools.partial(network_parameters, checked_network(network))
        trained = TrainedParameters(present(), optimizer, None, present=present)
        loss_scale = LossScale(scale_sense, trained.device)
        config = StepConfig(max_consecutive_skips=None)
        self.lr_scheduler = checked_schedule(lr_scheduler, optimizer)
        """Schedule that the cell steps; ``None`` without one. Save its state separately."""
        self._update = StepUpdate(
            trained,
            optimizer,
            config,
            loss_scale,
            lr_scheduler=self.lr_scheduler,
        )
        super().__init__(network, optimizer, trained, loss_scale)
        self._accumulate = GradientAccumulation(network, per_token=False)
        self._guard = self._accumulate.guard(optimizer, config)
        self.last_report: StepReport | None = None
        """Report of the last update; ``None`` before the first."""

    def __call__(self, *inputs: Any, **keywords: Any) -> LossScaleStepOutput:
        """Do one update.

        Returns:
            Loss, overflow flag and the loss scale that the next step uses.
        """
        self._update.parameters.release_gradients()
        guard = self._guard
        try:
            with contextlib.nullcontext() if guard is None else guard.updating(ends=True):
                accumulated = self._accumulate([NetworkCall(inputs, keywords)], self.scale_sense)
                self.last_report = self._update(accumulated.loss)
        finally:
            self._update.parameters.release_gradients()
        output = self.last_report.output
        return LossScaleStepOutput(output.loss, output.overflow, output.loss_scale)

    def flush(self) -> None:
        """Step the schedule if the last update was applied. Synchronizes with the device."""
        self._update.flush()

    def state_dict(self) -> dict[str, Any]:
        """Call `flush`, and return the cell's own state: the loss scale with its counters."""
        self.flush()
        return {"loss_scale": self._loss_scale.state_dict()}

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
        self._loss_scale.load_state_dict(state_dict["loss_scale"])
        self._update.counts.discard_pending()


def _weights(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    if not isinstance(values, Sequence) or isinstance(values, str):
        msg = f"`compute_output` must hold tensors, got {described(values)}"
        raise TypeError(msg)
    return [tensor for value in values for tensor in _tensors_in(value)]
