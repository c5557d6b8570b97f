"""A network, its loss and its optimizer as one training cell, and as one network to evaluate."""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.arguments import described
from mfwrap.mindspore.managers import DynamicLossScaleManager, LossScaleManager
from mfwrap.step.mindspore_cells import (
    LossScaleHooks,
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
    WithLossCell,
)
from mfwrap.step.update import Schedule
from mfwrap.tensors.wrappers import unwrapped_network, unwrapped_optimizer

__all__ = [
    "AmpLevel",
    "AutocastNetwork",
    "EvaluationNetwork",
    "Precision",
    "TrainNetwork",
    "TrainingCell",
    "build_train_network",
    "plain_accelerator",
    "precision_of",
]


AmpLevel = Literal["O0", "O1", "O2", "O3", "auto"]
"""How `Model` mixes precisions; see `precision_of`."""


class Precision(NamedTuple):
    """What a level means on a device."""

    dtype: torch.dtype | None
    """Type that matrix products are computed in; ``None`` for the weights' own."""

    scales_loss: bool
    """A dynamic loss scale belongs to it, unless another one is given."""


def precision_of(amp_level: AmpLevel, device: torch.device) -> Precision:
    """Return what a level means.

    Weights stay as they are, float32, at every level: MindSpore's ``to_float`` casts what is
    computed, too. ``"O0"`` computes in the weights' type. ``"O1"``, ``"O2"`` and ``"O3"`` compute
    in float16 wherever torch's autocast holds it safe, which takes the place of MindSpore's lists
    of operators; ``"O2"`` brings a dynamic loss scale along. ``"auto"`` is bfloat16 on a device
    that computes in it, ``"O2"`` on another one, and ``"O0"`` on a CPU.

    Args:
        amp_level: The level.
        device: Where the network is.

    Raises:
        ValueError: If there is no such level.

    Example:
        >>> precision_of("O2", torch.device("cpu"))
        Precision(dtype=torch.float16, scales_loss=True)
    """
    if amp_level not in get_args(AmpLevel):
        msg = f"`amp_level` must be one of {list(get_args(AmpLevel))}, got {amp_level!r}"
        raise ValueError(msg)
    if amp_level == "auto":
        if device.type == "cpu":
            return Precision(None, scales_loss=False)
        if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision(torch.bfloat16, scales_loss=False)
        return Precision(torch.float16, scales_loss=True)
    if amp_level == "O0":
        return Precision(None, scales_loss=False)
    return Precision(torch.float16, scales_loss=amp_level == "O2")


class AutocastNetwork(nn.Module):
    """A network in mixed precision that returns float32, so that its loss is computed in float32.

    Args:
        network: The network.
        dtype: Type that matrix products are computed in; ``None`` for the weights' own.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.network = network
        self._dtype = dtype

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the network; what it returns in half precision comes back in float32."""
        if self._dtype is None:
            return self.network(*inputs, **keywords)
        with self._autocast():
            return _in_float32(self.network(*inputs, **keywords))

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        parameter = next(self.network.parameters(), None)
        kind = "cpu" if parameter is None else parameter.device.type
        return torch.autocast(kind, dtype=self._dtype)


def _in_float32(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        half = outputs.dtype in {torch.float16, torch.bfloat16}
        return outputs.float() if half else outputs
    if isinstance(outputs, dict):
        # Also of a Hugging Face model's output, which is rebuilt as what it is.
        return type(outputs)(**{name: _in_float32(value) for name, value in outputs.items()})
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*map(_in_float32, outputs))
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(map(_in_float32, outputs))
    return outputs


TrainingCell = TrainOneStepCell | LossScaleHooks
"""What does one update of a network when it is called."""


class TrainNetwork(NamedTuple):
    """A network, and what trains it."""

    network: nn.Module
    """Without wrappers and loss function, on the training device."""

    device: torch.device
    """The training device."""

    precision: Precision
    """What the network computes in."""

    cell: TrainingCell | None
    """What does an update; ``None`` without an optimizer."""

    manager: LossScaleManager | None = None
    """Told on the host of the cell's overflows; ``None`` for none."""

    loss_fn: Callable[..., Tensor] | None = None
    """Called with the network's output and the label; ``None`` if the network returns its loss."""

    divisor: float = 1.0
    """What the optimizer has to divide gradients by; 1 where the cell does it."""

    def checked_cell(self) -> TrainingCell:
        """Return the cell.

        Raises:
            RuntimeError: If there is none.
        """
        if self.cell is None:
            msg = "`optimizer` must be given to train, got None"
            raise RuntimeError(msg)
        return self.cell


def plain_accelerator() -> Accelerator:
    """Return an accelerator that leaves precisions alone.

    Raises:
        ValueError: If the one that was made before mixes them.
    """
    accelerator = Accelerator()
    if accelerator.mixed_precision != "no":
        msg = (
            "`amp_level` says how precisions are mixed, and an Accelerator must not, got one with "
            f"mixed_precision={accelerator.mixed_precision!r}"
        )
        raise ValueError(msg)
    return accelerator


def build_train_network(
    network: nn.Module | TrainingCell,
    optimizer: Optimizer | None,
    loss_fn: Callable[..., Tensor] | None,
    *,
    amp_level: AmpLevel,
    loss_scale_manager: LossScaleManager | None,
    lr_scheduler: Schedule | None,
    accelerator: Accelerator,
) -> TrainNetwork:
    """Return a network with its training cell.

    Without a manager that is `TrainOneStepCell`, which drops no update; a precision that scales
    its loss brings ``DynamicLossScaleManager()``. With a manager that drops overflowing updates it
    is `TrainOneStepWithLossScaleCell`.

    Source: MindSpore, ``amp.build_train_network``.

    Args:
        network: Returns the loss, or what `loss_fn` takes; or a training cell, used as it is.
        optimizer: Of the network's parameters.
        loss_fn: Called with the network's output and the label.
        amp_level: How precisions are mixed.
        loss_scale_manager: The loss scale, ``None`` for that of the level.
        lr_scheduler: Stepped once per applied update.
        accelerator: Has the device, and prepares the network for several ranks.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If two arguments do not go together, or there is no such level.
    """
    if loss_fn is not None and not callable(loss_fn):
        msg = f"`loss_fn` must be callable or None, got {described(loss_fn)}"
        raise TypeError(msg)
    if isinstance(network, (TrainOneStepCell, LossScaleHooks)):
        _refuse_beside_cell(
            loss_fn=loss_fn,
            optimizer=optimizer,
            amp_level=None if amp_level == "O0" else amp_level,
            loss_scale_manager=loss_scale_manager,
            lr_scheduler=lr_scheduler,
        )
        return _around_cell(network)
    if not isinstance(network, nn.Module):
        msg = f"`network` must be a torch.nn.Module or a training cell, got {described(network)}"
        raise TypeError(msg)
    manager = loss_scale_manager
    if manager is not None and not isinstance(manager, LossScaleManager):
        msg = f"`loss_scale_manager` must be a LossScaleManager or None, got {described(manager)}"
        raise TypeError(msg)
    device = accelerator.device
    precision = precision_of(amp_level, device)
    built = TrainNetwork(network.to(device), device, precision, None, loss_fn=loss_fn)
    if optimizer is None:
        if manager is not None or lr_scheduler is not None:
            msg = "`loss_scale_manager` and `lr_scheduler` must go with `optimizer`, got None"
            raise ValueError(msg)
        return built
    if manager is None and precision.scales_loss:
        manager = DynamicLossScaleManager()
    trained = network if precision.dtype is None else AutocastNetwork(network, precision.dtype)
    if loss_fn is not None:
        # Any callable will do; a module's own weights would be the network's, too.
        trained = WithLossCell(trained, cast("nn.Module", loss_fn))
    cell, divisor = _cell(
        accelerator.prepare_model(trained), unwrapped_optimizer(optimizer), manager, lr_scheduler
    )
    return built._replace(cell=cell, manager=manager, divisor=divisor)


def _around_cell(cell: TrainingCell) -> TrainNetwork:
    device = unwrapped_optimizer(cell.optimizer).param_groups[0]["params"][0].device
    inner = unwrapped_network(cell.network)
    own_loss: Callable[..., Tensor] | None = None
    if isinstance(inner, WithLossCell):
        # As in MindSpore, where a cell with a loss leaves the names of weights as they are.
        inner, own_loss = inner.backbone_network, cast("nn.Module", inner.loss_fn)
    return TrainNetwork(inner, device, precision_of("O0", device), cell, loss_fn=own_loss)


def _cell(
    network: nn.Module,
    optimizer: Optimizer,
    manager: LossScaleManager | None,
    lr_scheduler: Schedule | None,
) -> tuple[TrainingCell, float]:
    """Return the cell, and what the optimizer has to divide gradients by."""
    if manager is None:
        return TrainOneStepCell(network, optimizer, lr_scheduler=lr_scheduler), 1.0
    update_cell = manager.get_update_cell()
    if update_cell is None:
        scale = manager.get_loss_scale()
        return TrainOneStepCell(network, optimizer, scale, lr_scheduler=lr_scheduler), scale
    cell = TrainOneStepWithLossScaleCell(network, optimizer, update_cell, lr_scheduler=lr_scheduler)
    return cell, 1.0


def _refuse_beside_cell(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            msg = (
                f"`{name}` must be left alone where `network` is a training cell, which has its "
                f"own, got {described(value)}"
            )
            raise ValueError(msg)


class EvaluationNetwork(nn.Module):
    """A network with its loss, for evaluation.

    Source: MindSpore, ``nn.WithEvalCell``.

    Args:
        network: Called with the data.
        loss_fn: Called with the network's output and the label.
        dtype: What the network computes in; ``None`` for the weights' own type.
    """

    def __init__(
        self, network: nn.Module, loss_fn: Callable[..., Tensor], dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.network = AutocastNetwork(network, dtype)
        self.loss_fn = loss_fn

    def forward(self, data: Any, label: Any) -> tuple[Tensor, Any, Any]:
        """Return loss, output and label."""
        outputs = self.network(data)
        return self.loss_fn(outputs, label), outputs, label
