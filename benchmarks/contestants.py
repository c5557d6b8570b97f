"""Contestants of epilogue.py: ways to do everything after backward."""

import abc
import importlib.util
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, StepConfig
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.losses import Accumulated
from mfwrap.step.parameters import TrainedParameters, network_parameters
from mfwrap.step.update import StepUpdate

LOSS_SCALE = 2.0**16
MAX_GRAD_NORM = 1.0
DECAY = 0.999
LEARNING_RATE = 1e-4
UPDATE_EVERY = 4


class Model(nn.Module):
    """A model with parameters and without a forward pass.

    Args:
        weights: Initial values; the model copies them.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weight.clone() for weight in weights)


class Contestant(abc.ABC):
    """One way to do everything after backward.

    Args:
        model: Model whose parameters are trained.
    """

    name: str
    compared_with = "mfwrap, fused AdamW"
    """Name of the contestant of mfwrap that averages as often."""
    cycle = 1
    """Number of steps after which the work repeats."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.device = self.parameters[0].device
        self._gradients = [torch.empty_like(parameter) for parameter in self.parameters]

    def load_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Give every parameter its scaled gradient."""
        torch._foreach_copy_(self._gradients, list(gradients))
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def state_bytes(self) -> int:
        """Return the bytes of parameters, gradients, two moments and one average."""
        return 5 * sum(parameter.nbytes for parameter in self.parameters)

    @abc.abstractmethod
    def step(self) -> None:
        """Unscale, clip, update, average the weights, and compute every gradient's norm."""


class Mfwrap(Contestant):
    """Do the part of `MFTrainOneStepCell` that follows backward."""

    name = Contestant.compared_with
    average_dtype: torch.dtype | None = None
    """Dtype of the average; ``None`` for that of the weights, at least float32."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._loss = torch.zeros((), device=self.device)
        optimizer = torch.optim.AdamW(self.parameters, LEARNING_RATE, fused=True)
        loss_scale = DynamicLossScaleUpdateCell(LOSS_SCALE, 2, 10**6)
        self._update = StepUpdate(
            TrainedParameters(network_parameters(model), optimizer, None),
            optimizer,
            StepConfig(use_clip_grad=True, max_grad_norm=MAX_GRAD_NORM, local_norm=True),
            LossScale(loss_scale, self.device),
            ema=ExponentialMovingAverage(
                model, DECAY**self.cycle, update_every=self.cycle, dtype=self.average_dtype
            ),
        )

    def step(self) -> None:
        self._update(Accumulated(self._loss, None))


class MfwrapHalfAverage(Mfwrap):
    """Keep the average in bfloat16, as the weights."""

    name = "mfwrap, fused AdamW, average in bfloat16"
    average_dtype = torch.bfloat16


class MfwrapEveryFourth(Mfwrap):
    """Average at every fourth update."""

    name = compared_with = f"mfwrap, average every {UPDATE_EVERY} updates"
    cycle = UPDATE_EVERY


class Torch(Contestant):
    """Use torch's GradScaler and ``clip_grad_norm_``; read each norm on the host separately."""

    fused = True
    scales = True
    """Whether gradients are unscaled and checked, which is done in float32 and float16 only."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._optimizer = torch.optim.AdamW(
            self.parameters, LEARNING_RATE, fused=self.fused, foreach=not self.fused
        )
        self._scaler = torch.amp.GradScaler(
            self.device.type, init_scale=LOSS_SCALE, growth_interval=10**6, enabled=self.scales
        )
        # Call `scale` once, because the first call creates the scale, which `unscale_` needs.
        self._scaler.scale(torch.zeros((), device=self.device))
        self._average = self.make_average()
        self.norms: object = None

    def read_norms(self) -> object:
        """Return the norm of each gradient."""
        return [p.grad.norm().item() for p in self.parameters if p.grad is not None]

    def step(self) -> None:
        self._scaler.unscale_(self._optimizer)
        self.norms = self.read_norms()
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._average()
        self._optimizer.zero_grad(set_to_none=True)

    @abc.abstractmethod
    def make_average(self) -> Callable[[], None]:
        """Return a function that averages the weights."""


class TorchFused(Torch):
    """Use fused AdamW, and one foreach call for the average."""

    name = "torch, fused AdamW, foreach average"

    def make_average(self) -> Callable[[], None]:
        averages = [parameter.detach().clone() for parameter in self.parameters]
        follow = get_ema_multi_avg_fn(DECAY)
        return lambda: follow(averages, self.parameters, 0)


class TorchFusedWithoutNorms(TorchFused):
    """Do the same as `TorchFused`, without the norm of every parameter."""

    name = "the same, without norms by parameter"

    def read_norms(self) -> object:
        return None


class TorchFusedForeachNorms(TorchFused):
    """Do the same as `TorchFused`, with all norms in one call, which stay on the device."""

    name = "torch, fused AdamW, foreach norms and average"

    def read_norms(self) -> object:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return torch.stack(torch._foreach_norm(gradients))


class TorchHalf(TorchFusedForeachNorms):
    """Do the same without GradScaler: bfloat16 needs none, so nothing checks for overflow."""

    name = "torch, fused AdamW, foreach norms and average, no GradScaler"
    scales = False


class TorchHalfFloatAverage(TorchHalf):
    """Keep the average in float32: a step of one thousandth is lost in bfloat16."""

    name = "torch, the same, average in float32"

    def make_average(self) -> Callable[[], None]:
        averages = [parameter.detach().float() for parameter in self.parameters]

        def average() -> None:
            weights = [parameter.detach().float() for parameter in self.parameters]
            torch._foreach_lerp_(averages, weights, 1 - DECAY)

        return average


class TorchFusedEveryFourth(TorchFused):
    """Do the same as `TorchFused`, and average at every fourth update."""

    name = f"torch, fused AdamW, foreach average every {UPDATE_EVERY} updates"
    compared_with = MfwrapEveryFourth.name
    cycle = UPDATE_EVERY

    def make_average(self) -> Callable[[], None]:
        averages = [parameter.detach().clone() for parameter in self.parameters]
        follow = get_ema_multi_avg_fn(DECAY**self.cycle)
        num_updates = 0

        def average() -> None:
            nonlocal num_updates
            num_updates += 1
            if num_updates % self.cycle == 0:
                follow(averages, self.parameters, 0)

        return average


class TorchForeach(TorchFused):
    """Use foreach AdamW, and one foreach call for the average."""

    name = "torch, foreach AdamW, foreach average"
    fused = False


class TorchAveragedModel(Torch):
    """Use fused AdamW, and torch's AveragedModel for the average."""

    name = "torch, fused AdamW, AveragedModel"

    def make_average(self) -> Callable[[], None]:
        averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        return lambda: averaged.update_parameters(self.model)


class TorchEmaPytorch(Torch):
    """Use fused AdamW, and the package ema-pytorch for the average."""

    name = "torch, fused AdamW, ema-pytorch"

    def make_average(self) -> Callable[[], None]:
        from ema_pytorch import EMA  # noqa: PLC0415  (may not be installed)

        average = EMA(self.model, beta=DECAY, update_after_step=0, update_every=1)
        update: Callable[[], None] = average.update
        return update


CONTESTANTS: tuple[type[Contestant], ...] = (
    Mfwrap,
    TorchFused,
    TorchFusedWithoutNorms,
    TorchForeach,
    TorchAveragedModel,
    *((TorchEmaPytorch,) if importlib.util.find_spec("ema_pytorch") else ()),
    MfwrapEveryFourth,
    TorchFusedEveryFourth,
)
