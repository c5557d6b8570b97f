"""The stable rank of weights: the effective number of dimensions of a matrix."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mfwrap.arguments import check_bool, check_choice, check_int
from mfwrap.tensors.shards import is_distributed, local_tensor

MOE_SHOW_MODES = ("full", "statistics", "all")


@dataclass(frozen=True, kw_only=True, slots=True)
class StableRankSettings:
    """Keys and defaults of MindFormers' ``stable_rank_config``.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting is out of range.
    """

    format: tuple[str, ...] = ()
    """Formats of the metrics. Empty: no stable rank is computed."""

    step_interval: int = 100
    """Steps from one computation to the next."""

    target: tuple[str, ...] = (".*",)
    """Regular expressions. A weight is reported if one of them is found in its name."""

    do_aggregation: bool = False
    """Gather sharded weights and report the stable rank of the whole weight. ``False`` reports the
    stable rank of this rank's shard."""

    moe_show_mode: str = "all"
    """What to report for experts: every expert (``"full"``), the largest, smallest and mean value
    (``"statistics"``), or both (``"all"``)."""

    power_iteration_num: int = 5
    """Number of power iterations. Each reads the weight twice."""

    def __post_init__(self) -> None:
        for name in ("step_interval", "power_iteration_num"):
            check_int(name, getattr(self, name), minimum=1)
        check_bool("do_aggregation", self.do_aggregation)
        check_choice("moe_show_mode", self.moe_show_mode, MOE_SHOW_MODES)

    def applies_to(self, name: str, weight: Tensor) -> bool:
        """Return whether the stable rank of a weight is reported.

        The weight must be a matrix or a stack of one matrix per expert, and `target` must match
        its name.
        """
        fits = weight.dim() in {2, 3} and weight.is_floating_point()
        return fits and any(re.search(pattern, name) for pattern in self.target)


class Spectrum(NamedTuple):
    """Results of power iteration, for one or several matrices."""

    stable_rank: Tensor
    """Shape ``(N,)``, float32: squared Frobenius norm divided by `eigenvalue`. It is between 1 and
    the rank of the matrix, up to the error of the iteration."""

    eigenvalue: Tensor
    """Shape ``(N,)``, float32: largest eigenvalue of ``W.T @ W``, approximated from below."""


@torch.no_grad()
def spectrum(weight: Tensor, num_iterations: int) -> Spectrum:
    """Compute the stable rank of a matrix, or of each matrix in a stack.

    The start vector is the same in every call; no random number is drawn. No host-device
    synchronization.

    Source: MindFormers, ``stable_rank_config``.

    Args:
        weight: Shape ``(m, n)`` or ``(N, m, n)``, any floating dtype.
        num_iterations: Number of power iterations. Each reads the weight twice.
    """
    matrices = weight.detach().float().reshape(-1, *weight.shape[-2:])
    size = matrices.shape[-1]
    # Power iteration cannot find a singular vector that is orthogonal to the start vector. A vector
    # of ones would be orthogonal to all rows of a centered weight. Cosines of squares are so
    # irregular that no regular structure of a weight is orthogonal to them.
    start = torch.arange(1, size + 1, device=weight.device, dtype=torch.float64)
    vector = torch.cos(start * start).float().reshape(1, size, 1)
    vector = (vector / vector.norm()).expand(len(matrices), size, 1)
    for _ in range(num_iterations):
        vector = matrices.mT @ (matrices @ vector)
        vector = vector / vector.norm(dim=1, keepdim=True)
    eigenvalue = (matrices @ vector).square().sum(dim=(1, 2))
    return Spectrum(matrices.square().sum(dim=(1, 2)) / eigenvalue, eigenvalue)


def tagged_spectra(
    weights: Mapping[str, Tensor], settings: StableRankSettings
) -> tuple[list[str], Sequence[Tensor]]:
    """Compute stable ranks and eigenvalues of the weights that the settings select.

    With ``do_aggregation``, every rank must call this.

    Args:
        weights: Weights by name; weights that the settings do not select are ignored.
        settings: Selects the weights and the values to report.

    Returns:
        MindFormers' tags, and one-dimensional tensors. Their concatenation has one value per tag.
    """
    tags: list[str] = []
    values: list[Tensor] = []
    for name, weight in weights.items():
        if not settings.applies_to(name, weight):
            continue
        matrices = local_tensor(weight)
        if settings.do_aggregation and is_distributed(weight):
            matrices = weight.full_tensor()
        found = spectrum(matrices, settings.power_iteration_num)
        for kind, each in zip(("weight_stable_rank", "weight_eigenvalue"), found, strict=True):
            if weight.dim() == 2:
                tags.append(f"{kind}/{name}")
                values.append(each)
                continue
            if settings.moe_show_mode != "statistics":
                tags += [f"{kind}/{name}/expert_{number}" for number in range(len(each))]
                values.append(each)
            if settings.moe_show_mode != "full":
                tags += [f"{kind}/{name}/expert_{word}" for word in ("max", "min", "mean")]
                values.append(torch.stack([each.max(), each.min(), each.mean()]))
    return tags, values
