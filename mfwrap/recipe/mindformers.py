"""Convert MindFormers' YAML files to recipes."""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from types import NoneType
from typing import Any, NamedTuple, final

from mfwrap.recipe.document import Path, RecipeDocument, shown, yaml_text
from mfwrap.recipe.mindformers_model import model_config_of, model_type_of
from mfwrap.recipe.step import shows_local_norms
from mfwrap.recipes.models.settings import config_keys
from mfwrap.recipes.tasks.table import TASKS


class ImportedRecipe(NamedTuple):
    """A recipe made from a MindFormers file."""

    text: str
    """YAML, with the notes as comments at the top."""

    notes: list[str]
    """One line for each key that was left out or changed."""


def import_mindformers(text: str, name: str) -> ImportedRecipe:
    """Convert a MindFormers file to a recipe that trains in the same way.

    The sections ``runner_wrapper``, ``optimizer``, ``lr_schedule``, ``callbacks`` and
    ``monitor_config`` are copied; the monitors write to the folder of the section ``tensorboard``.
    The data are not converted, because only MindSpore reads MindRecord files. The recipe uses
    built-in example data instead.

    Args:
        text: Content of the MindFormers file.
        name: Name of the file, for error messages.

    Raises:
        RecipeError: If `text` is not a YAML mapping, or mfwrap has no task for the file's trainer.
    """
    converter = _Converter(RecipeDocument.parse(text, name))
    recipe = converter.recipe()
    notes = converter.notes
    comments = "".join(f"# {note}\n" for note in [f"Imported from MindFormers' {name}.", *notes])
    body = yaml_text(recipe)
    return ImportedRecipe(comments + body, notes)


_COPIED = ("optimizer", "lr_schedule", "callbacks", "monitor_config")
_TASK_OF = {trainer: name for name, task in TASKS.items() for trainer in task.mindformers_trainers}
_TRAINING_KEYS: Mapping[str, str] = {
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "stop_step": "max_steps",
}
"""Field of ``TrainingArguments`` for each key of ``runner_config``."""


@final
class _Converter:
    """Convert a file section by section, and note the keys that are left out or changed.

    Args:
        document: The MindFormers file.
    """

    def __init__(self, document: RecipeDocument) -> None:
        self._document = document
        self._left = dict(document.data)
        self.notes: list[str] = []
        self._check_types((), document.data)

    def recipe(self) -> dict[str, Any]:
        """Return the sections of the recipe that are not empty."""
        task = self._task()
        model, sequence_length = self._model(task)
        data: dict[str, Any] = {"type": TASKS[task].example_data}
        if self._left.pop("train_dataset", None) is not None:
            self.notes.append("data: built-in example data; replace this section with your own")
        if sequence_length is not None and task == "causal_lm":
            data["sequence_length"] = sequence_length
        sections = {
            "task": task,
            "model": model,
            "data": data,
            "training": (training := self._training()),
            "runner_wrapper": (wrapper := self._wrapper()),
            **{name: self._copied(name) for name in _COPIED},
        }
        has_local_norms = bool(wrapper.get("local_norm"))
        has_local_norms |= shows_local_norms(sections["monitor_config"] or {})
        self._shard_accumulation(training, has_local_norms=has_local_norms)
        self.notes += convert_embedding_threshold(sections)
        self.notes += move_tensorboard(sections, self._section("tensorboard"))
        if self._left.pop("check_for_nan_in_loss_and_grad", False):
            add_nan_check(sections)
        self._leave_out("", self._left)
        return {name: value for name, value in sections.items() if value}

    def _check_types(self, path: Path, value: object) -> None:
        """Raise `RecipeError` for a key ``type`` whose value is not a string."""
        if path[-1:] == ("type",) and not isinstance(value, (str, NoneType)):
            raise self._document.error(path, f"expected a string, got {shown(value)}")
        items = value.items() if isinstance(value, dict) else ()
        for key, inner in enumerate(value) if isinstance(value, list) else items:
            self._check_types((*path, key), inner)

    def _copied(self, name: str) -> Any:
        """Return a section that is copied: a list of mappings for ``callbacks``, else a mapping."""
        if name != "callbacks":
            return self._section(name) or None
        value = self._left.pop(name, None)
        if not isinstance(value, (list, NoneType)):
            raise self._document.error((name,), f"expected a list, got {shown(value)}")
        return value

    def _leave_out(self, section: str, keys: Mapping[str, Any]) -> None:
        self.notes += [f"{section}{key}: left out" for key in keys]

    def _section(self, name: str, holder: dict[str, Any] | None = None) -> dict[str, Any]:
        value = (self._left if holder is None else holder).pop(name, None)
        if value is not None and not isinstance(value, dict):
            raise self._document.error((name,), f"expected a mapping, got {value!r}")
        return dict(value or {})

    def _task(self) -> str:
        trainer = self._section("trainer")
        said = trainer.get("type") or trainer.get("task_name") or "CausalLanguageModelingTrainer"
        if not isinstance(said, str) or said not in _TASK_OF:
            says = f"expected one of the trainers {sorted(_TASK_OF)}, got {said!r}"
            raise self._document.error(("trainer",), says)
        return _TASK_OF[said]

    def _model(self, task: str) -> tuple[dict[str, Any], int | None]:
        section = self._section("model")
        # MindFormers accepts model.model_config as well as model_config at the top level.
        settings = self._section("model_config", section) or self._section("model_config")
        section.pop("arch", None)  # the network's class, which a recipe derives from its task
        self._leave_out("model.", section)
        path = self._left.pop("pretrained_model_dir", None)
        sequence_length = settings.pop("seq_length", None)
        if isinstance(path, str) and path:
            if settings:
                self.notes.append("model.model_config: left out, the checkpoint has its own")
            return {"path": path}, sequence_length
        kind = model_type_of(settings) or TASKS[task].example_model
        if "type" in settings and model_type_of(settings) is None:
            self.notes.append(f"model: unknown type {settings['type']}; {kind} is used instead")
        known = self._config_keys(kind)
        config, left_out = model_config_of(settings, kind, known)
        self._leave_out("model.", dict.fromkeys(left_out))
        if isinstance(sequence_length, int) and "max_position_embeddings" in known:
            config.setdefault("max_position_embeddings", sequence_length)
        return {"config": config}, sequence_length

    def _config_keys(self, kind: object) -> set[str]:
        try:
            return config_keys(str(kind))
        except KeyError as error:
            path = ("model", "model_config", "model_type")
            says = f"expected a model type of transformers, got {kind!r}"
            raise self._document.error(path, says) from error

    def _training(self) -> dict[str, Any]:
        training: dict[str, Any] = {}
        for key, value in self._section("runner_config").items():
            if key not in _TRAINING_KEYS:
                self._leave_out("runner_config.", {key: value})
            elif value is not None and (key != "stop_step" or value):
                training[_TRAINING_KEYS[key]] = value
        for key in ("output_dir", "seed"):
            if self._left.get(key) is not None:
                training[key] = self._left.pop(key)
        self._accumulate_pipeline(training)
        evaluates = self._left.pop("do_eval", False)
        steps, epochs = map(self._interval, ("eval_step_interval", "eval_epoch_interval"))
        if evaluates:
            keys, notes = evaluation(steps, epochs, training)
            training |= keys
            self.notes += notes
        return training

    def _accumulate_pipeline(self, training: dict[str, Any]) -> None:
        parallel = self._left.get("parallel_config")
        if not isinstance(parallel, dict) or not isinstance(parallel.get("micro_batch_num"), int):
            return
        stages, number = parallel.get("pipeline_stage"), parallel["micro_batch_num"]
        if isinstance(stages, int) and stages > 1 and number > 1:
            training["gradient_accumulation_steps"] = number
            self.notes.append(
                "parallel_config.micro_batch_num: becomes training.gradient_accumulation_steps"
            )

    def _shard_accumulation(self, training: dict[str, Any], *, has_local_norms: bool) -> None:
        key, parallel = "parallel_optimizer_config", self._left.get("parallel")
        settings = parallel.get(key) if isinstance(parallel, dict) else None
        if not isinstance(settings, dict):
            return
        if settings.get("gradient_accumulation_shard") is not True:
            return
        name = f"parallel.{key}.gradient_accumulation_shard"
        if has_local_norms and training.get("gradient_accumulation_steps", 1) != 1:
            self.notes.append(f"{name}: left out, because it excludes local norms")
            return
        accumulation = {"sync_each_batch": True}
        training["accelerator_config"] = {"gradient_accumulation_kwargs": accumulation}
        self.notes.append(f"{name}: becomes training.accelerator_config")
        # Name the keys that are left out one by one, because one of their siblings is used.
        section = self._section("parallel")
        optimizer = self._section(key, section)
        del optimizer["gradient_accumulation_shard"]
        self._leave_out("parallel.", section)
        self._leave_out(f"parallel.{key}.", optimizer)

    def _interval(self, name: str) -> int | None:
        value = self._left.pop(name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._document.error((name,), f"expected an integer, got {value!r}")
        return value

    def _wrapper(self) -> dict[str, Any]:
        wrapper = self._section("runner_wrapper")
        if wrapper.get("type") in {"MFPipelineWithLossScaleCell", "pipeline_wrapper"}:
            wrapper["type"] = "MFTrainOneStepCell"
            self.notes.append(
                "runner_wrapper.type: changed to MFTrainOneStepCell, which has no pipeline"
            )
        if wrapper.pop("micro_batch_num", None) is not None:
            self.notes.append("runner_wrapper.micro_batch_num: left out")
        for key in ("use_skip_data_by_global_norm", "calculate_per_token_loss"):
            if self._left.pop(key, False):
                wrapper[key] = True
        return wrapper


def convert_embedding_threshold(sections: Mapping[str, Any]) -> list[str]:
    """Replace the limit of the squared embedding norm with its square root, and return notes."""
    key = "embedding_local_norm_threshold"
    notes = []
    for callback in _callbacks(sections):
        if isinstance(callback.get(key), (int, float)) and callback[key] > 0:
            callback[key] = math.sqrt(callback[key])
            notes.append(f"callbacks: {key} converted from the squared norm to the norm")
    return notes


_LOSS_FLAGS = frozenset({"log_loss_scale_to_tensorboard", "log_timers_to_tensorboard"})
"""Keys of ``tensorboard`` that are arguments of `MFLossMonitor`."""


def move_tensorboard(sections: dict[str, Any], tensorboard: Mapping[str, Any]) -> list[str]:
    """Pass the settings of MindFormers' section ``tensorboard`` to the monitors; return notes.

    Args:
        sections: Sections of the recipe, changed in place.
        tensorboard: The section; empty if the file has none.
    """
    settings = dict(tensorboard)
    folder = settings.pop("tensorboard_dir", None)
    if not settings.pop("tensorboard_on", True):
        return ["tensorboard: left out, because tensorboard_on is false"]
    if not isinstance(folder, str) or not folder:
        return ["tensorboard: left out, because it has no tensorboard_dir"] if tensorboard else []
    passed: set[str] = set()
    writers = []
    for callback in _callbacks(sections):
        if callback.get("type") == "MFLossMonitor":
            passed |= _LOSS_FLAGS & settings.keys()
            callback |= {key: settings[key] for key in sorted(passed)}
        if callback.get("type") in {"MFLossMonitor", "TrainingStateMonitor"}:
            writers.append(callback)
    if _is_on(sections["monitor_config"]):
        writers.append(sections["monitor_config"])
    if not writers:
        return ["tensorboard: left out, because no monitor writes to it"]
    for writer in writers:
        writer.setdefault("tensorboard_dir", folder)
    return [f"tensorboard.{key}: left out" for key in settings if key not in passed]


def add_nan_check(sections: dict[str, Any]) -> None:
    """Turn on the monitor's nan check; add `TrainingStateMonitor` if ``monitor_config`` is off."""
    key = "check_for_nan_in_loss_and_grad"
    if _is_on(sections["monitor_config"]):
        sections["monitor_config"] |= {key: True}
    else:
        monitor = {"type": "TrainingStateMonitor", key: True}
        sections["callbacks"] = [*(sections["callbacks"] or []), monitor]


def _callbacks(sections: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (each for each in sections["callbacks"] or [] if isinstance(each, dict))


def _is_on(monitor_config: object) -> bool:
    return isinstance(monitor_config, dict) and bool(monitor_config.get("monitor_on"))


_DEFAULT_STEPS = 100
"""MindFormers' ``eval_step_interval`` if it is missing or 0."""


def evaluation(
    steps: int | None, epochs: int | None, training: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of ``training`` that set evaluation at MindFormers' intervals, and notes.

    Args:
        steps: MindFormers' ``eval_step_interval``; < 0 for no evaluation by steps. ``None`` and 0
            stand for MindFormers' default, unless `epochs` is > 0.
        epochs: MindFormers' ``eval_epoch_interval``; <= 0 or ``None`` for no evaluation by epochs.
        training: Other keys of the section ``training``.
    """
    by_steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": steps or _DEFAULT_STEPS}
    if epochs is None or epochs <= 0:
        if by_steps["eval_steps"] > 0:
            return by_steps, []
        return {}, ["training: no evaluation interval is > 0; evaluates once, at the end"]
    if steps is not None and steps > 0:
        return by_steps, ["eval_epoch_interval: left out, because eval_step_interval is set"]
    keys, notes = _by_epochs(epochs, training)
    if not steps:
        says = f"left out (default {_DEFAULT_STEPS}), because eval_epoch_interval is set"
        notes.append(f"eval_step_interval: {says}")
    return keys, notes


def _by_epochs(epochs: int, training: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    note = "eval_epoch_interval: "
    if epochs == 1:
        return {"eval_strategy": "epoch"}, []
    length = training.get("num_train_epochs")
    if not isinstance(length, int) or length < 1 or "max_steps" in training:
        return {"eval_strategy": "epoch"}, [f"{note}evaluates every epoch, not every {epochs}"]
    if epochs >= length:
        return {}, [f"{note}the training has {length} epochs; evaluates once, at the end"]
    share = epochs / length
    # The Trainer multiplies the share by the length of the training, and rounds up to whole steps.
    # If floating point had rounded the share up, each evaluation would be one step too late.
    if Fraction(share) > Fraction(epochs, length):
        share = math.nextafter(share, 0)
    says = f"{note}becomes eval_steps, a share of the training ({epochs} of {length} epochs)"
    return {"eval_strategy": "steps", "eval_steps": share}, [says]
