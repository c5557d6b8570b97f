"""Running a recipe."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, set_seed

from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback, MFLossMonitor
from mfwrap.callbacks.metrics_recorder import (
    RECIPE_FILE,
    MetricsRecorder,
    ThroughputRecorder,
    results_of,
)
from mfwrap.recipe.document import RecipeError
from mfwrap.recipe.objects import REFUSALS, RecipeObjects
from mfwrap.recipe.recipe import Recipe, check_columns, data_errors
from mfwrap.recipe.recipe_folder import begin_anew, check_former_run
from mfwrap.recipe.recipe_schedule import scheduled
from mfwrap.recipes.data.source import DataError, Rows

__all__ = ["RunResult", "build_trainer", "run_recipe"]


class RunResult(NamedTuple):
    """What a run has left behind."""

    folder: Path
    """Holds ``recipe.yaml``, ``metrics.jsonl``, checkpoints, ``model`` and maybe ``model_ema``."""

    metrics: dict[str, float]
    """Of the last evaluation; names of averaged weights begin with ``ema_``."""


def run_recipe(
    recipe: Recipe,
    *,
    resume: str | bool = False,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> RunResult:
    """Train, evaluate raw and averaged weights, and save both.

    Args:
        recipe: What to run.
        resume: Folder of a checkpoint to go on from, or ``True`` for the newest of the run.
        overwrite: Whether checkpoints and models of a former run in the folder are removed; its
            records are in any case, but for a run that is resumed.
        say: Hears, in the main process, which ones were removed.

    Raises:
        RecipeError: If the data do not have what the task needs, or the folder holds checkpoints
            that are neither to be resumed nor overwritten.
        ValueError: If there is no whole checkpoint to resume from.
    """
    folder = Path(recipe.arguments.output_dir or "")
    if not (resume or overwrite):
        check_former_run(recipe.document, folder)
    trainer, recorder = build_trainer(recipe)
    if not resume:
        # Not before: what cannot begin takes no place.
        removed = begin_anew(folder, recipe.arguments, overwrite=overwrite)
        if overwrite and removed:
            say(f"removed from {folder}: {', '.join(removed)}")
    if trainer.is_world_process_zero():
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(recipe.document.data, sort_keys=False, allow_unicode=True)
        (folder / RECIPE_FILE).write_text(text, encoding="utf-8")
    trainer.train(resume_from_checkpoint=resume or None)
    return RunResult(folder, _finish(trainer, recorder, folder))


def build_trainer(recipe: Recipe) -> tuple[Any, MetricsRecorder]:
    """Return the Trainer of a recipe, and what records its metrics.

    Raises:
        RecipeError: If the data do not have what the task needs.
    """
    arguments, task = recipe.arguments, recipe.task
    # Weights are drawn before a Trainer sets the seed.
    set_seed(arguments.seed)
    with arguments.main_process_first():
        keywords = _keywords(recipe)
    if arguments.eval_strategy != "no" and keywords["eval_dataset"] is None:
        says = "must hold out rows for `training.eval_strategy`, got none"
        raise recipe.document.error(("data",), says)
    callbacks = [make() for make in recipe.make_callbacks]
    folder = Path(arguments.output_dir or "")
    has_record = any(isinstance(one, MFLossMonitor) for one in callbacks)
    recorder = MetricsRecorder(
        folder,
        evaluates_average=any(isinstance(one, EMACallback) for one in callbacks),
        says_evaluations=has_record,
    )
    step = recipe.step
    trainer = scheduled(task.trainer(), recipe.schedule)(
        args=arguments,
        callbacks=[recorder, ThroughputRecorder(folder), *callbacks],
        step=step.config,
        scale_sense=None if step.make_scale is None else step.make_scale(),
        ema=recipe.make_average,
        **keywords,
    )
    if has_record:
        # Its record has the numbers and a bar; theirs would say them again.
        for other in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(other)
    _normalise_loss(recipe, trainer)
    return trainer, recorder


def _keywords(recipe: Recipe) -> dict[str, Any]:
    objects = RecipeObjects(recipe.document)
    with data_errors(objects):
        rows = _rows(recipe, objects)
        keywords = recipe.task.build(recipe.model, recipe.data, rows)
    if recipe.peft is None and recipe.task.needs_reference:
        # A model without its adapter is its own reference.
        # Without dropout: a model of random weights is built for training.
        return keywords | {"ref_model": copy.deepcopy(keywords["model"]).eval()}
    if recipe.peft is None:
        return keywords
    if recipe.task.takes_peft:
        return keywords | {"peft_config": recipe.peft}
    from peft import get_peft_model  # noqa: PLC0415  (slow, and of an extra)

    return keywords | {"model": get_peft_model(keywords["model"], recipe.peft)}


def _rows(recipe: Recipe, objects: RecipeObjects) -> Rows:
    def check(table: Dataset) -> None:
        check_columns(recipe.document, recipe.task, table.column_names)
        recipe.task.check(table, recipe.data.columns)

    try:
        return recipe.data.rows(check)
    except (DataError, RecipeError):
        raise
    except REFUSALS as error:
        raise objects.refusal(("data",), recipe.document.data["data"], error) from error


def _normalise_loss(recipe: Recipe, trainer: Any) -> None:
    per_token = recipe.step.calculate_per_token_loss
    if per_token and not trainer.model_accepts_loss_kwargs:
        says = "must be left out or False with a model that is not told the number of targets"
        path = ("runner_wrapper", "calculate_per_token_loss")
        raise recipe.document.error(path, says)
    if per_token is False:
        trainer.model_accepts_loss_kwargs = False


def _finish(trainer: Any, recorder: MetricsRecorder, folder: Path) -> dict[str, float]:
    """Evaluate and save raw weights, and averaged ones where there is an average."""
    average = _average(trainer)
    metrics = {} if trainer.eval_dataset is None else results_of(trainer.evaluate())
    trainer.save_model(str(folder / "model"))
    if average is not None:
        with average.swap():
            if trainer.eval_dataset is not None:
                averaged = results_of(trainer.evaluate())
                metrics |= {f"ema_{name}": value for name, value in averaged.items()}
            trainer.save_model(str(folder / "model_ema"))
    if metrics and trainer.is_world_process_zero():
        recorder.write({"step": trainer.state.global_step, **metrics})
    return metrics


def _average(trainer: Any) -> ExponentialMovingAverage | None:
    """Return the Trainer's average, or that of an `EMACallback`."""
    found: list[ExponentialMovingAverage | None] = [trainer.ema]
    found += [one.ema for one in trainer.callback_handler.callbacks if isinstance(one, EMACallback)]
    return next((one for one in found if one is not None), None)
