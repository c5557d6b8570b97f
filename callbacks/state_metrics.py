"""What the training state monitor shows of a step: computed on the device, named on the host."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.callbacks.tensor_norms import parameter_names, tensor_norms, trainable
from mfwrap.callbacks.training_state_settings import TrainingStateSettings

__all__ = ["Metric", "PackedMetrics", "StateMetrics", "Target"]

_MOMENTS = {"adam_m_norm": "exp_avg", "adam_v_norm": "exp_avg_sq"}


class Metric(NamedTuple):
    """One number of a step."""

    tag: str
    formats: tuple[str, ...]
    """Where it is written: of ``"log"``, ``"tensorboard"``, ``"jsonl"``."""


class PackedMetrics(NamedTuple):
    """The numbers of a step on the device."""

    metrics: tuple[Metric, ...]
    values: Tensor | None
    """Shape ``(len(metrics),)``, float32; ``None`` if there are none."""


@final
class Target:
    """Which parameters are shown.

    Source: MindFormers, ``monitor_config.target`` and ``invert``.

    Args:
        patterns: Searched for in names.
        invert: Show those in which none is found.
    """

    def __init__(self, patterns: Sequence[str], *, invert: bool) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._invert = invert

    def holds(self, name: str) -> bool:
        """Tell whether a parameter, or a group of parameters, is shown."""
        return any(pattern.search(name) for pattern in self._patterns) != self._invert


@final
class StateMetrics:
    """Compute what is asked for of a step, without waiting for the device.

    Source: MindFormers, ``TrainingStateMonitor``, with its tags. Norms are those of unscaled
    gradients, where MindFormers shows scaled ones.

    Args:
        settings: Of the monitor.
    """

    def __init__(self, settings: TrainingStateSettings) -> None:
        self._settings = settings
        self._target = Target(settings.target, invert=settings.invert)
        self._selected: tuple[tuple[str, ...], list[int], Tensor | None] | None = None

    def of_step(
        self,
        output: Any,
        norm_names: Sequence[str],
        model: nn.Module | None,
        optimizer: Optimizer | None,
    ) -> PackedMetrics:
        """Return the numbers of one step.

        Args:
            output: Of the step, a named tuple; ``None`` if there is none.
            norm_names: Of the groups of its local norms.
            model: Whose weights are shown; ``None`` if unknown.
            optimizer: Whose state is shown; ``None`` if unknown.
        """
        metrics: list[Metric] = []
        values: list[Tensor] = []
        local_norm = getattr(output, "local_norm", None)
        if local_norm is not None:
            self._add_local_norms(metrics, values, local_norm, tuple(norm_names))
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if loss is not None:
            for tag, formats in (
                ("local_loss", self._settings.local_loss_format),
                ("device_accum_local_loss", self._settings.device_local_loss_format),
            ):
                if formats:
                    metrics.append(Metric(tag, formats))
                    values.append(loss.detach().float().mean().reshape(1))
        if model is not None:
            self._add_states(metrics, values, model, optimizer)
        if not values:
            return PackedMetrics((), None)
        device = values[0].device
        moved = [value.to(device, non_blocking=True) for value in values]
        return PackedMetrics(tuple(metrics), torch.cat(moved))

    def _add_local_norms(
        self, metrics: list[Metric], values: list[Tensor], norms: Tensor, names: tuple[str, ...]
    ) -> None:
        settings = self._settings
        if settings.local_norm_format:
            numbers, index = self._selection(names, norms.device)
            metrics += [
                Metric(f"local_norm/{names[i]}", settings.local_norm_format) for i in numbers
            ]
            # A copy in both cases: what is read later must not change meanwhile.
            values.append(norms.clone() if index is None else norms.index_select(0, index))
        if settings.device_local_norm_format:
            metrics.append(Metric("device_local_norm", settings.device_local_norm_format))
            values.append(norms.square().sum().sqrt().reshape(1))

    def _selection(
        self, names: tuple[str, ...], device: torch.device
    ) -> tuple[list[int], Tensor | None]:
        """Return which groups are shown, and the same as a tensor unless all are."""
        if self._selected is None or self._selected[0] != names:
            numbers = [i for i, name in enumerate(names) if self._target.holds(name)]
            whole = len(numbers) == len(names)
            index = None if whole else torch.tensor(numbers, dtype=torch.int64).to(device)
            self._selected = (names, numbers, index)
        return self._selected[1], self._selected[2]

    def _add_states(
        self,
        metrics: list[Metric],
        values: list[Tensor],
        model: nn.Module,
        optimizer: Optimizer | None,
    ) -> None:
        settings = self._settings
        if settings.optimizer_state_format and optimizer is not None:
            names = parameter_names(model)
            shown = [(p, n) for p, n in names.items() if self._target.holds(n)]
            for tag, key in _MOMENTS.items():
                states = {
                    name: optimizer.state[parameter][key]
                    for parameter, name in shown
                    if key in optimizer.state.get(parameter, ())
                }
                if states:
                    formats = settings.optimizer_state_format
                    metrics += [Metric(f"{tag}/{name}", formats) for name in states]
                    values.append(tensor_norms(list(states.values())))
        if settings.weight_state_format:
            metrics.append(Metric("weight_norm", settings.weight_state_format))
            weights = list(trainable(model).values())
            norm = tensor_norms(weights).square().sum().sqrt() if weights else torch.zeros(())
            values.append(norm.reshape(1))
