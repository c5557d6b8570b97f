"""Run a recipe: train, evaluate and save."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, set_seed

from mfwrap.arguments import callers_stacklevel
from mfwrap.callbacks import Callback, EMACallback, MFLossMonitor
from mfwrap.callbacks.memory.monitor import with_memory_monitor
from mfwrap.callbacks.metrics_recorder import MetricsRecorder, ThroughputRecorder
from mfwrap.checkpoints.ownership import owning_run
from mfwrap.checkpoints.resumption import AUTO
from mfwrap.checkpoints.whole import whole_file
from mfwrap.collectives import gather_objects, raising_together, this_rank
from mfwrap.recipes.data.columns import ANY_IMAGE, ClassCheck, check_numbers, check_rows
from mfwrap.recipes.data.forms import form_of
from mfwrap.recipes.data.source import SOURCE, ColumnUse, DataError, Needs, Rows
from mfwrap.recipes.data.streams import column_names
from mfwrap.recipes.models.loading import unused_weights
from mfwrap.recipes.models.own import OwnModel
from mfwrap.recipes.models.settings import ModelSettings, make_text_model
from mfwrap.recipes.tasks.inputs import build_for_inputs
from mfwrap.records.run_record import TRAINER_STATE
from mfwrap.records.settings import changed_since
from mfwrap.records.skipped_rows import SkippedRow, SkipRows, skipped_rows
from mfwrap.runner.document import (
    RECIPE_FILE,
    RecipeDocument,
    RecipeError,
    read_text,
    yaml_text,
)
from mfwrap.runner.failures import named_failure
from mfwrap.runner.finishing import finish
from mfwrap.runner.folder import (
    RESULT,
    begin_anew,
    check_former_run,
    check_others_files,
    claim,
    is_free_of_completions,
    list_completions,
    set_aside_tracebacks,
)
from mfwrap.runner.given import GivenObjects
from mfwrap.runner.inputs import changed_inputs, input_facts
from mfwrap.runner.lengths import check_answers, check_lengths, untrained_positions
from mfwrap.runner.model_card import Updates
from mfwrap.runner.objects import REFUSALS, RecipeObjects
from mfwrap.runner.outliers import far_values
from mfwrap.runner.own_code import NEEDS_FLAG, OwnCode
from mfwrap.runner.recipe import (
    Recipe,
    RecipeWarning,
    check_columns,
    check_max_length,
    data_errors,
    load_recipe,
    read_document,
    warn_of_settings,
)
from mfwrap.runner.resumption import former_run, write_result
from mfwrap.runner.reward import missing_values
from mfwrap.runner.training import optimized, with_checked_loss
from mfwrap.runner.tuning import tuning_of
from mfwrap.runner.unknown_tokens import check_known
from mfwrap.runner.way_on import telling_the_way_on
from mfwrap.trainer.display.console import StepProgressCallback

_STILL_COUNTED = (
    "the rows that are left out still count in the mean and the deviation by which the model "
    "standardizes; remove a row with a huge number from the file instead"
)


class RunResult(NamedTuple):
    """Result of a run."""

    folder: Path
    """Run folder with ``recipe.yaml``, ``metrics.jsonl``, checkpoints, ``model``, ``result.json``,
    and ``model_ema`` if the recipe averages weights."""

    metrics: dict[str, float]
    """Metrics of the last evaluation; those of averaged weights begin with ``ema_``."""

    checkpoint: str | None = None
    """Name of the best checkpoint, if ``model`` is that of it; ``None`` for the last step."""


def run_recipe(
    recipe: Recipe | str | Path,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    optimizer: Optimizer | Callable[[list[dict[str, Any]]], Optimizer] | None = None,
    callbacks: Sequence[TrainerCallback | Callback] = (),
    resume: str | bool = False,
    overwrite: bool = False,
    skip_rows: SkipRows | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> RunResult:
    """Train as a recipe describes; evaluate and save the raw weights and any averaged weights.

    Args:
        recipe: Recipe to run, or the path of its YAML file, which is read without overrides.
        model: Model to train instead of the section ``model``, of which only ``tokenizer`` counts.
            It is trained in place, keeps its dtypes, and must return a dictionary with ``loss``, or
            a tuple that begins with it.
        data: Data set instead of the source in the section ``data``, whose keys of all sources
            still count, such as ``eval_fraction``: a ``datasets.Dataset`` or a list of dictionaries
            with the columns of the task; a ``torch.utils.data.Dataset`` with the inputs of the
            model; or a pair of either, training rows and held-out rows.
        optimizer: Optimizer instead of the section ``optimizer``: a function of the parameter
            groups, such as ``functools.partial(torch.optim.SGD, lr=0.1)``, or an optimizer of the
            parameters of `model`. A function that has a parameter ``lr`` or ``learning_rate`` gets
            ``training.learning_rate``; a partial that sets it, and an optimizer, keep their own.
            An optimizer keeps its weight decay, too.
        callbacks: Callbacks in addition to those of the recipe.
        resume: Checkpoint folder to resume from, or ``True`` for the newest checkpoint in the run
            folder. With ``"auto"``, the same call starts a run, resumes it from its newest intact
            checkpoint, or returns its result if it has finished. Rank 0 decides for all ranks.
        overwrite: Whether to delete the checkpoints and models of an earlier run in the folder. The
            records of an earlier run are always deleted, except when the run is resumed.
        skip_rows: Rows of the training data to leave out: pairs of an epoch and a position in its
            order, or the path of a file that `mfwrap.records.read_skipped_rows` reads. A run that
            is resumed without it leaves out the rows of its checkpoint.
        say: Called in the main process with lines about the rows, see `build_trainer`, and with a
            line that names the checkpoint that the run resumes from, that lists what `overwrite`
            has deleted, that says that the run had finished before, or that warns at the end that
            most updates were skipped.

    Raises:
        RecipeError: If another program trains in the run folder, if the data lack something that
            the task needs, if the folder has checkpoints and neither `resume` nor `overwrite` is
            given, if `resume` is ``"auto"`` and the folder has the run of another recipe, if
            `skip_rows` is wrong, if a section contradicts an object, or if the recipe names classes
            of the user's own and was loaded without ``allow_code``.
        RuntimeError: If the models cannot be pushed (`training.push_to_hub`). They are complete in
            the run folder.
        TypeError: If an object has the wrong type.
        ValueError: If there is no intact checkpoint to resume from, or `optimizer` is an optimizer
            but `model` is missing.
    """
    given = GivenObjects(model, data, optimizer, callbacks)
    if any(one is not None for one in given[:-1]) or callbacks:
        recipe = _with_objects(recipe, given)
    elif not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    for path, name in recipe.unchecked.items():
        raise recipe.document.error(path, f"{name} {NEEDS_FLAG}")
    left_out = _checked_skip(skip_rows)
    folder = Path(recipe.arguments.output_dir or "")
    with contextlib.ExitStack() as stack:
        stack.enter_context(recipe.code.importable())
        try:
            stack.enter_context(owning_run(folder, waits=resume == AUTO))
        except BlockingIOError as error:
            raise RecipeError(str(error)) from error
        return _run(recipe, folder, left_out, resume=resume, overwrite=overwrite, say=say)


def _with_objects(recipe: Recipe | str | Path, given: GivenObjects) -> Recipe:
    if isinstance(recipe, Recipe):
        document, code = recipe.document, recipe.code
    else:
        document = RecipeDocument.parse(read_text(recipe), str(recipe))
        code = OwnCode(str(recipe), is_allowed=False)
    given.check(document)
    checked = read_document(given.document(document), given.code(code, document))
    if not isinstance(recipe, Recipe):
        warn_of_settings(checked)
    if keys := given.without_effect(document):
        says = "run_recipe got the object `optimizer`, so these settings have no effect"
        warnings.warn(
            f"{document.name}: {says}: {', '.join(keys)}",
            RecipeWarning,
            stacklevel=callers_stacklevel(),
        )
    return checked


def _run(
    recipe: Recipe,
    folder: Path,
    left_out: frozenset[SkippedRow] | None,
    *,
    resume: str | bool,
    overwrite: bool,
    say: Callable[[str], None],
) -> RunResult:
    if resume == AUTO:
        former = former_run(recipe.document, folder)
        if former.result is not None:
            if this_rank() == 0:
                say(f"{folder}: this run has finished before; --overwrite runs it again")
            return RunResult(folder, *former.result)
        resume = AUTO if former.has_checkpoints else False
    _check_folder(recipe, folder, is_new=not resume, overwrite=overwrite)
    is_free = is_free_of_completions(folder)
    trainer, recorder = build_trainer(recipe, left_out, say)
    with _naming_keys(recipe):
        check_answers(recipe, trainer, say)
    if resume:
        if this_rank() == 0:
            began = _folder_of(folder, resume=resume)
            _say_changes(recipe, began, trainer.run_facts.inputs, say)
        trainer.say_resume = say
        claim(folder, recipe.arguments)
    else:
        # Delete only after the Trainer was built: a run that cannot start must not delete an
        # earlier run.
        removed = begin_anew(folder, recipe.arguments, overwrite=overwrite)
        if overwrite and removed:
            say(f"removed from {folder}: {', '.join(removed)}")
    if trainer.is_world_process_zero():
        list_completions(folder, was_free=is_free)
        _remove_end(folder)
        with whole_file(folder / RECIPE_FILE) as partial:
            partial.write_text(yaml_text(recipe.document.data), encoding="utf-8")
    with _naming_keys(recipe), telling_the_way_on(trainer, folder):
        trainer.train(resume_from_checkpoint=resume or None)
    with trainer.run_facts.writing_failure():
        run = finish(recipe, trainer, recorder, say)
    checkpoint = None if run.best is None else run.best.checkpoint
    if trainer.is_local_process_zero():
        set_aside_tracebacks(folder)
    if trainer.is_world_process_zero():
        write_result(folder, run.metrics, checkpoint)
        _warn_of_skips(run.updates, say)
    return RunResult(folder, run.metrics, checkpoint)


def _remove_end(folder: Path) -> None:
    """Remove what only a run has that has finished."""
    for name in (RESULT, TRAINER_STATE):
        (folder / name).unlink(missing_ok=True)


def _folder_of(folder: Path, *, resume: str | bool) -> Path:
    """Return the folder of the run that is resumed, which may be another one than is written to."""
    if resume in {True, AUTO}:
        return folder
    other = Path(str(resume)).parent
    return folder if other.absolute() == folder.absolute() else other


def _say_changes(
    recipe: Recipe, folder: Path, inputs: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Say what a run that is resumed gets other than before: settings, code, data, base model."""
    if settings := changed_since(folder, recipe.document.data):
        say(f"the run continues with other settings: {'; '.join(settings)}")
    changed = [*recipe.code.changed_since(folder), *changed_inputs(recipe, folder, inputs)]
    if changed:
        names = ", ".join(changed)
        say(f"warning: {names} changed since {folder} was started; the run continues with it")


def _warn_of_skips(updates: Updates, say: Callable[[str], None]) -> None:
    """Warn if most updates of a training were skipped."""
    applied, skipped, why = updates
    if skipped and not applied:
        what = f"none of the {skipped:,} updates was applied, because no gradient was finite"
        say(f"warning: {what}; the weights are those of the start")
    elif skipped > applied:
        say(f"warning: {skipped:,} of {applied + skipped:,} updates were skipped, {why}")


def _check_folder(recipe: Recipe, folder: Path, *, is_new: bool, overwrite: bool) -> None:
    """Raise on all ranks if the run would replace or delete what it must not; rank 0 looks."""
    said = None
    with raising_together():
        if this_rank() == 0:
            try:
                if is_new:
                    check_former_run(recipe.document, folder, overwrite=overwrite)
                check_others_files(recipe.document, folder)
            except RecipeError as error:
                said = str(error)
    if found := gather_objects(said)[0]:
        raise RecipeError(found)


def _checked_skip(skip_rows: SkipRows | None) -> frozenset[SkippedRow] | None:
    try:
        return None if skip_rows is None else skipped_rows(skip_rows)
    except OSError as error:
        msg = f"{error.filename}: cannot be read ({error.strerror})"
        raise RecipeError(msg) from error
    except (TypeError, ValueError) as error:
        raise RecipeError(str(error)) from error


def build_trainer(
    recipe: Recipe,
    skip_rows: SkipRows | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Any, MetricsRecorder]:
    """Return the Trainer of a recipe, and the callback that records its metrics.

    Args:
        recipe: The recipe.
        skip_rows: Rows of the training data to leave out, as in `run_recipe`.
        say: Called in the main process with lines about rows that lack what a reward takes, and
            about numbers far from the others, with a line that says what the rows were recognized
            as, if the task takes several forms of rows, with lines about those of them that
            ``training.max_length`` leaves out or cuts, with the order of the classes if it is that
            of a checkpoint, and with a warning if a classifier of a checkpoint gets a new head or
            classes of other names, if a checkpoint has weights that the model does not use or far
            more tokens than its tokenizer, if sequences may be longer than those that a checkpoint
            was trained with, or if the tokenizer does not know a part of the rows.

    Raises:
        RecipeError: If the data do not fit the task.
    """
    arguments, task = recipe.arguments, recipe.task
    # Set the seed before the model's weights are initialized. The Trainer sets the seed only later.
    set_seed(arguments.seed)
    with arguments.main_process_first():
        tables: list[Dataset] = []
        is_main = arguments.process_index == 0
        rows = checked_rows(recipe, tables.append, say if is_main else lambda _: None)
        number = len(tables[0]) if tables else None
        arguments = _tuned(recipe, rows, tables, say)
        keywords = _keywords(recipe, rows, number)
        inputs = input_facts(recipe, rows, keywords["model"])
        keywords |= _adapter(recipe, keywords)
        _say_of_model(recipe, keywords, say, leaves_out_rows=skip_rows is not None)
    if recipe.add_metric is not None:
        keywords["compute_metrics"] = recipe.add_metric(keywords.get("compute_metrics"))
    _check_held_out(recipe, keywords["eval_dataset"])
    _check_batches(recipe, keywords["train_dataset"])
    folder = Path(arguments.output_dir or "")
    recorder, callbacks = _callbacks(recipe, folder)
    step = recipe.step
    kind = optimized(task.trainer(), recipe.optimizer, recipe.schedule, recipe.balance)
    if isinstance(recipe.model, OwnModel):
        kind = with_checked_loss(kind, recipe.document)
    with _naming_keys(recipe, keywords):
        trainer = kind(
            args=arguments,
            callbacks=[recorder, *callbacks],
            step=step.config,
            scale_sense=None if step.make_scale is None else step.make_scale(),
            ema=recipe.make_average,
            data_skip_steps=recipe.data_skip_steps,
            skip_rows=skip_rows,
            rollback=recipe.rollback,
            rampup_batch_size=recipe.rampup_batch_size,
            eval_per_token_loss=recipe.eval_per_token_loss,
            use_stateful_dataloader=recipe.use_stateful_dataloader,
            row_losses=recipe.data.row_losses,
            async_save=recipe.async_save,
            **keywords,
        )
    check_lengths(recipe, keywords, trainer, say)
    check_known(trainer, say)
    trainer.run_facts.describe(recipe.document.data, recipe.code.facts(folder), inputs)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, StepProgressCallback):
            callback.says_end = False  # a recipe evaluates and saves afterwards, and says so
    _normalize_loss(recipe, trainer)
    if number is not None:
        _name_rows(recipe, trainer, rows, number)
    return trainer, recorder


def _name_rows(recipe: Recipe, trainer: Any, rows: Rows, number: int) -> None:
    """Let anomalies name the lines of the files that the training rows come from.

    Args:
        recipe: The recipe.
        trainer: Its Trainer.
        rows: The rows that the Trainer got.
        number: Number of rows that were read.
    """
    packs = recipe.data.packing or getattr(trainer.args, "packing", False)
    # Trainers of TRL leave rows out by their length.
    if not packs and len(trainer.train_dataset) == len(rows.train):
        find = recipe.data.source_of_training_row
        trainer.name_rows(functools.partial(find, number=number))


def _training_row(
    recipe: Recipe, rows: Rows, number: int | None, columns: Mapping[str, Any]
) -> str | None:
    """Return file and line of the first training row with some columns; ``None`` if unknown.

    Args:
        recipe: The recipe.
        rows: Its rows.
        number: Number of rows that were read; ``None`` if it is unknown, as of a stream.
        columns: Values of the columns.
    """
    if number is None:
        return None
    found = (at for at, row in enumerate(rows.train) if columns.items() <= row.items())
    index = next(found, None)
    return None if index is None else recipe.data.source_of_training_row(index, number)


def _callbacks(recipe: Recipe, folder: Path) -> tuple[MetricsRecorder, list[Any]]:
    """Return the callback that records the metrics of a recipe's run, and the others."""
    callbacks = [make() for make in recipe.make_callbacks]
    for callback in callbacks:
        if isinstance(callback, EMACallback):
            callback.loads_best = False  # a run saves the raw weights as `model`
    has_record = any(isinstance(one, MFLossMonitor) for one in callbacks)
    recorder = MetricsRecorder(folder, says_evaluations=has_record)
    # The last one is last so that the time of the others at an evaluation is left out.
    return recorder, [*with_memory_monitor(callbacks, folder), ThroughputRecorder(folder)]


def _check_held_out(recipe: Recipe, rows: Any) -> None:
    """Raise `RecipeError` if held-out rows are needed and there are none."""
    if rows is not None:
        return
    for key, is_set, else_ in (
        (
            "training.eval_strategy",
            recipe.arguments.eval_strategy != "no",
            "set training.eval_strategy to no",
        ),
        ("metric", recipe.add_metric is not None, "leave the metric out"),
    ):
        if is_set:
            says = f"expected held-out rows because {key} is set, got none; set data.eval_fraction"
            raise recipe.document.error(("data",), f"{says} or data.eval_path, or {else_}")


@contextlib.contextmanager
def _naming_keys(recipe: Recipe, keywords: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Name the key of the recipe in errors of libraries, if it is known.

    Args:
        recipe: The recipe.
        keywords: Keywords of the Trainer that is constructed; ``None`` later.
    """
    given = keywords or {}
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        named = named_failure(
            recipe.document,
            error,
            network=given.get("model"),
            source=recipe.data,
            tokenizer=given.get("processing_class"),
        )
        if named is None:
            raise
        raise named from error


def _check_batches(recipe: Recipe, rows: Any) -> None:
    """Raise `RecipeError` if all rows together are an incomplete batch, which is left out."""
    arguments: Any = recipe.arguments
    number = _length(rows)
    # TRL's name for the answers that are written, and compared, at once.
    answers = getattr(arguments, "generation_batch_size", None)
    if answers is not None and number is not None:
        prompts = answers // arguments.num_generations
        if number < prompts:
            says = f"expected at most {number * arguments.num_generations} answers in a batch, "
            says += (
                f"{arguments.num_generations} (num_generations) to each of the {number} training"
            )
            path = ("training", "per_device_train_batch_size")
            raise recipe.document.error(path, f"{says} prompts, got {answers}; or add prompts")
    size = arguments.train_batch_size * arguments.world_size
    if arguments.dataloader_drop_last and number is not None and number < size:
        path = ("training", "dataloader_drop_last")
        says = f"expected false, or at least {size} training rows, one batch, got {number} rows"
        raise recipe.document.error(path, f"{says}; set training.per_device_train_batch_size lower")


def _length(rows: Any) -> int | None:
    return len(rows) if hasattr(rows, "__len__") else None


def _tuned(
    recipe: Recipe, rows: Rows, tables: Sequence[Dataset], say: Callable[[str], None]
) -> TrainingArguments:
    """Return the arguments of the training, and say what the rows are."""
    tuning = tuning_of(recipe, rows, tables)
    if tuning is None:
        return recipe.arguments
    if recipe.arguments.process_index == 0:
        say(tuning.line)
    return tuning.arguments


def _say_of_model(
    recipe: Recipe,
    keywords: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    leaves_out_rows: bool,
) -> None:
    """Warn of unused weights, another head or tokenizer, and positions that were not trained.

    Before, say the order of the classes if it follows from the checkpoint. If rows are left out,
    also warn that a model still has them in its mean and deviation.
    """
    if recipe.arguments.process_index != 0:
        return
    network = keywords["model"]
    has_scale = getattr(network, "target_scale", None) is not None
    inner = getattr(network, "get_base_model", lambda: network)()
    if order := recipe.model.order_of_classes(inner):
        say(order)
    notes = [
        recipe.model.other_head(inner),
        recipe.model.other_tokenizer(inner, keywords.get("processing_class")),
        untrained_positions(recipe, network),
        _STILL_COUNTED if leaves_out_rows and has_scale else None,
    ]
    for section, key in (("model", "model"), ("teacher", "teacher_model")):
        unused = unused_weights(keywords[key]) if key in keywords else None
        notes.append(unused and f"{section}.path: {unused}")
    for note in filter(None, notes):
        say(f"warning: {note}")


def task_keywords(recipe: Recipe, model: ModelSettings, rows: Rows) -> dict[str, Any]:
    """Return the Trainer's keywords that the task of a recipe builds.

    Args:
        recipe: The recipe.
        model: The model to train.
        rows: Rows of the recipe; see `checked_rows`.

    Raises:
        RecipeError: If the data or the model do not fit the task.
    """
    with data_errors(RecipeObjects(recipe.document)):
        if rows.are_inputs:
            if recipe.task.arguments() is not TrainingArguments:
                says = "because the Trainer of this task prepares the rows itself"
                msg = f"`type` must give a table, {says}"
                raise DataError(msg)
            keywords = build_for_inputs(model, recipe.task.auto_class, rows)
            return keywords | {"loss_by": recipe.data.loss_by}
        return _with_sources(recipe, recipe.task.build(model, recipe.data, rows))


def _with_sources(recipe: Recipe, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the Trainer's keywords with the source of each training row, if the data have it.

    A collator must not get the column. TRL's collators take the columns that they know, and TRL may
    leave out rows when it prepares them, so there the Trainer reads the column later.
    """
    if recipe.data.source_column is None:
        return keywords
    columns = keywords["train_dataset"].column_names
    if SOURCE not in columns:
        msg = f"`loss_by` needs a task that keeps the column {SOURCE!r}, got rows with {columns}"
        raise DataError(msg)
    if recipe.task.arguments() is not TrainingArguments:
        return keywords | {"loss_by": SOURCE}
    names = list(keywords["train_dataset"][SOURCE])
    without = {
        key: rows.remove_columns(SOURCE)
        for key in ("train_dataset", "eval_dataset")
        if (rows := keywords[key]) is not None and SOURCE in rows.column_names
    }
    return keywords | without | {"loss_by": names}


def _keywords(recipe: Recipe, rows: Rows, number: int | None) -> dict[str, Any]:
    """Return the keywords of the Trainer, with the model before it gets an adapter.

    Args:
        recipe: The recipe.
        rows: Its rows.
        number: Number of rows that were read; ``None`` if it is unknown.
    """
    keywords = task_keywords(recipe, recipe.model, rows)
    if (
        recipe.task.arguments() is not TrainingArguments
        and isinstance(recipe.model, OwnModel)
        and not isinstance(keywords["model"], PreTrainedModel)
    ):
        says = "expected a transformers.PreTrainedModel, because TRL trains no other model"
        got = type(keywords["model"]).__name__
        raise recipe.document.error(("model", "type"), f"{says}, got a {got}")
    check_max_length(recipe.document, recipe.arguments, keywords["model"])
    if recipe.make_rewards:
        beta = getattr(recipe.arguments, "beta", 0)
        if beta and recipe.model.path is None and recipe.peft is None:
            says = "expected 0, because TRL loads the reference from `model.path`, which is not set"
            raise recipe.document.error(("training", "beta"), f"{says}, got {beta}")
        columns = _common_columns(keywords["train_dataset"], keywords["eval_dataset"])
        find = functools.partial(_training_row, recipe, rows, number)
        keywords["reward_funcs"] = [make(columns, find) for make in recipe.make_rewards]
    if recipe.make_loss is not None:
        keywords["loss"] = recipe.make_loss(keywords["model"])
    if recipe.teacher is not None:
        keywords["teacher_model"] = _teacher(recipe, recipe.teacher, keywords)
    if recipe.peft is None and recipe.task.needs_reference:
        # Without an adapter, the reference is a copy of the model. (With an adapter, the trainer
        # uses the model itself, with the adapter turned off.) A model built from random weights is
        # in training mode, so `eval` turns off the dropout of the copy.
        return keywords | {"ref_model": copy.deepcopy(keywords["model"]).eval()}
    return keywords


def _adapter(recipe: Recipe, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of the Trainer that give the model the adapter of a recipe, if any."""
    if recipe.peft is None:
        return {}
    if recipe.task.takes_peft and recipe.peft.is_plain:
        return {"peft_config": recipe.peft.config}
    try:
        return {"model": recipe.peft.applied(keywords["model"])}
    except ValueError as error:
        section = recipe.document.data["peft"]
        raise RecipeObjects(recipe.document).refusal(("peft",), section, error) from error


def _teacher(recipe: Recipe, teacher: ModelSettings, keywords: Mapping[str, Any]) -> Any:
    """Return the teacher of a recipe, frozen.

    Args:
        recipe: The recipe.
        teacher: Section ``teacher``.
        keywords: The Trainer's keywords, with the model that learns.

    Raises:
        RecipeError: If the teacher does not have the tokens of the model.
    """
    with data_errors(RecipeObjects(recipe.document), "teacher"):
        found: Any = make_text_model(teacher, recipe.task.auto_class, keywords["processing_class"])
    numbers = [one.config.get_text_config().vocab_size for one in (keywords["model"], found)]
    if numbers[0] != numbers[1]:
        says = f"expected a model with {numbers[0]} tokens, as many as the model that learns"
        key = "config" if teacher.path is None else "path"
        hint = "give it the tokenizer of the teacher, or set model.config.vocab_size"
        says = f"{says}, got one with {numbers[1]}; {hint}"
        raise recipe.document.error(("teacher", key), says)
    return found.eval().requires_grad_(requires_grad=False)


def checked_rows(
    recipe: Recipe,
    note: Callable[[Dataset], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Rows:
    """Read the data of a recipe, and check that all rows fit the task.

    Args:
        recipe: The recipe.
        note: Called with all rows, with the task's columns, before some are held out or left out,
            and then with those of a held-out file, if there is one; not called for rows of a
            stream, and for rows that are inputs of the model.
        say: Called with a line about each column that a reward takes and some rows lack, and with a
            warning about each column of numbers that a value far from the others spoils, see
            `far_values`; not called for rows of a stream.

    Raises:
        RecipeError: If the data cannot be read, or a row does not fit.
    """
    objects = RecipeObjects(recipe.document)
    column = recipe.task.classes
    classes = None if column is None else ClassCheck(column, recipe.model.num_labels)

    names, needs = recipe.data.column_labels, recipe.task.needs_of(recipe.data)
    checked: list[Dataset] = []
    forms = recipe.task.forms

    def check(table: Dataset) -> None:
        nonlocal forms, needs
        held_out = bool(checked)
        origin = recipe.data.origin(held_out=held_out)
        columns = check_columns(recipe.document, needs, table.column_names, origin)
        if forms:
            form = form_of(forms, table.column_names, recipe.data.columns)
            columns = form.columns_in(table.column_names)
            forms, needs = (form,), (form.columns,)  # held-out rows must be of the same form
        if recipe.data.image_size is not None:
            columns = {**columns, "image": ANY_IMAGE}
        _check_assistant_only(recipe, columns)
        check_rows(table, columns, names, like=checked[0] if held_out else None)
        _say_of_values(recipe, table, say, held_out=held_out)
        if not held_out:
            checked.append(table)
        if not recipe.data.is_streamed:
            note(table)
        if classes is not None:
            classes.check(table, names, is_closed=held_out and not recipe.data.is_streamed)

    try:
        with data_errors(objects):
            rows = recipe.data.rows(Needs(_uses(recipe), check, check_numbers))
            if classes is not None and not recipe.data.is_streamed and not rows.are_inputs:
                classes.check_number()
            _check_rewards(recipe, rows)
            return rows
    except RecipeError:
        raise
    except REFUSALS as error:
        raise objects.refusal(("data",), recipe.document.data["data"], error) from error


def _check_rewards(recipe: Recipe, rows: Rows) -> None:
    """Raise `RecipeError` if a reward function needs an argument that the rows do not have."""
    for reward in recipe.make_rewards:
        reward.check(_common_columns(rows.train, rows.evaluation))


def _common_columns(train: Any, evaluation: Any) -> set[str]:
    """Return the columns of both training and held-out rows, if there are held-out ones."""
    return set.intersection(*(set(column_names(one)) for one in (train, evaluation) if one))


def _say_of_values(
    recipe: Recipe, table: Dataset, say: Callable[[str], None], *, held_out: bool
) -> None:
    """Say what of the values is unusual, see `checked_rows`; not of a stream."""
    if recipe.data.is_streamed:
        return
    if not held_out:
        far_values(recipe, table, say)
    kind = "held-out rows" if held_out else "rows"
    where = functools.partial(recipe.data.where, held_out=held_out)
    for line in missing_values(recipe.make_rewards, table, kind, where):
        say(line)


def _uses(recipe: Recipe) -> dict[str, ColumnUse]:
    """Return what the task uses columns as, by the user's names."""
    uses: dict[str, ColumnUse] = {}
    optional = [form.optional for form in recipe.task.forms]
    for needed in (*recipe.task.needs_of(recipe.data), *optional):
        for ours, kind in needed.items():
            use = None if kind is None else kind.use
            theirs = recipe.data.columns.get(ours, ours)
            for name in [theirs] if isinstance(theirs, str) else theirs:
                # A column may be used twice; texts are read as they are written.
                if use is not None and uses.get(name) != "text":
                    uses[name] = use
    return uses


def _check_assistant_only(recipe: Recipe, columns: Collection[str]) -> None:
    """Raise `RecipeError` if only the assistant's words shall count, but the data have no roles."""
    has_roles = {"messages", "conversations"} & set(columns)
    if getattr(recipe.arguments, "assistant_only_loss", False) and not has_roles:
        says = f"expected false, because the task uses the columns {sorted(columns)} of the data"
        path = ("training", "assistant_only_loss")
        raise recipe.document.error(path, f"{says} and not `messages`, got true")


def _normalize_loss(recipe: Recipe, trainer: Any) -> None:
    per_token = recipe.step.calculate_per_token_loss
    if per_token and not trainer.model_accepts_loss_kwargs:
        says = "expected false or no value, because the model does not accept num_items_in_batch"
        path = ("runner_wrapper", "calculate_per_token_loss")
        raise recipe.document.error(path, says)
    if per_token is False:
        trainer.model_accepts_loss_kwargs = False
