"""What the training state monitor shows of a step: computed on the device, named on the host."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.callbacks.training_state.expert_load import drop_rate, imbalance
from mfwrap.callbacks.training_state.forward_watches import ForwardNumbers
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.callbacks.training_state.stable_rank import tagged_spectra
from mfwrap.tensors.sharded_norms import tensor_norms
from mfwrap.tensors.wrappers import trainable

__all__ = ["Metric", "PackedMetrics", "StateMetrics", "Target"]

_MOMENTS = {"adam_m_norm": "exp_avg", "adam_v_norm": "exp_avg_sq"}


class Metric(NamedTuple):
    """One number of a step."""

    tag: str
    formats: tuple[str, ...]
    """Where it is written: of ``"log"``, ``"tensorboard"``, ``"jsonl"``, ``"trackers"``."""


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

    def is_due(self, step: int) -> bool:
        """Tell whether a step is shown, stable ranks aside, which have an interval of their own."""
        return step % self._settings.step_interval == 0

    def of_step(
        self,
        step: int,
        output: Any,
        norm_names: Sequence[str],
        model: nn.Module | None,
        optimizer: Optimizer | None,
        forward: ForwardNumbers | None = None,
    ) -> PackedMetrics:
        """Return the numbers of one step.

        Args:
            step: Its number.
            output: Of the step, a named tuple; ``None`` if there is none.
            norm_names: Of the groups of its local norms.
            model: Whose weights are shown; ``None`` if unknown.
            optimizer: Whose state is shown; ``None`` if unknown.
            forward: What was seen in its forwards.
        """
        found = _Numbers()
        if self.is_due(step):
            self._add_output(found, output, tuple(norm_names))
            if model is not None:
                self._add_states(found, model, optimizer)
            if forward is not None:
                self._add_forward(found, forward)
        stable_rank = self._settings.stable_rank_config
        if model is not None and stable_rank.format and step % stable_rank.step_interval == 0:
            tags, values = tagged_spectra(trainable(model), stable_rank)
            found.add(tags, stable_rank.format, *values)
        return found.packed()

    def _add_output(self, found: "_Numbers", output: Any, norm_names: tuple[str, ...]) -> None:
        local_norm = getattr(output, "local_norm", None)
        if local_norm is not None:
            self._add_local_norms(found, local_norm, norm_names)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if loss is not None:
            for tag, formats in (
                ("local_loss", self._settings.local_loss_format),
                ("device_accum_local_loss", self._settings.device_local_loss_format),
            ):
                if formats:
                    found.add([tag], formats, loss.detach().float().mean())

    def _add_local_norms(self, found: "_Numbers", norms: Tensor, names: tuple[str, ...]) -> None:
        settings = self._settings
        if settings.local_norm_format:
            numbers, index = self._selection(names, norms.device)
            tags = [f"local_norm/{names[i]}" for i in numbers]
            # A copy in both cases: what is read later must not change meanwhile.
            shown = norms.clone() if index is None else norms.index_select(0, index)
            found.add(tags, settings.local_norm_format, shown)
        if settings.device_local_norm_format:
            total = norms.square().sum().sqrt()
            found.add(["device_local_norm"], settings.device_local_norm_format, total)

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

    def _add_states(self, found: "_Numbers", model: nn.Module, optimizer: Optimizer | None) -> None:
        settings = self._settings
        if settings.optimizer_state_format and optimizer is not None:
            shown = [(p, n) for n, p in trainable(model).items() if self._target.holds(n)]
            for tag, key in _MOMENTS.items():
                states = {
                    name: optimizer.state[parameter][key]
                    for parameter, name in shown
                    if key in optimizer.state.get(parameter, ())
                }
                if states:
                    tags = [f"{tag}/{name}" for name in states]
                    norms = tensor_norms(list(states.values()))
                    found.add(tags, settings.optimizer_state_format, norms)
        if settings.weight_state_format:
            weights = list(trainable(model).values())
            norm = tensor_norms(weights).square().sum().sqrt() if weights else torch.zeros(())
            found.add(["weight_norm"], settings.weight_state_format, norm)

    def _add_forward(self, found: "_Numbers", forward: ForwardNumbers) -> None:
        settings = self._settings
        for name, logits in forward.max_attention_logits.items():
            tag = f"max_attention_logit/{name}"
            tags = [f"{tag}/head_{head}" for head in range(len(logits))]
            summary = torch.stack([logits.mean(), logits.max()])
            formats = settings.max_attention_logit_format
            found.add([*tags, f"{tag}/mean", f"{tag}/max"], formats, logits, summary)
        for name, shares in forward.expert_shares.items():
            tags = [f"expert_load/{name}/expert_{number}" for number in range(len(shares))]
            found.add(tags, settings.expert_load_format, shares)
            one = imbalance(shares)
            found.add([f"expert_imbalance/{name}"], settings.expert_load_format, one)
            if settings.expert_capacity_factor is not None:
                one = drop_rate(shares, settings.expert_capacity_factor)
                found.add([f"drop_rate/{name}"], settings.expert_load_format, one)


class _Numbers:
    """Numbers of a step while they are gathered."""

    def __init__(self) -> None:
        self._metrics: list[Metric] = []
        self._values: list[Tensor] = []

    def add(self, tags: Sequence[str], formats: tuple[str, ...], *values: Tensor) -> None:
        self._metrics += [Metric(tag, formats) for tag in tags]
        self._values += [value.float().reshape(-1) for value in values]

    def packed(self) -> PackedMetrics:
        if not self._values:
            return PackedMetrics((), None)
        device = self._values[0].device
        moved = [value.to(device, non_blocking=True) for value in self._values]
        return PackedMetrics(tuple(self._metrics), torch.cat(moved))
