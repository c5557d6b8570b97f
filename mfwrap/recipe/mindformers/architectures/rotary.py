"""Convert the scaling of rotary embeddings to ``rope_parameters`` of transformers."""

from typing import Any

from mfwrap.recipe.document import shown
from mfwrap.recipe.mindformers.architectures.keys import Keys

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
_METHODS = ("None", "PI", "NTK", "linear", "YARN", "LLAMA3")


def rope_parameters(keys: Keys, *, theta: float = 10_000.0, method: str = "None") -> dict[str, Any]:
    """Take the base of the rotary embeddings and its scaling.

    Source: MindFormers, ``FreqsMgr``.

    Args:
        keys: Keys of the model: ``theta``, ``extend_method`` and ``scaling_factor``.
        theta: Default of ``theta``.
        method: Default of ``extend_method``.

    Raises:
        ModelConfigError: If the scaling is unknown or incomplete.
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
            factor = keys.number("scaling_factor", 1.0)
            return {"rope_type": "default", "rope_theta": base * factor}
        case "PI":  # positions are divided by the factor
            factor = keys.number("scaling_factor", 1.0)
            return {"rope_type": "linear", "rope_theta": base, "factor": float(factor)}
        case "linear":
            return {"rope_type": "linear", "rope_theta": base, **_numbers(keys, ("factor",))}
        case "YARN":
            return {"rope_type": "yarn", "rope_theta": base, **_numbers(keys, _YARN)}
    return {"rope_type": "llama3", "rope_theta": base, **_numbers(keys, _LLAMA3)}


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
