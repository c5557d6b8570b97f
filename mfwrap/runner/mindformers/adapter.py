"""Convert MindFormers' ``pet_config`` and ``lora_config`` to a recipe's section ``peft``."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from mfwrap.runner.document import Path, shown
from mfwrap.runner.mindformers.rate_groups import MODEL_TYPES, mindformers_name, network_of
from mfwrap.runner.mindformers.source import SourceFile

_PATH: Path = ("model", "model_config", "pet_config")


class _Names(NamedTuple):
    """Names of a network's linear layers."""

    layers: Mapping[str, tuple[str, ...]]
    """transformers' layers by the path of cells in MindFormers; several if MindFormers has one
    layer for all of them."""

    parameters: Mapping[str, str]
    """transformers' modules outside of the layers, by the name of the parameter in MindFormers."""


_LLAMA = _Names(
    {
        "layers/attention/wq": ("q_proj",),
        "layers/attention/wk": ("k_proj",),
        "layers/attention/wv": ("v_proj",),
        "layers/attention/wo": ("o_proj",),
        "layers/feed_forward/w1": ("gate_proj",),
        "layers/feed_forward/w2": ("down_proj",),
        "layers/feed_forward/w3": ("up_proj",),
    },
    {"model.tok_embeddings.embedding_weight": "embed_tokens", "lm_head.weight": "lm_head"},
)
_FUSED_LLAMA = _Names(
    {
        "layers/attention/w_qkv": ("q_proj", "k_proj", "v_proj"),
        "layers/attention/wo": ("o_proj",),
        "layers/feed_forward/w_gate_hidden": ("gate_proj", "up_proj"),
        "layers/feed_forward/w2": ("down_proj",),
    },
    _LLAMA.parameters,
)
_QWEN = _Names(
    _LLAMA.layers,
    {"transformer.wte.embedding_weight": "embed_tokens", "lm_head.weight": "lm_head"},
)
_GLM = _Names(
    {
        "encoder/layers/self_attention/query_key_value": ("q_proj", "k_proj", "v_proj"),
        "encoder/layers/self_attention/dense": ("o_proj",),
        "encoder/layers/mlp/dense_h_to_4h": ("gate_up_proj",),
        "encoder/layers/mlp/dense_4h_to_h": ("down_proj",),
    },
    {"transformer.embedding.embedding_weight": "embed_tokens"},
)
_SPLIT_GLM = _Names(
    {
        "encoder/layers/self_attention/wq": ("q_proj",),
        "encoder/layers/self_attention/wk": ("k_proj",),
        "encoder/layers/self_attention/wv": ("v_proj",),
        **{path: names for path, names in _GLM.layers.items() if len(names) == 1},
    },
    _GLM.parameters,
)
_NAMES: Mapping[tuple[str, bool], _Names] = {
    ("Baichuan7BV2ForCausalLM", False): _LLAMA,
    ("Baichuan7BV2ForCausalLM", True): _FUSED_LLAMA,
    ("ChatGLM2ForConditionalGeneration", False): _SPLIT_GLM,
    ("ChatGLM2ForConditionalGeneration", True): _GLM,
    ("InternLM2ForCausalLM", False): _LLAMA,
    ("InternLM2ForCausalLM", True): _FUSED_LLAMA,
    ("InternLMForCausalLM", False): _LLAMA,
    ("LlamaForCausalLM", False): _LLAMA,
    ("LlamaForCausalLM", True): _FUSED_LLAMA,
    ("QwenForCausalLM", False): _QWEN,
}
"""By MindFormers' class of the network, and whether queries, keys and values share a layer."""

_FUSED_BY_DEFAULT = frozenset({"ChatGLM2ForConditionalGeneration", "InternLM2ForCausalLM"})
"""Networks in which queries, keys and values share a layer if ``qkv_concat`` is missing."""

_TYPES = frozenset({"glm", "glm4", "llama", "mistral", "qwen2", "qwen3"})
"""Types of transformers' models with the layers above."""

_TAKEN = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "exclude_layers")
_WITHOUT_EFFECT = (
    "compute_dtype", "in_channels", "lora_a_init", "lora_b_init", "out_channels",
    "param_init_type", "pet_type",
)  # fmt: skip

_WITH_LORA: Mapping[str, tuple[str, str]] = {
    "ChatGLM2WithLora": ("ChatGLM2ForConditionalGeneration", ".*query_key_value*"),
    "GPT2WithLora": ("GPT2LMHeadModel", ".*dense1.*|.*dense3.*"),
    "InternLMForCausalLMWithLora": ("InternLMForCausalLM", ".*wq|.*wk|.*wv|.*wo"),
    "LlamaForCausalLMWithLora": ("LlamaForCausalLM", ".*wq|.*wv"),
}
"""Classes of MindFormers 0.6 that add an adapter themselves: the network, and the layers with an
adapter."""


def take_arch(source: SourceFile, settings: dict[str, Any]) -> str | None:
    """Return MindFormers' class of the network; ``None`` if the file does not name it.

    MindFormers 0.6 has classes of its own for networks with an adapter. For such a class, the
    class without the adapter is returned, and the adapter is set in `settings`.

    Args:
        source: File, whose section ``model.arch`` is taken.
        settings: ``model_config``, whose key ``pet_config`` may be set.

    Raises:
        RecipeError: If the section has an unknown key, or a wrong value.
    """
    section = source.mapping("model", "arch")
    pet = section.get("pet") or {}
    for key in section.keys() - {"auto_register", "pet", "type"}:
        raise source.document.unknown_key(("model", "arch", key), {"pet", "type"})
    if not isinstance(pet, dict):
        says = f"expected a mapping, got {shown(pet)}"
        raise source.document.error(("model", "arch", "pet"), says)
    arch: str | None = section.get("type")
    inner = pet.get("pet_config") or settings.get("pet_config") or {}
    forced = {} if pet.get("pet_type") is None else {"pet_type": pet["pet_type"]}
    if arch is not None and arch in _WITH_LORA:
        arch, rule = _WITH_LORA[arch]
        forced = {"pet_type": "lora", "target_modules": rule}
    if isinstance(inner, dict) and (inner or forced):
        settings["pet_config"] = inner | forced
    return arch


def convert_adapter(
    source: SourceFile, section: Any, arch: str, model_type: str, *, qkv_concat: bool | None
) -> dict[str, Any] | None:
    """Return the section ``peft``; ``None`` if the file, or the recipe, trains all weights.

    Source: MindFormers, ``LoraConfig`` and ``LoraAdapter``.

    Args:
        source: File, for losses and errors.
        section: ``pet_config``; ``None`` if it is missing.
        arch: MindFormers' class of the network.
        model_type: transformers' type of the model.
        qkv_concat: MindFormers' key: one layer for queries, keys and values.

    Raises:
        RecipeError: If the section is not a mapping, has an unknown key, or a wrong value.
    """
    if not section:
        return None
    if not isinstance(section, dict):
        raise source.document.error(_PATH, f"expected a mapping, got {shown(section)}")
    kind = section.get("pet_type")
    is_fused = arch in _FUSED_BY_DEFAULT if qkv_concat is None else qkv_concat
    names = _NAMES.get((arch, is_fused))
    if kind != "lora" or names is None or model_type not in _TYPES:
        what = f"{kind} of {arch or model_type}" if kind == "lora" else f"pet_type {shown(kind)}"
        source.lose("lora", _PATH, f"mfwrap cannot convert {what}; the recipe trains all weights")
        return None
    known = {*_TAKEN, *_WITHOUT_EFFECT, "freeze_include", "freeze_exclude", "reg_rules"}
    for key in section.keys() - known:
        raise source.document.unknown_key((*_PATH, key), known)
    targets = _targets(source, section, names)
    peft = {
        "type": "lora",
        "r": section.get("lora_rank", 8),
        "lora_alpha": section.get("lora_alpha", 16),
        "lora_dropout": section.get("lora_dropout", 0.01),
        "target_modules": [name for fused in targets for name in fused],
    }
    if shared := [list(fused) for fused in targets if len(fused) > 1]:
        peft["shared_a"] = shared
    kept = _not_frozen(source, section, names)
    source.notes.append("pet_config: PEFT's own initialization of the adapter, weights in float32")
    return peft | ({"modules_to_save": kept} if kept else {})


def _targets(
    source: SourceFile, section: Mapping[str, Any], names: _Names
) -> list[tuple[str, ...]]:
    """Return transformers' layers of each of MindFormers' layers that has an adapter."""
    rule = section.get("target_modules", section.get("reg_rules"))
    excluded = section.get("exclude_layers") or []
    excluded = [excluded] if isinstance(excluded, str) else excluded
    try:
        found = [
            theirs
            for path, theirs in names.layers.items()
            if _is_target(path.split("/"), str(rule or ""), excluded)
        ]
    except (TypeError, re.error) as error:
        path = (*_PATH, "target_modules")
        raise source.document.error(path, f"expected regular expressions: {error}") from error
    if rule is None or not found:
        says = f"expected a regular expression that matches one of {sorted(names.layers)}"
        raise source.document.error((*_PATH, "target_modules"), f"{says}, got {shown(rule)}")
    return found


def _is_target(cells: Sequence[str], rule: str, excluded: Sequence[str]) -> bool:
    """Return whether MindFormers gives a layer an adapter.

    MindFormers matches the name of each cell, from the outermost. It enters a cell only if neither
    the rule nor an exclusion matches that cell's name.
    """
    *outer, layer = cells
    if any(re.match(pattern, cell) for cell in cells for pattern in excluded):
        return False
    return not any(re.match(rule, cell) for cell in outer) and bool(re.match(rule, layer))


def _not_frozen(source: SourceFile, section: Mapping[str, Any], names: _Names) -> list[str]:
    """Return the modules outside of the layers that are trained in addition to the adapter."""
    for key in ("freeze_include", "freeze_exclude"):
        value = section.get(key) or []
        known = [
            module
            for name, module in names.parameters.items()
            if any(fnmatch.fnmatchcase(name, str(pattern)) for pattern in value)
        ]
        unknown = [
            pattern
            for pattern in value
            if not any(fnmatch.fnmatchcase(name, str(pattern)) for name in names.parameters)
        ]
        if unknown or (known and key == "freeze_include"):
            says = f"mfwrap cannot convert {key} {shown(value)}"
            source.lose("lora", (*_PATH, key), f"{says}; the recipe freezes all but the adapter")
            return []
    return known


_LORA_CONFIG = "lora_config"


def take_lora_config(
    source: SourceFile, config: Mapping[str, Any], task: str
) -> dict[str, Any] | None:
    """Return the section ``peft`` for a file of the PyNative trainer; ``None`` without an adapter.

    Source: MindFormers, ``mindformers.pynative.pet``, ``build_lora_model`` and ``LinearWithLoRA``.

    Args:
        source: File, whose section ``lora_config`` is taken.
        config: Section ``model.config`` of the recipe.
        task: Task of the recipe.

    Raises:
        RecipeError: If the section has an unknown key or a wrong value, or selects no layer.
    """
    place = _LORA_CONFIG
    if (place,) not in source:
        return None
    rule = source.text(place, "target_modules") or ""
    excluded = source.text(place, "exclude_layers")
    peft: dict[str, Any] = {
        "type": "lora",
        "r": source.integer(place, "lora_rank", default=8),
        "lora_alpha": source.integer(place, "lora_alpha", default=16),
        "lora_dropout": source.number(place, "lora_dropout", default=0.0),
    }
    stds = {
        name: source.number(place, f"lora_{name}", default=default)
        for name, default in (("a_std", 0.01), ("b_std", 0.0))
    }
    source.refuse_left((place,), ("target_modules", "exclude_layers", "lora_rank", "lora_alpha"))
    if config.get("model_type") not in MODEL_TYPES:
        says = f"mfwrap cannot convert the names of the layers of {config.get('model_type')}"
        source.lose("lora", (place, "target_modules"), f"{says}; the recipe trains all weights")
        return None
    network = network_of(config, task)
    layers = [name for name, one in network.named_modules() if isinstance(one, nn.Linear)]
    paths = {name: _pynative_path(name) for name in layers if not _EXPERT.search(name)}
    try:
        chosen = [name for name in paths if _is_pynative_target(paths[name], rule, excluded)]
    except re.error as error:
        says = f"expected regular expressions: {error}"
        raise source.document.error((place, "target_modules"), says) from error
    if not chosen or not rule:
        known = sorted({path.rpartition(".")[2] for path in paths.values()})
        says = f"expected a regular expression that finds the path of one of {known}"
        raise source.document.error((place, "target_modules"), f"{says}, got {shown(rule)}")
    fused: dict[tuple[str, str], list[str]] = {}
    for name in chosen:
        parent, _, own = name.rpartition(".")
        fused.setdefault((parent, paths[name]), []).append(own)
    shared = {tuple(names): None for names in fused.values() if len(names) > 1}
    peft["target_modules"] = _shortened(chosen, layers)
    if shared:
        peft["shared_a"] = [list(names) for names in shared]
    source.notes.append("lora_config: weights of the adapter in float32; experts have no adapter")
    return peft | {name: std for name, std in stds.items() if std or name == "a_std"}


_EXPERT = re.compile(r"\.experts\.\d+\.")


def _pynative_path(layer: str) -> str:
    """Return the path of the cell that has a layer of transformers in the PyNative trainer."""
    return "model." + mindformers_name(f"{layer}.weight").removesuffix(".weight")


def _is_pynative_target(path: str, rule: str, excluded: str | None) -> bool:
    """Return whether a layer gets an adapter: no cell around it is excluded, and the rule fits."""
    cells = path.split(".")
    around = [".".join(cells[:end]) for end in range(1, len(cells) + 1)]
    if excluded and any(re.search(excluded, one) for one in around):
        return False
    return re.search(rule, path) is not None


def _shortened(chosen: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return the last parts of names, or whole names if not all layers of that name are chosen."""
    short: dict[str, None] = {}
    for name in chosen:
        last = name.rpartition(".")[2]
        namesakes = [one for one in layers if one.rpartition(".")[2] == last]
        short[last if {*namesakes} <= {*chosen} else name] = None
    return list(short)
