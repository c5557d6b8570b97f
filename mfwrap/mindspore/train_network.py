"""Build the training cell and the evaluation network of a `Model`."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.arguments import check_callable, described
from mfwrap.mindspore.cells import (
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
    WithLossCell,
)
from mfwrap.mindspore.managers import DynamicLossScaleManager, LossScaleManager
from mfwrap.step.parts.cell_parts import LossScaleHooks
from mfwrap.step.schedules import Schedule
from mfwrap.tensors.wrappers import unwrapped_network, unwrapped_optimizer

AmpLevel = Literal["O0", "O1", "O2", "O3", "auto"]
"""Mixed precision of a `Model`; see `precision_of`."""


class Precision(NamedTuple):
    """Precision that an `AmpLevel` selects on a device."""

    dtype: torch.dtype | None
    """Type of matrix products; ``None`` for the type of the weights."""

    scales_loss: bool
    """Whether a dynamic loss scale is used if no loss-scale manager is given."""


def precision_of(amp_level: AmpLevel, device: torch.device) -> Precision:
    """Return the precision that an `AmpLevel` selects on a device.

    ``"O0"`` computes in the type of the weights. ``"O1"``, ``"O2"`` and ``"O3"`` compute in float16
    where torch's autocast considers it safe; autocast replaces MindSpore's lists of operators.
    ``"O2"`` has a dynamic loss scale. ``"auto"`` is ``"O0"`` on a CPU, ``"O2"`` on a CUDA device
    without bfloat16, and autocast to bfloat16 on any other device. The weights keep their type at
    every level, as in MindSpore, where ``to_float`` casts only the inputs of operators.

    Args:
        amp_level: The level.
        device: Device of the network.

    Raises:
        ValueError: If the level is unknown.

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


TrainingCell = TrainOneStepCell | LossScaleHooks
"""A cell that does one update of a network per call."""


class TrainNetwork(NamedTuple):
    """A network and its training cell."""

    network: nn.Module
    """The network without wrappers and loss function, on the training device."""

    device: torch.device
    """The training device."""

    precision: Precision
    """Precision of the network."""

    cell: TrainingCell | None
    """The training cell; ``None`` without an optimizer."""

    manager: LossScaleManager | None = None
    """Loss-scale manager on the host, updated from the cell's overflows; ``None`` without one."""

    loss_fn: Callable[..., Tensor] | None = None
    """Called with the network's output and the label; ``None`` if the network returns its loss."""

    divisor: float = 1.0
    """Number by which gradients are divided before the optimizer runs. It is 1 if the cell unscales
    the gradients, or there is no loss scale."""

    def checked_cell(self) -> TrainingCell:
        """Return the training cell.

        Raises:
            RuntimeError: If there is no optimizer.
        """
        if self.cell is None:
            msg = "`optimizer` must be given to train, got None"
            raise RuntimeError(msg)
        return self.cell


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
    """Build the training cell of a network.

    With a manager that skips overflowing updates, the cell is a `TrainOneStepWithLossScaleCell`.
    Otherwise it is a `TrainOneStepCell`, which applies every update. If no manager is given and the
    level has a dynamic loss scale, the manager is ``DynamicLossScaleManager()``.

    Source: MindSpore, ``amp.build_train_network``.

    Args:
        network: A network that returns its loss, or an output for `loss_fn`; or a training cell,
            which is used as it is.
        optimizer: Optimizer of the network's parameters.
        loss_fn: Called with the network's output and the label.
        amp_level: Mixed precision.
        loss_scale_manager: The loss scale; ``None`` for the default of `amp_level`.
        lr_scheduler: Learning-rate schedule, stepped once per applied update.
        accelerator: Supplies the device, and wraps the network for several ranks.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the level is unknown, or two arguments exclude each other.
    """
    if loss_fn is not None:
        check_callable("loss_fn", loss_fn)
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
            msg = "`loss_scale_manager` and `lr_scheduler` need an `optimizer`, got optimizer=None"
            raise ValueError(msg)
        return built
    if manager is None and precision.scales_loss:
        manager = DynamicLossScaleManager()
    trained = network if precision.dtype is None else AutocastNetwork(network, precision.dtype)
    if loss_fn is not None:
        # The cast is for mypy: any callable works. If `loss_fn` is a module, its weights become
        # part of the network.
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
        # Return the network inside the cell. The names of the cell's own weights have a prefix that
        # the names in MindSpore lack.
        inner, own_loss = inner.backbone_network, cast("nn.Module", inner.loss_fn)
    return TrainNetwork(inner, device, precision_of("O0", device), cell, loss_fn=own_loss)


def _cell(
    network: nn.Module,
    optimizer: Optimizer,
    manager: LossScaleManager | None,
    lr_scheduler: Schedule | None,
) -> tuple[TrainingCell, float]:
    """Return the cell, and the number by which gradients are divided before the optimizer runs."""
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
                f"`{name}` must be left out if `network` is a training cell, which has its own, "
                f"got {described(value)}"
            )
            raise ValueError(msg)


def plain_accelerator() -> Accelerator:
    """Return an accelerator without mixed precision.

    Raises:
        ValueError: If the process already has an Accelerator with mixed precision, because all
            accelerators of a process share that setting.
    """
    # Without `cpu=True`, accelerate would not connect several processes on a machine that has no
    # accelerator: each would train alone.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    if accelerator.mixed_precision != "no":
        msg = (
            "`Model` needs an Accelerator without mixed precision, got one with "
            f"mixed_precision={accelerator.mixed_precision!r}; use `amp_level` instead"
        )
        raise ValueError(msg)
    return accelerator


class AutocastNetwork(nn.Module):
    """Run a network under autocast and return float32, so that its loss is computed in float32.

    Args:
        network: The network.
        dtype: Type of matrix products; ``None`` for the type of the weights, without autocast.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.network = network
        self._dtype = dtype

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the network; convert its float16 and bfloat16 outputs to float32."""
        if self._dtype is None:
            return self.network(*inputs, **keywords)
        parameter = next(self.network.parameters(), None)
        kind = "cpu" if parameter is None else parameter.device.type
        with torch.autocast(kind, dtype=self._dtype):
            return convert_to_fp32(self.network(*inputs, **keywords))


class EvaluationNetwork(nn.Module):
    """Return loss, output and label of a batch, for evaluation.

    Source: MindSpore, ``nn.WithEvalCell``.

    Args:
        network: Called with the data.
        loss_fn: Called with the network's output and the label.
        dtype: Type of matrix products in the network; ``None`` for the type of the weights.
    """

    def __init__(
        self, network: nn.Module, loss_fn: Callable[..., Tensor], dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.network = AutocastNetwork(network, dtype)
        self.loss_fn = loss_fn

    def forward(self, data: Any, label: Any) -> tuple[Tensor, Any, Any]:
        """Compute the loss; return loss, output and label."""
        outputs = self.network(data)
        return self.loss_fn(outputs, label), outputs, label
