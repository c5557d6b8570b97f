"""The step of a recipe: its settings, loss scale and average of the weights."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, final

import torch

from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.config import StepConfig
from mfwrap.loss_scale import UPDATE_CELLS
from mfwrap.loss_scale.live import LossScale, ScaleSense
from mfwrap.runner.objects import RecipeObjects, without_nulls
from mfwrap.runner.sections import RunnerWrapperSection


@final
@dataclass(frozen=True)
class StepChoice:
    """Settings of a recipe's training step, and a function that builds its loss scale."""

    config: StepConfig
    """Settings of the step."""

    make_scale: Callable[[], ScaleSense] | None = None
    """Builds the loss scale; ``None`` for the default of the Trainer."""

    calculate_per_token_loss: bool | None = None
    """See `RunnerWrapperSection`."""


def shows_local_norms(monitor_config: Mapping[str, Any]) -> bool:
    """Return whether the monitor of a section ``monitor_config`` needs local norms."""
    formats = ("local_norm_format", "device_local_norm_format", "noise_scale_format")
    return monitor_config.get("monitor_on") is True and any(map(monitor_config.get, formats))


def read_step(
    objects: RecipeObjects,
    wrapper: RunnerWrapperSection | None,
    monitor_config: Mapping[str, Any] | None,
    max_grad_norm: float,
) -> StepChoice:
    """Return the step that the sections describe.

    Args:
        objects: Builder for the recipe.
        wrapper: Section ``runner_wrapper``.
        monitor_config: Section ``monitor_config``. It may set the threshold of norm spikes. If its
            monitor shows local norms, the step computes them even without ``local_norm``, as in
            MindFormers.
        max_grad_norm: Global norm at which the training clips gradients; 0 if it does not clip.

    Raises:
        RecipeError: If a setting is out of range, or two settings contradict each other.
    """
    monitor = monitor_config or {}
    shows_norms = shows_local_norms(monitor)
    if wrapper is None:
        return StepChoice(StepConfig(local_norm=shows_norms))
    # Copy the fields that the section shares with StepConfig. Some fields are set again below,
    # because they also depend on other sections. `calculate_per_token_loss` is not copied: the
    # Trainer gets this setting.
    names = {each.name for each in fields(StepConfig)} & {each.name for each in fields(wrapper)}
    settings = {name: getattr(wrapper, name) for name in names - {"calculate_per_token_loss"}}
    settings["local_norm"] = wrapper.local_norm or shows_norms
    settings["use_clip_grad"] = max_grad_norm > 0
    settings["max_grad_norm"] = max_grad_norm or None
    threshold = "global_norm_spike_threshold"
    if settings[threshold] is None:
        settings[threshold] = monitor.get(threshold)
    return StepChoice(
        objects.build(("runner_wrapper",), StepConfig, settings),
        _scale(objects, wrapper.scale_sense),
        wrapper.calculate_per_token_loss,
    )


_KNOWN = ("decay", "warmup", "update_every", "device", "sigma_rel")
"""Arguments of `ExponentialMovingAverage` that the section ``ema`` may have."""


def read_average(
    objects: RecipeObjects, section: Mapping[str, Any] | None
) -> Callable[[Any], ExponentialMovingAverage] | None:
    """Return a function that builds the average of a model's weights; ``None`` without ``ema``."""
    if section is None:
        return None
    section = without_nulls(ExponentialMovingAverage, section)
    probe = functools.partial(ExponentialMovingAverage, [torch.zeros(())])
    objects.build(("ema",), probe, section, known=_KNOWN)
    return functools.partial(ExponentialMovingAverage, **section)


def _scale(
    objects: RecipeObjects, scale_sense: float | dict[str, Any] | None
) -> Callable[[], ScaleSense] | None:
    """Return a function that builds the loss scale of a section; ``None`` without a loss scale."""
    if scale_sense is None:
        return None
    section, path = ("runner_wrapper",), ("runner_wrapper", "scale_sense")
    make: Callable[[], ScaleSense]
    if isinstance(scale_sense, dict):
        name, settings = objects.named_type(path, scale_sense, UPDATE_CELLS)
        settings = without_nulls(UPDATE_CELLS[name], settings)
        objects.build(path, UPDATE_CELLS[name], settings)
        make = functools.partial(UPDATE_CELLS[name], **settings)
    else:
        make = functools.partial(float, scale_sense)
    try:
        LossScale(make(), torch.device("cpu"))
    except ValueError as error:
        raise objects.refusal(section, {"scale_sense": scale_sense}, error) from error
    return make
