"""Callbacks written for MindFormers' PyNative trainer, and a training that runs them."""

import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from mfwrap.callbacks import PyNativeCallback as TrainerCallback
from support.trainer_runs import new_trainer

__all__ = ["ConfigWriter", "LossLogger", "RateRecorder", "Regression", "expected", "regression"]

RATE, DECAY, MAX_NORM, STEPS, WARM_UP = 0.05, 0.1, 0.5, 6, 2
ROWS, ACCUMULATION, BATCH = 16, 2, 4
SETTINGS = {
    "per_device_train_batch_size": BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "learning_rate": RATE,
    "weight_decay": DECAY,
    "max_grad_norm": MAX_NORM,
    "max_steps": STEPS,
    "warmup_steps": WARM_UP,
}


class LossLogger(TrainerCallback):
    """Log a line every few steps."""

    def __init__(self, log_interval: int = 1):
        super().__init__()
        self.log_interval = log_interval
        self.lines = []

    def on_step_end(self, args, state, **kwargs):
        loss = kwargs.get("loss")
        grad_norm = kwargs.get("grad_norm")
        if loss is None or state.global_step % self.log_interval != 0:
            return
        lr = kwargs.get("lr_scheduler")(state.global_step)
        self.lines.append(
            f"{{ step:[{state.global_step:5d}/{state.max_steps:5d}], "
            f"loss: {self._to_float(loss):10.6f}, lr: {self._to_float(lr):10.6e}, "
            f"grad_norm: {self._to_float(grad_norm):10.6f} }}"
        )

    @staticmethod
    def _to_float(data):
        if data is None:
            return data
        if hasattr(data, "asnumpy"):
            return float(data.asnumpy())
        if hasattr(data, "item"):
            return data.item()
        return float(data)


class RateRecorder:
    """Record values of each step; without a base class, and with only one method."""

    def __init__(self):
        self.steps, self.rates, self.norms, self.losses = [], [], [], []

    def on_step_end(self, args, state, loss=None, grad_norm=None, lr_scheduler=None, **kwargs):
        self.steps.append(state.global_step)
        self.rates.append(lr_scheduler(state.global_step - 1))
        self.norms.append(grad_norm)
        self.losses.append(loss)
        return "ignored"


class ConfigWriter(TrainerCallback):
    """Read arguments and state, and keep them as JSON."""

    def on_train_begin(self, args, state, **kwargs):
        self.config = json.loads(json.dumps(args.to_dict()))
        self.numbers = (
            args.training.steps,
            args["training"]["local_batch_size"],
            args.training.get("global_batch_size"),
            args.training.max_norm,
            args.optimizer.type,
            args.optimizer.betas,
            args.optimizer.weight_decay,
            args.lr_scheduler.type,
            args.lr_scheduler.learning_rate,
            args.model.get("hidden_size", "none"),
            args.get("run_mode", "train"),
            args.parallelism.data_parallel,
        )
        self.state = (state.global_step, state.max_steps, state.epoch_step, state.is_train_begin)
        self.calls = []
        self.weights = sum(p.numel() for model in kwargs["model"] for p in model.parameters())
        self.batches = len(kwargs["train_dataset"])

    def on_epoch_begin(self, args, state, **kwargs):
        self.calls.append(("epoch_begin", state.global_step, state.epoch))

    def on_epoch_end(self, args, state, **kwargs):
        self.calls.append(("epoch_end", state.global_step, state.epoch))

    def on_step_begin(self, args, state, **kwargs):
        self.calls.append(("step_begin", state.global_step, state.epoch))

    def on_step_end(self, args, state, **kwargs):
        self.calls.append(("step_end", state.global_step, state.epoch))
        self.consumed = (state.consumed_samples, state.num_accumulation_steps)

    def on_train_end(self, args, state, **kwargs):
        self.calls.append(("train_end", state.global_step, state.is_train_end))


class Regression(nn.Module):
    """A linear network that keeps the micro-batches that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.met: list[tuple[Tensor, Tensor]] = []
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean squared error."""
        loss = (self.linear(x) - labels).square().mean()
        if self.training:
            self.met.append((x, labels))
            self.losses.append(loss.detach())
        return {"loss": loss}


def regression(
    kind: type[Trainer], folder: Any, callbacks: Any, extras: Any = None, **settings: Any
) -> Trainer:
    """Return a trainer of a `Regression` whose gradients are large enough to be clipped."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 3, generator=generator)
    data = [{"x": row, "labels": row.sum(0, keepdim=True)} for row in x]
    return new_trainer(
        kind,
        folder,
        model=Regression(),
        data=data,
        callbacks=callbacks,
        extras={"data_collator": None} | (extras or {}),
        **SETTINGS | settings,
    )


def expected(met: list[tuple[Tensor, Tensor]]) -> list[tuple[float, float, float]]:
    """Return rate, loss and gradient norm of each step, by a torch loop in float64.

    Args:
        met: Micro-batches in their order.
    """
    network = Regression().double()
    optimizer = torch.optim.AdamW(
        [
            {"params": [network.linear.weight], "weight_decay": DECAY},
            {"params": [network.linear.bias], "weight_decay": 0.0},
        ]
    )
    values = []
    for step in range(len(met) // ACCUMULATION):
        rate = RATE * min(step / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batches = met[ACCUMULATION * step : ACCUMULATION * (step + 1)]
        losses = [network(x.double(), labels.double())["loss"] for x, labels in batches]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        values.append((rate, loss.item(), norm.item()))
    return values
