"""What does the updates of a loop of your own: an attached step, a cell, or a torch optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap import MFTrainOneStepCell, StepConfig, StepReport
from mfwrap.accelerate import AttachedStep
from mfwrap.arguments import described
from mfwrap.compatibility.accelerate import data_loaders_of, models_of, optimizers_of
from mfwrap.tensors.wrappers import unwrapped_optimizer


class PlainOutput(NamedTuple):
    """Numbers of an update in a loop without mfwrap's step; ``None`` where they are unknown."""

    loss: Tensor
    learning_rate: Tensor | None
    global_norm: Tensor | None


class UpdateSource:
    """What does the updates of a loop.

    Args:
        model: Network, with its wrappers; ``None`` if unknown.
        optimizer: Optimizer, with its wrapper.
    """

    accelerator: Accelerator | None = None
    step_config: StepConfig | None = None
    """Settings of mfwrap's step; ``None`` without one."""

    calls: list[Callable[[], None]]
    """Functions that mfwrap's step calls before the weights change."""

    def __init__(self, model: nn.Module | None, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer

    @property
    def model(self) -> nn.Module | None:
        """Network, with its wrappers; ``None`` if unknown."""
        return self._model

    @property
    def optimizer(self) -> Any:
        """Optimizer, with its wrapper; ``None`` if there is none yet."""
        return self._optimizer

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the step, and of the optimizer's first parameter group."""
        found: dict[str, Any] = {}
        if self.step_config is not None:
            found["step"] = dataclasses.asdict(self.step_config)
        optimizer = unwrapped_optimizer(self.optimizer)
        if isinstance(optimizer, Optimizer):
            group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
            # A schedule keeps the rate that was set, and moves the other one.
            group["lr"] = group.pop("initial_lr", group["lr"])
            found["optimizer"] = {"type": type(optimizer).__name__, **group}
        return found

    @property
    def max_grad_norm(self) -> float | None:
        """Norm that gradients are clipped to; ``None`` if they are not, or if it is unknown."""
        config = self.step_config
        return config.max_grad_norm if config is not None and config.use_clip_grad else None

    @property
    def loader(self) -> Any:
        """The first prepared data loader; ``None`` without one."""
        loaders = [] if self.accelerator is None else data_loaders_of(self.accelerator)
        return next(iter(loaders), None)

    def call_before_update(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have a function called before the weights change; return a function that ends this."""
        self.calls.append(call)
        return lambda: self.calls.remove(call)

    def report(self) -> StepReport | None:
        """Return the report of the last update; ``None`` if there is none."""
        return None


@final
class AttachedSource(UpdateSource):
    """The step that `attach` has put behind an accelerator."""

    def __init__(self, attached: AttachedStep, model: nn.Module | None) -> None:
        super().__init__(model, None)
        self.attached = attached
        self.accelerator = attached.accelerator
        self.step_config = attached.config
        self.calls = attached.attachment.step.before_update

    @property
    def model(self) -> nn.Module | None:
        """The given model, or the first prepared one."""
        models = models_of(self.attached.accelerator)
        return self._model if self._model is not None else next(iter(models), None)

    @property
    def optimizer(self) -> Any:
        """The first prepared optimizer."""
        return next(iter(optimizers_of(self.attached.accelerator)), None)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the step and the optimizer, without what the accelerator or the loop sets."""
        found = super().settings
        step = found["step"]
        del step["gradient_accumulation_steps"]
        if not step["use_clip_grad"]:
            # The loop may clip by itself. This is unknown before its first step.
            del step["use_clip_grad"], step["max_grad_norm"]
        return found

    @property
    def max_grad_norm(self) -> float | None:
        """Limit of the loop's own last clipping, or else of the step's."""
        own = self.attached.attachment.max_grad_norm
        return super().max_grad_norm if own is None else own

    def report(self) -> StepReport | None:
        """Return the report of the last update."""
        return self.attached.last_report


@final
class CellSource(UpdateSource):
    """A cell, which does a whole update in one call."""

    def __init__(self, cell: MFTrainOneStepCell) -> None:
        super().__init__(cell.network, cell.optimizer)
        self._cell = cell
        # A subclass may have a `config` of its own.
        self.step_config = cell.config if isinstance(cell.config, StepConfig) else None
        self.calls = cell.before_update

    def report(self) -> StepReport | None:
        """Return the report of the last update."""
        return self._cell.last_report


@final
class OptimizerSource(UpdateSource):
    """A torch optimizer in a loop without mfwrap's step."""

    _rate: Tensor | float | None = None
    """Learning rate of the last update: the loop may have set that of the next one since."""

    def call_before_update(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have a function called before each ``optimizer.step``; return one that ends this."""

        def before(*_: Any) -> None:
            self._rate = self._rate_now()
            call()

        hook = unwrapped_optimizer(self.optimizer).register_step_pre_hook(before)
        remove: Callable[[], None] = hook.remove
        return remove

    def output(self, loss: Tensor | float, grad_norm: Tensor | float | None) -> PlainOutput:
        """Return the numbers of an update, as tensors on the device of the loss."""
        mean = torch.as_tensor(loss).detach().float().mean()
        rate = self._rate_now() if self._rate is None else self._rate
        return PlainOutput(
            mean, _filled(rate, mean), None if grad_norm is None else _filled(grad_norm, mean)
        )

    def _rate_now(self) -> Tensor | float:
        rate: Tensor | float = unwrapped_optimizer(self.optimizer).param_groups[0]["lr"]
        return rate.clone() if isinstance(rate, Tensor) else rate


def _filled(number: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return number.detach().float()
    return torch.full_like(like, number)


def source_of(step: object, model: nn.Module | None) -> UpdateSource:
    """Return the source of the updates.

    Raises:
        TypeError: If `step` is none of the three kinds.
    """
    if isinstance(step, AttachedStep):
        return AttachedSource(step, model)
    if isinstance(step, MFTrainOneStepCell):
        return CellSource(step)
    if isinstance(unwrapped_optimizer(step) if hasattr(step, "optimizer") else step, Optimizer):
        return OptimizerSource(model, step)
    msg = (
        "`step` must be what `attach` returned, an MFTrainOneStepCell or a torch optimizer, got "
        f"{described(step)}"
    )
    raise TypeError(msg)
