"""Programs that each rank runs to train with bad losses or missing targets on some ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, MFTrainOneStepCell
from support.small_networks import IGNORED, TokenClassifier, labelled_batches
from support.training_state import training_state

__all__ = ["CASES", "NUM_STEPS", "OPTIMIZERS", "Case", "meet", "train_fixture"]

NUM_STEPS = 3
INF, NAN = float("inf"), float("nan")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused AdamW": lambda weights: AdamW(weights, lr=1e-2, fused=True),
    "fused SGD": lambda weights: SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "foreach AdamW": lambda weights: AdamW(weights, lr=1e-2, foreach=True),
    "SGD": lambda weights: SGD(weights, lr=0.1, momentum=0.9, dampening=0.5),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault in one step of a training, and the expected outcome of that step."""

    step: int = 1
    """Index of the step with the fault."""

    factors: tuple[float, float] = (1.0, 1.0)
    """Factors of the losses of rank 0 and rank 1."""

    without_targets: tuple[int, ...] = ()
    """Ranks whose batch has no targets."""

    hook: Callable[..., Any] | None = None
    """Communication hook of DistributedDataParallel."""

    spike_threshold: float | None = None
    """Smallest global norm for which an update is skipped; ``None`` turns this off."""

    spike_policy: str = "record"
    """Policy for a norm that is far above those before it."""

    overflows: bool = True
    """Whether the step overflows."""

    skips: bool = True
    """Whether the update is skipped."""

    bad_ranks: tuple[bool, bool] = (False, False)
    """Whether the own gradients of rank 0 and rank 1 are non-finite."""


CASES = {
    "NaN on one": Case(factors=(1.0, NAN), bad_ranks=(False, True)),
    "NaN on the other": Case(factors=(NAN, 1.0), bad_ranks=(True, False)),
    "inf on both": Case(factors=(INF, INF), bad_ranks=(True, True)),
    "inf of either sign": Case(factors=(INF, -INF), bad_ranks=(True, True)),
    "overflow in the first step": Case(step=0, factors=(INF, 1.0), bad_ranks=(True, False)),
    "spike on one": Case(factors=(1e3, 1.0), spike_threshold=50.0, overflows=False),
    "relative spike on one": Case(factors=(1e3, 1.0), spike_policy="skip", overflows=False),
    "clipped spike on one": Case(
        factors=(1.0, 1e3), spike_policy="clip", overflows=False, skips=False
    ),
    "no targets on one": Case(without_targets=(1,), overflows=False, skips=False),
    "no targets on both": Case(without_targets=(0, 1), overflows=False),
    "no targets and a NaN": Case(without_targets=(1,), factors=(NAN, 1.0), bad_ranks=(True, False)),
    "too large for float16": Case(factors=(1.0, 1e5), hook=fp16_compress_hook),
    "NaN, compressed": Case(factors=(1.0, NAN), hook=fp16_compress_hook, bad_ranks=(False, True)),
}


def meet(rank: int, optimizer: str) -> dict[str, Any]:
    """Train all cases as one of the ranks; return the states and outputs of their steps."""
    return {name: _meet(rank, case, optimizer) for name, case in CASES.items()}


def _meet(rank: int, case: Case, optimizer: str) -> dict[str, Any]:
    torch.manual_seed(0)
    network = DistributedDataParallel(TokenClassifier())
    inner = OPTIMIZERS[optimizer](network.parameters())
    ema = ExponentialMovingAverage(network.module, decay=0.9)
    schedule = StepLR(inner, 1, gamma=0.5)
    cell = MFTrainOneStepCell(
        network,
        inner,
        use_clip_grad=True,
        scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 100),
        local_norm=True,
        lr_scheduler=schedule,
        ema=ema,
        calculate_per_token_loss=True,
        use_skip_data_by_global_norm=case.spike_threshold is not None,
        global_norm_spike_threshold=case.spike_threshold or 1.0,
        spike_policy=case.spike_policy,
        communication_hook=None if case.hook is None else (None, case.hook),
    )

    def state() -> dict[str, Any]:
        present = training_state(network, inner, ema, schedule)
        # Leave out this counter: it counts skipped updates too, so a skip changes it.
        del present["/ExponentialMovingAverage/counters/num_calls"]
        return present

    states, outputs, reduction_norms = [state()], [], []
    for step in range(NUM_STEPS):
        [(inputs, labels)] = labelled_batches(1, seed=10 * step + rank)
        is_bad = step == case.step
        if is_bad and rank in case.without_targets:
            labels[:] = IGNORED
        outputs.append(cell(inputs, labels, case.factors[rank] if is_bad else 1.0))
        cell.flush()
        reduction_norms.append(cell.last_report.reduction_norms)
        states.append(state())
    report = cell.last_report
    return {
        "states": states,
        "overflows": [output.overflow.item() for output in outputs],
        "scales": [output.loss_scale.item() for output in outputs],
        "norms": torch.stack([output.global_norm for output in outputs]),
        "reduction_norms": torch.stack(reduction_norms),
        "local_norms": torch.stack([output.local_norm for output in outputs]),
        "counts": [report.applied_updates.item(), report.skipped_updates.item()],
    }


class _Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def train_fixture(rank: int) -> dict[str, Any]:
    """Run the two steps that were recorded from MindSpore, as one of two ranks."""
    network = DistributedDataParallel(_Product())
    cell = MFTrainOneStepCell(
        network,
        SGD(network.parameters(), lr=1.0),
        use_clip_grad=True,
        max_grad_norm=100.0,
        scale_sense=DynamicLossScaleUpdateCell(8.0, 2, 100),
        local_norm=True,
    )
    inputs = [[[1.0, 2.0], [3.0, 4.0]][rank], [[1.0, 2.0], [INF, 4.0]][rank]]
    outputs, weights = [], []
    for values in inputs:
        outputs.append(cell(torch.tensor(values)))
        weights.append(network.module.w.detach().clone())
    return {
        "losses": [output.loss.item() for output in outputs],
        "overflows": [output.overflow.item() for output in outputs],
        "scales": [output.loss_scale.item() for output in outputs],
        "norms": [output.global_norm.item() for output in outputs],
        "squares": [output.local_norm.square().item() for output in outputs],
        "weights": weights,
    }
