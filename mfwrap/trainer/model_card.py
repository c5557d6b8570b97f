"""Write the card of a saved model, README.md: what the model is, and how to use it."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.modelcard import METRIC_TAGS

from mfwrap.checkpoints.folders import whole_file
from mfwrap.records.evaluations import ends_with_averages, last_evaluation
from mfwrap.trainer.model_usage import inner_model, library_of, task_of, usage
from mfwrap.trainer.view import TrainerView

CARD = "README.md"
"""File of a model card, which the hub shows as the page of a model."""

_MARK = (
    "<!-- mfwrap has written this card, and writes it again with the model as long as this line is "
    "here. -->"
)

_TEMPLATE = "# Model Card for Model ID"
"""Title of the hub's template of a card, as long as nobody has filled it in."""

WITHOUT_EFFECT = frozenset(
    {
        *("output_dir", "run_name", "disable_tqdm", "log_level", "log_level_replica"),
        *("log_on_each_node", "skip_memory_metrics", "project", "push_to_hub", "hub_token"),
        *("hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"),
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    }
)
"""Training arguments that change neither the weights nor the records of a run."""

_ORIGIN = re.compile(
    r"This model is a fine-tuned version of \[(None)?\]\(https://huggingface\.co/(None)?\)"
)
"""What stock cards say of a model that was trained from random weights."""

_USAGE = re.compile(r"^#+ (Quick start|Usage)\b", re.MULTILINE)
"""Heading of a card that says already how to load the model: TRL's, sentence-transformers'."""

_OF_THE_MACHINE = frozenset(
    {"accelerator_config", "dataloader_pin_memory", "report_to", "resume_from_checkpoint"}
)
"""Further training arguments that a card leaves out: they follow from the machine."""

_SAVED, _AVERAGES = "value", "averaged weights"
"""Headings of results: of the saved weights, and of averages that were only evaluated."""


@final
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a model was evaluated on, in the hub's terms."""

    dataset: str = "unknown"
    """Name on the hub, or a name of the source."""

    config: str | None = None
    """Configuration of the data set."""

    split: str | None = None
    """Split of the data set."""

    results: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the weights of this card, without the prefix ``eval_``."""


@final
@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card says about one saved model, apart from what the model itself tells."""

    name: str
    """Name of the model."""

    facts: Mapping[str, Any]
    """See `mfwrap.records.run_facts.lasting_facts`."""

    origin: str
    """Sentence about where the model comes from."""

    training: str
    """Text of the section about the training."""

    results: str = ""
    """Table of results; empty without an evaluation."""

    evaluation: Evaluation = Evaluation()
    """Results for the front matter."""

    repository: str | None = None
    """Repository on the hub; ``None`` if the model is not pushed."""

    subfolder: str = ""
    """Folder of the model in the repository."""

    base_model: str | None = None
    """Name on the hub of the model that was fine-tuned."""

    datasets: Sequence[str] = ()
    """Names on the hub of the data sets that the model was trained on."""

    tags: Sequence[str] = ()
    """Tags, in addition to those that the model and its libraries have."""

    is_chat: bool = False
    """Whether a language model is used with messages instead of a text."""


def write_card(model: Any, tokenizer: Any, card: CardFacts, folder: Path) -> None:
    """Write the card of a model into its folder.

    Args:
        model: The model.
        tokenizer: Tokenizer or processor that is saved with the model; ``None`` without one.
        card: What to say.
        folder: Folder of the model. The front matter of a card there, for example PEFT's, is kept
            as far as `card` says nothing else.
    """
    file = folder / CARD
    before = ModelCardData()
    if file.is_file():
        before = ModelCard.load(file, ignore_metadata_errors=True).data
    text = "\n\n".join(
        [
            _MARK,
            f"# {card.name}",
            f"{_what(model, card)} {card.origin}",
            "## Use",
            usage(model, tokenizer, card.repository, card.subfolder, is_chat=card.is_chat),
            *(["## Results", card.results] if card.results else []),
            "## Training",
            card.training,
            "## Versions",
            versions_text(card.facts["versions"]),
        ]
    )
    _save(file, front_matter(model, card, before), text)


def front_matter(model: Any, card: CardFacts, before: ModelCardData) -> ModelCardData:
    """Return the front matter of a card.

    Args:
        model: The model.
        card: What to say.
        before: Front matter whose other entries are kept.
    """
    task = task_of(model)
    results = evaluation_results(card.evaluation, task)
    tags = {"mfwrap", "generated_from_trainer", *card.tags, *(before.tags or ())}
    tags |= set(getattr(model, "model_tags", None) or ())
    if card.base_model is None:
        # PEFT names the base model, which may be a folder of this machine.
        tags = {one for one in tags if not one.startswith("base_model:")}
    known: dict[str, Any] = {
        "base_model": card.base_model,
        "datasets": list(card.datasets) or None,
        "eval_results": results or None,
        "library_name": library_of(model),
        "metrics": sorted({one.metric_type for one in results} & set(METRIC_TAGS)) or None,
        "model_name": card.name if results else None,
        "pipeline_tag": task,
        # Sorted, because TRL's tags come in the order of a set, which changes with each process.
        "tags": sorted(tags),
    }
    others: Any = before
    kept = {key: value for key, value in others.to_dict().items() if key not in known}
    kept.pop("model-index", None)
    return ModelCardData(**known, **kept)


def evaluation_results(evaluation: Evaluation, task: str | None) -> list[EvalResult]:
    """Return an evaluation in the hub's form, without numbers that JSON does not have."""
    return [
        EvalResult(
            task_type=task or "other",
            dataset_type=evaluation.dataset,
            dataset_name=evaluation.dataset,
            dataset_config=evaluation.config,
            dataset_split=evaluation.split,
            metric_type=name,
            metric_name=name.replace("_", " ").capitalize(),
            metric_value=value,
        )
        for name, value in evaluation.results.items()
        if math.isfinite(value)
    ]


def _what(model: Any, card: CardFacts) -> str:
    """Return a sentence about the network."""
    numbers = card.facts["parameters"]
    if hasattr(model, "peft_config"):
        kind = str(model.active_peft_config.peft_type.value).replace("_", " ")
        trained = f"{numbers['trainable']:,} of the {numbers['total']:,} parameters"
        return (
            f"A {kind} adapter of a `{type(inner_model(model)).__name__}`: {trained} were trained."
        )
    return f"A `{type(model).__name__}` with {numbers['total']:,} parameters."


def versions_text(versions: Mapping[str, str]) -> str:
    """Return a list of libraries and their versions."""
    return "\n".join(f"- {name} {version}" for name, version in versions.items())


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings as a block of YAML."""
    text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=100)
    return f"```yaml\n{text}```"


def results_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of metrics.

    Args:
        columns: Metrics by name, for each heading of a column.
    """
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    if not names:
        return ""
    rows = [["metric", *columns], ["---"] * (len(columns) + 1)]
    for name in names:
        values = [column.get(name) for column in columns.values()]
        rows.append([f"`{name}`", *("" if one is None else f"{one:.6g}" for one in values)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@contextlib.contextmanager
def describing(
    trainer: TrainerView, output_dir: str | None, *, is_checkpoint: bool
) -> Iterator[None]:
    """Write the card of the model that a Trainer saves within the block.

    A card that mfwrap has not written stays, also one that is written within the block. Only the
    hub's empty template, which PEFT writes, is replaced.

    Args:
        trainer: The trainer.
        output_dir: Folder of the model; ``None`` for that of the trainer.
        is_checkpoint: Whether the model belongs to a checkpoint, which gets no card.
    """
    held: Any = trainer
    folder = Path(output_dir or held.args.output_dir)
    is_writer = held.args.should_save and not is_checkpoint and not _is_taken_over(folder)
    yield
    if is_writer and not _is_taken_over(folder, by_template=False):
        model = held.accelerator.unwrap_model(held.model, keep_torch_compile=False)
        write_card(model, _tokenizer(held), _card_of_trainer(held, model, folder), folder)


def extend_card(trainer: TrainerView) -> None:
    """Add to the card that a Trainer has just written what mfwrap knows of the training.

    The text stays, with the usage, the settings of the step and the versions added that it lacks.
    In the front matter, tags are added and sorted, and the results if it has none.

    Args:
        trainer: The trainer, whose main process has written the card to its ``output_dir``.
    """
    held: Any = trainer
    if not held.is_world_process_zero():
        return
    file = Path(held.args.output_dir) / CARD
    if not file.is_file():
        return  # a method of the user's own writes none, or to another place
    written = ModelCard.load(file, ignore_metadata_errors=True)
    model = held.accelerator.unwrap_model(held.model, keep_torch_compile=False)
    card = _card_of_trainer(held, model, file.parent)
    data = written.data
    own = front_matter(model, card, data)
    data.tags, data.pipeline_tag = own.tags, data.get("pipeline_tag") or own.pipeline_tag
    if not data.get("eval_results"):
        data.eval_results, data.model_name = own.eval_results, data.model_name or own.model_name
    text = _ORIGIN.sub(card.origin.replace("It", "This model", 1).rstrip("."), written.text.strip())
    text = text.replace('model="None"', 'model="."')
    if _USAGE.search(text) is None:
        text += "\n\n## Use\n\n" + usage(model, _tokenizer(held), card.repository, "")
    text += f"\n\n## Training with mfwrap\n\n{card.training}"
    text += f"\n\n### Versions\n\n{versions_text(card.facts['versions'])}"
    _save(file, data, text)


def _results(trainer: Any) -> tuple[str, dict[str, float]]:
    """Return the results in the Trainer's log that come nearest to the saved weights.

    These are, in this order, the results after the training, those of the checkpoint that was
    loaded as the best one, and the last ones.

    Returns:
        The heading of their column, and the results.
    """
    log, state = trainer.state.log_history, trainer.state
    # Only the summary at the end of a training has the mean loss.
    ends = [index for index, entry in enumerate(log) if "train_loss" in entry]
    numbers, are_averages = last_evaluation(log[ends[-1] :] if ends else [])
    if numbers:
        return _SAVED if are_averages == ends_with_averages(state) else _AVERAGES, numbers
    if ends and trainer.args.load_best_model_at_end and state.best_model_checkpoint:
        best = int(Path(state.best_model_checkpoint).name.rpartition("-")[2])
        log = [entry for entry in log if entry.get("step") == best]
    numbers, are_averages = last_evaluation(log)
    return _SAVED if are_averages == ends_with_averages(state) else _AVERAGES, numbers


def _card_of_trainer(trainer: Any, model: Any, folder: Path) -> CardFacts:
    facts = trainer.run_facts.lasting()
    heading, numbers = _results(trainer)
    repository = getattr(trainer, "hub_model_id", None)
    name = repository.rpartition("/")[2] if repository else folder.absolute().name
    base = getattr(getattr(model, "config", None), "name_or_path", "") or ""
    is_on_hub = bool(base) and not Path(base).exists()
    return CardFacts(
        name=name,
        facts=facts,
        origin=origin_text(model, base if is_on_hub else None, is_new=not base),
        training=_training_text(trainer, facts["configuration"]),
        results=results_table({heading: numbers}),
        evaluation=Evaluation(results=numbers if heading == _SAVED else {}),
        repository=repository,
        base_model=base if is_on_hub else None,
    )


def origin_text(model: Any, base_model: str | None, *, is_new: bool) -> str:
    """Return a sentence about where the weights come from.

    Args:
        model: The model.
        base_model: Name on the hub of the model that was fine-tuned.
        is_new: Whether the training began with random weights.
    """
    if base_model is not None:
        link = f"[{base_model}](https://huggingface.co/{base_model})"
        return f"It was fine-tuned from {link}."
    start = "random weights" if is_new else "a checkpoint on disk"
    if hasattr(model, "peft_config"):
        return f"Its base model was {'built with random weights' if is_new else start}."
    return f"It was trained from {start}."


def shared_settings(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run without what concerns the machine and the output alone.

    Args:
        configuration: Settings without secrets, nested by name. An absolute path is shortened to
            its last part: a card is read by others.
    """
    shown: dict[str, Any] = _without_folders(configuration)
    training = shown.get("training")
    if isinstance(training, dict):
        left_out = WITHOUT_EFFECT | _OF_THE_MACHINE
        shown["training"] = {key: one for key, one in training.items() if key not in left_out}
    return shown


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _training_text(trainer: Any, configuration: Mapping[str, Any]) -> str:
    """Return what the card of an `MFTrainer` says about the training."""
    settings = shared_settings(configuration)
    for name, of in (("training", trainer.args), ("step", trainer.attached.config)):
        fields = {one.name: one for one in dataclasses.fields(of)}
        settings[name] = {
            key: one
            for key, one in settings.get(name, {}).items()
            if key not in fields or not _is_default(fields[key], one)
        }
    average = "" if trainer.ema is None else ", and kept an average of the weights"
    return (
        f"`{type(trainer).__name__}` made {trainer.state.global_step} updates with MindFormers' "
        f"training step in mfwrap{average}. Settings that differ from their defaults:\n\n"
        f"{settings_text({name: one for name, one in settings.items() if one})}"
    )


def _is_default(setting: "dataclasses.Field[Any]", value: Any) -> bool:
    default = setting.default
    if default is dataclasses.MISSING and setting.default_factory is not dataclasses.MISSING:
        default = setting.default_factory()
    # The Trainer replaces some defaults, such as None by False or an empty list.
    return value == default or (not value and not default)


def _tokenizer(trainer: Any) -> Any:
    """Return what the Trainer saves beside the model to prepare its inputs."""
    collator = getattr(trainer.data_collator, "tokenizer", None)
    return collator if trainer.processing_class is None else trainer.processing_class


def _is_taken_over(folder: Path, *, by_template: bool = True) -> bool:
    """Return whether a folder has a card that mfwrap has not written.

    Args:
        folder: Folder of the model.
        by_template: Whether the hub's empty template counts as a card.
    """
    file = folder / CARD
    if not file.is_file():
        return False
    text = file.read_text(encoding="utf-8", errors="replace")
    is_template = _TEMPLATE in text and not by_template
    return _MARK not in text and not is_template


def _save(file: Path, data: ModelCardData, text: str) -> None:
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")
    with whole_file(file) as partial:
        card.save(partial)
