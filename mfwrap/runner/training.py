"""The arguments of a recipe's training, with its optimizer, schedule and adapter."""

import dataclasses
import pathlib
import traceback
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from transformers import TrainingArguments

from mfwrap.collectives import leave_shared_store, refuse_lone_process
from mfwrap.runner.document import Path, RecipeDocument
from mfwrap.runner.expert_bias import BalanceChoice
from mfwrap.runner.layer_decay import LayerDecaySection
from mfwrap.runner.objects import RecipeObjects, without_nulls
from mfwrap.runner.optimizers import OptimizerChoice, read_optimizer
from mfwrap.runner.parameter_groups import DEFAULT_GROUP
from mfwrap.runner.ranges import check_range
from mfwrap.runner.schedules import (
    GroupedScheduleChoice,
    Schedule,
    ScheduleChoice,
    read_grouped_schedule,
    read_schedule,
)
from mfwrap.runner.sections import RunnerWrapperSection, Sections


class TrainingChoice(NamedTuple):
    """Training arguments, optimizer and schedule of a recipe."""

    arguments: TrainingArguments
    optimizer: OptimizerChoice | None
    """Optimizer that the Trainer cannot build; ``None`` for the optimizer named in `arguments`."""

    schedule: Schedule | None
    """MindFormers' schedule; ``None`` for the schedule named in `arguments`."""


def read_training(
    objects: RecipeObjects,
    kind: type[TrainingArguments],
    *,
    sections: Sections,
    wrapper: RunnerWrapperSection | None,
) -> TrainingChoice:
    """Return the arguments of the training, its optimizer and its schedule.

    Args:
        objects: Builder for the recipe.
        kind: ``TrainingArguments``, or the task's subclass of it.
        sections: Sections of the recipe.
        wrapper: Section ``runner_wrapper``, checked.

    Raises:
        ConnectionError: If this process cannot join the other ranks.
        RecipeError: If a setting is unknown, out of range, or set in two sections to different
            values, or if a launcher started several processes but this one would train alone.
    """
    sections = dataclasses.replace(sections, training=without_nulls(kind, sections.training))
    training = sections.training
    known = {field.name for field in fields(kind) if field.init}
    settings = objects.kept(("training",), training, known)
    if settings.get("deepspeed") is not None:
        says = "is not supported, because DeepSpeed updates within its own backward; leave it out"
        says = f"{says}, and shard a large model with training.fsdp"
        raise objects.document.error(("training", "deepspeed"), says)
    for key, value in settings.items():
        objects.check_type(("training", key), kind, key, value)
        check_range(objects, ("training", key), key, value)
    if settings.get("load_best_model_at_end") and settings.get("eval_strategy", "no") == "no":
        says = "needs evaluations; set training.eval_strategy to steps or epoch, as save_strategy"
        raise objects.document.error(("training", "load_best_model_at_end"), says)
    if settings.get("output_dir") is None:
        settings["output_dir"] = f"runs/{pathlib.Path(objects.document.name).stem}"
    objects.check_folder(("training", "output_dir"), settings["output_dir"])
    if not torch.accelerator.is_available():
        # Change three defaults on a CPU. Without `use_cpu`, accelerate would not connect several
        # processes: each would train alone. torch would warn about pinned memory, and TRL would
        # train in bf16, which is meant for accelerators.
        settings = {"use_cpu": True, "dataloader_pin_memory": False, "bf16": False} | settings
    optimizer = _read_optimizer(objects, settings, sections)
    optimizer, schedule = _read_schedule(objects, settings, sections, optimizer)
    optimizer, schedule = _read_layer_decay(objects, sections, optimizer, schedule)
    if wrapper is not None:
        settings["max_grad_norm"] = _max_grad_norm(objects, training, wrapper)
    leave_shared_store()
    arguments = objects.build(("training",), kind, settings, known=known)
    try:
        refuse_lone_process(
            arguments.world_size,
            "leave `training.use_cpu` out, and use a launcher that sets LOCAL_RANK",
        )
    except ValueError as error:
        raise objects.document.error(("training",), str(error)) from error
    return TrainingChoice(arguments, optimizer, schedule)


def _read_optimizer(
    objects: RecipeObjects, settings: dict[str, Any], sections: Sections
) -> OptimizerChoice | None:
    """Add the section ``optimizer`` to the arguments of the training.

    Returns:
        The optimizer that the section names; ``None`` if the Trainer builds it.
    """
    if sections.optimizer is None:
        return None
    dtypes = {sections.model.get(key) for key in ("dtype", "norm_dtype", "embedding_dtype")}
    are_half = bool(dtypes & {"bfloat16", "float16"})
    optimizer, arguments, defaults = read_optimizer(objects, sections.optimizer, are_half=are_half)
    if optimizer is not None and "optim" in settings:
        kind = sections.optimizer["type"]
        says = f"must be left out, because the section optimizer names {kind}"
        raise objects.document.error(("training", "optim"), says)
    _merge(objects, settings, arguments, "optimizer")
    for name, value in defaults.items():
        settings.setdefault(name, value)
    return optimizer


def _read_schedule(
    objects: RecipeObjects,
    settings: dict[str, Any],
    sections: Sections,
    optimizer: OptimizerChoice | None,
) -> tuple[OptimizerChoice | None, Schedule | None]:
    """Add the learning rate of the schedule's section to the arguments of the training.

    Returns:
        The optimizer, with the parameter groups that the schedule needs, and the schedule.
    """
    section, grouped = sections.lr_schedule, sections.grouped_lr_schedule
    name = "lr_schedule" if grouped is None else "grouped_lr_schedule"
    if section is None and grouped is None:
        return optimizer, None
    keys = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
    paths: list[Path] = [("training", key) for key in keys if key in sections.training]
    paths += [("lr_schedule",)] if section is not None and grouped is not None else []
    if paths:
        says = f"must be left out, because the recipe has a section {name}"
        raise objects.document.error(paths[0], says)
    max_steps = settings.get("max_steps", -1)
    schedule: Schedule | None
    if grouped is None:
        schedule, rate = read_schedule(objects, (name,), section or {}, max_steps)
    else:
        schedule, rate, rate_groups = read_grouped_schedule(objects, grouped, max_steps)
        choice = optimizer or OptimizerChoice(objects.document)
        optimizer = dataclasses.replace(choice, rate_groups=rate_groups)
    if rate is not None:
        _merge(objects, settings, {"learning_rate": rate}, name)
    return optimizer, schedule


def _read_layer_decay(
    objects: RecipeObjects,
    sections: Sections,
    optimizer: OptimizerChoice | None,
    schedule: Schedule | None,
) -> tuple[OptimizerChoice | None, Schedule | None]:
    """Return the optimizer and the schedule with the learning rates of ``layer_decay``."""
    path = ("layer_decay",)
    if sections.layer_decay is None:
        return optimizer, schedule
    if sections.grouped_lr_schedule is not None:
        says = "must be left out, because the recipe has a section grouped_lr_schedule"
        raise objects.document.error(path, says)
    section = objects.parse(path, LayerDecaySection, sections.layer_decay)
    choice = optimizer or OptimizerChoice(objects.document)
    # A schedule of the user's own multiplies the initial rate of each group, as torch's do.
    if isinstance(schedule, ScheduleChoice) and schedule.has_formula:
        schedule = GroupedScheduleChoice({DEFAULT_GROUP: schedule})
    return dataclasses.replace(choice, layer_decay=section), schedule


def _merge(
    objects: RecipeObjects, settings: dict[str, Any], others: Mapping[str, Any], section: str
) -> None:
    """Add another section's settings to `settings`; raise `RecipeError` if two values differ."""
    for key, value in others.items():
        if key in settings and settings[key] != value:
            path = ("training", key)
            if path not in objects.document.places:
                path = ("optimizer", key)  # an earlier call merged `optimizer` into `settings`
            says = f"expected {value!r} as in {section}, or no value, got {settings[key]!r}"
            raise objects.document.error(path, says)
        settings[key] = value


def _max_grad_norm(
    objects: RecipeObjects, training: Mapping[str, Any], wrapper: RunnerWrapperSection
) -> float:
    """Return the Trainer's ``max_grad_norm``; with 0 the norm is reported but not clipped."""
    path = ("training", "max_grad_norm")
    limit = training.get("max_grad_norm")
    if wrapper.max_grad_norm is not None and limit not in (None, wrapper.max_grad_norm):
        says = f"expected {wrapper.max_grad_norm} as in runner_wrapper, got {limit}"
        raise objects.document.error(path, says)
    clips = limit is not None if wrapper.use_clip_grad is None else wrapper.use_clip_grad
    if clips:
        limits = (wrapper.max_grad_norm, limit, 1.0)
        return float(next(each for each in limits if each is not None))
    if limit:
        says = f"expected 0 because runner_wrapper.use_clip_grad is false, got {limit}"
        raise objects.document.error(path, says)
    return 0.0


def optimized(
    trainer: type[Any],
    optimizer: OptimizerChoice | None,
    schedule: Schedule | None,
    balance: BalanceChoice | None = None,
) -> type[Any]:
    """Return a subclass of a Trainer that builds a recipe's optimizer and schedule.

    If the recipe has neither, and no balance of experts, the Trainer itself is returned.

    Args:
        trainer: Class of the Trainer.
        optimizer: Optimizer; ``None`` for the Trainer's own.
        schedule: Schedule; ``None`` for the Trainer's own.
        balance: How experts are balanced by biases; ``None`` for not.
    """
    methods: dict[str, Any] = {}
    if optimizer is not None or balance is not None:

        def create_optimizer(self: Any, model: Any = None) -> Any:
            """Build the recipe's optimizer; the Trainer's own method then keeps it."""
            is_new = self.optimizer is None
            network = self.model if model is None else model
            if is_new and optimizer is not None:
                decayed = self.get_decay_parameter_names(network)
                self.optimizer = optimizer.build(self.args, network, decayed)
            created = trainer.create_optimizer(self, model)
            if is_new and balance is not None:
                balance.begin(self.optimizer, network)
            return created

        methods["create_optimizer"] = create_optimizer
    if schedule is not None:

        def create_scheduler(
            self: Any, num_training_steps: int, optimizer: Optimizer | None = None
        ) -> Any:
            """Build the recipe's schedule; the Trainer's own method then keeps and prepares it."""
            if self.lr_scheduler is None:
                self.lr_scheduler = schedule.make(
                    self.optimizer if optimizer is None else optimizer, num_training_steps
                )
            return trainer.create_scheduler(self, num_training_steps, optimizer)

        methods["create_scheduler"] = create_scheduler
    return type(trainer.__name__, (trainer,), methods) if methods else trainer


def with_checked_loss(trainer: type[Any], document: RecipeDocument) -> type[Any]:
    """Return a subclass of a Trainer that says so if the model of a recipe returns no loss.

    Args:
        trainer: Class of the Trainer.
        document: Recipe; supplies the place for the error.
    """

    def refusal(got: str) -> Exception:
        name = document.data["model"]["type"]
        return document.error(("model", "type"), f"{_NO_LOSS}; got {got} from {name}")

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a micro-batch as the Trainer does, if it is one number."""
        try:
            found = trainer.compute_loss(self, *args, **kwargs)
        except (IndexError, TypeError, KeyError) as error:
            # The Trainer itself has failed to take the loss out of the output, not the model.
            if traceback.extract_tb(error.__traceback__)[-1].name != "compute_loss":
                raise
            got = "no loss"
            raise refusal(got) from error
        loss = found[0] if isinstance(found, tuple) else found
        if not isinstance(loss, torch.Tensor) or loss.dim() > 0:
            is_tensor = isinstance(loss, torch.Tensor)
            got = f"shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
            raise refusal(got)
        return found

    return type(trainer.__name__, (trainer,), {"compute_loss": compute_loss})


_NO_LOSS = (
    'expected a model whose forward returns a dictionary with "loss", or a tuple that begins with '
    "the loss, a tensor of shape ()"
)
