"""Schedules and optimizers other than a constant rate with Adam."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LinearLR,
    LRScheduler,
    OneCycleLR,
)
from transformers import get_cosine_schedule_with_warmup

from mfwrap.optimizers import ChainedOptimizer, Muon, hidden_matrices
from support.healthy.training import (
    Batch,
    Clusters,
    Objective,
    Text,
    Training,
    adam,
    classification,
    dice,
    error_rate,
    language_loss,
    mlp,
    one_part,
    small_gpt2,
)

__all__ = [
    "factored_moments",
    "momentum",
    "more_micro_batches",
    "one_cycle",
    "orthogonal_updates",
    "rate_to_zero",
    "signs_of_momentum",
    "warm_restarts",
]


def _language(
    seed: int,
    optimizer_of: Callable[[nn.Module], Optimizer],
    schedule_of: Callable[[Optimizer], LRScheduler | None] = lambda _: None,
) -> Training:
    text, body = Text(seed), small_gpt2()
    optimizer = optimizer_of(body)
    held_out = text.draw(32, 16, dice(seed, 3))
    return one_part(
        Objective(body, language_loss),
        optimizer,
        lambda step: {"tokens": text.draw(4, 16, dice(seed, 2, step))},
        lambda: language_loss(body, held_out).item(),
        schedule=schedule_of(optimizer),
        watches=("max_attention_logit_format",),
    )


def _classes(
    seed: int,
    optimizer_of: Callable[[nn.Module], Optimizer],
    micro_batches: Callable[[int], int] = lambda _: 1,
    noise: float = 1.2,
) -> Training:
    body, clusters = mlp(16, 64, 64, 8), Clusters(seed)
    held_out = clusters.batch(512, dice(seed, 3), noise)

    def batches(step: int) -> list[Batch]:
        generator = dice(seed, 2, step)
        return [clusters.batch(4, generator, noise) for _ in range(micro_batches(step))]

    return one_part(
        Objective(body, classification),
        optimizer_of(body),
        batches,
        lambda: error_rate(body, held_out),
    )


def warm_restarts(seed: int, num_steps: int) -> Training:
    """A cosine schedule that begins again after 50, 150 and 350 steps."""
    return _language(
        seed, lambda body: adam(body, 5e-3), lambda one: CosineAnnealingWarmRestarts(one, 50, 2)
    )


def one_cycle(seed: int, num_steps: int) -> Training:
    """A rate that rises 25-fold in the first third, while the first beta falls, and falls to 0."""
    return _language(
        seed,
        lambda body: adam(body, 1e-2),
        lambda one: OneCycleLR(one, max_lr=1e-2, total_steps=num_steps + 1),
    )


def rate_to_zero(seed: int, num_steps: int) -> Training:
    """A rate that falls to exactly zero, which the last tenth of the run has."""
    return _language(
        seed, adam, lambda one: LinearLR(one, 1.0, 0.0, total_iters=9 * num_steps // 10)
    )


def more_micro_batches(seed: int, num_steps: int) -> Training:
    """Gradients of one micro-batch at first, of four then, and of eight at last."""
    return _classes(seed, adam, lambda step: (1, 4, 8)[min(2, 3 * (step - 1) // num_steps)])


def momentum(seed: int, num_steps: int) -> Training:
    """SGD with Nesterov momentum on four rows: solved soon, but for a rare row near a border."""

    def optimizer(body: nn.Module) -> SGD:
        return SGD(body.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=True)

    return _classes(seed, optimizer, noise=0.7)


def factored_moments(seed: int, num_steps: int) -> Training:
    """Adafactor: the size of an update follows from that of the weight."""
    return _language(seed, lambda body: Adafactor(body.parameters(), lr=2e-2))


class _Lion(Optimizer):
    """Updates are the signs of a momentum, so they never become smaller."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the weights."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(weight)
                    self._update(weight, weight.grad, state["exp_avg"], group["lr"])

    @staticmethod
    def _update(weight: Tensor, gradient: Tensor, average: Tensor, rate: float) -> None:
        direction = average.lerp(gradient, 0.1).sign()
        weight.mul_(1 - 0.1 * rate).add_(direction, alpha=-rate)
        average.lerp_(gradient, 0.01)


def signs_of_momentum(seed: int, num_steps: int) -> Training:
    """Lion, with decay of the weights."""
    return _language(seed, lambda body: _Lion(body.parameters(), 1e-3))


def orthogonal_updates(seed: int, num_steps: int) -> Training:
    """Muon for the matrices and AdamW for embeddings and vectors, with one cosine schedule."""

    def optimizer(body: nn.Module) -> ChainedOptimizer:
        matrices = hidden_matrices(body)
        others = [weight for name, weight in body.named_parameters() if name not in matrices]
        return ChainedOptimizer(
            Muon(matrices.values(), lr=5e-3, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=5e-3, fused=True),
        )

    return _language(
        seed,
        optimizer,
        lambda one: get_cosine_schedule_with_warmup(one, num_steps // 20, num_steps),
    )
