"""A training run from one YAML file: read, checked to the last value, and run."""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from transformers import TrainingArguments

from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.recipe.callbacks import (
    MakeCallback,
    needs_tensorboard_dir,
    read_callbacks,
    read_monitor,
)
from mfwrap.recipe.document import RecipeDocument, RecipeError
from mfwrap.recipe.objects import REFUSALS, RecipeObjects
from mfwrap.recipe.sections import Sections
from mfwrap.recipe.step import StepChoice, read_average, read_step, read_wrapper
from mfwrap.recipe.training import ScheduleChoice, read_peft, read_training
from mfwrap.recipes.data.source import DataError, DataSource
from mfwrap.recipes.models.settings import ModelSettings, check_length
from mfwrap.recipes.tasks.table import SOURCES, TASKS, Task

__all__ = [
    "Recipe",
    "RecipeError",
    "RecipeWarning",
    "check_columns",
    "data_errors",
    "load_recipe",
    "parse_recipe",
]


class RecipeWarning(UserWarning):
    """Keys of MindFormers that a recipe holds and that have no meaning here."""


@final
@dataclass(frozen=True)
class Recipe:
    """A run that can be started: all of its settings fit.

    Args:
        document: What was read.
        task: What is trained.
        model: Section ``model``.
        data: Section ``data``.
        arguments: Of the training.
        schedule: MindFormers' schedule; ``None`` for that of `arguments`.
        step: Settings of the step.
        make_average: Makes the average of the weights; ``None`` without one.
        peft: PEFT's configuration of an adapter; ``None`` to train all weights.
        make_callbacks: Make the callbacks, each for one run.
        without_meaning: MindFormers' keys that are left out.
    """

    document: RecipeDocument
    task: Task
    model: ModelSettings
    data: DataSource
    arguments: TrainingArguments
    schedule: ScheduleChoice | None
    step: StepChoice
    make_average: Callable[[Any], ExponentialMovingAverage] | None
    peft: Any
    make_callbacks: tuple[MakeCallback, ...]
    without_meaning: tuple[str, ...]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file and check it; nothing is downloaded or trained.

    Args:
        path: YAML file.
        overrides: ``section.key=value`` each, which replace what the file says.

    Raises:
        RecipeError: If anything does not fit, with file, line and key, in one line.

    Warns:
        RecipeWarning: If it holds MindFormers' keys without a meaning here, all in one warning.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: must be a recipe in YAML, got a file that cannot be read: {error}"
        raise RecipeError(msg) from error
    return parse_recipe(text, str(path), overrides)


def parse_recipe(text: str, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from its text; see `load_recipe`.

    Args:
        text: YAML.
        name: Of the file, for errors and for the folder of the run.
        overrides: As in `load_recipe`.
    """
    document = RecipeDocument.parse(text, name).overridden(overrides)
    objects = RecipeObjects(document)
    recipe = _read(objects, objects.parse((), Sections, document.data))
    if recipe.without_meaning:
        keys = ", ".join(recipe.without_meaning)
        warnings.warn(f"{name}: without a meaning here: {keys}", RecipeWarning, stacklevel=3)
    return recipe


def _read(objects: RecipeObjects, sections: Sections) -> Recipe:
    task = _task(objects, sections.task)
    model = objects.parse(("model",), ModelSettings, sections.model)
    data = _data(objects, task, sections)
    wrapper = read_wrapper(objects, sections.runner_wrapper)
    _check_model(objects, task, model, data)
    training = read_training(
        objects,
        task.arguments(),
        name=Path(objects.document.name).stem,
        training=sections.training,
        wrapper=wrapper,
        optimizer=sections.optimizer,
        lr_schedule=sections.lr_schedule,
    )
    step = read_step(objects, wrapper, sections.monitor_config, training.arguments.max_grad_norm)
    curves = f"{training.arguments.output_dir}/tensorboard"
    monitors = read_monitor(
        objects,
        sections.monitor_config,
        use_skip_data_by_global_norm=step.config.use_skip_data_by_global_norm or None,
        tensorboard_dir=curves if needs_tensorboard_dir(sections.monitor_config) else None,
    )
    return Recipe(
        document=objects.document,
        task=task,
        model=model,
        data=data,
        arguments=training.arguments,
        schedule=training.schedule,
        step=step,
        make_average=read_average(objects, sections.ema),
        peft=read_peft(objects, sections.peft, sections.task),
        make_callbacks=(*read_callbacks(objects, sections.callbacks), *monitors),
        without_meaning=tuple(objects.without_meaning),
    )


def _task(objects: RecipeObjects, name: str) -> Task:
    if name not in TASKS:
        raise objects.document.error(("task",), f"must be one of {sorted(TASKS)}, got {name!r}")
    return TASKS[name]


def _data(objects: RecipeObjects, task: Task, sections: Sections) -> DataSource:
    kind = sections.data.get("type")
    if not isinstance(kind, str) or kind not in SOURCES:
        says = f"must be one of {sorted(SOURCES)}, got {kind!r}"
        raise objects.document.error(("data", "type"), says)
    for option in ("sequence_length", "packing"):
        if sections.data.get(option) is not None and option not in task.options:
            says = f"is not a setting of the task {sections.task}"
            raise objects.document.error(("data", option), says)
    data = objects.parse(("data",), SOURCES[kind], sections.data)
    known = data.known_columns
    if known is not None:
        for column in data.columns.values():
            if column not in known:
                says = f"must name columns of {sorted(known)}, got {column!r}"
                raise objects.document.error(("data", "columns"), says)
        check_columns(objects.document, task, known | data.columns.keys())
    return data


def check_columns(document: RecipeDocument, task: Task, columns: Collection[str]) -> None:
    """Raise `RecipeError` unless the data's columns are enough for the task."""
    if not any(needed <= set(columns) for needed in task.needs):
        wanted = " or ".join(str(sorted(needed)) for needed in task.needs)
        says = f"must have the columns {wanted} for the task, got {sorted(columns)}"
        raise document.error(("data", "type"), says)


@contextmanager
def data_errors(objects: RecipeObjects) -> Iterator[None]:
    """Turn what is wrong with the data into an error of the recipe, at the key that it names."""
    try:
        yield
    except DataError as error:
        whole, says = "`data` ", str(error)
        if says.startswith(whole):
            raise objects.document.error(("data",), says.removeprefix(whole)) from error
        raise objects.refusal(("data",), objects.document.data["data"], error) from error


def _check_model(
    objects: RecipeObjects, task: Task, model: ModelSettings, data: DataSource
) -> None:
    """Refuse a model that the task cannot train; one of random weights is built, without memory."""
    if model.tokenizer is not None and not task.uses_tokenizer:
        says = "is not a setting of a task without text"
        raise objects.document.error(("model", "tokenizer"), says)
    kind = model.model_type
    if kind is None:
        return
    if kind not in task.model_types():
        says = f"must be a model that the task can train, got {kind!r}"
        raise objects.document.error(("model", "config", "model_type"), says)
    try:
        with torch.device("meta"):
            network = model.make_model(task.auto_class)
    except REFUSALS as error:
        settings = objects.document.data["model"]["config"]
        raise objects.refusal(("model", "config"), settings, error) from error
    if data.sequence_length is not None:
        with data_errors(objects):
            check_length(data.sequence_length, network)
