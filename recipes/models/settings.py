"""The model of a recipe: a checkpoint, or a configuration with random weights."""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mfwrap.names import hint
from mfwrap.recipes.data.places import check_place, is_folder, not_a_folder, resolve_package
from mfwrap.recipes.data.source import DataError, DataSource, RecipeSection
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.recipes.models.chat_templates import (
    check_template,
    is_on_hub,
    set_template,
)
from mfwrap.recipes.models.checkpoint import (
    TOKENIZER_FILES,
    check_code,
    check_no_adapter,
    check_tokenizer,
    check_weights,
    model_type_of,
)
from mfwrap.recipes.models.image_processor import load_numbers, make_image_processor
from mfwrap.recipes.models.loading import (
    ModelError,
    check_on_hub,
    from_hub,
    load_network,
    load_tokenizer,
    said_by,
)
from mfwrap.recipes.models.perceptron import Perceptron, PerceptronConfig
from mfwrap.recipes.models.quantization import quantization_config
from mfwrap.tensors.embedding_tables import num_embeddings, num_positions

_BYTES = "bytes"
_NEWEST = "main"
_ONE_CLASS = "single_label_classification"

_LEAST_USED = 0.8
"""Smallest share of a model's embeddings that its own tokenizer uses; the others fill up a size."""

"""The ``problem_type`` of a model that gives each row one class."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(RecipeSection):
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

    chat_template: str | None = None
    """Chat template in place of the tokenizer's: ``chatml``; the name of a template that TRL ships,
    such as ``llama3`` or ``qwen3``; a Jinja file; or a tokenizer that has it (a folder or a name on
    the hub). It is saved with the tokenizer. The token that ends an answer becomes the tokenizer's
    end-of-text token."""

    revision: str | None = None
    """Branch, tag or commit of `path` on the hub."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the trained weights."""

    norm_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the weights of normalization layers; by default `dtype`. A scale near 1 in half
    precision ignores steps smaller than about 0.001. Different dtypes need ``bf16`` or ``fp16`` in
    the section ``training``, and FSDP2 refuses them. Weights of `path` are rounded to `dtype`
    first."""

    embedding_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the embeddings, and of the head if it is tied to them; see `norm_dtype`."""

    quantization: dict[str, Any] | None = None
    """Arguments of transformers' ``BitsAndBytesConfig``, for weights of 4 or 8 bits below an
    adapter. The default of ``bnb_4bit_compute_dtype`` is `dtype`."""

    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = (
        None
    )
    """Implementation of attention; by default the choice of transformers."""

    trust_remote_code: bool = False
    """Run Python code from the folder or the hub repository of `path` and `tokenizer`. If False,
    a model or tokenizer that needs such code is refused."""

    def __post_init__(self) -> None:
        """Check that the settings name exactly one model, and that its folder can be loaded."""
        self._check_source()
        if self.config is not None:
            self._check_config(self.config)
        if self.path is not None:
            self._check_folder("path", self.path, ("config.json",), "a model folder")
        if self.tokenizer is not None and self.tokenizer != _BYTES:
            self._check_folder(
                "tokenizer", self.tokenizer, TOKENIZER_FILES, "a folder with a tokenizer"
            )
        if self.quantization is not None:
            quantization_config(self.quantization, self.dtype)
        if self.chat_template is not None:
            check_template(self.chat_template)
        if self.revision is not None and self.path is None:
            msg = f"`revision` needs `path`, got revision {self.revision!r} and no path"
            raise ValueError(msg)

    def _check_source(self) -> None:
        """Check that the settings name exactly one model."""
        if (self.path is None) == (self.config is None):
            got = "neither" if self.path is None else "both"
            msg = f"`path` must be set if `config` is not, and left out if it is, got {got}"
            raise ValueError(msg)

    @property
    def model_type(self) -> str | None:
        """Type of the model; ``None`` for a checkpoint on the hub, or one with code of its own."""
        if self.config is not None:
            return str(self.config["model_type"])
        folder = self.folder()
        if folder is None or self.trust_remote_code:
            return None
        return model_type_of("path", folder)

    @property
    def num_labels(self) -> int | None:
        """Number of classes that `config` sets; ``None`` if it follows from the data."""
        config = self.config or {}
        names, number = config.get("id2label"), config.get("num_labels")
        return len(names) if isinstance(names, dict) else number

    @property
    def obstacle(self) -> str | None:
        """Why model and tokenizer cannot be built without a network; ``None`` if they can."""
        for setting, name in (("path", self.path), ("tokenizer", self.tokenizer)):
            if name not in {None, _BYTES} and not is_folder(resolve_package("", str(name))):
                return f"`model.{setting}` names a model on the hub: {not_a_folder(str(name))}"
        if self.chat_template is not None and is_on_hub(self.chat_template):
            return f"`model.chat_template` names a tokenizer on the hub: {self.chat_template}"
        return None

    def check_names(self) -> None:
        """Check that the hub has model and tokenizer, if they are names on the hub.

        Raises:
            ModelError: If it has not, or does not answer.
        """
        for setting, name in (("path", self.path), ("tokenizer", self.tokenizer)):
            if name is not None and name != _BYTES:
                check_on_hub(setting, resolve_package(setting, name))

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """Build or load the tokenizer, with a padding token.

        Raises:
            ModelError: If something cannot be loaded from the hub, if the checkpoint's
                configuration is faulty, if the tokenizer has neither a padding token nor one that
                ends a text, or if `chat_template` does not fit it.
        """
        setting = "path" if self.tokenizer is None else "tokenizer"
        if self.path is not None:
            self.saved_config()  # read before the tokenizer, which would be blamed for its faults
        name = resolve_package(setting, getattr(self, setting) or _BYTES)
        tokenizer: PreTrainedTokenizerBase
        if name == _BYTES:
            tokenizer = byte_tokenizer()
        else:
            tokenizer = load_tokenizer(
                setting,
                name,
                trust_remote_code=self.trust_remote_code,
                revision=self.revision or _NEWEST,
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if self.chat_template is not None:
            try:
                with from_hub("chat_template", self.chat_template):
                    set_template(tokenizer, self.chat_template)
            except ValueError as error:
                raise ModelError(str(error)) from error
        if tokenizer.pad_token is None:
            msg = (
                f"`{setting}` must have a tokenizer with a padding or an end token, got one with "
                "neither; set eos_token, which ends a text, and pad_token in its "
                "tokenizer_config.json, or copy that file from the model it was made of"
            )
            raise ModelError(msg)
        return tokenizer

    def check_channels(self, number: int) -> None:
        """Check that images have as many channels as the model takes, if that is known.

        Args:
            number: Number of channels of an image.

        Raises:
            ModelError: If the model takes another number.
        """
        if self.path is not None:
            key, wanted = "path", num_channels_of(self.saved_config())
        else:
            key, wanted = "config.num_channels", (self.config or {}).get("num_channels")
        if wanted not in {None, number}:
            of = "" if self.path is None else "a model with num_channels "
            msg = (
                f"`{key}` must be {of}{number}, as many channels as the images have, got {wanted}; "
                "image files get three channels by data.image_size"
            )
            raise ModelError(msg)

    def make_image_processor(self, image: Any, size: int | None) -> Any:
        """Return the image processor: with the checkpoint's numbers, or one that scales to [-1, 1].

        Args:
            image: One of the images; see `mfwrap.recipes.models.image_processor.pixel_values`.
            size: Width and height to which images are scaled; ``None`` to leave them as they are.

        Raises:
            ModelError: If that of the checkpoint cannot be loaded, or does not fit the image.
        """
        numbers = None
        if self.path is not None:
            numbers = load_numbers(
                resolve_package("path", self.path),
                trust_remote_code=self.trust_remote_code,
                revision=self.revision or _NEWEST,
            )
        return make_image_processor(numbers, image, size)

    def make_model(self, auto_class: Any, **implied: Any) -> nn.Module:
        """Build or load the model.

        Args:
            auto_class: Class of transformers, for example ``AutoModelForCausalLM``; ``None`` for a
                `Perceptron`.
            implied: Keys of the configuration that follow from the data. `config` takes precedence.
        """
        settings: dict[str, Any] = {"dtype": getattr(torch, self.dtype)}
        if self.attn_implementation is not None:
            settings["attn_implementation"] = self.attn_implementation
        try:
            network = self._built(auto_class, settings, implied)
        except ImportError as error:
            if self.attn_implementation is None:
                raise
            said = " ".join(str(error).split())
            msg = (
                f"`attn_implementation` cannot be {self.attn_implementation!r} on this machine; "
                f"leave it out, or set it to 'sdpa'; transformers says: {said}"
            )
            raise ModelError(msg) from error
        # transformers keeps a checkpoint's own `label2id`, of other classes than those of the data.
        config: Any = getattr(network, "config", None)
        if names := getattr(config, "id2label", None):
            config.label2id = {name: number for number, name in names.items()}
        self.convert_parts(network)
        return network

    def _built(
        self, auto_class: Any, settings: dict[str, Any], implied: dict[str, Any]
    ) -> nn.Module:
        if self.path is not None:
            return self._loaded(resolve_package("path", self.path), auto_class, settings, implied)
        if isinstance(config := self._configuration(implied), PerceptronConfig):
            perceptron = Perceptron(config)
            for layers in (perceptron.layers, perceptron.head):
                layers.to(settings["dtype"])  # mean and deviation of the data stay float32
            return perceptron
        network: nn.Module = auto_class.from_config(config, **settings)
        if self.quantization is not None and next(network.parameters()).device.type != "meta":
            network = self._quantized(network, auto_class, settings)
        return network

    def convert_parts(self, network: nn.Module) -> None:
        """Convert the weights of norms and embeddings, but not their results.

        Autocast would convert the results for the next layer, but not for a sum, and not in float16
        on a CPU. Source: MindFormers, ``LlamaRMSNorm`` and ``LlamaEmbedding``. Tied weights stay
        tied.
        """
        for module in network.modules():
            if isinstance(module, nn.Embedding):
                dtype = self.embedding_dtype
            elif "Norm" in type(module).__name__ and not any(module.children()):
                dtype = self.norm_dtype
            else:
                continue
            if dtype is not None and dtype != self.dtype:
                module.to(getattr(torch, dtype))
                result = getattr(torch, self.dtype) if isinstance(module, nn.Embedding) else None
                module.register_forward_hook(functools.partial(_cast_result, dtype=result))
        head = getattr(network, "get_output_embeddings", lambda: None)()
        if self.embedding_dtype not in {None, self.dtype} and isinstance(head, nn.Linear):
            head.register_forward_pre_hook(_cast_input)

    def _quantized(self, network: Any, auto_class: Any, settings: dict[str, Any]) -> Any:
        """Return a network with quantized weights; transformers quantizes only while it loads."""
        with tempfile.TemporaryDirectory(prefix="mfwrap-") as folder:
            network.save_pretrained(folder)
            loaded: Any = self._loaded(folder, auto_class, settings, {})
        loaded.name_or_path = loaded.config.name_or_path = ""  # saved with an adapter
        return loaded

    def _loaded(
        self, path: str, auto_class: Any, settings: dict[str, Any], implied: dict[str, Any]
    ) -> nn.Module:
        # The checkpoint determines vocabulary and sizes, but the labels follow from the data.
        about_labels = {k: v for k, v in implied.items() if k in {"num_labels", "id2label"}}
        if auto_class is not None:
            settings["trust_remote_code"] = self.trust_remote_code
        if self.quantization is not None:
            settings["quantization_config"] = quantization_config(self.quantization, self.dtype)
        if about_labels:
            _check_problem(self.saved_config())
        try:
            return load_network(
                path,
                (auto_class or Perceptron).from_pretrained,
                revision=self.revision or _NEWEST,
                **settings,
                **about_labels,
            )
        except (ImportError, ModelError):
            raise
        except Exception:
            if self.path is not None and auto_class is not None:
                self._check_can_be_built(auto_class)
            raise

    def _check_can_be_built(self, auto_class: Any) -> None:
        """Raise `ModelError` if the checkpoint's configuration is one of no network."""
        config = self.saved_config()
        with _naming_config(str(self.path)), torch.device("meta"):
            auto_class.from_config(config, trust_remote_code=self.trust_remote_code)

    def _configuration(self, implied: dict[str, Any]) -> PreTrainedConfig:
        given = dict(self.config or {})
        kind = given.pop("model_type")
        known = config_keys(kind)
        if "id2label" in given or self.num_labels not in {None, implied.get("num_labels")}:
            # The names of the classes in the data are not those of the model.
            implied = {key: value for key, value in implied.items() if "label" not in key}
        settings = {k: v for k, v in implied.items() if k in known or k in _OF_ALL} | given
        config: PreTrainedConfig = AutoConfig.for_model(kind, **settings)
        return config

    def weightless(self) -> "ModelSettings":
        """Return the model without memory for its weights, to prepare data for it."""
        return WeightlessModel.of(self)

    def count_parameters(self, auto_class: Any) -> int:
        """Return the number of weights, without allocating memory for them.

        For a folder, the number is estimated from the size of the files, at four bytes per weight.

        Args:
            auto_class: See `make_model`.
        """
        folder = self.folder()
        if folder is not None:
            return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 4
        with torch.device("meta"):
            network = self.make_model(auto_class)
        return sum(parameter.numel() for parameter in network.parameters())

    def saved_config(self) -> Any:
        """Return the configuration of the checkpoint `path`; it must be set.

        Raises:
            ModelError: If it cannot be loaded.
        """
        path = resolve_package("path", str(self.path))
        check_on_hub("path", path)
        with _naming_config(path), from_hub("path", path):
            return AutoConfig.from_pretrained(
                path,
                trust_remote_code=self.trust_remote_code,
                revision=self.revision or _NEWEST,
            )

    def class_names(self) -> list[str]:
        """Return the names of the checkpoint's classes, in the order of the rows of its head.

        The list is empty without a checkpoint, and for one with the names that transformers gives
        to classes without a name.
        """
        return [] if self.path is None else _class_names(self.saved_config())

    def order_of_classes(self, network: Any) -> str | None:
        """Say the order of the classes; ``None`` if it does not follow from the checkpoint.

        Args:
            network: The model that `make_model` has made, for the classes of the data.
        """
        kind = type(network).__name__
        if self.path is None or not kind.endswith("Classification"):
            return None
        saved, names = self.saved_config(), _class_names(network.config)
        if kind not in (saved.architectures or ()) or names == sorted(names):
            return None
        if _without_case(names) != _without_case(_class_names(saved)):
            return None
        return f"the classes have the order of the head of {self.path!r}: {', '.join(names):.200}"

    def other_head(self, network: Any) -> str | None:
        """Say that the head of a classifier is new, or was trained for classes of other names.

        Args:
            network: The model that `make_model` has made, for the classes of the data.

        Returns:
            One sentence; ``None`` if the network has the head of its checkpoint and its classes.
        """
        kind = type(network).__name__
        if self.path is None or not kind.endswith("Classification"):
            return None
        saved, number = self.saved_config(), network.config.num_labels
        if kind not in (saved.architectures or ()):
            return None
        if saved.num_labels != number:
            return (
                f"model.path: {self.path!r} has a head for {saved.num_labels} classes, and the "
                f"data have {number}, so the head starts from random numbers; that is right for "
                "new classes"
            )
        before, now = _class_names(saved), _class_names(network.config)
        if not before or _without_case(before) == _without_case(now):
            return None
        return (
            f"model.path: {self.path!r} has a head for the classes {', '.join(before):.200}, and "
            f"the data have {', '.join(now):.200}, so the rows of the head go on as the classes of "
            "the data, in this order; if they are the same classes, name them in the data as the "
            "checkpoint does"
        )

    def other_tokenizer(self, network: Any, tokenizer: Any) -> str | None:
        """Say that a checkpoint has far more tokens than its tokenizer, which may be another's.

        Args:
            network: The model.
            tokenizer: Its tokenizer, or what processes other inputs.

        Returns:
            One sentence; ``None`` if the numbers fit, or one of them is unknown.
        """
        number = num_embeddings(network)
        if (
            self.path is None
            or number is None
            or not isinstance(tokenizer, PreTrainedTokenizerBase)
        ):
            return None
        if len(tokenizer) >= _LEAST_USED * number:
            return None
        return (
            f"model.path: {self.path!r} has embeddings of {number:,} tokens, and its tokenizer "
            f"has {len(tokenizer):,}; if it is the tokenizer of another model, nothing that the "
            "weights have learned fits"
        )

    def folder(self) -> Path | None:
        """Return the folder of the checkpoint; ``None`` if it is on the hub."""
        folder = None if self.path is None else resolve_package("path", self.path)
        return Path(folder) if folder is not None and is_folder(folder) else None

    def _check_folder(self, setting: str, name: str, files: Collection[str], content: str) -> None:
        """Check a folder with a model or a tokenizer, or the form of a name on the hub."""
        name = resolve_package(setting, name)
        if setting == "path" and is_folder(name):
            check_no_adapter(setting, Path(name))
        check_place(setting, name, files, content)
        if not is_folder(name):
            return
        if not self.trust_remote_code:
            check_code(setting, Path(name))
        if setting == "tokenizer" or self.tokenizer is None:
            check_tokenizer(setting, Path(name))
        if setting == "path":
            check_weights(setting, Path(name))
            _ = self.model_type

    def _check_config(self, config: dict[str, Any]) -> None:
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            says = f"must be a model type of transformers, got {kind!r}{hint(kind, CONFIG_MAPPING)}"
            msg = f"`config.model_type` {says}"
            raise ValueError(msg)
        known = config_keys(kind) | _OF_ALL | {"model_type"}
        for key, value in config.items():
            if key == "num_labels" and not (isinstance(value, int) and value >= 2):
                msg = f"`config.num_labels` must be >= 2, the number of classes, got {value!r:.80}"
                raise ValueError(msg)
            if key == "problem_type" and value not in {None, _ONE_CLASS}:
                says = f"{_ONE_CLASS!r} (the only kind in recipes) or left out"
                msg = f"`config.problem_type` must be {says}, got {value!r:.80}"
                raise ValueError(msg)
            if key not in known:
                msg = f"`config.{key}` is not a key of {kind!r} models{hint(key, known)}"
                raise ValueError(msg)
            counts = not key.endswith("_size")  # a width: `shared_expert_intermediate_size`
            limit = next((most for name, most in _LIMITS.items() if counts and name in key), None)
            numbers = value if isinstance(value, list) else [value]
            if limit is not None and any(isinstance(n, int) and n > limit for n in numbers):
                msg = f"`config.{key}` must be <= {limit}, got {value!r:.80}"
                raise ValueError(msg)


@final
@dataclass(frozen=True, kw_only=True)
class WeightlessModel(ModelSettings):
    """A model without memory for its weights, on the meta device."""

    checkpoint: ModelSettings | None = None
    """The model itself, which has a checkpoint; ``None`` for a model with random weights."""

    def __post_init__(self) -> None:
        """Check nothing: the settings are those of a model that was checked."""

    @classmethod
    def of(cls, model: ModelSettings) -> "WeightlessModel":
        """Return a model with the same configuration, the same tokenizer and the same classes.

        A checkpoint's configuration is read, its weights are not.
        """
        given = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        if model.path is None:
            return cls(**given)
        found = model.saved_config().to_dict()
        known = (config_keys(found["model_type"]) | {"model_type"}) - _OF_ALL
        given["config"] = {key: value for key, value in found.items() if key in known}
        given["tokenizer"] = model.path if model.tokenizer is None else model.tokenizer
        return cls(**given | {"path": None, "revision": None, "checkpoint": model})

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer; see `ModelSettings.make_tokenizer`."""
        return (
            super().make_tokenizer()
            if self.checkpoint is None
            else self.checkpoint.make_tokenizer()
        )

    def check_channels(self, number: int) -> None:
        """Check the number of channels; see `ModelSettings.check_channels`."""
        if self.checkpoint is None:
            super().check_channels(number)
        else:
            self.checkpoint.check_channels(number)

    def make_image_processor(self, image: Any, size: int | None) -> Any:
        """Return the image processor; see `ModelSettings.make_image_processor`."""
        if self.checkpoint is None:
            return super().make_image_processor(image, size)
        return self.checkpoint.make_image_processor(image, size)

    def class_names(self) -> list[str]:
        """Return the names of the checkpoint's classes; see `ModelSettings.class_names`."""
        return [] if self.checkpoint is None else self.checkpoint.class_names()

    def make_model(self, auto_class: Any, **implied: Any) -> nn.Module:
        """Build the model; see `ModelSettings.make_model`."""
        with torch.device("meta"):
            return super().make_model(auto_class, **implied)


@contextlib.contextmanager
def _naming_config(path: str) -> Iterator[None]:
    """Convert an error of transformers about a checkpoint's configuration to a `ModelError`."""
    try:
        yield
    except (ImportError, ModelError):
        raise
    except Exception as error:  # what is wrong with a value has any type
        says = f"must be a model whose config.json transformers accepts, got {path!r:.200}"
        msg = f"`path` {says}: {said_by(error)}"
        raise ModelError(msg) from error


def _cast_result(
    _: nn.Module, inputs: tuple[torch.Tensor, ...], result: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """Convert the result of a layer to a dtype, or for ``None`` to that of its input."""
    return result.to(inputs[0].dtype if dtype is None else dtype)


def _cast_input(layer: nn.Linear, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Convert the input of a linear layer to the dtype of its weight."""
    return inputs[0].to(layer.weight.dtype)


def make_text_model(
    model: ModelSettings, auto_class: Any, tokenizer: PreTrainedTokenizerBase, **implied: Any
) -> nn.Module:
    """Build or load a model for a tokenizer.

    Args:
        model: Section ``model``.
        auto_class: See `ModelSettings.make_model`.
        tokenizer: Tokenizer of the model.
        implied: Keys of the configuration that follow from the data.

    Raises:
        ModelError: If the tokenizer has tokens that the model does not have, or if a language model
            is an encoder.
    """
    num_tokens = len(tokenizer)
    given = model.config or {}
    size, padding = given.get("vocab_size", num_tokens), given.get("pad_token_id")
    if isinstance(size, int) and size < num_tokens:
        msg = f"`config.vocab_size` must be >= {num_tokens}, as many as the tokenizer, got {size}"
        raise ModelError(msg)
    if isinstance(padding, int) and isinstance(size, int) and padding >= size:
        msg = f"`config.pad_token_id` must be < {size}, the size of the vocabulary, got {padding}"
        raise ModelError(msg)
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    vocabulary = {"vocab_size": num_tokens} | {name: getattr(tokenizer, name) for name in names}
    network = model.make_model(auto_class, **implied, **vocabulary)
    is_own_code = model.path is None and model.config is None  # it may mask as it likes
    if auto_class is AutoModelForCausalLM and not is_own_code:
        _check_is_causal(model, network)
    number = num_embeddings(network)
    is_own = model.path is None and model.tokenizer is None
    if number is not None and number < num_tokens and not is_own:
        says = f"at most {number} tokens, as many as the model"
        msg = f"`tokenizer` must have {says}, got {num_tokens}; {_ADDED_TOKENS}"
        if model.tokenizer is None:
            says = f"a vocab_size of at least {num_tokens}, as many tokens as its tokenizer"
            todo = f"give it its own tokenizer, or {_ADDED_TOKENS}"
            msg = f"`path` must be a model with {says}, got {number}; {todo}"
        raise ModelError(msg)
    return network


_ADDED_TOKENS = (
    "if you have added tokens, call `model.resize_token_embeddings(len(tokenizer))`, save the "
    "model, and name its folder in `path`"
)


def _check_is_causal(model: ModelSettings, network: Any) -> None:
    """Raise `ModelError` if a causal language model sees the tokens that it must predict.

    transformers builds one of an encoder, too, such as BERT, and only logs that it should be a
    decoder.
    """
    config = getattr(network, "config", None)
    is_of_encoders = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    if not is_of_encoders or getattr(config, "is_decoder", True):
        return
    says = "must be a decoder, such as a Llama, whose tokens do not see those that follow"
    kind = f"the encoder {type(network).__name__}"
    if model.path is None:
        msg = f"`config.model_type` {says}, got {kind}; or set config.is_decoder to true"
    else:
        msg = f"`path` {says}, got {kind} (is_decoder is false in its config.json)"
    raise ModelError(msg)


def num_channels_of(config: Any) -> int | None:
    """Return the number of channels of the images that a model takes; ``None`` if it is unknown."""
    for part in (config, getattr(config, "vision_config", None)):
        number = getattr(part, "num_channels", None)
        if isinstance(number, int):
            return number
    return None


def _check_problem(config: Any) -> None:
    """Refuse a classifier whose configuration has another loss than that of the task."""
    kind = getattr(config, "problem_type", None)
    if kind not in {None, _ONE_CLASS}:
        says = f"a model that gives each row one class, got problem_type {kind!r:.80}"
        todo = "to train it on one class per row, set problem_type to null there"
        msg = f"`path` must be {says} in its config.json; {todo}"
        raise ModelError(msg)


def _class_names(config: Any) -> list[str]:
    """Return the names of the classes of a configuration; an empty list if they have none."""
    names = getattr(config, "id2label", None) or {}
    found = [str(names[number]) for number in sorted(names)]
    return [] if found == [f"LABEL_{number}" for number in range(len(found))] else found


def _without_case(names: Collection[str]) -> list[str]:
    return [name.casefold() for name in names]


_LIMITS = {"layer": 1_000, "depth": 1_000, "block": 1_000, "expert": 1_000, "num_labels": 100_000}
"""Largest numbers that a recipe may set, by a part of the key. They are above the sizes of any real
model. transformers builds layers, experts and labels one by one, so a number with a few digits too
many would take hours."""

_OF_ALL = frozenset({"num_labels", "id2label", "label2id", "problem_type"})
"""Keys that every configuration has."""


_WITH_HEAD_DIM = frozenset({"glm4_moe", "qwen2", "qwen2_moe", "qwen3_moe"})
"""Model types that read ``head_dim`` from their configuration, whose class does not declare it."""


def config_keys(kind: str) -> set[str]:
    """Return the keys of a model type's configuration, with their aliases.

    Args:
        kind: ``model_type`` of transformers or of a `Perceptron`.

    Raises:
        KeyError: If the model type is unknown.
    """
    if kind == PerceptronConfig.model_type:
        return {"num_features", "hidden_size", "num_hidden_layers", "standardize"}
    config_class: Any = CONFIG_MAPPING[kind]
    undeclared = {"head_dim"} if kind in _WITH_HEAD_DIM else set()
    declared = {field.name for field in dataclasses.fields(config_class)}
    return declared | undeclared | {*config_class.attribute_map}


_DEFAULT_LENGTH = 512


def fitting_length(data: DataSource, network: nn.Module) -> int:
    """Return the maximum number of tokens in a sequence.

    This is ``data.sequence_length`` if it is set, otherwise 512 or the number of the model's
    positions, whichever is smaller.

    Raises:
        DataError: If ``data.sequence_length`` is larger than the number of positions.
    """
    if data.sequence_length is None:
        limit = num_positions(network)
        return _DEFAULT_LENGTH if limit is None else min(_DEFAULT_LENGTH, limit)
    check_length(data.sequence_length, network)
    return data.sequence_length


def check_length(length: int, network: nn.Module) -> None:
    """Check that a model has enough positions for sequences of a length.

    A model with rotary or relative positions has no limit.

    Raises:
        DataError: If `length` is larger than the number of positions.
    """
    limit = num_positions(network)
    if limit is not None and length > limit:
        said = getattr(getattr(network, "config", None), "max_position_embeddings", None)
        msg = (
            f"`sequence_length` must be <= {limit}, the number of positions of this model "
            f"(max_position_embeddings {said}), got {length}"
        )
        raise DataError(msg)
