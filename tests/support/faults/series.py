"""Collect the numbers of a run: each step's, and samples of weights and moments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState

__all__ = ["SAMPLE_INTERVAL", "Series", "save_series"]

SAMPLE_INTERVAL = 10
"""Steps from one sample of weights and moments to the next, as the monitor's default."""

_OUTPUTS = ("loss", "learning_rate", "global_norm")
_MOMENTS = {
    "first_moment": ("exp_avg", "momentum_buffer"),
    "second_moment": ("exp_avg_sq", "sum", "square_avg"),
}


class Series(TrainerCallback):
    """Collect the series of a run: each step's numbers, and samples of weights and moments.

    `arrays` has for each step ``loss``, ``learning_rate`` and ``global_norm``, and, of shape
    ``(G,)``, the L2 norms ``local_norm`` of this rank's gradients and ``weight_norm`` of the
    weights after the update; for each sample ``sample_step`` and, of shape ``(G,)``, the L2 norms
    ``first_moment`` and ``second_moment`` after the update, and ``update_ratio`` (norm of the
    change of a weight to its norm before).
    """

    def __init__(self) -> None:
        self.arrays: dict[str, list[np.ndarray]] = {}
        self.names: list[str] = []
        """Names of the groups: each trainable weight is one."""

        self._before: list[Tensor] = []
        self._gradients: Tensor | None = None

    def see_gradients(self, weights: list[nn.Parameter]) -> None:
        """Measure the gradients of a step whose output has no local norms."""
        norms = [weight.new_zeros(()) if weight.grad is None else weight.grad for weight in weights]
        self._gradients = torch.stack([each.float().norm() for each in norms])

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Keep the weights before a step that is sampled."""
        del args, control
        weights = _trainable(others["model"])
        self.names = list(weights)
        if (state.global_step + 1) % SAMPLE_INTERVAL == 0:
            self._before = [weight.detach().clone() for weight in weights.values()]

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Collect the numbers of a step."""
        del args, control
        output = others["step_output"]
        for name in _OUTPUTS:
            self._add(name, getattr(output, name))
        own = getattr(output, "local_norm", None)
        self._add("local_norm", self._gradients if own is None else own)
        weights = list(_trainable(others["model"]).values())
        self._add(
            "weight_norm", torch.stack([weight.detach().float().norm() for weight in weights])
        )
        if self._before:
            self._sample(state.global_step, weights, others["optimizer"])

    def _sample(
        self, step: int, weights: list[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        before, self._before = self._before, []
        updates = torch.stack(
            [
                (new.detach().float() - old.float()).norm()
                for new, old in zip(weights, before, strict=True)
            ]
        )
        norms = torch.stack([old.float().norm() for old in before])
        self._add("sample_step", torch.tensor(step))
        self._add("update_ratio", updates / norms)
        for kind, names in _MOMENTS.items():
            states = [optimizer.state.get(weight, {}) for weight in weights]
            moments = [
                next((state[name] for name in names if name in state), torch.zeros(1))
                for state in states
            ]
            self._add(kind, torch.stack([moment.float().norm() for moment in moments]))

    def _add(self, name: str, value: Any) -> None:
        number = torch.as_tensor(value).detach().float().cpu().numpy()
        self.arrays.setdefault(name, []).append(number)

    def stacked(self) -> dict[str, np.ndarray]:
        """Return each series as one array, whose first dimension are the steps or samples."""
        return {name: np.stack(rows) for name, rows in self.arrays.items()}


def save_series(path: Path, **runs: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Write the series of runs, each by its ranks, to an ``.npz`` file.

    The names in the file are those of the run, the rank and the series, such as ``twin.0.loss``.
    """
    arrays = {
        f"{run}.{rank}.{name}": array
        for run, ranks in runs.items()
        for rank, series in enumerate(ranks)
        for name, array in series.items()
    }
    np.savez_compressed(path, **arrays)


def _trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    network = getattr(network, "module", network)
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
