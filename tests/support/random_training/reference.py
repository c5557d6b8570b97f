"""Train in float64 as part 4 of docs/contract.md says, without any code of mfwrap.

Networks, gradients and optimizers are torch's. Everything else is written down here from the text
of the contract: normalization of the loss, norms, overflow, skips, clipping, loss scale, schedule
and average.
"""

import copy
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import assume
from torch import Tensor

from support.random_training.cases import (
    Batch,
    Case,
    new_network,
    new_optimizer,
    rate_factor,
)

__all__ = ["Expected", "expected_updates"]

LARGEST = math.sqrt(torch.finfo(torch.float32).max)
"""Largest scaled norm whose square is finite in float32."""


class Expected(NamedTuple):
    """What the contract says about one update."""

    losses: list[float]
    """Loss of each rank."""
    overflow: bool
    skipped: bool
    loss_scale: float
    """Loss scale after the update."""
    rates: list[float]
    """Learning rates of the update, one per parameter group."""
    global_norm: float
    local_norms: list[dict[str, float]]
    """Norms of each rank's own gradients, by group."""
    applied_updates: int
    skipped_updates: int
    consecutive_skips: int
    weights: dict[str, Tensor]
    """All parameters after the update, by name."""
    averages: dict[str, Tensor]
    """Averages after the update, by name; empty without an average."""


class Scale:
    """Loss scale of a case, as part 5 of the contract says."""

    def __init__(self, kind: str, value: float, *settings: float) -> None:
        self.value = value
        self._is_dynamic = kind == "dynamic"
        if self._is_dynamic:
            self._factor, self._window, self._hysteresis = settings
        self._good_steps = self._overflows = 0

    def update(self, *, overflow: bool) -> None:
        """Change the scale for the next update."""
        if not self._is_dynamic:
            return
        before = self.value
        if overflow:
            self._good_steps = 0
            self._overflows += 1
            if self._overflows >= self._hysteresis:
                self.value = max(self.value / self._factor, 1.0)
        else:
            self._good_steps += 1
            if self._good_steps == self._window:
                self._good_steps = 0
                if self.value * self._factor <= torch.finfo(torch.float32).max:
                    self.value *= self._factor
        if self.value != before:
            self._overflows = 0


class Average:
    """Average of a case's trainable weights."""

    def __init__(self, weights: dict[str, Tensor], settings: tuple[float, bool, int]) -> None:
        self._decay, self._warms_up, self._every = settings
        self._calls = self._applied = 0
        self.values = copy.deepcopy(weights)

    def update(self, weights: dict[str, Tensor], *, applied: bool) -> None:
        """Follow the weights at every `every`-th update, if that update was applied."""
        self._calls += 1
        if applied and self._calls % self._every == 0:
            decay = self._decay
            if self._warms_up:
                decay = min(decay, (1 + self._applied) / (10 + self._applied))
            for name, weight in weights.items():
                self.values[name] += (1 - decay) * (weight - self.values[name])
        self._applied += applied


def expected_updates(case: Case) -> list[Expected]:
    """Return what the contract says about each update of a case.

    A case in which rounding would decide whether an update is skipped is rejected.
    """
    network = new_network(case).double()
    optimizer = new_optimizer(case, network, plain=True)
    base_rates = [group["lr"] for group in optimizer.param_groups]
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    scale = Scale(*case.scale)
    average = None if case.average is None else Average(_values(named), case.average)
    counts = [0, 0, 0]
    updates = []
    for update in range(case.num_updates):
        batches = [case.micro_batches(update, rank) for rank in range(case.num_ranks)]
        losses, own, whole, has_targets = _gradients(network, named, batches, case)
        norm = _norm(list(whole.values()))
        scaled = norm * scale.value
        # Near these limits, the rounding of float32 decides.
        assume(not LARGEST / 50 < scaled < LARGEST * 50)
        assume(case.threshold is None or not 0.9 < norm / case.threshold < 1.1)
        overflow = not math.isfinite(norm) or scaled > LARGEST
        is_spike = case.threshold is not None and not norm < case.threshold
        skipped = overflow or is_spike or not has_targets
        local_norms = [_grouped(gradients, case.groups) for gradients in own]
        rates = [rate * rate_factor(counts[0]) for rate in base_rates]
        if not skipped:
            limit = math.inf if case.max_norm is None else case.max_norm
            coefficient = min(1.0, limit / (norm + 1e-6))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for name, parameter in named.items():
                parameter.grad = whole[name] * coefficient if name in whole else None
            optimizer.step()
        counts = [
            counts[0] + (not skipped),
            counts[1] + skipped,
            counts[2] + 1 if skipped else 0,
        ]
        used_scale = scale.value
        scale.update(overflow=overflow)
        if average is not None:
            average.update(_values(named), applied=not skipped)
        updates.append(
            Expected(
                losses,
                overflow,
                skipped,
                scale.value,
                rates,
                norm if scaled <= LARGEST or not math.isfinite(norm) else math.inf,
                [_as_read(norms, used_scale) for norms in local_norms],
                *counts,
                _values(dict(network.named_parameters())),
                {} if average is None else copy.deepcopy(average.values),
            )
        )
    return updates


def _values(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def _gradients(
    network: torch.nn.Module,
    named: dict[str, Tensor],
    batches: Sequence[Sequence[Batch]],
    case: Case,
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor], bool]:
    """Return each rank's loss and own gradients, the gradients of the update, and its targets."""
    sums, numerators, counts = [], [], []
    for of_rank in batches:
        parts = [network(*batch) for batch in of_rank]
        pairs = parts if case.per_token else [(part, torch.ones(())) for part in parts]
        numerator = torch.stack([value for value, _ in pairs]).sum()
        found = torch.autograd.grad(numerator, list(named.values()), allow_unused=True)
        sums.append({n: g for n, g in zip(named, found, strict=True) if g is not None})
        numerators.append(numerator.item())
        counts.append(float(sum(count.item() for _, count in pairs)))
    total = sum(counts)
    whole = {name: sum(each[name] for each in sums) / (total or 1.0) for name in sums[0]}
    own = [
        {name: gradient / (count or 1.0) for name, gradient in each.items()}
        for each, count in zip(sums, counts, strict=True)
    ]
    losses = [n / c if c else math.nan for n, c in zip(numerators, counts, strict=True)]
    return losses, own, whole, total > 0


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def _grouped(gradients: dict[str, Tensor], groups: str | None) -> dict[str, float]:
    """Return the norm of each group: one per parameter, or one per numbered layer."""
    members: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        layer = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
        members.setdefault(layer[0] if groups and layer else name, []).append(gradient)
    return {group: _norm(held) for group, held in members.items()}


def _as_read(norms: dict[str, float], scale: float) -> dict[str, float]:
    """Return the norms, infinite where the square of the scaled norm overflows in float32."""
    for norm in norms.values():
        assume(not LARGEST / 50 < norm * scale < LARGEST * 50)
    return {name: norm if norm * scale < LARGEST else math.inf for name, norm in norms.items()}
