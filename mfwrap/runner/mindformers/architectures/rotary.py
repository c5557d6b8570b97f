"""Convert the scaling of rotary embeddings to ``rope_parameters`` of transformers."""

from typing import Any

from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.architectures.keys import Keys

_YARN = (
    "factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
)
_LLAMA3 = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
_PRETRAINED = 2048
"""Default of ``pretrain_seqlen`` and of ``seq_length``."""

_METHODS = ("None", "PI", "NTK", "linear", "YARN", "LLAMA3")


def rope_parameters(keys: Keys, *, theta: float = 10_000.0, method: str = "None") -> dict[str, Any]:
    """Take the base of the rotary embeddings and its scaling.

    Source: MindFormers, ``FreqsMgr``.

    Args:
        keys: Keys of the model: ``theta``, ``extend_method`` and ``scaling_factor``.
        theta: Default of ``theta``.
        method: Default of ``extend_method``.

    Raises:
        RecipeError: If the scaling is unknown or incomplete.
    """
    base = keys.number("theta", theta)
    name = keys.value("extend_method", method)
    if name not in _METHODS:
        says = f"expected one of {list(_METHODS)}, got {shown(name)}"
        keys.refuse("extend_method", says)
    match name:
        case "None":
            keys.drop("scaling_factor")
            return {"rope_type": "default", "rope_theta": base}
        case "NTK":  # a larger base, for all lengths
            return {"rope_type": "default", "rope_theta": base * _extension(keys)}
        case "PI":  # positions are divided by the factor
            return {"rope_type": "linear", "rope_theta": base, "factor": _extension(keys)}
        case "linear":
            return {"rope_type": "linear", "rope_theta": base, **_numbers(keys, ("factor",))}
        case "YARN":
            return {"rope_type": "yarn", "rope_theta": base, **_numbers(keys, _YARN)}
    return {"rope_type": "llama3", "rope_theta": base, **_numbers(keys, _LLAMA3)}


def _extension(keys: Keys) -> float:
    """Return by how much the positions of ``NTK`` and ``PI`` exceed those of the pretraining.

    Source: MindFormers. Since 1.0, ``scaling_factor`` is this number. Before, it was the length of
    the sequences in units of ``pretrain_seqlen``, if they were longer than that.
    """
    length = keys.peek_size("seq_length", _PRETRAINED)
    if "scaling_factor" in keys:
        return float(keys.number("scaling_factor", 1.0))
    if "pretrain_seqlen" not in keys and length > _PRETRAINED:
        says = "required, because versions of MindFormers differ in what they do without it"
        keys.refuse("scaling_factor", says)
    return max(1.0, length / keys.size("pretrain_seqlen", _PRETRAINED))


def _numbers(keys: Keys, names: tuple[str, ...]) -> dict[str, Any]:
    """Take ``scaling_factor``, a mapping that must have exactly the keys `names`."""
    given = keys.mapping("scaling_factor")
    if given.keys() != set(names):
        says = f"expected a mapping with the keys {list(names)}, got {shown(given)}"
        keys.refuse("scaling_factor", says)
    values: dict[str, Any] = {}
    for name in names:
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            says = f"expected a number for {name}, got {shown(value)}"
            keys.refuse("scaling_factor", says)
        is_length = name == "original_max_position_embeddings"
        values[name] = int(value) if is_length else float(value)
    return values
