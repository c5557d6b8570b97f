"""DeepSpeed's own step, reported as MindFormers' tuple."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from mfwrap.arguments import described
from mfwrap.config import StepConfig
from mfwrap.outputs import StepOutput
from mfwrap.step.forward import MeanLoss, NetworkCall, calls_of, split_calls
from mfwrap.tensors.wrappers import is_deepspeed_engine

__all__ = ["DeepSpeedCell"]


@final
class DeepSpeedCell:
    """One whole update of a DeepSpeed engine: its own step, with MindFormers' tuple.

    The engine scales, reduces, clips, skips and updates; loss, overflow, loss scale, learning rate
    and global norm are read from it. It decides on the host, so each update waits for the device.
    Its step has no place for an average of the weights, local norms, skipped spikes or another
    loss scale; monitors that need only a ``step_output`` take what it returns.

    Args:
        engine: What ``deepspeed.initialize`` returned, in bfloat16, float16 or under ZeRO: only
            there does it look whether gradients are finite.
        config: What the engine does, to be checked against it; nothing of it is set. The global
            norm is reported if `use_clip_grad` is set.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the engine cannot do what `config` asks for, or does something else.
    """

    def __init__(self, engine: Any, config: StepConfig | None = None) -> None:
        config = StepConfig() if config is None else config
        if not is_deepspeed_engine(engine):
            msg = f"`engine` must be a deepspeed.DeepSpeedEngine, got {described(engine)}"
            raise TypeError(msg)
        if not isinstance(config, StepConfig):
            msg = f"`config` must be a StepConfig or None, got {described(config)}"
            raise TypeError(msg)
        _check(engine, config)
        self.engine = engine
        self._config = config
        self._forward = MeanLoss(engine)

    def __call__(self, *inputs: Any, **batch: Any) -> StepOutput:
        """Do one update from one batch, split into the engine's number of micro-batches.

        Args:
            inputs: Positional arguments of the network.
            batch: Keyword arguments of the network.

        Returns:
            MindFormers' 5-tuple, by name.

        Raises:
            TypeError: If the network returns no loss.
            ValueError: If a tensor does not split, or the loss is not one element.
        """
        return self._step(split_calls(inputs, batch, self.engine.gradient_accumulation_steps()))

    def step(self, micro_batches: Sequence[Any]) -> StepOutput:
        """Do one update from as many micro-batches as the engine accumulates.

        Args:
            micro_batches: As in ``MFTrainOneStepCell.step``.

        Raises:
            TypeError: If `micro_batches` is not a sequence, or the network returns no loss.
            ValueError: If their number is another, or the loss is not one element.
        """
        calls = calls_of(micro_batches)
        expected = self.engine.gradient_accumulation_steps()
        if len(calls) != expected:
            msg = f"`micro_batches` must be the engine's {expected}, got {len(calls)}"
            raise ValueError(msg)
        return self._step(calls)

    def _step(self, calls: Sequence[NetworkCall]) -> StepOutput:
        # Before the engine's step, which lets the schedule advance.
        rate = float(self.engine.get_lr()[0])
        losses = []
        for call in calls:
            loss = self._forward(call).numerator
            self.engine.backward(loss)
            losses.append(loss.detach().float())
            self.engine.step()
        mean = torch.stack(losses).mean()
        return StepOutput(
            loss=mean,
            overflow=_tensor(self.engine.optimizer.overflow, mean).bool(),
            loss_scale=_tensor(self.engine.optimizer.loss_scale, mean),
            learning_rate=_tensor(rate, mean),
            global_norm=_tensor(self.engine.get_global_grad_norm(), mean)
            if self._config.use_clip_grad
            else None,
        )


def _tensor(value: Any, like: Tensor) -> Tensor:
    """Return a number or a tensor of one element, shape ``()``, float32."""
    if isinstance(value, Tensor):
        return value.detach().float().reshape(()).to(like.device)
    return torch.full((), float(value), dtype=torch.float32, device=like.device)


def _check(engine: Any, config: StepConfig) -> None:
    if not hasattr(engine.optimizer, "overflow"):
        msg = (
            "`engine` must train in bfloat16, in float16 or under ZeRO, got one that applies "
            "updates whether gradients are finite or not"
        )
        raise ValueError(msg)
    for name in ("local_norm", "use_skip_data_by_global_norm", "calculate_per_token_loss"):
        if getattr(config, name):
            msg = f"`{name}` must be False with DeepSpeed, whose own step does not do it, got True"
            raise ValueError(msg)
    steps = engine.gradient_accumulation_steps()
    if config.gradient_accumulation_steps not in (1, steps):
        msg = (
            f"`gradient_accumulation_steps` must be the engine's {steps}, or left at 1, got "
            f"{config.gradient_accumulation_steps}"
        )
        raise ValueError(msg)
    limit = float(engine.gradient_clipping())
    if config.use_clip_grad and limit != config.max_grad_norm:
        msg = (
            f"`max_grad_norm` must be the engine's gradient_clipping of {limit}, got "
            f"{config.max_grad_norm}"
        )
        raise ValueError(msg)
