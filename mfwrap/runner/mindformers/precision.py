"""Convert MindFormers' dtypes to the dtype of weights and the Trainer's mixed precision."""

from collections.abc import Mapping
from typing import Any

from mfwrap.runner.document import Path, shown
from mfwrap.runner.mindformers.source import SourceFile

_SECTION = ("model", "model_config")
_DTYPES = ("float32", "bfloat16", "float16")
_WEIGHTS = ("param_init_type", "params_dtype", "param_init_dtype", "dtype", "torch_dtype")
_COMPUTE = ("compute_dtype", "compute_type")
_EMBEDDINGS = ("embedding_init_type",)
_NORMS = ("layernorm_compute_type", "layernorm_compute_dtype", "layernorm_dtype")
_PARTS = frozenset({
    "moe_router_dtype", "res_dtype", "residual_dtype", "rotary_dtype", "router_dense_type",
    "softmax_compute_dtype", "softmax_compute_type", "softmax_dtype",
})  # fmt: skip
_DEFAULTS: Mapping[str, tuple[str, str]] = {
    "BertConfig": ("float32", "float16"),
    "BloomConfig": ("float32", "float16"),
    "GPT2Config": ("float32", "float16"),
    "MaeConfig": ("float32", "float32"),
    "SwinConfig": ("float32", "float32"),
    "T5Config": ("float32", "float32"),
    "ViTConfig": ("float32", "float32"),
}
"""Default dtypes of weights and computations, by MindFormers' class. Source: these classes."""

_OF_OTHER_CLASSES = ("float16", "float16")
_OF_THE_CORE = ("float32", "bfloat16")
"""Defaults of MindFormers' core of 2025, whose files name no class."""

_FLAGS: Mapping[str, str] = {"float16": "fp16", "bfloat16": "bf16"}


def take_precision(
    source: SourceFile, settings: dict[str, Any], place: Path = _SECTION
) -> tuple[dict[str, str], dict[str, bool]]:
    """Return the keys of the recipe's sections ``model`` and ``training`` that set dtypes.

    Args:
        source: File, for notes, losses and errors.
        settings: ``model_config``, whose keys about dtypes are taken.
        place: Place of `settings` in the file.

    Raises:
        RecipeError: If a dtype is not float32, bfloat16 or float16.
    """
    kind: str | None = settings.get("type")
    defaults = _OF_THE_CORE if kind is None else _DEFAULTS.get(kind, _OF_OTHER_CLASSES)
    weights = _take(source, settings, place, _WEIGHTS) or defaults[0]
    compute = _take(source, settings, place, _COMPUTE) or defaults[1]
    norms = _take_norms(source, settings, place, kind, weights)
    embeddings = _take(source, settings, place, _EMBEDDINGS) or weights
    parts = {"norm_dtype": norms, "embedding_dtype": embeddings}
    parts = {key: dtype for key, dtype in parts.items() if dtype != weights}
    _take_parts(source, settings, place)
    if compute == "float32" and {weights, *parts.values()} != {"float32"}:
        half = " and ".join(sorted({weights, *parts.values()} - {"float32"}))
        says = f"the file computes in float32 with weights in {half}; the recipe in {weights}"
        source.lose("precision", (*place, "compute_dtype"), says)
        parts = {}
    flag = _FLAGS.get(compute)
    return {"dtype": weights, **parts}, {} if flag is None else {flag: True}


def _take_norms(
    source: SourceFile, settings: dict[str, Any], place: Path, kind: str | None, weights: str
) -> str:
    """Return the dtype of the weights of norms.

    Source: MindFormers. Its root mean square norms have their weights in the dtype in which they
    compute; its ``LayerNorm`` has them in float32; its core of 2025, in the dtype of all weights.
    """
    if kind is None:
        source.without_effect += [
            ".".join(map(str, (*place, key)))
            for key in _NORMS
            if settings.pop(key, None) is not None
        ]
        return weights
    return _take(source, settings, place, _NORMS) or "float32"


def _take(
    source: SourceFile, settings: dict[str, Any], place: Path, keys: tuple[str, ...]
) -> str | None:
    found = {key: settings.pop(key) for key in keys if settings.get(key) is not None}
    for key, value in found.items():
        if value not in _DTYPES:
            says = f"expected one of {list(_DTYPES)}, got {shown(value)}"
            raise source.document.error((*place, key), says)
    return next(iter(found.values()), None)


def _take_parts(source: SourceFile, settings: dict[str, Any], place: Path) -> None:
    """Take the dtypes of parts of the network: torch's autocast chooses these dtypes itself."""
    parts = {key: settings.pop(key) for key in list(settings) if key in _PARTS}
    halved = sorted(key for key, value in parts.items() if value in ("float16", "bfloat16"))
    if halved:
        says = "torch computes these parts in the dtype that autocast chooses, mostly float32"
        source.notes.append(f"{'.'.join(map(str, place))}: {', '.join(halved)}: {says}")
    source.without_effect += [".".join(map(str, (*place, key))) for key in parts.keys() - {*halved}]
