"""Train an attached accelerate loop that can be saved and resumed, also in a new process."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR

from mfwrap import (
    AdaptiveLossScaleUpdateCell,
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    FixedLossScaleUpdateCell,
    StepConfig,
)
from mfwrap.accelerate import attach
from support.programs import Program
from support.small_networks import Classifier, labelled_batches
from support.training_state import training_state

__all__ = [
    "FACTORS",
    "LOSS_SCALES",
    "NAN",
    "OPTIMIZERS",
    "AttachedRun",
    "RunSettings",
    "new_accelerator",
    "resume_in_a_new_process",
]

NAN = float("nan")
FACTORS = (1.0, NAN, 1.0, 1.0, NAN, NAN, 1.0, 1.0, NAN, 1.0)
"""Factors of the losses of successive updates; an update with a NaN is skipped."""

LOSS_SCALES = {
    "none": lambda: None,
    "number": lambda: 2.0**10,
    "fixed": lambda: FixedLossScaleUpdateCell(2.0**10),
    "dynamic": lambda: DynamicLossScaleUpdateCell(2.0**10, 2, 2, hysteresis=2),
    "adaptive": lambda: AdaptiveLossScaleUpdateCell(2.0**10, 2, 20),
}
OPTIMIZERS = {
    "fused AdamW": lambda weights: AdamW(weights, lr=1e-2, fused=True),
    "foreach AdamW": lambda weights: AdamW(weights, lr=1e-2, foreach=True),
    "fused SGD": lambda weights: SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "SGD": lambda weights: SGD(weights, lr=0.1, momentum=0.9, dampening=0.5),
}
SCHEDULES = {
    "inverse": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "warm restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 3),
}


def new_accelerator(precision: str = "no", **settings: Any) -> Accelerator:
    """Return an accelerator on the CPU that shares no state with earlier accelerators.

    In fp16 it gets autocast and a gradient scaler, which accelerate creates on CUDA only.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **settings)
    if precision == "fp16":
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    return accelerator


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run, as names and numbers that can be written to JSON."""

    optimizer: str = "fused AdamW"
    schedule: str = "inverse"
    loss_scale: str = "dynamic"
    precision: str = "no"
    accumulation: int = 1
    max_norm: float | None = 0.5
    ema: bool = True
    num_networks: int = 1
    """Number of networks, each with its own optimizer; only the first network is trained."""

    spike_policy: str = "record"

    seed: int = 0


class AttachedRun:
    """Train a network with an optimizer, a schedule and an average on one accelerator.

    Args:
        settings: Settings of the run.
        attached: Whether to attach mfwrap's step; if False, the loop is plain accelerate.
        async_save: Whether the attached step saves in the background.
        accelerator_settings: Further keyword arguments of the accelerator.
    """

    def __init__(
        self,
        settings: RunSettings | None = None,
        *,
        attached: bool = True,
        async_save: bool = False,
        **accelerator_settings: Any,
    ) -> None:
        self.settings = settings = RunSettings() if settings is None else settings
        self.accelerator = new_accelerator(
            settings.precision,
            gradient_accumulation_steps=settings.accumulation,
            **accelerator_settings,
        )
        self.step = None
        if attached:
            self.step = attach(
                self.accelerator,
                StepConfig(spike_policy=settings.spike_policy),
                _average if settings.ema else None,
                scale_sense=LOSS_SCALES[settings.loss_scale](),
                async_save=async_save,
            )
        self.prepare()

    def prepare(self) -> None:
        """Create networks, optimizers and schedule, and prepare them with accelerate."""
        settings = self.settings
        torch.manual_seed(settings.seed)
        networks = [Classifier() for _ in range(settings.num_networks)]
        optimizers = [OPTIMIZERS[settings.optimizer](each.parameters()) for each in networks]
        schedule = SCHEDULES[settings.schedule](optimizers[0])
        prepared = self.accelerator.prepare(*networks, *optimizers, schedule)
        self.network, self.schedule = prepared[0], prepared[-1]
        self.optimizer = prepared[settings.num_networks]

    def train(self, first: int, last: int, factors: tuple[float, ...] = FACTORS) -> list[Tensor]:
        """Run the updates `first` to ``last - 1``.

        On several ranks, each rank trains on its share of every micro-batch.

        Returns:
            The losses, one per micro-batch.
        """
        steps = self.settings.accumulation
        batches = labelled_batches(len(factors) * steps)
        losses = []
        for update, part in itertools.product(range(first, last), range(steps)):
            inputs, labels = map(self._share, batches[update * steps + part])
            with self.accelerator.accumulate(self.network):
                loss = self.network(inputs, labels, factors[update] if part == 0 else 1.0)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and self.settings.max_norm is not None:
                    self.accelerator.clip_grad_norm_(
                        self.network.parameters(), self.settings.max_norm
                    )
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def _share(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.accelerator.num_processes)[self.accelerator.process_index]

    def trained(self) -> dict[str, Any]:
        """Return copies of the state that plain accelerate has: weights, optimizer, schedule."""
        trained = training_state(self.network, self.optimizer.optimizer)
        return trained | _copied("schedule", self.schedule.state_dict())

    def state(self) -> dict[str, Any]:
        """Flush the step, and return copies of its state and of `trained` as one mapping."""
        own = _copied("/step", self.step.attachment.step.state_dict())
        return self.trained() | own


def _average(network: nn.Module) -> ExponentialMovingAverage:
    return ExponentialMovingAverage(network, decay=0.9, warmup=True, update_every=2)


def _copied(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value.clone() if isinstance(value, Tensor) else value}
    return {k: v for key, item in value.items() for k, v in _copied(f"{name}/{key}", item).items()}


def resume_in_a_new_process(
    folder: Path, jobs: Mapping[str, tuple[RunSettings, int]]
) -> dict[str, Any]:
    """Load checkpoints in a new process, train them to the end, and return the results.

    Args:
        folder: Folder with one checkpoint per job, named after the job.
        jobs: For each job, the settings of its run and the index of its next update.

    Returns:
        For each job, a dict of its losses and its final state.
    """
    described = {name: (asdict(settings), first) for name, (settings, first) in jobs.items()}
    (folder / "jobs.json").write_text(json.dumps(described), encoding="utf-8")
    code = f"import pathlib, sys, {__name__} as runs; runs._resume(pathlib.Path(sys.argv[1]))"
    Program(code, folder).end()
    results: dict[str, Any] = torch.load(folder / "results.pt", weights_only=True)
    return results


def _resume(folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    results = {}
    for name, (settings, first) in jobs.items():
        run = AttachedRun(RunSettings(**settings))
        run.accelerator.load_state(folder / name)
        losses = run.train(first, len(FACTORS))
        results[name] = {"losses": losses, "state": run.state()}
    torch.save(results, folder / "results.pt")
