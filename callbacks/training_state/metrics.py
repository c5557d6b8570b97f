"""Compute a step's metrics for the training state monitor, on the device."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.callbacks.culprit.judges.step import JudgedStep
from mfwrap.callbacks.training_state.expert_load import drop_rate, imbalance
from mfwrap.callbacks.training_state.forward_watches import ForwardNumbers
from mfwrap.callbacks.training_state.settings import (
    Formats,
    TrainingStateSettings,
    stable_rank_settings,
)
from mfwrap.callbacks.training_state.stable_rank import tagged_spectra
from mfwrap.tensors.sharded_norms import tensor_norms
from mfwrap.tensors.shards import meeting_device, on_device
from mfwrap.tensors.wrappers import trainable, unwrapped_optimizer

_MOMENTS = {"adam_m_norm": "exp_avg", "adam_v_norm": "exp_avg_sq"}


class StateMetric(NamedTuple):
    """Name of a metric of a step, and the formats in which it is written."""

    tag: str
    formats: tuple[str, ...]
    """Any of ``"log"``, ``"tensorboard"``, ``"jsonl"`` and ``"trackers"``."""


class PackedMetrics(NamedTuple):
    """Metrics of a step, on the device."""

    metrics: tuple[StateMetric, ...]
    values: Tensor | None
    """Shape ``(len(metrics),)``, float32; ``None`` without metrics."""


@final
class StateMetrics:
    """Compute the metrics that the settings request, without host-device synchronization.

    Source: MindFormers, ``TrainingStateMonitor``, with its tags. Norms are those of unscaled
    gradients; MindFormers reports norms of scaled gradients.

    Args:
        settings: Settings of the monitor.
    """

    def __init__(self, settings: TrainingStateSettings) -> None:
        self._settings = settings
        self._stable_rank = stable_rank_settings(settings.stable_rank_config)
        self._patterns = [re.compile(pattern) for pattern in settings.target or ()]
        self._selected: dict[tuple[str, ...], tuple[list[int], Tensor | None]] = {}

    def of_step(
        self,
        step: int,
        output: Any,
        norm_names: Sequence[str],
        model: nn.Module | None,
        optimizer: Any,
        forward: ForwardNumbers | None = None,
        *,
        noise_scale: Tensor | None = None,
        judged: JudgedStep | None = None,
    ) -> PackedMetrics:
        """Return the metrics of one step, if it is reported. Stable ranks have their own interval.

        Args:
            step: Number of the step.
            output: Output of the step, a named tuple or a loss; ``None`` if the loop passes none.
            norm_names: Names of the groups of gradients, one per local norm.
            model: Network whose weights are measured; ``None`` if unknown.
            optimizer: Optimizer whose state is measured, with or without wrappers; ``None`` if
                unknown.
            forward: Numbers from the forward passes of the step; ``None`` if they were not watched.
            noise_scale: Gradient noise scale, shape ``()``; ``None`` if none is due.
            judged: Judgement of the step, with the updates of the weights; ``None`` if it was not
                judged.
        """
        found = _Numbers()
        is_due = step % self._settings.step_interval == 0
        if is_due:
            self._add_output(found, output, tuple(norm_names))
            if model is not None:
                self._add_states(found, model, optimizer)
            if forward is not None:
                self._add_forward(found, forward)
        if noise_scale is not None:
            found.add(["noise_scale"], self._settings.noise_scale_format, noise_scale)
        stable_rank = self._stable_rank
        if model is not None and stable_rank.format and step % stable_rank.step_interval == 0:
            tags, values = tagged_spectra(trainable(model), stable_rank)
            found.add(tags, stable_rank.format, *values)
        if judged is not None and is_due:
            self._add_update_ratios(found, judged)
        return found.packed()

    def _is_target(self, name: str) -> bool:
        """Return whether a parameter, or a group of parameters, is reported."""
        return any(each.search(name) for each in self._patterns) != self._settings.invert

    def _add_output(self, found: "_Numbers", output: Any, norm_names: tuple[str, ...]) -> None:
        settings = self._settings
        local_norm = getattr(output, "local_norm", None)
        if local_norm is not None:
            self._add_local_norms(found, local_norm, norm_names)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if loss is not None:
            for tag, formats in (
                ("local_loss", settings.local_loss_format),
                ("device_accum_local_loss", settings.device_local_loss_format),
            ):
                if formats:
                    found.add([tag], formats, loss.detach().float().mean())

    def _add_local_norms(self, found: "_Numbers", norms: Tensor, names: tuple[str, ...]) -> None:
        settings = self._settings
        if settings.local_norm_format:
            numbers, index = self._selection(names, norms.device)
            tags = [f"local_norm/{names[i]}" for i in numbers]
            # Copy in both cases: the values are read later, and `norms` may change until then.
            shown = norms.clone() if index is None else norms.index_select(0, index)
            found.add(tags, settings.local_norm_format, shown)
        if settings.device_local_norm_format:
            total = norms.square().sum().sqrt()
            found.add(["device_local_norm"], settings.device_local_norm_format, total)

    def _selection(
        self, names: tuple[str, ...], device: torch.device
    ) -> tuple[list[int], Tensor | None]:
        """Return the indices of the reported groups, as a list and as a tensor.

        The tensor is ``None`` if all groups are reported.
        """
        if names not in self._selected:
            numbers = [i for i, name in enumerate(names) if self._is_target(name)]
            whole = len(numbers) == len(names)
            index = None if whole else torch.tensor(numbers, dtype=torch.int64).to(device)
            self._selected[names] = (numbers, index)
        return self._selected[names]

    def _add_states(self, found: "_Numbers", model: nn.Module, optimizer: Any) -> None:
        settings = self._settings
        if settings.optimizer_state_format:
            inner = unwrapped_optimizer(optimizer)
            if isinstance(inner, Optimizer):
                self._add_moments(found, model, inner)
        if settings.weight_state_format:
            weights = list(trainable(model).values())
            norm = tensor_norms(weights).square().sum().sqrt() if weights else torch.zeros(())
            found.add(["weight_norm"], settings.weight_state_format, norm)

    def _add_moments(self, found: "_Numbers", model: nn.Module, optimizer: Optimizer) -> None:
        shown = [(p, n) for n, p in trainable(model).items() if self._is_target(n)]
        for tag, key in _MOMENTS.items():
            states = {
                name: optimizer.state[parameter][key]
                for parameter, name in shown
                if key in optimizer.state.get(parameter, ())
            }
            if states:
                tags = [f"{tag}/{name}" for name in states]
                norms = tensor_norms(list(states.values()))
                found.add(tags, self._settings.optimizer_state_format, norms)

    def _add_update_ratios(self, found: "_Numbers", judged: JudgedStep) -> None:
        formats, change = self._settings.update_ratio_format, judged.change
        if not formats or change is None:
            return
        values = change.update / change.weight
        numbers, index = self._selection(judged.weights, values.device)
        tags = [f"update_ratio/{judged.weights[i]}" for i in numbers]
        found.add(tags, formats, values if index is None else values.index_select(0, index))

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
        for name, spread in forward.bias_spreads.items():
            found.add([f"expert_bias_spread/{name}"], settings.expert_load_format, spread)


class _Numbers:
    """Metrics of a step while they are collected."""

    def __init__(self) -> None:
        self._metrics: list[StateMetric] = []
        self._values: list[Tensor] = []

    def add(self, tags: Sequence[str], formats: Formats, *values: Tensor) -> None:
        self._metrics += [StateMetric(tag, tuple(formats or ())) for tag in tags]
        self._values += [value.float().reshape(-1) for value in values]

    def packed(self) -> PackedMetrics:
        if not self._values:
            return PackedMetrics((), None)
        device = meeting_device(self._values)
        moved = [on_device(value, device) for value in self._values]
        return PackedMetrics(tuple(self._metrics), torch.cat(moved))
