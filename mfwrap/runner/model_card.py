"""Write the cards of the models that a recipe has trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.recipes.data.library import BUILDERS, DatasetsSource
from mfwrap.recipes.data.places import is_folder, resolve_package
from mfwrap.records.evaluations import AVERAGED
from mfwrap.runner.folder import AVERAGED_MODEL, MODEL
from mfwrap.runner.recipe import Recipe
from mfwrap.trainer.model_card import (
    CardFacts,
    Evaluation,
    origin_text,
    results_table,
    settings_text,
    shared_settings,
    write_card,
)

_PREFIXES = {MODEL: "eval_", AVERAGED_MODEL: f"{AVERAGED}eval_"}
"""Prefix of the metrics of a model."""

_COLUMNS = {MODEL: "trained weights", AVERAGED_MODEL: "averaged weights"}


class FinishedRun(NamedTuple):
    """A recipe and what has come out of it."""

    recipe: Recipe
    """The recipe."""

    trainer: Any
    """Its Trainer, after the training."""

    average: ExponentialMovingAverage | None
    """Average of the weights; ``None`` without one."""

    metrics: Mapping[str, float]
    """Results of all evaluations; those of averaged weights begin with ``ema_``."""


def write_recipe_card(run: FinishedRun, name: str, folder: Path) -> None:
    """Write the card of a model into its folder.

    The same recipe with the same results gives the same bytes: the card has no time, and nothing of
    the machine.

    Args:
        run: The run.
        name: ``model``, or ``model_ema`` for the averaged weights.
        folder: Folder with the files of the model.
    """
    recipe, trainer = run.recipe, run.trainer
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    facts = trainer.run_facts.lasting()
    repository = trainer.hub_model_id if recipe.arguments.push_to_hub else None
    title = repository.rpartition("/")[2] if repository else Path(recipe.document.name).stem
    results = {
        column: {
            key.removeprefix(_PREFIXES[each]): value
            for key, value in run.metrics.items()
            if key.startswith(_PREFIXES[each])
        }
        for each, column in _COLUMNS.items()
    }
    tokenizer, on_hub = trainer.processing_class, _hub_data(recipe)
    card = CardFacts(
        name=title if name == MODEL else f"{title} ({_COLUMNS[name]})",
        facts=facts,
        origin=_origin(run, model, name),
        training=_training(run, facts["configuration"]),
        results=_results({key: one for key, one in results.items() if one}),
        evaluation=_evaluation(recipe, results[_COLUMNS[name]]),
        repository=repository,
        subfolder="" if name == MODEL else name,
        base_model=_base_model(recipe),
        datasets=[] if on_hub is None else [on_hub.path],
        tags=[str(recipe.document.data["task"])],
        is_chat=recipe.model.path is not None and _has_chat(tokenizer),
    )
    write_card(model, tokenizer, card, folder)


def _has_chat(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def _base_model(recipe: Recipe) -> str | None:
    """Return the name on the hub of the checkpoint that was fine-tuned; ``None`` if it has none."""
    path = recipe.model.path
    return None if path is None or is_folder(resolve_package("path", path)) else path


def _hub_data(recipe: Recipe) -> DatasetsSource | None:
    """Return the source of the data if they are on the hub; ``None`` otherwise."""
    data = recipe.data
    if not isinstance(data, DatasetsSource) or data.path in BUILDERS or is_folder(data.path):
        return None
    return data


def _origin(run: FinishedRun, model: Any, name: str) -> str:
    recipe = run.recipe
    path = recipe.model.path
    said = origin_text(model, _base_model(recipe), is_new=path is None)
    if path is not None and path.startswith("package:"):
        said = f"It was fine-tuned from the checkpoint `{path}`."
    if run.average is None:
        return said
    kind = "an exponential moving average over the training"
    if name == AVERAGED_MODEL:
        return f"{said} These are the averaged weights: {kind}."
    other = "in the folder" if recipe.arguments.push_to_hub else "beside this folder, in"
    return f"{said} The averaged weights, {kind}, are {other} `{AVERAGED_MODEL}`."


def _training(run: FinishedRun, configuration: Mapping[str, Any]) -> str:
    recipe, trainer = run.recipe, run.trainer
    task = recipe.document.data["task"]
    return (
        f"{trainer.state.global_step} updates for the task `{task}`, with MindFormers' training "
        f"step in mfwrap.\n\n{_data(run)}\n\nThe recipe, for `mfwrap train`:\n\n"
        f"{settings_text(shared_settings(configuration))}"
    )


def _data(run: FinishedRun) -> str:
    """Return a sentence about the data, and how many there were."""
    data, trainer = run.recipe.data, run.trainer
    section = run.recipe.document.data["data"]
    path = section.get("path")
    if _hub_data(run.recipe) is not None:
        said = f"[{path}](https://huggingface.co/datasets/{path})."
    else:
        said = str(type(data).__doc__).partition("\n")[0].replace("``", "`")
        if isinstance(path, str):
            said += f" Here: `{Path(path).name}`."
    sizes = [
        f"{len(rows):,} examples {purpose}"
        for rows, purpose in (
            (trainer.train_dataset, "to train on"),
            (trainer.eval_dataset, "held out to evaluate on"),
        )
        if hasattr(rows, "__len__")
    ]
    return f"Data: {said}" + (f" There were {' and '.join(sizes)}." if sizes else "")


def _results(columns: Mapping[str, Mapping[str, float]]) -> str:
    if not columns:
        return ""
    return f"On the held-out examples, after the training:\n\n{results_table(columns)}"


def _evaluation(recipe: Recipe, results: Mapping[str, float]) -> Evaluation:
    data = _hub_data(recipe)
    if data is None:
        kind: Any = recipe.data
        return Evaluation(dataset=kind.type, split="held out", results=results)
    return Evaluation(
        dataset=data.path, config=data.name, split=data.eval_split or data.split, results=results
    )
