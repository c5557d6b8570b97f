"""Convert a ``model_config`` by the class that MindFormers builds from it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from mfwrap.recipes.models.settings import ModelSettings, config_keys
from mfwrap.recipes.tasks.table import TASKS
from mfwrap.runner.document import Path, shown
from mfwrap.runner.mindformers.architectures.core import convert_core
from mfwrap.runner.mindformers.architectures.core_experts import take_bias_rate
from mfwrap.runner.mindformers.architectures.deepseek import (
    convert_deepseek_v2,
    convert_deepseek_v3,
)
from mfwrap.runner.mindformers.architectures.encoders import (
    convert_bert,
    convert_swin,
    convert_vit,
)
from mfwrap.runner.mindformers.architectures.glm import convert_glm
from mfwrap.runner.mindformers.architectures.gpt import (
    convert_bloom,
    convert_gpt2,
    convert_t5,
    convert_wizard_coder,
)
from mfwrap.runner.mindformers.architectures.keys import Keys
from mfwrap.runner.mindformers.architectures.llama import (
    convert_baichuan2,
    convert_early_internlm,
    convert_internlm,
    convert_internlm2,
    convert_llama,
    convert_qwen,
)
from mfwrap.runner.mindformers.architectures.vocabulary import CORE_NO_EFFECT, EXPERTS_NO_EFFECT
from mfwrap.runner.mindformers.source import SourceFile

_Convert = Callable[[Keys, Keys], dict[str, Any]]
"""Converts the keys of ``model_config`` and of ``moe_config``."""


class _Family(NamedTuple):
    """A class of configurations of MindFormers."""

    convert: _Convert
    networks: tuple[str, ...]
    """Values of ``arch.type`` that name the network that is converted."""


def _dense(convert: Callable[[Keys], dict[str, Any]]) -> _Convert:
    """Return a converter of a network whose experts, if the file has any, are not converted."""

    def converted(keys: Keys, moe: Keys) -> dict[str, Any]:
        if moe.peek_size("expert_num", 1) > 1:
            says = "expected 1: transformers has no such network with experts"
            moe.refuse("expert_num", says)
        return convert(keys)

    return converted


_FAMILIES: Mapping[str, _Family] = {
    "BertConfig": _Family(
        _dense(convert_bert),
        (
            "BertForMultipleChoice",
            "BertForPreTraining",
            "BertForQuestionAnswering",
            "BertForTokenClassification",
            "BertModel",
        ),
    ),
    "BloomConfig": _Family(_dense(convert_bloom), ("BloomLMHeadModel",)),
    "ChatGLM32kConfig": _Family(_dense(convert_glm), ("ChatGLM32kForConditionalGeneration",)),
    "ChatGLM2Config": _Family(_dense(convert_glm), ("ChatGLM2ForConditionalGeneration",)),
    "DeepseekV2Config": _Family(convert_deepseek_v2, ("DeepseekV2ForCausalLM",)),
    "DeepseekV3Config": _Family(
        convert_deepseek_v3, ("DeepseekV3ForCausalLM", "TrainingDeepseekV3ForCausalLM")
    ),
    "GPT2Config": _Family(
        _dense(convert_gpt2), ("GPT2ForSequenceClassification", "GPT2LMHeadModel")
    ),
    "InternLM2Config": _Family(convert_internlm2, ("InternLM2ForCausalLM",)),
    "InternLMConfig": _Family(convert_internlm, ("InternLMForCausalLM",)),
    "LlamaConfig": _Family(
        convert_llama, ("LlamaForCausalLM", "ParallelLlamaForCausalLM", "ParallelQwenForCausalLM")
    ),
    "QwenConfig": _Family(convert_qwen, ("ParallelQwenForCausalLM", "QwenForCausalLM")),
    "SwinConfig": _Family(_dense(convert_swin), ("SwinForImageClassification",)),
    "T5Config": _Family(_dense(convert_t5), ("T5ForConditionalGeneration",)),
    "ViTConfig": _Family(_dense(convert_vit), ("ViTForImageClassification",)),
    "WizardCoderConfig": _Family(_dense(convert_wizard_coder), ("WizardCoderLMHeadModel",)),
}

_BY_NETWORK: Mapping[tuple[str, str | None], _Convert] = {
    ("BertConfig", "BertForTokenClassification"): _dense(partial(convert_bert, tags_tokens=True)),
    ("LlamaConfig", "Baichuan7BV2ForCausalLM"): convert_baichuan2,
    ("LlamaConfig", "InternLMForCausalLM"): convert_early_internlm,
}
"""Networks that read the keys of a class differently; the one of InternLM before release 1.0."""

_NO_NETWORK = {
    "Baichuan13BForCausalLM": "Baichuan 13B (ALiBi)",
    "Baichuan13BV2ForCausalLM": "Baichuan 2 13B (ALiBi, normalized output weights)",
    "BloomRewardModel": "Bloom with a reward head",
    "ChatGLM2WithPtuning2": "ChatGLM with prefix tuning",
    "GLMConfig": "ChatGLM 1",
    "IFlytekSparkConfig": "iFlytek Spark",
    "PanguAlphaConfig": "PanGu-alpha",
    "TelechatConfig": "TeleChat",
    "YiZhaoConfig": "YiZhao",
    "telechat2": "TeleChat 2",
    "telechat3": "TeleChat 3",
}
"""Networks that transformers does not have, by ``arch.type``, ``type`` or ``model_type``."""


_CORE_KINDS: Mapping[str, str] = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4Config": "glm4",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeConfig": "glm4_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Qwen2Config": "qwen2",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3Config": "qwen3",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeConfig": "qwen3_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""``model_type`` for a ``type`` or ``architectures`` of MindFormers' core."""


def convert_model(
    source: SourceFile,
    settings: Mapping[str, Any],
    path: Path,
    network: str | None,
    task: str,
    experts: Mapping[str, Any],
) -> dict[str, Any]:
    """Convert a ``model_config`` to the section ``model.config`` of a recipe.

    Args:
        source: The file, which gets the losses and the keys without effect.
        settings: The file's ``model_config``.
        path: Place of `settings` in the file.
        network: MindFormers' class of the network; ``None`` if the file does not name it.
        task: Task of the recipe.
        experts: The file's section ``moe_config``; if it is empty, that in `settings` counts.

    Raises:
        RecipeError: If transformers has no such network, a value is wrong, or no class of
            MindFormers reads a key.
    """
    if not settings and network is None:
        says = "expected a section model with model_config; if MindFormers merges several files"
        says = f"{says} (base_config), import the merged file"
        raise source.document.error(("model",), says)
    keys = Keys(source, settings, path)
    experts_path = ("moe_config",) if experts else (*path, "moe_config")
    moe = Keys(source, experts or keys.mapping("moe_config"), experts_path)
    name, kind = keys.value("type"), keys.value("model_type")
    for asked in (network, name, kind):
        if isinstance(asked, str) and asked in _NO_NETWORK:
            says = f"transformers has no class for {_NO_NETWORK[asked]}"
            keys.refuse("type", f"{says}; expected one of {sorted(_FAMILIES)}")
    _lose_quantization(keys)
    if isinstance(name, str) and name in _FAMILIES:
        family, of_network = _FAMILIES[name], _BY_NETWORK.get((name, network))
        if not (network is None or of_network or network in family.networks):
            says = f"expected a network of {sorted(family.networks)} for {name}"
            raise source.document.error(("model", "arch"), f"{says}, got {shown(network)}")
        is_mixture = moe.peek_size("expert_num", 1) > 1
        config = (of_network or family.convert)(keys, moe)
        keys.refuse_unknown()
        if is_mixture:
            moe.refuse_unknown(EXPERTS_NO_EFFECT)
    else:
        kind = _core_kind(keys, name, kind)
        config = convert_core(keys, kind, config_keys(kind))
        keys.refuse_unknown(CORE_NO_EFFECT)
    dense, layers = config.get("first_k_dense_replace"), config.get("num_hidden_layers")
    # Values of other types are refused when the recipe is checked.
    if isinstance(dense, int) and isinstance(layers, int) and dense >= layers:
        keys.move_biases(None)  # no layer has experts
    if TASKS[task].classes is None:
        config.pop("num_labels", None)
    return config


def lose_overriding_keys(source: SourceFile, settings: Mapping[str, Any], path: Path) -> None:
    """Sort the ``model_config`` of a file that names a checkpoint with its own ``config.json``.

    MindFormers lets the file override the checkpoint's configuration; a recipe does not. Each key
    that describes the network is therefore part of a loss.

    Args:
        source: The file, which gets the loss and the keys without effect.
        settings: The file's ``model_config``.
        path: Place of `settings` in the file.
    """
    keys = Keys(source, settings, path)
    # How biases move is a part of the training, and no key of the checkpoint's configuration.
    rate = take_bias_rate(keys, is_enabled=False)
    if rate is not None:
        keys.move_biases(rate)
    if names := keys.unknown(CORE_NO_EFFECT):
        says = f"the file sets {', '.join(names)} over the checkpoint's config.json"
        keys.lose("architecture", names[0], f"{says}; the recipe trains the checkpoint as it is")


def num_parameters(source: SourceFile, config: Mapping[str, Any], path: Path, task: str) -> int:
    """Return the number of parameters of a model, without allocating memory for them.

    Args:
        source: The file, for errors.
        config: Section ``model.config`` of a recipe.
        path: Place of the model in the file.
        task: Task of the recipe, which determines the model's head.

    Raises:
        RecipeError: If transformers cannot build the model.
    """
    try:
        return ModelSettings(config=dict(config)).count_parameters(TASKS[task].auto_class)
    except Exception as error:
        # transformers raises errors of many types for sizes that do not fit together.
        says = f"transformers cannot build this {config.get('model_type')}: {error}"
        raise source.document.error(path, says) from error


def _lose_quantization(keys: Keys) -> None:
    for key in ("quant", "quant_config", "quantization_config", "quantization_bit"):
        if keys.value(key):
            says = f"{key} quantizes the weights; the recipe trains them unquantized"
            keys.lose("quantization", key, says)


def _core_kind(keys: Keys, name: object, kind: object) -> str:
    """Return the model type of a ``model_config`` in transformers' own names."""
    named = keys.value("architectures", name)
    if isinstance(named, list) and len(named) == 1:
        (named,) = named
    kind = kind or (_CORE_KINDS.get(named) if isinstance(named, str) else None)
    if name is not None and str(name) not in _CORE_KINDS:
        says = f"expected one of {sorted(_FAMILIES)}, the classes that transformers has"
        keys.refuse("type", f"{says}, too, got {shown(name)}")
    if not isinstance(kind, str):
        says = f"expected type (one of {sorted(_FAMILIES)}) or model_type (of transformers)"
        keys.refuse("type", f"{says}, got neither")
    try:
        config_keys(kind)
    except KeyError:
        says = f"expected a model type of transformers, got {shown(kind)}"
        keys.refuse("model_type", says)
    return kind
