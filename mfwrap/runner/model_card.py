"""Write the cards of the models that a recipe has trained: what each is, and how to load it."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from datasets import Dataset
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel
from transformers.modelcard import make_markdown_table

from mfwrap.recipes.data.library import BUILDERS, DatasetsSource
from mfwrap.recipes.data.places import is_folder, resolve_package
from mfwrap.recipes.models.own import OwnModel
from mfwrap.recipes.models.settings import num_channels_of
from mfwrap.records.evaluations import AVERAGED
from mfwrap.runner.averages import FinalAverage
from mfwrap.runner.folder import AVERAGED_MODEL, MODEL
from mfwrap.runner.own_code import OBJECT
from mfwrap.runner.recipe import Recipe
from mfwrap.trainer.preflight import WITHOUT_EFFECT

_PREFIXES = {MODEL: "eval_", AVERAGED_MODEL: f"{AVERAGED}eval_"}
"""Prefix of the metrics of a model."""

_NO_RESULTS = frozenset({"entropy"})
"""Metrics of TRL that do not say how good a model is."""

_COLUMNS = {MODEL: "trained weights", AVERAGED_MODEL: "averaged weights"}

_OF_THE_MACHINE = frozenset(
    {"accelerator_config", "dataloader_pin_memory", "report_to", "resume_from_checkpoint"}
)
"""Further training arguments that a card leaves out: they follow from the machine."""


class Best(NamedTuple):
    """The best checkpoint of a run, whose weights the Trainer has loaded at the end."""

    checkpoint: str
    """Name of its folder."""

    step: int
    metric: str
    """Metric by which it is the best: ``"eval_loss"``, or ``"ema_eval_loss"`` if the evaluations of
    the training used averaged weights."""


class Updates(NamedTuple):
    """What has become of the updates of a training, with those before it was resumed."""

    applied: int
    skipped: int
    why: str
    """Why some were skipped: the end of a sentence."""


class FinishedRun(NamedTuple):
    """A recipe and what has come out of it."""

    recipe: Recipe
    """The recipe."""

    trainer: Any
    """Its Trainer, after the training."""

    average: FinalAverage | None
    """Average of the weights; ``None`` without one."""

    metrics: dict[str, float]
    """Results of all evaluations; those of averaged weights begin with ``ema_``."""

    best: Best | None = None
    """Checkpoint whose weights are saved; ``None`` if those of the last step are."""

    @property
    def model(self) -> Any:
        """The trained network without wrappers."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)

    @property
    def updates(self) -> Updates:
        """The updates of the training, which are read from the device."""
        windows = self.trainer.attached.attachment.step.windows.values()
        counts = [window.update.counts for window in windows]
        spikes = " or was a spike" if self.recipe.step.config.spike_policy == "skip" else ""
        return Updates(
            sum(int(each.applied_updates) for each in counts),
            sum(int(each.skipped_updates) for each in counts),
            f"because a gradient was not finite{spikes}",
        )


def write_recipe_card(run: FinishedRun, name: str, folder: Path) -> None:
    """Write the card of a model into its folder.

    The same recipe with the same results gives the same bytes: the card has no time, and nothing of
    the machine.

    Args:
        run: The run.
        name: ``model``, or ``model_ema`` for the averaged weights.
        folder: Folder with the files of the model. The entries that PEFT has put in the front
            matter of a card there are kept.
    """
    recipe, trainer = run.recipe, run.trainer
    file = folder / "README.md"
    repository = trainer.hub_model_id if recipe.arguments.push_to_hub else None
    title = repository.rpartition("/")[2] if repository else Path(recipe.document.name).stem
    title = title if name == MODEL else f"{title} ({_COLUMNS[name]})"
    place = f'"{repository or "."}"'
    if repository and name != MODEL:
        place += f', subfolder="{name}"'
    facts = trainer.run_facts.lasting()
    versions = "\n".join(f"- {library} {one}" for library, one in facts["versions"].items())
    sections = [
        f"# {title}",
        f"{_network(run, facts['parameters'])} {_origin(run, name)}",
        f"## Use\n\n{_usage(run, name, place)}",
        _results(run.metrics),
        f"## Training\n\n{_training(run, facts['configuration'])}",
        f"## Versions\n\n{versions}",
    ]
    text = "\n\n".join(filter(None, sections))
    data = ModelCardData()
    if file.is_file():
        data = ModelCard.load(file, ignore_metadata_errors=True).data
    _complete(data, run, title, name)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n").save(file)


def shared_settings(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run without what concerns the machine and the output alone.

    Args:
        configuration: Settings without secrets, nested by name. An absolute path is shortened to
            its last part: a card is read by others.
    """
    shown: dict[str, Any] = _without_folders(configuration)
    if training := shown.get("training"):
        left_out = WITHOUT_EFFECT | _OF_THE_MACHINE
        shown["training"] = {key: one for key, one in training.items() if key not in left_out}
    return shown


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _complete(data: Any, run: FinishedRun, title: str, name: str) -> None:
    """Complete the front matter of a card."""
    recipe, base, on_hub = run.recipe, _base_model(run.recipe), _hub_data(run.recipe)
    tags = {"mfwrap", "generated_from_trainer", str(recipe.document.data["task"])}
    tags |= {*(data.tags or ()), *(getattr(run.model, "model_tags", None) or ())}
    data.library_name = _library(run)
    data.pipeline_tag = recipe.task.hub_task
    # PEFT names the base model also if it is a folder of this machine.
    data.base_model = base
    # Sorted, because TRL's tags come in the order of a set, which changes with each process.
    data.tags = sorted(tag for tag in tags if base or not tag.startswith("base_model:"))
    data.datasets = None if on_hub is None else [on_hub.path]
    kind: Any = recipe.data
    # A source of the user's own need not have a field `type`.
    dataset = getattr(kind, "type", recipe.document.data["data"].get("type"))
    config, split = None, "held out"
    if on_hub is not None:
        dataset, config, split = on_hub.path, on_hub.name, on_hub.eval_split or on_hub.split
    data.eval_results = [
        EvalResult(
            task_type=recipe.task.hub_task,
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_config=config,
            dataset_split=split,
            metric_type=metric,
            metric_name=metric.replace("_", " ").capitalize(),
            metric_value=value,
        )
        for metric, value in _metrics(run.metrics, name).items()
        if math.isfinite(value)  # JSON has no other numbers
    ] or None
    data.model_name = title if data.eval_results else None


def _metrics(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """Return the metrics of a model without their prefix."""
    prefix = _PREFIXES[name]
    found = {
        key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)
    }
    return {key: value for key, value in found.items() if key not in _NO_RESULTS}


def _results(metrics: Mapping[str, float]) -> str:
    """Return the section with the results of all models; empty without an evaluation."""
    columns = {_COLUMNS[name]: _metrics(metrics, name) for name in _COLUMNS}
    rows = [
        {"metric": f"`{metric}`"}
        | {column: f"{values[metric]:.6g}" for column, values in columns.items() if values}
        for metric in columns[_COLUMNS[MODEL]]
    ]
    said = "## Results\n\nOn the held-out examples, after the training:\n\n"
    return said + str(make_markdown_table(rows)).rstrip() if rows else ""


def _library(run: FinishedRun) -> str:
    """Return the library that loads the model."""
    recipe = run.recipe
    if recipe.peft is not None:
        return "peft"
    if isinstance(recipe.model, OwnModel):
        return "transformers" if isinstance(run.model, PreTrainedModel) else "pytorch"
    return recipe.task.library


def _usage(run: FinishedRun, name: str, place: str) -> str:
    """Return code that loads a model, and runs it if a pipeline of transformers does.

    Args:
        run: The run.
        name: Folder of the model in the run folder.
        place: Arguments of ``from_pretrained`` that say where the model is.
    """
    recipe = run.recipe
    if recipe.peft is not None and recipe.model.path is None:
        return (
            "The model that this adapter belongs to had random weights, which were not saved. So "
            "the adapter cannot be used on its own: it shows the training. To get one that can, "
            "train an adapter of a checkpoint."
        )
    processor = _image_processor(run)
    prepared = "" if processor is None else f"\n\n{_preparation(processor)}"
    if isinstance(recipe.model, OwnModel):
        return _own_usage(run, recipe.model, place) + prepared
    if recipe.task.library == "sentence-transformers":
        return _encoder_usage(place)
    return _transformers_usage(run, name, place) + prepared


def _transformers_usage(run: FinishedRun, name: str, place: str) -> str:
    """Return code that loads a model, or an adapter, by a class of transformers or of mfwrap."""
    recipe, task, tokenizer = run.recipe, run.recipe.task, run.trainer.processing_class
    processor = _image_processor(run)
    install, module, kind, labels = "transformers torch", "transformers", "Perceptron", ""
    if task.auto_class is None:
        install, module = '"mfwrap[recipes]"', "mfwrap.recipes.models"
    else:
        kind = task.auto_class.__name__
    base, note = None, ""
    if recipe.peft is not None:
        install = "peft transformers torch"
        if task.classes:
            labels = f", num_labels={run.model.config.num_labels}"
        base, note = _local_base(run, name)
        if base is None:
            module = "peft"
            kind = kind.replace("Auto", "AutoPeft") if task.peft_task_type else "AutoPeftModel"
    imports = {module: [kind]}
    lines = [f"model = {kind}.from_pretrained({place}{labels})"]
    if base is not None:
        imports["peft"] = ["PeftModel"]
        lines = [f'base = {kind}.from_pretrained("{base}"{labels})']
        lines.append(f"model = PeftModel.from_pretrained(base, {place})")
    if processor is not None:
        imports["PIL"] = ["Image"]
        imports["transformers"].append("AutoImageProcessor")
        lines += [f"processor = AutoImageProcessor.from_pretrained({place})"]
        lines += _image_lines(processor, num_channels_of(run.model.config) or 3)
    elif tokenizer is not None:
        asked = '"This is a text."'
        if task.hub_task == "text-generation":
            has_template = recipe.model.path is not None and bool(tokenizer.chat_template)
            is_chat = has_template and not _has_learned_texts(run.trainer.train_dataset)
            asked = _CHAT if is_chat else '"This is", max_new_tokens=32, do_sample=False'
            if recipe.peft is not None:  # the base model may end its texts by another token
                asked += ", eos_token_id=tokenizer.eos_token_id"
        imports.setdefault("transformers", []).extend(["AutoTokenizer", "pipeline"])
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained({place})",
            f'run = pipeline("{task.hub_task}", model=model, tokenizer=tokenizer)',
            f"print(run({asked}))",
        ]
    where = "" if run.recipe.arguments.push_to_hub else ", in the folder of the model"
    named = (f"from {one} import {', '.join(names)}" for one, names in sorted(imports.items()))
    code = "\n".join([*named, "", *lines])
    return f"{note}After `pip install {install}`{where}:\n\n```python\n{code}\n```"


def _has_learned_texts(rows: Any) -> bool:
    """Return whether rows are texts without turns, to which no chat template was applied."""
    first = rows[0] if isinstance(rows, Dataset) and len(rows) else {}
    is_text = any(isinstance(first.get(name), str) for name in ("prompt", "text"))
    return is_text and "messages" not in first


def _image_processor(run: FinishedRun) -> Any:
    """Return the image processor that mfwrap has made; ``None`` if it has made none."""
    is_ours = run.recipe.document.data["task"] == "image_classification"
    return run.trainer.processing_class if is_ours else None


def _image_lines(processor: Any, num_channels: int) -> list[str]:
    """Return code that classifies an image."""
    size = processor.size["width"], processor.size["height"]
    mode = {1: "L", 2: "LA", 4: "RGBA"}.get(num_channels, "RGB")
    return [
        f'image = Image.new("{mode}", {size})  # or Image.open("image.png")',
        'logits = model(**processor(image, return_tensors="pt")).logits',
        "print(model.config.id2label[logits.argmax().item()])",
    ]


def _preparation(processor: Any) -> str:
    """Return sentences that say how an image becomes the input of a model."""
    width, height = processor.size["width"], processor.size["height"]
    size = f"An image must have {width} x {height} pixels."
    if processor.do_resize:
        size = f"Each image is converted to RGB and scaled to {width} x {height} pixels (bicubic)."
    done = []
    if processor.do_rescale:
        done.append(f"multiplied by {processor.rescale_factor:.6g}")
    if processor.do_normalize:
        mean, std = (
            ", ".join(f"{one:.6g}" for one in (numbers if len(set(numbers)) > 1 else numbers[:1]))
            for numbers in (processor.image_mean, processor.image_std)
        )
        done.append(f"reduced by the mean {mean} and divided by the deviation {std}")
    scaling = f" Its pixels, from 0 to 255, are {' and then '.join(done)}." if done else ""
    return f"{size}{scaling} `preprocessor_config.json` says so, too."


def _local_base(run: FinishedRun, name: str) -> tuple[str | None, str]:
    """Return the path of an adapter's base model for code, and a sentence about it.

    The path is ``None`` if PEFT finds the base model itself: on the hub, or by an absolute path in
    the files of the adapter, which holds on this machine.

    Args:
        run: The run.
        name: Folder of the adapter in the run folder.
    """
    path, arguments = str(run.recipe.model.path), run.recipe.arguments
    folder = Path(resolve_package("path", path))
    is_pushed, is_absolute = arguments.push_to_hub, folder.is_absolute()
    if not is_folder(folder) or (is_absolute and not is_pushed):
        return None, ""
    run_folder = Path(arguments.output_dir or "")
    if is_pushed or run_folder.is_absolute():
        said = (
            f'The base model is not on the hub: replace `"{folder.name}"` by the path of its folder'
        )
        return folder.name, f"{said}. "
    # PEFT has noted a path that is relative to the folder in which the training was started.
    relative = Path(os.path.relpath(folder, run_folder / name)).as_posix()
    return relative, f"The base model was in the folder `{path}`, where the training was started. "


def _encoder_usage(place: str) -> str:
    """Return code that loads a sentence encoder and compares two texts."""
    lines = ["from sentence_transformers import SentenceTransformer", ""]
    lines.append(f"model = SentenceTransformer({place})")
    lines.append('embeddings = model.encode(["This is a text.", "Here is another one."])')
    lines.append("print(model.similarity(embeddings, embeddings))")
    code = "\n".join(lines)
    return f"After `pip install sentence-transformers`:\n\n```python\n{code}\n```"


def _own_usage(run: FinishedRun, own: OwnModel, place: str) -> str:
    """Return code that loads a model of its author's own class."""
    kind = type(run.model).__qualname__
    name = own.type.removeprefix(OBJECT)
    said = f"This needs its author's own code, `{name}`, which is not in this folder. "
    if isinstance(run.model, PreTrainedModel):
        install = "transformers torch"
        lines = [f"from {type(run.model).__module__} import {kind}", ""]
        lines.append(f"model = {kind}.from_pretrained({place})")
    else:
        install = "safetensors torch"
        said += f"Build a `{kind}` as `model`, with the settings in the section `model` below. "
        lines = ["from safetensors.torch import load_model", ""]
        lines.append('load_model(model, "model.safetensors")')
    code = "\n".join(lines)
    return f"{said}After `pip install {install}`:\n\n```python\n{code}\n```"


_CHAT = '[{"role": "user", "content": "What can you do?"}], max_new_tokens=64, do_sample=False'


def _network(run: FinishedRun, parameters: Mapping[str, int]) -> str:
    """Return a sentence about the network."""
    model = run.model
    if run.recipe.peft is None:
        return f"A `{type(model).__name__}` with {parameters['total']:,} parameters."
    value = str(model.active_peft_config.peft_type.value)
    kind = _SPELLINGS.get(value, value.replace("_", " "))
    article = "An" if kind[0] in "AIO" else "A"
    trained = f"{parameters['trainable']:,} of the {parameters['total']:,} parameters"
    network = type(model.get_base_model()).__name__
    return f"{article} {kind} adapter of a `{network}`: {trained} were trained."


_SPELLINGS = {
    "ADALORA": "AdaLoRA",
    "DELORA": "DeLoRA",
    "GRALORA": "GraLoRA",
    "LOHA": "LoHa",
    "LOKR": "LoKr",
    "LORA": "LoRA",
    "RANDLORA": "RandLora",
    "VERA": "VeRA",
    "XLORA": "X-LoRA",
}
"""PEFT's types whose usual spelling is not in capitals."""


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


def _origin(run: FinishedRun, name: str) -> str:
    """Return sentences about where the weights come from."""
    path, base = run.recipe.model.path, _base_model(run.recipe)
    own = run.recipe.model
    if isinstance(own, OwnModel):
        said = f"It was built by `{own.type.removeprefix(OBJECT)}`."
    elif base is not None:
        said = f"It was fine-tuned from [{base}](https://huggingface.co/{base})."
    elif path is None and run.recipe.peft is not None:
        said = "Its base model was built with random weights."
    elif path is None:
        said = "It was trained from random weights."
    else:
        at = f"the checkpoint `{path}`" if path.startswith("package:") else "a checkpoint on disk"
        said = f"It was fine-tuned from {at}."
    said += _best(run, name)
    if run.average is None:
        return said
    kind = "an exponential moving average over the training"
    if name == AVERAGED_MODEL:
        return f"{said} These are the averaged weights: {kind}."
    other = "in the folder" if run.recipe.arguments.push_to_hub else "beside this folder, in"
    return f"{said} The averaged weights, {kind}, are {other} `{AVERAGED_MODEL}`."


def _best(run: FinishedRun, name: str) -> str:
    """Return a sentence about the checkpoint that a model is of; nothing if it is the last step."""
    if run.best is None or (
        name == AVERAGED_MODEL and run.average is not None and run.average.step != run.best.step
    ):
        return ""
    number = f"{run.best.step} of {run.trainer.state.global_step}"
    return f" Its weights are those after step {number}, the best by `{run.best.metric}`."


def _training(run: FinishedRun, configuration: Mapping[str, Any]) -> str:
    """Return the updates, the data and the recipe of a run."""
    recipe, trainer = run.recipe, run.trainer
    path, on_hub = recipe.document.data["data"].get("path"), _hub_data(recipe)
    data = str(type(recipe.data).__doc__).partition("\n")[0].replace("``", "`")
    if on_hub is not None:
        data = f"[{on_hub.path}](https://huggingface.co/datasets/{on_hub.path})."
    elif isinstance(path, str):
        data += f" Here: `{Path(path).name}`."
    sizes = [
        f"{len(rows):,} examples {purpose}"
        for rows, purpose in (
            (trainer.train_dataset, "to train on"),
            (trainer.eval_dataset, "held out to evaluate on"),
        )
        if hasattr(rows, "__len__")
    ]
    if sizes:
        data += f" There were {' and '.join(sizes)}."
    settings = yaml.safe_dump(
        shared_settings(configuration), sort_keys=False, allow_unicode=True, width=100
    )
    flag = "" if recipe.code.facts(Path()) is None else " --allow-code"
    applied, skipped, why = run.updates
    number, end = f"{trainer.state.global_step} updates", ""
    if skipped:
        number = f"{applied} of {applied + skipped} updates were applied"
        end = f"; the others were skipped {why}"
    return (
        f"{number} for the task `{recipe.document.data['task']}`, with MindFormers' training step "
        f"in mfwrap{end}.\n\nData: {data}\n\nThe recipe, for "
        f"`mfwrap train{flag}`:\n\n```yaml\n{settings}```"
    )
