"""What a recipe can train: the table of tasks."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    TrainingArguments,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from mfwrap.recipes.data.built_in import (
    DiabetesSource,
    DigitsSource,
    DocstringsSource,
    PackageDocstringsSource,
    PythonTokensSource,
    PythonTopicsSource,
)
from mfwrap.recipes.data.columns import (
    check_image_labels,
    check_labelled_texts,
    check_labelled_words,
    check_numbers,
    check_preferences,
    check_texts,
    check_tuning,
)
from mfwrap.recipes.data.files import DatasetsSource, JsonLinesSource, TextSource
from mfwrap.recipes.data.source import DataSource, Rows
from mfwrap.recipes.models.perceptron import PerceptronConfig
from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.recipes.tasks.language import (
    build_causal_lm,
    build_preference_tuning,
    build_supervised_tuning,
)
from mfwrap.recipes.tasks.prediction import (
    build_image_classification,
    build_regression,
    build_sequence_classification,
    build_token_classification,
)
from mfwrap.trainer import MFTrainer, MFTrainerMixin

__all__ = ["SOURCES", "TASKS", "Task"]

SOURCES: Mapping[str, type[DataSource]] = MappingProxyType(
    {
        "datasets": DatasetsSource,
        "diabetes": DiabetesSource,
        "digits": DigitsSource,
        "docstrings": DocstringsSource,
        "json_lines": JsonLinesSource,
        "package_docstrings": PackageDocstringsSource,
        "python_tokens": PythonTokensSource,
        "python_topics": PythonTopicsSource,
        "text": TextSource,
    }
)
"""Sources of data by their ``type`` in a recipe."""


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and how a Trainer for it is built."""

    needs: tuple[frozenset[str], ...]
    """Columns of the data, one of these sets."""

    build: Callable[[ModelSettings, DataSource, Rows], dict[str, Any]]
    """Makes the Trainer's keywords: model, data sets, collator, tokenizer, metrics."""

    check: Callable[[Dataset, Mapping[str, str]], None]
    """Raises `DataError` where a row does not hold what the task takes; is also given the data's
    names of columns by the task's."""

    options: frozenset[str] = frozenset()
    """Keys of the section ``data``, of those for every source, that only this task heeds."""

    uses_tokenizer: bool = True
    """Whether ``model.tokenizer`` is heeded."""

    auto_class: Any = None
    """Class of transformers that makes the model; ``None`` for a `Perceptron`."""

    trainer: Callable[[], type[Any]] = lambda: MFTrainer
    """Returns the class of the Trainer, with the step behind it."""

    arguments: Callable[[], type[TrainingArguments]] = lambda: TrainingArguments
    """Returns the class whose fields the section ``training`` has."""

    needs_reference: bool = False
    """Whether the Trainer compares with the model that it begins from."""

    takes_peft: bool = False
    """Whether the Trainer puts the adapter on by itself."""

    def model_types(self) -> frozenset[str]:
        """Return the kinds of models that can be trained from random weights."""
        if self.auto_class is None:
            return frozenset({PerceptronConfig.model_type})
        return frozenset(_MODELS[self.auto_class])


_MODELS: Mapping[Any, Collection[str]] = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForImageClassification: MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    AutoModelForTokenClassification: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}
"""Kinds of models that each class of transformers can make."""


def _supervised_tuning_trainer() -> type[Any]:
    # TRL takes seconds to import, and is of an extra.
    from trl import SFTTrainer  # noqa: PLC0415

    class SupervisedTuningTrainer(MFTrainerMixin, SFTTrainer):
        """TRL's supervised fine-tuning with the step behind it."""

    return SupervisedTuningTrainer


def _supervised_tuning_arguments() -> type[TrainingArguments]:
    from trl import SFTConfig  # noqa: PLC0415

    arguments: type[TrainingArguments] = SFTConfig
    return arguments


def _preference_tuning_trainer() -> type[Any]:
    from trl import DPOTrainer  # noqa: PLC0415

    class PreferenceTuningTrainer(MFTrainerMixin, DPOTrainer):
        """TRL's direct preference optimisation with the step behind it."""

    return PreferenceTuningTrainer


def _preference_tuning_arguments() -> type[TrainingArguments]:
    from trl import DPOConfig  # noqa: PLC0415

    arguments: type[TrainingArguments] = DPOConfig
    return arguments


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "causal_lm": Task(
            needs=(frozenset({"text"}),),
            build=build_causal_lm,
            check=check_texts,
            auto_class=AutoModelForCausalLM,
            options=frozenset({"sequence_length", "packing"}),
        ),
        "supervised_tuning": Task(
            needs=(
                frozenset({"messages"}),
                frozenset({"prompt", "completion"}),
                frozenset({"text"}),
            ),
            build=build_supervised_tuning,
            check=check_tuning,
            auto_class=AutoModelForCausalLM,
            trainer=_supervised_tuning_trainer,
            arguments=_supervised_tuning_arguments,
            takes_peft=True,
        ),
        "preference_tuning": Task(
            needs=(frozenset({"chosen", "rejected"}),),
            build=build_preference_tuning,
            check=check_preferences,
            auto_class=AutoModelForCausalLM,
            trainer=_preference_tuning_trainer,
            arguments=_preference_tuning_arguments,
            needs_reference=True,
            takes_peft=True,
        ),
        "sequence_classification": Task(
            needs=(frozenset({"text", "label"}),),
            build=build_sequence_classification,
            check=check_labelled_texts,
            auto_class=AutoModelForSequenceClassification,
            options=frozenset({"sequence_length"}),
        ),
        "token_classification": Task(
            needs=(frozenset({"tokens", "labels"}),),
            build=build_token_classification,
            check=check_labelled_words,
            auto_class=AutoModelForTokenClassification,
            options=frozenset({"sequence_length"}),
        ),
        "image_classification": Task(
            needs=(frozenset({"image", "label"}),),
            build=build_image_classification,
            check=check_image_labels,
            auto_class=AutoModelForImageClassification,
            uses_tokenizer=False,
        ),
        "regression": Task(
            needs=(frozenset({"features", "target"}),),
            build=build_regression,
            check=check_numbers,
            uses_tokenizer=False,
        ),
    }
)
"""Tasks by their name in a recipe."""
