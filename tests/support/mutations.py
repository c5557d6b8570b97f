"""Mutate the values of recipes and rows, and the bytes of files."""

import copy
import random
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

Path = tuple[Any, ...]

MINDFORMERS = {
    "runner_wrapper": {
        "type": "MFTrainOneStepCell",
        "scale_sense": {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": 1024,
            "scale_factor": 2,
            "scale_window": 3,
        },
        "use_clip_grad": True,
        "max_grad_norm": 1.0,
        "local_norm": True,
    },
    "lr_schedule": {"type": "CosineWithWarmUpLR", "lr_end": 1e-3, "warmup_steps": 0},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8},
    "ema": {"decay": 0.9, "warmup": True},
    "callbacks": [{"type": "MFLossMonitor", "per_print_times": 2}],
    "monitor_config": {"monitor_on": True, "step_interval": 1, "weight_state_format": "jsonl"},
}
"""All sections that MindFormers has, too."""

_NUMBERS = [0, -1, 1, 2, 3, 7, 10**12, -(10**12), 0.5, 1.5, 1e38, 1e308]
_NOT_FINITE = [float("inf"), -float("inf"), float("nan")]
_TEXTS = [
    "",
    "x",
    "no",
    "bytes",
    "../..",
    "/etc",
    "1e-3",
    "a: b",
    "MFLossMonitor",
    "ä",
    "a\0b",
    "~",
]
_NESTED = [[], [1, "a"], {}, {"type": "x"}, {"type": ["x"]}, {"a": {"b": [None]}}, [[]], [{}], [1]]
_VALUES = [None, True, False, *_NUMBERS, *_NOT_FINITE, *_TEXTS, *_NESTED]
_MADE_UP = ["extra", "learning_rates", "decay_", "typ", "type", "<<", "hub_token", "path"]
_BYTES = [
    *rb"\xff|\0|{|}|\"|\n|\ud800|: |&a |*a|<<: |- |\t|NaN|#".split(b"|"),
    *(b"\xff", b"\0", b"\n", b"\t", b"[" * 5_000, b"9" * 5_000),
]


def change_value(
    draw: random.Random,
    data: Any,
    keys: Mapping[Path, Collection[str]] = MappingProxyType({}),
) -> Path:
    """Replace, change slightly, remove, rename, set or add one value, in place.

    Args:
        draw: Source of the choices.
        data: Mappings, lists and plain values.
        keys: Keys that the mapping at a path may have.

    Returns:
        The path of the changed value.
    """
    paths = list(_paths(data))
    *holder_path, key = draw.choice(paths)
    holder = data
    for part in holder_path:
        holder = holder[part]
    kinds = ["replace", "change", "exchange", "remove"]
    kind = draw.choice([*kinds, "rename", "set", "add"] if isinstance(holder, dict) else kinds)
    if kind == "replace":
        holder[key] = draw.choice(_VALUES)
    elif kind == "change":
        holder[key] = draw.choice(_similar(holder[key]))
    elif kind == "exchange":
        other = data
        for part in draw.choice(paths):
            other = other[part]
        holder[key] = copy.deepcopy(other)
    elif kind == "remove":
        del holder[key]
    elif kind == "rename":
        old, key = key, f"{key}{draw.choice('s_x')}"
        holder[key] = holder.pop(old)
    else:
        known = sorted(keys.get(tuple(holder_path), ())) if kind == "set" else []
        key = draw.choice(known or _MADE_UP)
        holder[key] = draw.choice(_VALUES)
    return (*holder_path, key)


def change_bytes(draw: random.Random, content: bytes) -> bytes:
    """Return a content with bytes cut out, inserted, repeated or flipped."""
    start = draw.randrange(max(1, len(content)))
    end = min(len(content), start + draw.randint(1, 40))
    kind = draw.choice(["cut", "truncate", "insert", "repeat", "flip"])
    if kind == "cut":
        return content[:start] + content[end:]
    if kind == "truncate":
        return content[:start]
    if kind == "insert" or not content:
        return content[:start] + draw.choice(_BYTES) + content[start:]
    if kind == "repeat":
        return content[:end] + content[start:]
    flipped = bytes([content[start] ^ 1 << draw.randrange(8)])
    return content[:start] + flipped + content[start + 1 :]


def _similar(value: Any) -> list[Any]:
    """Return values that differ little from a value, in size or in type."""
    if isinstance(value, bool):
        return [not value, int(value), str(value)]
    if isinstance(value, (int, float)):
        return [value + 1, value - 1, -value, 2 * value, value // 2, float(value), str(value)]
    if isinstance(value, str):
        return [f"{value}x", value[:-1], value.upper(), [value], f" {value}", f"./{value}"]
    if isinstance(value, list):
        return [[*value, *value], value[:-1], value[::-1], [value], dict(enumerate(value))]
    return [[value], list((value or {}).values()), list(value or {})]


def _paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Yield the path of every value in mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*at, key)
        if isinstance(inner, (dict, list)):
            yield from _paths(inner, (*at, key))
