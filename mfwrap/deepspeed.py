"""Run DeepSpeed's own training step, and return MindFormers' tuple."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from mfwrap.arguments import described
from mfwrap.config import StepConfig
from mfwrap.outputs import StepOutput
from mfwrap.step.calls import NetworkCall, calls_of, split_calls
from mfwrap.step.losses import MeanLoss
from mfwrap.tensors.wrappers import is_deepspeed_engine

__all__ = ["DeepSpeedCell"]


@final
class DeepSpeedCell:
    """Do a whole update of a DeepSpeed engine, and return MindFormers' tuple.

    The engine scales, reduces, clips, skips and updates. The cell reads loss, overflow, loss scale,
    learning rate and global norm from the engine. DeepSpeed decides on the host whether to skip, so
    each update synchronizes with the device. The engine's step does not support an average of the
    weights, local norms, skipping of spikes or another loss scale. The result works with monitors
    that need only a ``step_output``.

    Args:
        engine: Engine that ``deepspeed.initialize`` returned. It must train in bfloat16, in float16
            or under ZeRO: otherwise DeepSpeed does not check whether gradients are finite.
        config: Settings that the engine must have; ``None`` for the defaults. The cell compares
            them with the engine's settings, and does not change the engine. The global norm is
            reported if `use_clip_grad` is set.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a setting of `config` differs from the engine's, or if the engine does not
            support the setting.
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
            MindFormers' 5-tuple, as a named tuple.

        Raises:
            TypeError: If the network returns no loss.
            ValueError: If the tensors to split differ in their first dimensions or cannot be split
                evenly, or the loss does not have exactly one element.
        """
        steps = self.engine.gradient_accumulation_steps()
        return self._step(split_calls(inputs, batch, steps, self._config.not_split))

    def step(self, micro_batches: Sequence[Any]) -> StepOutput:
        """Do one update from a list of micro-batches, as many as the engine accumulates.

        Args:
            micro_batches: As in ``MFTrainOneStepCell.step``.

        Raises:
            TypeError: If `micro_batches` is not a sequence, or the network returns no loss.
            ValueError: If the number of micro-batches differs from the engine's, or the loss does
                not have exactly one element.
        """
        calls = calls_of(micro_batches)
        expected = self.engine.gradient_accumulation_steps()
        if len(calls) != expected:
            msg = (
                f"`micro_batches` must hold {expected} micro-batches, as the engine's "
                f"gradient_accumulation_steps, got {len(calls)}"
            )
            raise ValueError(msg)
        return self._step(calls)

    def _step(self, calls: Sequence[NetworkCall]) -> StepOutput:
        # Read the rate before the engine's step, which advances the schedule.
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
    """Convert a number or a tensor with one element to a float32 tensor of shape ``()``."""
    if isinstance(value, Tensor):
        return value.detach().float().reshape(()).to(like.device)
    return torch.full((), float(value), dtype=torch.float32, device=like.device)


def _check(engine: Any, config: StepConfig) -> None:
    if not hasattr(engine.optimizer, "overflow"):
        msg = (
            "`engine` must train in bfloat16, in float16 or under ZeRO, got an engine that does "
            "not check whether gradients are finite"
        )
        raise ValueError(msg)
    for name in (
        "local_norm",
        "use_skip_data_by_global_norm",
        "calculate_per_token_loss",
        "sync_each_batch",
        "accumulate_allreduce_grads_in_fp32",
    ):
        if getattr(config, name):
            msg = f"`{name}` must be False with DeepSpeed, which does not support it, got True"
            raise ValueError(msg)
    if config.spike_policy != "record":
        msg = (
            '`spike_policy` must be "record" with DeepSpeed, which decides by itself what to skip '
            f"and clip, got {config.spike_policy!r}"
        )
        raise ValueError(msg)
    steps = engine.gradient_accumulation_steps()
    if config.gradient_accumulation_steps not in (1, steps):
        msg = (
            f"`gradient_accumulation_steps` must be {steps}, as in the engine, or left at 1, got "
            f"{config.gradient_accumulation_steps}"
        )
        raise ValueError(msg)
    limit = float(engine.gradient_clipping())
    if config.use_clip_grad and limit != config.max_grad_norm:
        msg = (
            f"`max_grad_norm` must be {limit}, as the engine's gradient_clipping, got "
            f"{config.max_grad_norm}"
        )
        raise ValueError(msg)
