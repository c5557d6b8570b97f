"""Check the optimizer and the learning-rate schedule of a recipe on one tiny parameter."""

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.optimization import get_scheduler

from mfwrap.runner.document import RecipeError
from mfwrap.runner.objects import RecipeObjects
from mfwrap.runner.training import TrainingChoice
from mfwrap.trainer.preflight import check_optim

_ANY_LENGTH = 1_000
"""Number of steps for a training whose length depends on its data."""

_PREFIXES = ("adam_", "learning_rate", "lr_scheduler", "optim", "warmup", "weight_decay")
"""Beginnings of the keys that optimizer and schedule depend on."""


def check_optimizer(objects: RecipeObjects, training: TrainingChoice) -> None:
    """Build the optimizer and its schedule for one parameter, and take one step.

    An optimizer that chooses parameters by their names in the model is not built.

    Args:
        objects: Builder for the recipe.
        training: Arguments of the training, optimizer and schedule.

    Raises:
        RecipeError: If the optimizer or the schedule refuses its settings, or the optimizer changes
            its weights during backward.
    """
    arguments = training.arguments
    try:
        _try(training)
    except RecipeError:
        raise
    except Exception as error:  # an optimizer of the user's own may raise anything
        section = objects.document.data.get("training", {})
        given = {key: value for key, value in section.items() if key.startswith(_PREFIXES)}

        def retry(kept: Mapping[str, Any]) -> None:
            changed = copy.copy(arguments)
            for field in dataclasses.fields(arguments):
                if field.name in given.keys() - kept.keys():
                    setattr(changed, field.name, field.default)
            _try(training._replace(arguments=changed))

        raise objects.refusal(("training",), given, error, retry) from error


def _try(training: TrainingChoice) -> None:
    arguments, choice = training.arguments, training.optimizer
    check_optim(arguments)
    if choice is not None and choice.is_object:
        return
    if choice is not None and choice.make is not None:
        network = torch.nn.Linear(2, 2)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        plain = dataclasses.replace(
            choice, rate_groups=(), layer_decay=None, qk_clip_threshold=None
        )
        own = plain.build(arguments, network, ())
        own.step()
        if training.schedule is None:
            _check_schedule(own, arguments)
        return
    if arguments.optim_target_modules is not None:
        _refuse_rate_groups(training)
        return
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    if {"params", "model", "optimizer_dict"} & settings.keys() or not isinstance(kind, type):
        _refuse_rate_groups(training)
    optimizer = kind([{"params": [parameter], "weight_decay": arguments.weight_decay}], **settings)
    if kind.__module__.startswith("torch.optim"):  # others may need an accelerator
        optimizer.step()
    if training.schedule is None:
        _check_schedule(optimizer, arguments)


def _refuse_rate_groups(training: TrainingChoice) -> None:
    if training.optimizer is not None:
        name = getattr(training.arguments.optim, "value", training.arguments.optim)
        is_by_layer = training.optimizer.layer_decay is not None
        section = "layer_decay" if is_by_layer else "grouped_lr_schedule"
        msg = (
            f"`optim` must be an optimizer that takes parameter groups, because the recipe has a "
            f"section {section}, got {name}"
        )
        raise ValueError(msg)


def _check_schedule(optimizer: torch.optim.Optimizer, arguments: TrainingArguments) -> None:
    length = arguments.max_steps if arguments.max_steps > 0 else _ANY_LENGTH
    settings: Any = arguments.lr_scheduler_kwargs  # a dict by now, whatever its declared type
    schedule: Any = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.get_warmup_steps(length),
        num_training_steps=length,
        scheduler_specific_kwargs=settings,
    )
    for factor_at in getattr(schedule, "lr_lambdas", ()):
        for step in (0, 1, length // 2, length - 1, length):
            factor = factor_at(step)
            if not (isinstance(factor, (int, float)) and math.isfinite(factor)):
                msg = (
                    "`lr_scheduler_kwargs` must give a finite learning rate at each step, got the "
                    f"factor {factor!r:.80} at step {step}"
                )
                raise ValueError(msg)
