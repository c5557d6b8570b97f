"""The stable rank of weights: how many directions of a matrix count."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfwrap.arguments import check_bool, check_int

__all__ = ["MOE_SHOW_MODES", "Spectrum", "StableRankSettings", "spectrum", "tagged_spectra"]

MOE_SHOW_MODES = ("full", "statistics", "all")


@dataclass(frozen=True, kw_only=True, slots=True)
class StableRankSettings:
    """MindFormers' ``stable_rank_config``, with its keys and defaults."""

    format: tuple[str, ...] = ()
    step_interval: int = 100
    target: tuple[str, ...] = (".*",)
    do_aggregation: bool = False
    """Of sharded weights, that of the whole weight; otherwise of this rank's shard."""

    moe_show_mode: str = "all"
    """Of weights of experts: each one's (``"full"``), largest, smallest and mean
    (``"statistics"``), or both (``"all"``)."""

    power_iteration_num: int = 5

    def __post_init__(self) -> None:
        """Refuse what does not fit.

        Raises:
            TypeError: If a setting has the wrong type.
            ValueError: If one is out of range.
        """
        for name in ("step_interval", "power_iteration_num"):
            check_int(name, getattr(self, name), minimum=1)
        check_bool("do_aggregation", self.do_aggregation)
        if self.moe_show_mode not in MOE_SHOW_MODES:
            msg = f"`moe_show_mode` must be of {list(MOE_SHOW_MODES)}, got {self.moe_show_mode!r}"
            raise ValueError(msg)

    def holds(self, name: str, weight: Tensor) -> bool:
        """Tell whether a weight is shown: a matrix, or one for each expert."""
        fits = weight.dim() in {2, 3} and weight.is_floating_point()
        return fits and any(re.search(pattern, name) for pattern in self.target)


class Spectrum(NamedTuple):
    """What power iteration finds of matrices."""

    stable_rank: Tensor
    """Shape ``(N,)``, float32: the squared Frobenius norm over `eigenvalue`; at least 1 and at
    most the rank, but for what the iteration lacks."""

    eigenvalue: Tensor
    """Shape ``(N,)``, float32: the largest one of ``W.T @ W``, approached from below."""


@torch.no_grad()
def spectrum(weight: Tensor, num_iterations: int) -> Spectrum:
    """Compute the stable rank of a matrix, or of each of several.

    Each iteration reads the weight twice. The start is the same in every call, and no random
    number is drawn. Does not wait for the device.

    Source: MindFormers, ``stable_rank_config``.

    Args:
        weight: Shape ``(m, n)`` or ``(N, m, n)``, any floating type.
        num_iterations: Of power iteration.
    """
    matrices = weight.detach().float().reshape(-1, *weight.shape[-2:])
    size = matrices.shape[-1]
    # No column can be at right angles to all of it by design, as to a vector of ones.
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
    """Compute stable ranks and eigenvalues of weights that are shown, with MindFormers' tags.

    Args:
        weights: By name; of those that `settings` do not hold there is nothing.
        settings: What is shown.

    Returns:
        Tags, and tensors of one dimension with as many numbers altogether.
    """
    tags: list[str] = []
    values: list[Tensor] = []
    for name, weight in weights.items():
        if not settings.holds(name, weight):
            continue
        gathered = _gathered(weight, whole=settings.do_aggregation)
        found = spectrum(gathered, settings.power_iteration_num)
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


def _gathered(weight: Tensor, *, whole: bool) -> Tensor:
    """Return the whole of a sharded weight, which all ranks have to ask for, or this shard."""
    gather: Any = getattr(weight, "full_tensor" if whole else "to_local", None)
    gathered: Tensor = weight if gather is None else gather()
    return gathered
