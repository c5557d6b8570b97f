"""The model of a recipe: a checkpoint, or a configuration with random weights."""

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mfwrap.names import hint
from mfwrap.recipes.data.source import DataError, DataSource, Section
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.recipes.models.perceptron import Perceptron, PerceptronConfig

_BYTES = "bytes"
_PACKAGE = "package:"

_PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@final
@dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """The section ``model``.

    Raises:
        ValueError: If both or neither of `path` and `config` are set, or `config` has a key that
            its model does not know.
    """

    path: str | None = None
    """Checkpoint to start from: a name on the Hugging Face hub, a folder, or
    ``package:name/folder`` for a folder of an installed package. (The package is not imported.)"""

    config: dict[str, Any] | None = None
    """Configuration of a model with random weights: ``model_type`` and the keys of that type."""

    tokenizer: str | None = None
    """Name on the hub, folder, or ``bytes`` for one token per byte. The default is the
    checkpoint's tokenizer if `path` is set, and ``bytes`` if `config` is set."""

    revision: str | None = None
    """Branch, tag or commit of `path` on the hub."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the trained weights."""

    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = (
        None
    )
    """Implementation of attention; by default the choice of transformers."""

    def __post_init__(self) -> None:
        """Check that the settings name exactly one model."""
        if (self.path is None) == (self.config is None):
            got = "neither" if self.path is None else "both"
            msg = f"`path` must be set if `config` is not, and left out if it is, got {got}"
            raise ValueError(msg)
        if self.config is not None:
            self._check_config(self.config)
        for name in ("path", "tokenizer"):
            _place(name, getattr(self, name))
        if self.revision is not None and self.path is None:
            msg = f"`revision` needs `path`, got revision {self.revision!r} and no path"
            raise ValueError(msg)

    @property
    def model_type(self) -> str | None:
        """Type of a model with random weights; ``None`` for a checkpoint."""
        return None if self.config is None else self.config["model_type"]

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """Build or load the tokenizer, with a padding token."""
        name = _place("tokenizer", self.tokenizer) or _place("path", self.path) or _BYTES
        if name == _BYTES:
            return byte_tokenizer()
        revision = {} if self.revision is None else {"revision": self.revision}
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **revision)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def make_model(self, auto_class: Any, **implied: Any) -> nn.Module:
        """Build or load the model.

        Args:
            auto_class: Class of transformers, for example ``AutoModelForCausalLM``; ``None`` for a
                `Perceptron`.
            implied: Keys of the configuration that follow from the data. `config` takes precedence.
        """
        settings: dict[str, Any] = {"dtype": _PRECISIONS[self.dtype]}
        if self.attn_implementation is not None:
            settings["attn_implementation"] = self.attn_implementation
        if self.path is not None:
            return self._loaded(auto_class, settings, implied)
        config = self._configuration(implied)
        if isinstance(config, PerceptronConfig):
            network: nn.Module = Perceptron(config)
            network.to(settings["dtype"])
        else:
            network = auto_class.from_config(config, **settings)
        return network

    def _loaded(
        self, auto_class: Any, settings: dict[str, Any], implied: dict[str, Any]
    ) -> nn.Module:
        # The checkpoint determines vocabulary and sizes, but the labels follow from the data.
        about_labels = {k: v for k, v in implied.items() if k in {"num_labels", "id2label"}}
        if self.revision is not None:
            settings["revision"] = self.revision
        if about_labels:
            settings["ignore_mismatched_sizes"] = True
        loader = auto_class if auto_class is not None else Perceptron
        model: nn.Module = loader.from_pretrained(
            _place("path", self.path), **settings, **about_labels
        )
        return model

    def _configuration(self, implied: dict[str, Any]) -> PreTrainedConfig:
        given = dict(self.config or {})
        kind = given.pop("model_type")
        known = config_keys(kind)
        settings = {k: v for k, v in implied.items() if k in known or k in _OF_ALL} | given
        if kind == PerceptronConfig.model_type:
            return PerceptronConfig(**settings)
        config: PreTrainedConfig = AutoConfig.for_model(kind, **settings)
        return config

    def _check_config(self, config: dict[str, Any]) -> None:
        kind = config.get("model_type")
        kinds = [*CONFIG_MAPPING, PerceptronConfig.model_type]
        if not isinstance(kind, str) or kind not in kinds:
            says = f"must be a model type of transformers, got {kind!r}{hint(kind, kinds)}"
            msg = f"`config.model_type` {says}"
            raise ValueError(msg)
        known = config_keys(kind) | _OF_ALL | {"model_type"}
        for key in config:
            if key not in known:
                msg = f"`config.{key}` is not a key of {kind!r} models{hint(key, known)}"
                raise ValueError(msg)


def _place(setting: str, name: str | None) -> str | None:
    """Return the folder to which ``package:name/folder`` refers; return any other name unchanged.

    Raises:
        ValueError: If the package is not installed, or does not have the folder.
    """
    if name is None or not name.startswith(_PACKAGE):
        return name
    package, _, inner = name.removeprefix(_PACKAGE).partition("/")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    for place in (found.submodule_search_locations or []) if found is not None else []:
        folder = Path(place) / inner
        if folder.is_dir():
            return str(folder)
    msg = f"`{setting}` must be a folder of an installed package; {name!r} does not exist"
    raise ValueError(msg)


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the settings of a model's configuration that follow from a tokenizer."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {"vocab_size": len(tokenizer)} | {name: getattr(tokenizer, name) for name in names}


_OF_ALL = frozenset({"num_labels", "id2label", "label2id", "problem_type"})
"""Keys that every configuration has."""


def config_keys(kind: str) -> set[str]:
    """Return the keys of a model type's configuration, with their aliases.

    Args:
        kind: ``model_type`` of transformers or of a `Perceptron`.

    Raises:
        KeyError: If the model type is unknown.
    """
    if kind == PerceptronConfig.model_type:
        return {"num_features", "hidden_size", "num_hidden_layers"}
    config_class: Any = CONFIG_MAPPING[kind]
    return {field.name for field in dataclasses.fields(config_class)} | {
        *config_class.attribute_map
    }


_DEFAULT_LENGTH = 512
_TABLES = frozenset(
    {
        "embed_positions",
        "pos_embed",
        "pos_embeddings",
        "position_embedding",
        "position_embeddings",
        "positions_embed",
        "wpe",
    }
)
"""Names that models of transformers give to their embedding of absolute positions."""


def fitting_length(data: DataSource, network: nn.Module) -> int:
    """Return the maximum number of tokens in a sequence.

    This is ``data.sequence_length`` if it is set, otherwise 512 or the number of the model's
    positions, whichever is smaller.

    Raises:
        DataError: If ``data.sequence_length`` is larger than the number of positions.
    """
    if data.sequence_length is None:
        limit = _num_positions(network)
        return _DEFAULT_LENGTH if limit is None else min(_DEFAULT_LENGTH, limit)
    check_length(data.sequence_length, network)
    return data.sequence_length


def check_length(length: int, network: nn.Module) -> None:
    """Check that a model has enough positions for sequences of a length.

    A model with rotary or relative positions has no limit.

    Raises:
        DataError: If `length` is larger than the number of positions.
    """
    limit = _num_positions(network)
    if limit is not None and length > limit:
        said = getattr(getattr(network, "config", None), "max_position_embeddings", None)
        msg = (
            f"`sequence_length` must be <= {limit}, the number of positions of this model "
            f"(max_position_embeddings {said}), got {length}"
        )
        raise DataError(msg)


def _num_positions(network: nn.Module) -> int | None:
    tables = [
        module
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    if not tables:
        return None
    # In some models' table of positions, the first position has the row after the padding row. The
    # rows up to and including the padding row are then unused. Other models have spare rows, so the
    # configured number of positions takes precedence if it is smaller.
    sizes = [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for table in tables
    ]
    said: Any = getattr(getattr(network, "config", None), "max_position_embeddings", None)
    return min([*sizes, said]) if isinstance(said, int) else min(sizes)
