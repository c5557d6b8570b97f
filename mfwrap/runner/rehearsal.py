"""Try the first step of a recipe in a temporary folder."""

import contextlib
import io
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mfwrap.records.rewards import ALIKE, REWARD_MEAN, is_constant
from mfwrap.runner.callbacks import FOLDER_KEYS
from mfwrap.runner.document import RecipeError
from mfwrap.runner.finishing import finish
from mfwrap.runner.lengths import check_answers
from mfwrap.runner.objects import RecipeObjects
from mfwrap.runner.recipe import Recipe, data_errors, read_document
from mfwrap.runner.run import build_trainer, checked_rows
from mfwrap.runner.tuning import rows_line
from mfwrap.trainer.error_notes import OF_MESSAGES

_MAX_PARAMETERS = 30_000_000
"""A model with more parameters is not trained: its step may take minutes on a CPU."""

_MAX_ROWS = 1_000
"""Number of training rows to prepare for the step. All rows are checked."""

_BATCH = 2
"""Number of rows in each batch of the step."""

_ANSWER = 16
"""Largest number of tokens of each answer that the model writes in the step."""


def rehearse(recipe: Recipe, say: Callable[[str], None] = lambda _: None) -> str | None:
    """Train one step of a recipe, evaluate and save, in a temporary folder that is deleted.

    All rows of local data are checked. Each batch has two rows, except for tasks whose Trainer gets
    texts, and for losses by row; answers that the model writes have at most 16 tokens. Nothing is
    downloaded or uploaded, and nothing is written to the folders that the recipe names.

    Args:
        recipe: Checked recipe.
        say: Called at the end with each line that the run would say about its rows and its model;
            see `build_trainer`.

    Returns:
        ``None`` if a step was trained. Otherwise the reason why it was not tried: the data or the
        model are on the hub, only MindFormers reads the data, or the model has more than 30 million
        parameters.

    Raises:
        RecipeError: If the data do not fit the task, the step fails, or the hub does not have the
            model.
    """
    if recipe.data.why_unread is not None:
        return recipe.data.why_unread
    lines: Sequence[str | None]
    with quiet(), recipe.code.importable():
        reason = _reason_to_skip(recipe)
        if reason is not None:
            tables: list[Dataset] = []
            said: list[str] = []
            rows = checked_rows(recipe, tables.append, said.append)
            lines = [*said, rows_line(recipe, rows, tables)]
        else:
            lines = _try(recipe)
    for line in filter(None, lines):
        say(line)
    return reason


def _try(recipe: Recipe) -> list[str]:
    """Try the step; with all rows if the first rows are too few to fill one packed sequence."""
    try:
        return _try_step(recipe, _MAX_ROWS)
    except RecipeError:
        raise
    except Exception:  # noqa: BLE001  (any library may raise any error)
        return _try_with_all_rows(recipe)


def _try_with_all_rows(recipe: Recipe) -> list[str]:
    try:
        return _try_step(recipe, None)
    except RecipeError:
        raise
    except Exception as error:
        raise failure(recipe, "the first step fails", error) from error


def failure(recipe: Recipe, what: str, error: Exception) -> RecipeError:
    """Return an error of any library, or of the user's own code, as one that names the recipe.

    Args:
        recipe: The recipe.
        what: What fails.
        error: The error.
    """
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    said = f"{type(error).__name__}{recipe.code.place_of(error)}: {error}{notes}"
    return RecipeError(f"{recipe.document.name}: {what}: {said}")


def _reason_to_skip(recipe: Recipe) -> str | None:
    # Without callbacks of the user's own, the rest of the step can be tried.
    unknown = [name for path, name in recipe.unchecked.items() if path[0] != "callbacks"]
    if unknown:
        return f"it needs the code of {', '.join(unknown)}, which runs only with --allow-code"
    for section, model in (("model", recipe.model), ("teacher", recipe.teacher)):
        if model is not None and (obstacle := model.obstacle) is not None:
            with data_errors(RecipeObjects(recipe.document), section):
                model.check_names()
            return obstacle.replace("`model.", f"`{section}.", 1)
    number = recipe.model.count_parameters(recipe.task.auto_class)
    if number > _MAX_PARAMETERS:
        return f"the model has {number:,} parameters, more than {_MAX_PARAMETERS:,}"
    return None


def _try_step(recipe: Recipe, max_rows: int | None) -> list[str]:
    """Try the step, and return what `build_trainer` has said."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mfwrap-") as folder:
        small = limited(recipe, folder, max_rows, _BATCH)
        trainer, recorder = build_trainer(small, say=lines.append)
        check_answers(recipe, trainer, lines.append)  # those of the run are longer
        collate = trainer.data_collator
        # Keep the length of the training, which the schedule depends on. Answers to one prompt
        # must stay together, losses of embeddings need the batch that they are made for, and losses
        # by row all rows that the sampler has dealt.
        if not (recipe.task.gets_texts or trainer.loss_by_row.is_on):
            trainer.data_collator = lambda rows: collate(rows[:_BATCH])
        trainer.add_callback(_OneStep())
        trainer.train()
        finish(small, trainer, recorder)
        if recipe.make_rewards:
            lines += _rewards(trainer)
    return lines


def _rewards(trainer: Any) -> Iterator[str]:
    """Yield a line with the rewards of the answers of the step, as TRL has logged them."""
    most = trainer.args.max_completion_length
    for log in trainer.state.log_history:
        said = []
        for match in filter(None, map(REWARD_MEAN.fullmatch, log)):
            name, mean = match[1], log[match[0]]
            # TRL takes a reward that has judged no answer for NaN, or for None.
            if mean is None or math.isnan(mean):
                said.append(f"{name} judged none of them, which teaches nothing")
                continue
            deviation = log[f"rewards/{name}/std"]
            alike = ", the same for all, which teaches nothing"
            alike = alike if is_constant(mean, deviation) else ""
            said.append(f"{name} {mean:.4g} (standard deviation {deviation:.4g}{alike})")
        if said:
            rewards = ", ".join(said)
            if log.get(ALIKE) == 1 and "teaches nothing" not in rewards:
                rewards += "; the answers to each prompt got the same, which teaches nothing"
            if "teaches nothing" in rewards and isinstance(
                trainer.train_dataset[0]["prompt"], list
            ):
                rewards += f"; {OF_MESSAGES}"
            yield f"mean reward of the answers of the step, of up to {most} tokens: {rewards}"


def limited(recipe: Recipe, folder: str, max_train: int | None, max_eval: int | None) -> Recipe:
    """Return a recipe whose run stays in a folder, silent and small.

    Args:
        recipe: The recipe.
        folder: Folder for all that the run writes.
        max_train: Largest number of training rows; ``None`` for that of the recipe.
        max_eval: Largest number of held-out rows; ``None`` for that of the recipe.
    """
    settings: dict[str, Any] = {
        "training.output_dir": folder,
        "training.report_to": "none",
        "training.push_to_hub": False,
        "training.disable_tqdm": True,
        # It may fit another number of processes only. The global batch is its largest one.
        "rampup_batch_size": None,
    }
    for name, most in (("max_train_samples", max_train), ("max_eval_samples", max_eval)):
        given = getattr(recipe.data, name)
        if most is not None and (given is None or given > most):
            settings[f"data.{name}"] = most
    if (getattr(recipe.arguments, "max_completion_length", None) or 0) > _ANSWER:
        settings["training.max_completion_length"] = _ANSWER
    data = recipe.document.data
    entries = {f"callbacks.{i}": entry for i, entry in enumerate(data.get("callbacks") or ())}
    entries["monitor_config"] = data.get("monitor_config") or {}
    for name, entry in entries.items():
        for key in FOLDER_KEYS & entry.keys():
            settings[f"{name}.{key}"] = f"{folder}/{name}"
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return read_document(recipe.document.overridden(overrides), recipe.code)


@final
class _OneStep(TrainerCallback):
    """Evaluate, save and stop after the first step, if the recipe evaluates and saves at all."""

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> TrainerControl:
        """Set the flags that the Trainer reads after a step."""
        del state, kwargs
        control.should_log = True
        control.should_evaluate = args.eval_strategy != "no"
        control.should_save = args.save_strategy != "no"
        control.should_training_stop = True
        return control


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress what a run prints, and restore torch's random numbers."""
    level = logging.root.manager.disable
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)
