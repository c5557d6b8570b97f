"""A data-parallel training over ranks, and the same training with torch alone in one process."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from support.small_networks import IGNORED, Classifier, TokenClassifier, labelled_batches

__all__ = ["CASES", "Case", "micro_batches", "own_norms", "train_alone", "train_on_rank"]

NUM_STEPS = 4
BATCH = 16
MAX_NORM = 0.5
DECAY = 0.9
LOSS_SCALE = 2.0**10
OPTIMIZERS = {
    "AdamW": lambda weights: AdamW(weights, lr=1e-2, fused=True),
    "SGD": lambda weights: SGD(weights, lr=0.1, momentum=0.9, fused=True),
}


@dataclass(frozen=True)
class Case:
    """The settings of one training."""

    accumulation: int
    precision: str
    optimizer: str
    per_token: bool
    sync_each_batch: bool = False


CASES = {
    "-".join(map(str, (case.accumulation, case.precision, case.optimizer, case.per_token))): case
    for case in itertools.starmap(
        Case, itertools.product((1, 4), ("float32", "bfloat16"), OPTIMIZERS, (False, True))
    )
} | {
    f"each of 4 reduced-{per_token}": Case(4, "float32", "SGD", per_token, sync_each_batch=True)
    for per_token in (False, True)
}


class _Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(inputs, labels)


def _network(case: Case) -> nn.Module:
    torch.manual_seed(0)
    network = TokenClassifier() if case.per_token else Classifier()
    return _Autocast(network) if case.precision == "bfloat16" else network


def micro_batches(case: Case, step: int, num_ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the micro-batches of each rank, which are shares of one batch.

    With a per-token loss, the ranks have unequal numbers of targets. In the last step, the last
    rank has no targets.
    """
    [(inputs, labels)] = labelled_batches(1, size=BATCH, seed=step + 1)
    if case.per_token:
        labels[1:6] = IGNORED
        if step == NUM_STEPS - 1 and num_ranks > 1:
            labels[-BATCH // num_ranks :] = IGNORED
    size = BATCH // (num_ranks * case.accumulation)
    pieces = list(zip(inputs.split(size), labels.split(size), strict=True))
    ends = range(case.accumulation, len(pieces) + 1, case.accumulation)
    return [pieces[end - case.accumulation : end] for end in ends]


def _weights(network: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in network.parameters()]


def train_on_rank(rank: int) -> dict[str, Any]:
    """Train every case as one of the ranks; return the results of each case by name."""
    return {name: _train_on_rank(rank, case) for name, case in CASES.items()}


def _train_on_rank(rank: int, case: Case) -> dict[str, Any]:
    num_ranks = distributed.get_world_size()
    network = DistributedDataParallel(_network(case))
    ema = ExponentialMovingAverage(network.module, decay=DECAY)
    cell = MFTrainOneStepCell(
        network,
        OPTIMIZERS[case.optimizer](network.parameters()),
        use_clip_grad=True,
        max_grad_norm=MAX_NORM,
        scale_sense=LOSS_SCALE,
        local_norm=not case.sync_each_batch,
        sync_each_batch=case.sync_each_batch,
        ema=ema,
        calculate_per_token_loss=case.per_token,
        gradient_accumulation_steps=case.accumulation,
    )
    before, outputs = [], []
    for step in range(NUM_STEPS):
        before.append(_weights(network))
        outputs.append(cell.step(micro_batches(case, step, num_ranks)[rank]))
    return {
        "before": before,
        "losses": torch.stack([output.loss for output in outputs]),
        "norms": torch.stack([output.global_norm for output in outputs]),
        "local_norms": torch.stack(
            [getattr(output, "local_norm", torch.empty(0)) for output in outputs]
        ),
        "overflows": [output.overflow.item() for output in outputs],
        "weights": _weights(network),
        "averages": [average.clone() for _, average in ema.named_averages()],
    }


def train_alone(case: Case, num_ranks: int) -> dict[str, Any]:
    """Train a case with torch alone, in one process, on the micro-batches of all ranks."""
    network = _network(case)
    optimizer: Optimizer = OPTIMIZERS[case.optimizer](network.parameters())
    averages = _weights(network)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        pieces = list(itertools.chain(*micro_batches(case, step, num_ranks)))
        losses.append(_backward(network, pieces))
        norms.append(clip_grad_norm_(network.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        for average, weight in zip(averages, network.parameters(), strict=True):
            average.lerp_(weight.detach(), 1 - DECAY)
    return {
        "losses": torch.stack(losses),
        "norms": torch.stack(norms),
        "weights": _weights(network),
        "averages": averages,
    }


def _backward(network: nn.Module, pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute the gradients of the loss of all pieces; return the loss.

    The loss is the mean over the pieces, or with a per-token loss the sum over the number of
    targets.
    """
    results = [network(*piece) for piece in pieces]
    if isinstance(results[0], tuple):
        total, count = map(sum, zip(*results, strict=True))
    else:
        total, count = sum(results), len(results)
    total.backward()
    # Divide the gradients, not the loss: in bfloat16, the backward of a divided loss rounds
    # differently.
    for parameter in network.parameters():
        parameter.grad.div_(count)
    return total.detach() / count


def own_norms(case: Case, weights: list[Tensor], pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the norm of each gradient of one rank's own loss, computed in float64."""
    network = TokenClassifier() if case.per_token else Classifier()
    network.double()
    for parameter, weight in zip(network.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    pieces = [(inputs.double(), labels) for inputs, labels in pieces]
    if all(labels.eq(IGNORED).all() for _, labels in pieces):
        return torch.zeros(len(weights), dtype=torch.float64)
    _backward(network, pieces)
    return torch.stack([parameter.grad.norm() for parameter in network.parameters()])
