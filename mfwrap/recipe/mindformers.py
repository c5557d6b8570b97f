"""MindFormers' YAML files as recipes."""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, final

import yaml

from mfwrap.recipe.document import RecipeDocument
from mfwrap.recipe.mindformers_model import model_config_of, model_type_of
from mfwrap.recipes.models.settings import config_keys

__all__ = [
    "ImportedRecipe",
    "evaluation",
    "import_mindformers",
]


_AS_THEY_STAND = ("optimizer", "lr_schedule", "callbacks", "monitor_config")
_TASKS: Mapping[str, str] = {
    "CausalLanguageModelingTrainer": "causal_lm",
    "image_classification": "image_classification",
    "ImageClassificationTrainer": "image_classification",
    "sequence_classification": "sequence_classification",
    "text_classification": "sequence_classification",
    "TextClassificationTrainer": "sequence_classification",
    "text_generation": "causal_lm",
    "token_classification": "token_classification",
    "TokenClassificationTrainer": "token_classification",
}
_DATA: Mapping[str, dict[str, Any]] = {
    "causal_lm": {"type": "python_topics"},
    "image_classification": {"type": "digits"},
    "sequence_classification": {"type": "docstrings"},
    "token_classification": {"type": "python_tokens"},
}
"""Data that are there, in the place of MindRecord files."""

_DEFAULT_MODELS: Mapping[str, str] = {
    "causal_lm": "llama",
    "image_classification": "vit",
    "sequence_classification": "bert",
    "token_classification": "bert",
}


class ImportedRecipe(NamedTuple):
    """A recipe that a MindFormers file has become."""

    text: str
    """YAML."""

    notes: list[str]
    """What was left out or changed, one line each."""


def import_mindformers(text: str, name: str) -> ImportedRecipe:
    """Return the recipe that trains as a MindFormers file says.

    Its ``runner_wrapper``, ``optimizer``, ``lr_schedule``, ``callbacks`` and ``monitor_config``
    are taken as they stand; the folder of ``tensorboard`` is given to the monitors. Data are left
    out: MindRecord files are MindSpore's own, so that the recipe begins with data that are there.

    Args:
        text: The MindFormers file.
        name: Its name, for errors.

    Raises:
        RecipeError: If it is no YAML mapping, or trains what no recipe can.
    """
    document = RecipeDocument.parse(text, name)
    converter = _Converter(document)
    recipe = converter.recipe()
    notes = converter.notes
    comments = "".join(f"# {note}\n" for note in [f"From MindFormers' {name}.", *notes])
    body = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    return ImportedRecipe(comments + body, notes)


@final
class _Converter:
    """Takes over section after section, and notes what has no place.

    Args:
        document: The MindFormers file.
    """

    def __init__(self, document: RecipeDocument) -> None:
        self._document = document
        self._left = dict(document.data)
        self.notes: list[str] = []

    def recipe(self) -> dict[str, Any]:
        """Return the recipe's sections, those that are not empty."""
        task = self._task()
        model, sequence_length = self._model(task)
        data = dict(_DATA[task])
        if self._left.pop("train_dataset", None) is not None:
            self.notes.append(f"data: put your own here; {data['type']} are data that are there")
        if sequence_length is not None and task == "causal_lm":
            data["sequence_length"] = sequence_length
        sections = {
            "task": task,
            "model": model,
            "data": data,
            "training": self._training(),
            "runner_wrapper": self._wrapper(),
            **{name: self._left.pop(name, None) for name in _AS_THEY_STAND},
        }
        self.notes += turn_embedding_threshold(sections)
        self.notes += take_over_curves(sections, self._section("tensorboard"))
        if self._left.pop("check_for_nan_in_loss_and_grad", False):
            take_over_nan_check(sections)
        self._note_the_rest()
        return {name: value for name, value in sections.items() if value}

    def _section(self, name: str, holder: dict[str, Any] | None = None) -> dict[str, Any]:
        value = (self._left if holder is None else holder).pop(name, None)
        if value is not None and not isinstance(value, dict):
            raise self._document.error((name,), f"must be a mapping, got {value!r}")
        return dict(value or {})

    def _task(self) -> str:
        trainer = self._section("trainer")
        said = trainer.get("type") or trainer.get("task_name") or "CausalLanguageModelingTrainer"
        if said not in _TASKS:
            says = f"must be one of {sorted(_TASKS)}, got {said!r}"
            raise self._document.error(("trainer",), says)
        return _TASKS[said]

    def _model(self, task: str) -> tuple[dict[str, Any], int | None]:
        section = self._section("model")
        # Both forms: model.model_config, and model_config with the class beside.
        settings = self._section("model_config", section) or self._section("model_config")
        section.pop("arch", None)  # the class of the network, which the task chooses here
        self.notes += [f"model: without {key}" for key in section]
        path = self._left.pop("pretrained_model_dir", None)
        sequence_length = settings.pop("seq_length", None)
        if isinstance(path, str) and path:
            if settings:
                self.notes.append("model: without model_config, for the checkpoint has its own")
            return {"path": path}, sequence_length
        kind = model_type_of(settings) or _DEFAULT_MODELS[task]
        if "type" in settings and model_type_of(settings) is None:
            self.notes.append(f"model: {settings['type']} is not known here, so it is a {kind}")
        known = self._config_keys(kind)
        config, notes = model_config_of(settings, kind, known)
        self.notes += notes
        if isinstance(sequence_length, int) and "max_position_embeddings" in known:
            config.setdefault("max_position_embeddings", sequence_length)
        return {"config": config}, sequence_length

    def _config_keys(self, kind: object) -> set[str]:
        try:
            return config_keys(str(kind))
        except KeyError as error:
            says = f"must be a model of transformers, got {kind!r}"
            path = ("model", "model_config", "model_type")
            raise self._document.error(path, says) from error

    def _training(self) -> dict[str, Any]:
        runner = self._section("runner_config")
        training: dict[str, Any] = {}
        names = {
            "epochs": "num_train_epochs",
            "batch_size": "per_device_train_batch_size",
            "gradient_accumulation_steps": "gradient_accumulation_steps",
            "stop_step": "max_steps",
        }
        for key, value in runner.items():
            if key not in names:
                self.notes.append(f"runner_config: without {key}")
            elif value is not None and (key != "stop_step" or value):
                training[names[key]] = value
        for key in ("output_dir", "seed"):
            if self._left.get(key) is not None:
                training[key] = self._left.pop(key)
        self._accumulate_pipeline(training)
        self._evaluate(training)
        return training

    def _accumulate_pipeline(self, training: dict[str, Any]) -> None:
        parallel = self._left.get("parallel_config")
        if not isinstance(parallel, dict) or not isinstance(parallel.get("micro_batch_num"), int):
            return
        stages, number = parallel.get("pipeline_stage"), parallel["micro_batch_num"]
        if isinstance(stages, int) and stages > 1 and number > 1:
            training["gradient_accumulation_steps"] = number
            self.notes.append("training: the micro-batches of the pipeline are accumulated")

    def _evaluate(self, training: dict[str, Any]) -> None:
        evaluates = self._left.pop("do_eval", False)
        steps, epochs = map(self._interval, ("eval_step_interval", "eval_epoch_interval"))
        if evaluates:
            keys, notes = evaluation(steps, epochs, training)
            training |= keys
            self.notes += notes

    def _interval(self, name: str) -> int | None:
        value = self._left.pop(name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._document.error((name,), f"must be an int, got {value!r}")
        return value

    def _wrapper(self) -> dict[str, Any]:
        wrapper = self._section("runner_wrapper")
        if wrapper.get("type") in {"MFPipelineWithLossScaleCell", "pipeline_wrapper"}:
            wrapper["type"] = "MFTrainOneStepCell"
            self.notes.append("runner_wrapper: without a pipeline, so MFTrainOneStepCell")
        if wrapper.pop("micro_batch_num", None) is not None:
            self.notes.append("runner_wrapper: without micro_batch_num")
        for key in ("use_skip_data_by_global_norm", "calculate_per_token_loss"):
            if self._left.pop(key, False):
                wrapper[key] = True
        return wrapper

    def _note_the_rest(self) -> None:
        self.notes += [f"without {name}" for name in self._left]


_LOSS_FLAGS = frozenset({"log_loss_scale_to_tensorboard", "log_timers_to_tensorboard"})
"""Keys of ``tensorboard`` that are arguments of `MFLossMonitor`."""


def turn_embedding_threshold(sections: Mapping[str, Any]) -> list[str]:
    """Turn MindFormers' limit, of the square of a norm, into one of the norm; return notes."""
    key = "embedding_local_norm_threshold"
    notes = []
    for one in _callbacks(sections):
        if isinstance(one.get(key), (int, float)) and one[key] > 0:
            one[key] = math.sqrt(one[key])
            notes.append(f"callbacks: {key} is of the norm here, not of its square")
    return notes


def take_over_curves(sections: dict[str, Any], tensorboard: Mapping[str, Any]) -> list[str]:
    """Give the monitors what MindFormers' section ``tensorboard`` says; return notes.

    Args:
        sections: Of the recipe.
        tensorboard: The section; empty if there is none.
    """
    settings = dict(tensorboard)
    folder = settings.pop("tensorboard_dir", None)
    if not settings.pop("tensorboard_on", True):
        return ["without tensorboard, which is off"]
    if not isinstance(folder, str) or not folder:
        return ["without tensorboard, which names no folder"] if tensorboard else []
    kept: set[str] = set()
    writers = [one for one in _callbacks(sections) if one.get("type") == "TrainingStateMonitor"]
    for one in _callbacks(sections):
        if one.get("type") == "MFLossMonitor":
            kept |= _LOSS_FLAGS & settings.keys()
            one |= {key: settings[key] for key in sorted(kept)}
            writers.append(one)
    if _is_on(sections["monitor_config"]):
        writers.append(sections["monitor_config"])
    if not writers:
        return ["without tensorboard: no monitor is there that writes curves"]
    for one in writers:
        one.setdefault("tensorboard_dir", folder)
    return [f"tensorboard: without {key}" for key in settings if key not in kept]


def take_over_nan_check(sections: dict[str, Any]) -> None:
    """Let the monitor check for nan; add one if there is none."""
    key = "check_for_nan_in_loss_and_grad"
    if _is_on(sections["monitor_config"]):
        sections["monitor_config"] |= {key: True}
    else:
        monitor = {"type": "TrainingStateMonitor", key: True}
        sections["callbacks"] = [*(sections["callbacks"] or []), monitor]


def _callbacks(sections: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (one for one in sections["callbacks"] or [] if isinstance(one, dict))


def _is_on(monitor_config: object) -> bool:
    return isinstance(monitor_config, dict) and bool(monitor_config.get("monitor_on"))


_DEFAULT_STEPS = 100
"""MindFormers' ``eval_step_interval`` where it is not given, or 0."""


def evaluation(
    steps: int | None, epochs: int | None, training: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the training's keys for an evaluation, and notes about what they do not say.

    Args:
        steps: MindFormers' ``eval_step_interval``; < 0 for none.
        epochs: MindFormers' ``eval_epoch_interval``; < 0 for none.
        training: The other keys of the training.
    """
    by_steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": steps or _DEFAULT_STEPS}
    if epochs is None or epochs <= 0:
        if by_steps["eval_steps"] > 0:
            return by_steps, []
        return {}, ["training: no interval of evaluation is > 0, so once, at its end"]
    if steps is not None and steps > 0:
        return by_steps, [f"training: without eval_epoch_interval {epochs}, beside that of steps"]
    keys, notes = _by_epochs(epochs, training)
    if not steps:
        notes.append(f"training: without eval_step_interval {_DEFAULT_STEPS}, a default")
    return keys, notes


def _by_epochs(epochs: int, training: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    if epochs == 1:
        return {"eval_strategy": "epoch"}, []
    length = training.get("num_train_epochs")
    if not isinstance(length, int) or length < 1 or "max_steps" in training:
        says = f"training: evaluates after every epoch, not every {epochs} epochs"
        return {"eval_strategy": "epoch"}, [says]
    if epochs >= length:
        return {}, [f"training: has no evaluation before epoch {epochs}, so once, at its end"]
    part = epochs / length
    if Fraction(part) > Fraction(epochs, length):  # the Trainer rounds up: one step too late
        part = math.nextafter(part, 0)
    says = f"training: {epochs} of {length} epochs are eval_steps, a part of the training"
    return {"eval_strategy": "steps", "eval_steps": part}, [says]
