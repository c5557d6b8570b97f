"""The step of a recipe: its settings, loss scale and average."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.config import StepConfig
from mfwrap.loss_scale.adaptive import AdaptiveLossScaleUpdateCell
from mfwrap.loss_scale.cells import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell
from mfwrap.loss_scale.live import LossScale, ScaleSense
from mfwrap.recipe.objects import RecipeObjects
from mfwrap.recipe.sections import RunnerWrapperSection

__all__ = ["StepChoice", "read_average", "read_step", "read_wrapper"]

_UPDATE_CELLS: Mapping[str, Callable[..., Any]] = {
    "AdaptiveLossScaleUpdateCell": AdaptiveLossScaleUpdateCell,
    "DynamicLossScaleUpdateCell": DynamicLossScaleUpdateCell,
    "FixedLossScaleUpdateCell": FixedLossScaleUpdateCell,
}


@final
@dataclass(frozen=True)
class StepChoice:
    """The step of a recipe.

    Args:
        config: Its settings.
        make_scale: Makes the loss scale; ``None`` for the Trainer's.
        calculate_per_token_loss: As in the section; ``None`` for what the Trainer does.
    """

    config: StepConfig
    make_scale: Callable[[], ScaleSense] | None
    calculate_per_token_loss: bool | None


def read_wrapper(
    objects: RecipeObjects, section: Mapping[str, Any] | None
) -> RunnerWrapperSection | None:
    """Return the section ``runner_wrapper``, its values checked one by one."""
    if section is None:
        return None
    return objects.parse(("runner_wrapper",), RunnerWrapperSection, section)


def read_step(
    objects: RecipeObjects,
    wrapper: RunnerWrapperSection | None,
    monitor_config: Mapping[str, Any] | None,
    max_grad_norm: float,
) -> StepChoice:
    """Return the step that the sections describe.

    Args:
        objects: Builds its parts.
        wrapper: Section ``runner_wrapper``.
        monitor_config: Section ``monitor_config``, which has the threshold of spikes if
            `wrapper` does not, and may show local norms: MindFormers' dump needs no other switch.
        max_grad_norm: Of the training; 0 if it does not clip.

    Raises:
        RecipeError: If a setting is out of range, or two exclude each other.
    """
    shows_norms = _shows_local_norms(monitor_config or {})
    if wrapper is None:
        return StepChoice(StepConfig(local_norm=shows_norms), None, None)
    threshold = wrapper.global_norm_spike_threshold
    if threshold is None:
        threshold = (monitor_config or {}).get("global_norm_spike_threshold")
    settings: dict[str, Any] = {
        "use_clip_grad": max_grad_norm > 0,
        "local_norm": wrapper.local_norm or shows_norms,
        "local_norm_groups": wrapper.local_norm_groups,
        "use_skip_data_by_global_norm": wrapper.use_skip_data_by_global_norm,
        "max_consecutive_skips": wrapper.max_consecutive_skips,
    }
    if max_grad_norm > 0:
        settings["max_grad_norm"] = max_grad_norm
    if threshold is not None:
        settings["global_norm_spike_threshold"] = threshold
    config = objects.build(("runner_wrapper",), StepConfig, settings)
    make_scale = _scale(objects, wrapper.scale_sense)
    return StepChoice(config, make_scale, wrapper.calculate_per_token_loss)


def _shows_local_norms(monitor_config: Mapping[str, Any]) -> bool:
    formats = ("local_norm_format", "device_local_norm_format")
    is_on = monitor_config.get("monitor_on") is True
    return is_on and any(monitor_config.get(name) for name in formats)


def read_average(
    objects: RecipeObjects, section: Mapping[str, Any] | None
) -> Callable[[Any], ExponentialMovingAverage] | None:
    """Return what makes the average of a model; ``None`` without a section ``ema``."""
    if section is None:
        return None
    make = functools.partial(ExponentialMovingAverage, [torch.zeros(())])
    hidden = {"parameters", "dtype"}
    known = {"decay", "warmup", "update_every", "device"}
    objects.build(("ema",), make, section, hidden=hidden, known=known)
    settings = dict(section)
    return lambda model: ExponentialMovingAverage(model, **settings)


def _scale(objects: RecipeObjects, scale_sense: Any) -> Callable[[], ScaleSense] | None:
    path = ("runner_wrapper", "scale_sense")
    if scale_sense is None:
        return None
    device = torch.device("cpu")
    if not isinstance(scale_sense, dict):
        number = float(scale_sense)
        try:
            LossScale(number, device)
        except ValueError as error:
            raise objects.refusal(path[:1], {"scale_sense": number}, error) from error
        return lambda: number
    settings = dict(scale_sense)
    name = settings.pop("type", None)
    if not isinstance(name, str) or name not in _UPDATE_CELLS:
        says = f"must be one of {sorted(_UPDATE_CELLS)}, got {name!r}"
        raise objects.document.error((*path, "type"), says)
    cell = _UPDATE_CELLS[name]
    made = objects.build(path, cell, settings)
    try:
        LossScale(made, device)
    except ValueError as error:
        raise objects.refusal(path, {}, error) from error
    return functools.partial(cell, **settings)
