"""Read a recipe and check every value of it, without downloading or training anything."""

import difflib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from mfwrap.arguments import callers_stacklevel
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.config import StepConfig
from mfwrap.names import hint
from mfwrap.recipes.data.columns import Columns, needed_columns
from mfwrap.recipes.data.endings import type_of
from mfwrap.recipes.data.own import OwnSource
from mfwrap.recipes.data.source import DataError, DataSource
from mfwrap.recipes.models.checkpoint import has_tokenizer
from mfwrap.recipes.models.loading import ModelError
from mfwrap.recipes.models.own import IMPLIED, SHARED, OwnModel
from mfwrap.recipes.models.quantization import why_no_kernels
from mfwrap.recipes.models.settings import (
    ModelSettings,
    check_length,
)
from mfwrap.recipes.tasks.table import OWN_SECTIONS, SOURCES, TASKS, Task
from mfwrap.runner.adapters import AdapterChoice, read_peft
from mfwrap.runner.callbacks import (
    MakeCallback,
    needs_tensorboard_dir,
    read_callbacks,
    read_monitor,
)
from mfwrap.runner.document import Path as KeyPath
from mfwrap.runner.document import RecipeDocument, read_text
from mfwrap.runner.embedding_loss import MakeLoss, read_loss
from mfwrap.runner.expert_bias import BIAS_RATE, BalanceChoice
from mfwrap.runner.metric import ComputeMetrics, read_metric
from mfwrap.runner.objects import REFUSALS, RecipeObjects, taken, without_nulls
from mfwrap.runner.optimization import check_optimizer
from mfwrap.runner.optimizers import OptimizerChoice
from mfwrap.runner.own_code import NEEDS_FLAG, OwnCode, OwnKind, OwnType, is_own
from mfwrap.runner.replacements import without_replaced
from mfwrap.runner.reward import MakeReward, read_rewards
from mfwrap.runner.schedules import Schedule
from mfwrap.runner.sections import RunnerWrapperSection, Sections
from mfwrap.runner.step import StepChoice, read_average, read_step
from mfwrap.runner.training import read_training
from mfwrap.schedules.batch_growth import RampUp, check_multiples
from mfwrap.tensors.embedding_tables import num_positions
from mfwrap.trainer.mixin import loop_settings
from mfwrap.trainer.rollback import Rollback


class RecipeWarning(UserWarning):
    """A recipe has MindFormers keys that have no effect in mfwrap."""


@final
@dataclass(frozen=True)
class Recipe:
    """A checked recipe, ready for `run_recipe`."""

    document: RecipeDocument
    """The recipe as written, with overrides."""

    task: Task
    """Kind of training, such as ``causal_lm``."""

    model: ModelSettings
    """Section ``model``."""

    teacher: ModelSettings | None
    """Section ``teacher``; ``None`` without one."""

    data: DataSource
    """Section ``data``."""

    arguments: TrainingArguments
    """Arguments of the training."""

    optimizer: OptimizerChoice | None
    """Optimizer that the Trainer cannot build; ``None`` for the optimizer named in `arguments`."""

    schedule: Schedule | None
    """MindFormers' schedule; ``None`` for the schedule named in `arguments`."""

    balance: BalanceChoice | None
    """How experts are balanced by biases; ``None`` for not."""

    step: StepChoice
    """Settings of the training step, and its loss scale."""

    make_average: Callable[[Any], ExponentialMovingAverage] | None
    """Builds the average of a model's weights; ``None`` without an average."""

    peft: AdapterChoice | None
    """Adapter to train; ``None`` to train all weights."""

    data_skip_steps: int | None
    """Number of updates whose data are skipped at the start."""

    rampup_batch_size: RampUp | None
    """How the batch grows to the global batch; ``None`` for a batch of one size."""

    eval_per_token_loss: bool
    """Whether ``eval_loss`` is the mean over all targets, and not over the rows."""

    use_stateful_dataloader: bool
    """Whether streamed rows keep their place by their state, and are not read again."""
    async_save: bool
    """Whether checkpoints are written in the background."""

    rollback: Rollback | None
    """When to go back to a checkpoint; ``None`` for never."""

    add_metric: Callable[[ComputeMetrics | None], ComputeMetrics] | None
    """Adds the user's own metric to the task's; ``None`` without one."""

    make_rewards: tuple[MakeReward, ...]
    """Functions that each build one reward of the model's answers."""

    make_loss: MakeLoss | None
    """Builds the loss of a sentence encoder; ``None`` if the model has its own loss."""

    make_callbacks: tuple[MakeCallback, ...]
    """Functions that each build one callback of a run."""

    without_meaning: tuple[str, ...]
    """Dotted names of MindFormers keys that have no effect."""

    code: OwnCode
    """The user's own classes that the recipe names."""

    unchecked: Mapping[KeyPath, str]
    """Names of the user's own classes that were not loaded, because the recipe may not run code, by
    their paths. Such a recipe cannot be trained."""


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, allow_code: bool = False
) -> Recipe:
    """Read a recipe from a file and check it; nothing is downloaded or trained.

    Args:
        path: YAML file.
        overrides: Entries of the form ``section.key=value`` that replace values of the file.
        allow_code: Whether to import the modules whose classes the recipe names, as in ``type:
            my_module.MyCallback``. Without it, no such module is imported, and `run_recipe` refuses
            a recipe that names one.

    Raises:
        RecipeError: If the recipe is invalid. The message is one line of text that names the key,
            the file and the line number.

    Warns:
        RecipeWarning: If MindFormers keys of the recipe have no effect: one warning that lists all
            of these keys.
        UserWarning: If the recipe trains in float16, and torch finds no GPU.
    """
    return parse_recipe(read_text(path), str(path), overrides, allow_code=allow_code)


def parse_recipe(
    text: str, name: str, overrides: Sequence[str] = (), *, allow_code: bool = False
) -> Recipe:
    """Read a recipe from a string and check it; see `load_recipe`.

    Args:
        text: YAML text.
        name: Name for error messages; its stem is the default name of the run folder, and modules
            of the user's own are looked for in its folder.
        overrides: See `load_recipe`.
        allow_code: See `load_recipe`.
    """
    document = RecipeDocument.parse(text, name).overridden(overrides)
    code = OwnCode(name, is_allowed=allow_code)
    recipe = read_document(without_replaced(document), code)
    warn_of_settings(recipe)
    return recipe


def warn_of_settings(recipe: Recipe) -> None:
    """Warn of settings without effect, and of what is slow here."""
    if recipe.arguments.fp16 and not torch.accelerator.is_available():
        says = "training.fp16: torch finds no GPU, and without one a Trainer computes in float32"
        warnings.warn(f"{says}; set it to false", stacklevel=callers_stacklevel())
    if recipe.without_meaning:
        keys = ", ".join(recipe.without_meaning)
        says = f"{recipe.document.name}: these settings have no effect in mfwrap: {keys}"
        warnings.warn(says, RecipeWarning, stacklevel=callers_stacklevel())


def read_document(document: RecipeDocument, code: OwnCode | None = None) -> Recipe:
    """Check every section of a recipe.

    Args:
        document: The recipe as plain values.
        code: Finds the classes that the recipe names; by default, no code may run.

    Raises:
        RecipeError: If the recipe is invalid.
    """
    objects = RecipeObjects(document, code)
    _check_nesting(document)
    sections = objects.parse((), Sections, document.data)
    task = _task(objects, sections.task)
    _check_sections(document, task, sections)
    model = _model(objects, sections.model)
    if model.quantization is not None and not (task.takes_peft and sections.peft is not None):
        tasks = sorted(name for name, each in TASKS.items() if each.takes_peft)
        says = f"needs one of the tasks {tasks} and a section peft, whose adapter is trained"
        raise document.error(("model", "quantization"), says)
    teacher = None
    if sections.teacher is not None:
        teacher = _model_settings(objects, ("teacher",), sections.teacher)
    data = _data(objects, task, sections)
    wrapper = rollback = None
    if sections.runner_wrapper is not None:
        path = ("runner_wrapper",)
        wrapper = objects.parse(path, RunnerWrapperSection, sections.runner_wrapper)
    if sections.rollback is not None:
        rollback = objects.build(("rollback",), Rollback, sections.rollback)
    network = _check_model(objects, task, model, data)
    try:
        arguments = task.arguments()
    except ImportError as error:
        raise document.error(("task",), str(error)) from error
    training = read_training(objects, arguments, sections=sections, wrapper=wrapper)
    if network is not None:
        check_max_length(document, training.arguments, network)
    _check_dtypes(document, model, training.arguments)
    if data.is_streamed and training.arguments.max_steps <= 0:
        says = "expected a number of updates, because streamed data have no length"
        got = training.arguments.max_steps
        raise document.error(("training", "max_steps"), f"{says}, got {got}")
    _check_best_model(document, training.arguments)
    if sections.eval_per_token_loss and not task.has_targets:
        says = f"expected false, because the rows of the task {sections.task} have no targets"
        raise document.error(("eval_per_token_loss",), f"{says} to count, got true")
    check_optimizer(objects, training)
    if network is not None and training.optimizer is not None and sections.peft is None:
        # With an adapter, the trained parameters have other names.
        training.optimizer.groups(training.arguments, network, ())
    balance = _balance(document, sections, network)
    step = read_step(objects, wrapper, sections.monitor_config, training.arguments.max_grad_norm)
    _check_accumulation(document, step.config, training.arguments)
    _check_growth(document, sections, training.arguments)
    curves = f"{training.arguments.output_dir}/tensorboard"
    monitors = read_monitor(
        objects,
        sections.monitor_config,
        use_skip_data_by_global_norm=step.config.use_skip_data_by_global_norm or None,
        tensorboard_dir=curves if needs_tensorboard_dir(sections.monitor_config) else None,
    )
    return Recipe(
        document=document,
        task=task,
        model=model,
        teacher=teacher,
        data=data,
        arguments=training.arguments,
        optimizer=training.optimizer,
        schedule=training.schedule,
        balance=balance,
        step=step,
        make_average=read_average(objects, sections.ema),
        peft=read_peft(objects, sections.peft, task.peft_task_type),
        data_skip_steps=sections.data_skip_steps,
        rampup_batch_size=sections.rampup_batch_size,
        eval_per_token_loss=sections.eval_per_token_loss,
        use_stateful_dataloader=sections.use_stateful_dataloader,
        async_save=sections.async_save,
        rollback=rollback,
        add_metric=read_metric(objects, sections.metric),
        make_rewards=read_rewards(
            objects, sections.reward, getattr(training.arguments, "reward_weights", None)
        ),
        make_loss=read_loss(objects, sections.loss) if "loss" in task.sections else None,
        make_callbacks=(*read_callbacks(objects, sections.callbacks), *monitors),
        without_meaning=tuple(objects.without_meaning),
        code=objects.code,
        unchecked=objects.unchecked,
    )


def _check_nesting(document: RecipeDocument) -> None:
    """Raise `RecipeError` if a key of the section ``training`` is beside the sections."""
    task = document.data.get("task")
    kind: type[TrainingArguments] = TrainingArguments
    if isinstance(task, str) and task in TASKS:
        # Without the library of a task, the recipe is refused below.
        with suppress(ImportError):
            kind = TASKS[task].arguments()
    of_training = {field.name for field in fields(kind)} - {
        field.name for field in fields(Sections)
    }
    for key in document.data:
        if key in of_training:
            says = f"is a key of the section training; write it as training.{key}"
            raise document.error((key,), f"{says}, that is, indented below `training:`")


def _check_best_model(document: RecipeDocument, arguments: TrainingArguments) -> None:
    """Raise `RecipeError` if a run ends before it saves what ``load_best_model_at_end`` loads."""
    steps, last = arguments.save_steps, arguments.max_steps
    saves_steps = arguments.load_best_model_at_end and arguments.save_strategy == "steps"
    if saves_steps and 0 < last < steps:
        says = f"expected at most training.max_steps ({last}), because load_best_model_at_end"
        raise document.error(("training", "save_steps"), f"{says} needs a checkpoint, got {steps}")


def _balance(
    document: RecipeDocument, sections: Sections, network: nn.Module | None
) -> BalanceChoice | None:
    """Return how experts are balanced; raise `RecipeError` if those of the model cannot be."""
    rate = sections.moe_router_bias_update_rate
    if rate is None:
        return None
    balance = BalanceChoice(document, rate)
    if sections.peft is not None:
        says = "must be left out with a section peft: checkpoints of adapters have no such biases"
        raise document.error((BIAS_RATE,), says)
    if network is not None:
        balance.check(network)
    return balance


_TASK = OwnKind("a Task of mfwrap.recipes.tasks.table", lambda found: isinstance(found, Task))
_MODEL = OwnKind(
    "a subclass of torch.nn.Module, or a function that builds a model",
    lambda found: issubclass(found, nn.Module) if isinstance(found, type) else callable(found),
)
_DATA = OwnKind(
    "a class of data sets, with __getitem__ or of torch's IterableDataset, or a function that "
    "returns a data set",
    lambda found: (
        issubclass(found, (DataSource, IterableDataset)) or hasattr(found, "__getitem__")
        if isinstance(found, type)
        else callable(found)
    ),
)


def _task(objects: RecipeObjects, name: str) -> Task:
    if not is_own(name):
        return TASKS[objects.choice(("task",), name, TASKS)]
    if not objects.code.is_allowed:
        raise objects.document.error(("task",), f"{name} {NEEDS_FLAG}")
    task: Task = objects.code.load(objects.document, ("task",), name, _TASK)
    return task


def _check_sections(document: RecipeDocument, task: Task, sections: Sections) -> None:
    """Raise `RecipeError` if a section that only some tasks have is missing, or has no effect."""
    for name, is_needed in OWN_SECTIONS.items():
        is_given = getattr(sections, name) is not None
        if is_given and name not in task.sections:
            raise document.error((name,), f"is not a section of the task {sections.task}")
        if is_needed and name in task.sections and not is_given:
            says = f"required by the task {sections.task}, but missing"
            raise document.error((name,), says)
    if sections.peft is not None and task.library == "sentence-transformers":
        raise document.error(("peft",), f"is not a section of the task {sections.task}")


def _model_settings(
    objects: RecipeObjects, path: KeyPath, section: Mapping[str, Any]
) -> ModelSettings:
    """Return a section about a model; raise `RecipeError` if it cannot be quantized here."""
    model = objects.parse(path, ModelSettings, section)
    if model.quantization is not None and (reason := why_no_kernels(model.quantization)):
        raise objects.document.error((*path, "quantization"), f"cannot be used here: {reason}")
    return model


def _model(objects: RecipeObjects, section: Mapping[str, Any]) -> ModelSettings:
    path = ("model",)
    own = objects.own_type(path, section, _MODEL)
    if own is None:
        return _model_settings(objects, path, section)
    shared = {key: value for key, value in own.settings.items() if key in SHARED}
    model = replace(objects.parse(path, OwnModel, shared), type=own.name)
    if own.found is None:
        return model
    arguments = _arguments(own.found, own.settings, SHARED)
    arguments = objects.checked_arguments(path, own.found, arguments, implied=IMPLIED)
    return replace(
        model,
        make=partial(objects.call, path, own.found, **arguments),
        takes=tuple(taken(own.found, IMPLIED - arguments.keys())),
        keeps_dtype=path in objects.code.given,
    )


def _arguments(
    make: Callable[..., Any], settings: Mapping[str, Any], shared: Collection[str]
) -> dict[str, Any]:
    """Return the settings that are arguments of a class of the user's own.

    Args:
        make: The class, or a function.
        settings: The section without its type.
        shared: Keys that mfwrap reads; the class gets them too, if it takes them.
    """
    both = taken(make, shared)
    kept = {key: value for key, value in settings.items() if key not in shared or key in both}
    return without_nulls(make, kept)


def _check_dtypes(
    document: RecipeDocument, model: ModelSettings, arguments: TrainingArguments
) -> None:
    """Raise `RecipeError` if the weights have several dtypes without mixed precision."""
    if arguments.bf16 or arguments.fp16:
        return
    for key in ("norm_dtype", "embedding_dtype"):
        dtype = getattr(model, key)
        if dtype not in {None, model.dtype}:
            says = f"expected {model.dtype!r}, as in model.dtype, or training.bf16 or training.fp16"
            raise document.error(("model", key), f"{says} set to true, got {dtype!r}")


def _check_accumulation(
    document: RecipeDocument, config: StepConfig, arguments: TrainingArguments
) -> None:
    """Raise `RecipeError` if the step's local norms do not fit how gradients are accumulated."""
    try:
        loop_settings(config, arguments)
    except ValueError as error:
        path = ("training", "accelerator_config")
        raise document.error(path, str(error)) from error


def _check_growth(
    document: RecipeDocument, sections: Sections, arguments: TrainingArguments
) -> None:
    """Raise `RecipeError` if a batch cannot grow as asked, on any number of processes.

    The Trainer checks the rest at its start: the number of processes may be another one then.
    """
    growth, path = sections.rampup_batch_size, ("rampup_batch_size",)
    if growth is None:
        return
    for name in ("data_skip_steps", "rollback"):
        if getattr(sections, name) is not None:
            says = f"expected no value beside {name}, which counts updates of one size"
            raise document.error(path, f"{says}, got {growth}")
    rows = arguments.train_batch_size
    if isinstance(growth, list):
        sizes = growth[:2]
    else:
        sizes = [*growth.values()]
        of_update = rows * arguments.gradient_accumulation_steps
        num_processes, rest = divmod(sizes[-1], of_update)
        if rest:
            says = f"expected a last size that is a multiple of {of_update}, the rows of an update"
            raise document.error(path, f"{says} on one process, got {sizes[-1]}")
        rows *= num_processes
    try:
        check_multiples(sizes, rows)
    except ValueError as error:
        says = str(error).removeprefix("each size of `rampup_batch_size` ")
        raise document.error(path, f"each size {says}") from error


def _data(objects: RecipeObjects, task: Task, sections: Sections) -> DataSource:
    section = sections.data
    if section.get("type") is None and _are_names(section.get("path")):
        try:
            held_out = section.get("eval_path")
            kind = type_of(section["path"], held_out if _are_names(held_out) else None)
            section = {**section, "type": kind}
        except ValueError as error:
            raise objects.refusal(("data",), section, error) from error
    own = objects.own_type(("data",), section, _DATA)
    kind = "" if own is not None else objects.named_type(("data",), section, SOURCES)[0]
    for option in sorted({name for each in TASKS.values() for name in each.options}):
        if section.get(option) is not None and option not in task.options:
            says = f"is not a setting of the task {sections.task}"
            raise objects.document.error(("data", option), says)
    data = (
        objects.parse(("data",), SOURCES[kind], section) if own is None else _own_data(objects, own)
    )
    for key, is_set in {"loss_by": data.source_column, "row_losses": data.row_losses}.items():
        if is_set and not task.has_targets:
            says = f"must be left out, because the rows of the task {sections.task} have no loss"
            raise objects.document.error(("data", key), f"{says} of their own")
    if data.known_columns is not None:
        known = data.known_columns | data.columns.keys()
        check_columns(objects.document, task.needs_of(data), known)
    return data


def _own_data(objects: RecipeObjects, own: OwnType) -> DataSource:
    """Return data of the user's own, whose class is called when the rows are read."""
    path = ("data",)
    if isinstance(own.found, type) and issubclass(own.found, DataSource):
        return objects.parse(path, own.found, own.settings)
    of_all = {field.name for field in fields(DataSource)}
    shared = {key: value for key, value in own.settings.items() if key in of_all}
    data = replace(objects.parse(path, OwnSource, shared), type=own.name)
    if own.found is None:
        return data
    arguments = _arguments(own.found, own.settings, of_all)
    arguments = objects.checked_arguments(path, own.found, arguments)
    return replace(data, make=partial(objects.call, path, own.found, **arguments))


def _are_names(value: object) -> bool:
    """Return whether a value is a string, a list of strings that is not empty, or several."""
    if isinstance(value, dict):
        return bool(value) and all(map(_are_names, value.values()))
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, str) for one in value)
    return isinstance(value, str)


def check_columns(
    document: RecipeDocument,
    needs: Sequence[Columns],
    found: Collection[str],
    origin: str | None = None,
) -> Columns:
    """Return the columns that the task needs, or raise `RecipeError` if the data lack them.

    Args:
        document: Recipe; supplies the place for the error.
        needs: Alternative sets of columns; see `Task.needs_of`.
        found: Names of the data's columns, after ``data.columns`` has renamed them.
        origin: File that has the columns; ``None`` if the data are not in a file.
    """
    columns = needed_columns(needs, found)
    if columns is None:
        wanted = " or ".join(str(sorted(needed)) for needed in needs)
        of = "" if origin is None else f" in {origin}"
        says = f"expected data with the columns {wanted}, got {sorted(found)}{of}; if they have"
        says = f"{says} other names, set data.columns, as in {{{_renaming(needs, found)}}}"
        is_typed = "type" in (document.data.get("data") or {})
        raise document.error(("data", "type") if is_typed else ("data",), says)
    return columns


def _renaming(needs: Sequence[Columns], found: Collection[str]) -> str:
    """Return an example of ``data.columns``: of a column whose name is similar, if there is one."""
    for name in (name for columns in needs for name in columns if name not in found):
        if similar := difflib.get_close_matches(name, found, 1, _SIMILAR):
            return f"{name}: {similar[0]}"
    return f"{min(needs[-1].keys() - set(found))}: NAME"


_SIMILAR = 0.8
"""Smallest similarity of two names of columns of which one may stand for the other."""


def check_max_length(
    document: RecipeDocument, arguments: TrainingArguments, network: nn.Module
) -> None:
    """Raise `RecipeError` if the longest sequences or answers exceed the model's positions.

    Args:
        document: Recipe; supplies the place for the error.
        arguments: Arguments of the training. Only those of TRL have ``max_length``, or
            ``max_completion_length``, beside which a prompt needs at least one position.
        network: The model.
    """
    limit = num_positions(network)
    if limit is None:
        return
    answer = getattr(arguments, "max_completion_length", None)
    if answer is not None and answer >= limit:
        says = f"expected an integer < {limit}, the number of positions of this model"
        raise document.error(("training", "max_completion_length"), f"{says}, got {answer}")
    length = getattr(arguments, "max_length", limit)
    if length is None or length > limit:
        says = f"expected an integer <= {limit}, the number of positions of this model"
        raise document.error(("training", "max_length"), f"{says}, got {length}")


@contextmanager
def data_errors(objects: RecipeObjects, model: str = "model") -> Iterator[None]:
    """Convert a `DataError` or `ModelError` in the block to a `RecipeError` that names the key.

    Args:
        objects: Builder for the recipe.
        model: Section of the model.
    """
    try:
        yield
    except ModelError as error:
        raise objects.refusal((model,), objects.document.data[model], error) from error
    except DataError as error:
        says = str(error).removeprefix("`data` ")
        if says != str(error):
            raise objects.document.error(("data",), says) from error
        raise objects.refusal(("data",), objects.document.data["data"], error) from error


def _check_tokenizer(objects: RecipeObjects, task: Task, model: ModelSettings) -> None:
    """Raise `RecipeError` if the task cannot use the tokenizer or its template, or has none."""
    if model.tokenizer is not None and not task.uses_tokenizer:
        says = "is not a setting of a task without text"
        raise objects.document.error(("model", "tokenizer"), says)
    if model.chat_template is not None and not task.takes_conversations:
        says = "is not a setting of a task without conversations"
        raise objects.document.error(("model", "chat_template"), says)
    folder = model.folder()
    needs_own = task.uses_tokenizer and model.tokenizer is None
    if needs_own and folder is not None and not has_tokenizer(folder):
        says = "expected the tokenizer that the weights were trained with, by its name or folder"
        got = (
            f"because {model.path!r}, the folder of the model, has none; or copy its files, "
            "such as tokenizer.json and tokenizer_config.json, into that folder"
        )
        raise objects.document.error(("model", "tokenizer"), f"{says}, {got}")


def _check_model(
    objects: RecipeObjects, task: Task, model: ModelSettings, data: DataSource
) -> nn.Module | None:
    """Raise `RecipeError` if the task cannot train the model.

    A model from a configuration is built on the meta device, which takes no memory, and returned.
    """
    # A model that the task cannot train may have no tokenizer, and needs none.
    kind, known = model.model_type, task.model_types()
    if kind is not None and kind not in known:
        says = f"expected a model type that this task can train, got {kind!r}"
        says += hint(kind, known) if model.config is not None else ""
        # `AutoModel`, which builds the encoders of embeddings, builds models of images, too.
        others = [name for name in TASKS if name != "embedding"]
        able = [name for name in others if kind in TASKS[name].model_types()]
        says = f"{says}; tasks that can train it: {', '.join(able)}" if able else says
        key = ("config", "model_type") if model.config is not None else ("path",)
        raise objects.document.error(("model", *key), says)
    _check_tokenizer(objects, task, model)
    if model.config is None:
        return None

    def build(config: Mapping[str, Any]) -> nn.Module:
        with torch.device("meta"):
            return replace(model, config=dict(config)).make_model(task.auto_class)

    try:
        network = build(model.config)
    except ModelError as error:
        raise objects.refusal(("model",), objects.document.data["model"], error) from error
    except REFUSALS as error:
        raise objects.refusal(("model", "config"), model.config, error, build) from error
    if data.sequence_length is not None:
        with data_errors(objects):
            check_length(data.sequence_length, network)
    return network
