"""The table of tasks: what a recipe can train, and what each task needs."""

import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from transformers import (
    AutoModel,
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
    MODEL_MAPPING_NAMES,
)

from mfwrap.compatibility.other_trainers import ExactRewards
from mfwrap.recipes.data.built_in import (
    DiabetesSource,
    DigitsSource,
    DocstringsSource,
    PackageDocstringsSource,
    PythonTokensSource,
    PythonTopicsSource,
)
from mfwrap.recipes.data.columns import (
    IMAGE,
    INSTRUCTIONS,
    LABEL,
    LABELS,
    NUMBER,
    NUMBERS,
    PAIRS,
    TEXT,
    WORDS,
    Columns,
)
from mfwrap.recipes.data.conversations import PROMPTS
from mfwrap.recipes.data.files import (
    JsonLinesSource,
    JsonSource,
    ParquetSource,
    TableSource,
    TextSource,
)
from mfwrap.recipes.data.forms import PREFERENCES, TUNING, Form
from mfwrap.recipes.data.images import ImageFolderSource
from mfwrap.recipes.data.library import DatasetsSource
from mfwrap.recipes.data.mindformers import MindFormersSource
from mfwrap.recipes.data.source import DataSource, Rows
from mfwrap.recipes.models.perceptron import PerceptronConfig
from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.recipes.tasks.embedding import build_embedding
from mfwrap.recipes.tasks.language import build_causal_lm
from mfwrap.recipes.tasks.prediction import (
    build_image_classification,
    build_regression,
    build_sequence_classification,
    build_token_classification,
)
from mfwrap.recipes.tasks.prompts import build_prompts
from mfwrap.recipes.tasks.tuning import build_tuning
from mfwrap.trainer import MFTrainer, MFTrainerMixin

SOURCES: Mapping[str, type[DataSource]] = MappingProxyType(
    {
        "csv": TableSource,
        "datasets": DatasetsSource,
        "diabetes": DiabetesSource,
        "digits": DigitsSource,
        "docstrings": DocstringsSource,
        "image_folder": ImageFolderSource,
        "json": JsonSource,
        "json_lines": JsonLinesSource,
        "mindformers": MindFormersSource,
        "package_docstrings": PackageDocstringsSource,
        "parquet": ParquetSource,
        "python_tokens": PythonTokensSource,
        "python_topics": PythonTopicsSource,
        "text": TextSource,
        "tsv": TableSource,
    }
)
"""Sources of data by their ``type`` in a recipe."""


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """A task that a recipe can train a model for, and how to build its Trainer."""

    needs: tuple[Columns, ...]
    """Alternative sets of columns of the data; the first set whose columns all exist is used."""

    build: Callable[[ModelSettings, DataSource, Rows], dict[str, Any]]
    """Builds the Trainer's keyword arguments: model, data sets, collator, tokenizer and metrics."""

    forms: tuple[Form, ...] = ()
    """Forms of rows that the task recognizes by their columns, those of `needs`; empty for a task
    with one form of rows."""

    hub_task: str
    """The hub's name of the task. For texts, it is also the name of a pipeline of transformers."""

    options: frozenset[str] = frozenset()
    """Optional keys of the section ``data`` that this task accepts, but not every other task."""

    sections: frozenset[str] = frozenset()
    """Sections of `OWN_SECTIONS` that a recipe of this task has."""

    library: str = "transformers"
    """Library that loads the saved model; adapters are loaded by PEFT."""

    classes: str | None = None
    """Column with a class, or a list of classes, in each row; ``None`` for a task without them."""

    uses_tokenizer: bool = True
    """Whether the recipe may set ``model.tokenizer``."""

    auto_class: Any = None
    """Class of transformers that builds the model; ``None`` for a `Perceptron`."""

    trainer: Callable[[], type[Any]] = lambda: MFTrainer
    """Returns the class of the Trainer, with MindFormers' step."""

    arguments: Callable[[], type[TrainingArguments]] = lambda: TrainingArguments
    """Returns the class whose fields are the keys of the section ``training``."""

    needs_reference: bool = False
    """Whether the Trainer compares the model with a copy from before the training."""

    gets_texts: bool = False
    """Whether the Trainer gets the texts themselves, and tokenizes them in each step."""

    takes_peft: bool = False
    """Whether the Trainer applies a PEFT adapter itself."""

    peft_task_type: str | None = None
    """PEFT's name of the task; ``None`` if PEFT has none."""

    mindformers_trainers: frozenset[str] = frozenset()
    """MindFormers' ``trainer.type`` and ``trainer.task_name`` for this task."""

    @property
    def has_targets(self) -> bool:
        """Whether each row has targets of its own, so that a loss belongs to a row."""
        return not (self.needs_reference or self.gets_texts)

    @property
    def takes_conversations(self) -> bool:
        """Whether rows may be conversations, which a chat template writes as texts."""
        return bool(self.forms) or self.needs is PROMPTS

    def needs_of(self, data: DataSource) -> tuple[Columns, ...]:
        """Return `needs`, or the columns of the section's ``template``."""
        return self.needs if data.template is None else (INSTRUCTIONS,)

    def model_types(self) -> frozenset[str]:
        """Return the model types that can be trained from random weights."""
        if self.auto_class is None:
            return frozenset({PerceptronConfig.model_type})
        return frozenset(_MODELS[self.auto_class])


_MODELS: Mapping[Any, Collection[str]] = {
    AutoModel: MODEL_MAPPING_NAMES,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForImageClassification: MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    AutoModelForTokenClassification: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}
"""Model types that each class of transformers can build."""


OWN_SECTIONS: Mapping[str, bool] = MappingProxyType(
    {"loss": False, "reward": True, "teacher": True}
)
"""Sections that only some tasks have, and whether these tasks need them."""


def _class_of(library: str, extra: str, name: str) -> type[Any]:
    """Return a class of a library that is part of an extra.

    Raises:
        ImportError: If the library is not installed, or its release lacks the class.
    """
    try:
        found: type[Any] = getattr(importlib.import_module(library), name)
    except (AttributeError, ImportError) as error:
        msg = f'needs {name} of {library}; install it with pip install -U "mfwrap[{extra}]"'
        raise ImportError(msg) from error
    return found


_trl_class = functools.partial(_class_of, "trl", "recipes")
_encoder_class = functools.partial(_class_of, "sentence_transformers", "embeddings")


def _with_step(
    find: Callable[[str], type[Any]], name: str, *mixins: type[Any]
) -> Callable[[], type[Any]]:
    """Return a function that makes a subclass of a Trainer with MindFormers' step."""
    methods = {"create_model_card": _write_no_card}
    return lambda: type(f"MF{name}", (MFTrainerMixin, *mixins, find(name)), methods)


def _write_no_card(*args: Any, **kwargs: Any) -> None:
    """Write no card of TRL into run folder and checkpoints: the run's models have their own."""
    del args, kwargs


_trl_trainer = functools.partial(_with_step, _trl_class)


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "causal_lm": Task(
            needs=({"text": TEXT},),
            build=build_causal_lm,
            hub_task="text-generation",
            auto_class=AutoModelForCausalLM,
            options=frozenset(
                {"packing", "separate_texts", "sequence_length", "targets", "template"}
            ),
            peft_task_type="CAUSAL_LM",
            mindformers_trainers=frozenset({"CausalLanguageModelingTrainer", "text_generation"}),
        ),
        "supervised_tuning": Task(
            needs=tuple(form.columns for form in TUNING),
            build=functools.partial(build_tuning, TUNING),
            forms=TUNING,
            hub_task="text-generation",
            auto_class=AutoModelForCausalLM,
            trainer=_trl_trainer("SFTTrainer"),
            arguments=lambda: _trl_class("SFTConfig"),
            takes_peft=True,
            peft_task_type="CAUSAL_LM",
        ),
        "preference_tuning": Task(
            needs=tuple(form.columns for form in PREFERENCES),
            build=functools.partial(build_tuning, PREFERENCES),
            forms=PREFERENCES,
            hub_task="text-generation",
            auto_class=AutoModelForCausalLM,
            trainer=_trl_trainer("DPOTrainer"),
            arguments=lambda: _trl_class("DPOConfig"),
            needs_reference=True,
            takes_peft=True,
            peft_task_type="CAUSAL_LM",
        ),
        "reward_tuning": Task(
            needs=PROMPTS,
            build=build_prompts,
            hub_task="text-generation",
            auto_class=AutoModelForCausalLM,
            sections=frozenset({"reward"}),
            trainer=_trl_trainer("GRPOTrainer", ExactRewards),
            arguments=lambda: _trl_class("GRPOConfig"),
            gets_texts=True,
            takes_peft=True,
            peft_task_type="CAUSAL_LM",
        ),
        "distillation": Task(
            needs=PROMPTS,
            build=build_prompts,
            hub_task="text-generation",
            auto_class=AutoModelForCausalLM,
            sections=frozenset({"teacher"}),
            trainer=_trl_trainer("DistillationTrainer"),
            arguments=lambda: _trl_class("DistillationConfig"),
            gets_texts=True,
            takes_peft=True,
            peft_task_type="CAUSAL_LM",
        ),
        "sequence_classification": Task(
            needs=({"text": TEXT, "label": LABEL},),
            build=build_sequence_classification,
            hub_task="text-classification",
            classes="label",
            auto_class=AutoModelForSequenceClassification,
            options=frozenset({"sequence_length"}),
            peft_task_type="SEQ_CLS",
            mindformers_trainers=frozenset(
                {"TextClassificationTrainer", "sequence_classification", "text_classification"}
            ),
        ),
        "token_classification": Task(
            needs=({"tokens": WORDS, "labels": LABELS},),
            build=build_token_classification,
            hub_task="token-classification",
            classes="labels",
            auto_class=AutoModelForTokenClassification,
            options=frozenset({"sequence_length"}),
            peft_task_type="TOKEN_CLS",
            mindformers_trainers=frozenset({"TokenClassificationTrainer", "token_classification"}),
        ),
        "embedding": Task(
            needs=PAIRS,
            build=build_embedding,
            hub_task="sentence-similarity",
            auto_class=AutoModel,
            library="sentence-transformers",
            options=frozenset({"sequence_length"}),
            sections=frozenset({"loss"}),
            trainer=_with_step(_encoder_class, "SentenceTransformerTrainer"),
            arguments=lambda: _encoder_class("SentenceTransformerTrainingArguments"),
            gets_texts=True,
        ),
        "image_classification": Task(
            needs=({"image": IMAGE, "label": LABEL},),
            build=build_image_classification,
            hub_task="image-classification",
            classes="label",
            options=frozenset({"image_size"}),
            auto_class=AutoModelForImageClassification,
            uses_tokenizer=False,
            mindformers_trainers=frozenset({"ImageClassificationTrainer", "image_classification"}),
        ),
        "regression": Task(
            needs=({"features": NUMBERS, "target": NUMBER},),
            build=build_regression,
            hub_task="tabular-regression",
            library="mfwrap",
            uses_tokenizer=False,
        ),
    }
)
"""Tasks by their name in a recipe."""
