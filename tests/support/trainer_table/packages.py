"""The packages that only the table needs. Imports nothing, so that they can be installed first."""

import importlib.util

__all__ = ["ALSO_NEEDED", "PACKAGES", "is_installed", "package_of"]

PACKAGES = {
    "bitsandbytes": (
        *("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
        *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"),
        *("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"),
        *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
    ),
    "torchao": ("adamw_torch_4bit", "adamw_torch_8bit"),
    "galore-torch": (
        *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"),
        *("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
    ),
    "apollo-torch": ("apollo_adamw", "apollo_adamw_layerwise"),
    "lomo-optim": ("lomo", "adalomo"),
    "grokadamw": ("grokadamw",),
    "schedulefree": ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
    "torch-optimi": ("stable_adamw",),
    "optuna": ("hyperparameter_search",),
}
"""Names of rows by the distribution that they need."""

ALSO_NEEDED = ("alembic", "colorlog", "Mako", "SQLAlchemy")
"""Dependencies of optuna that the project does not install."""

_MODULES = {
    "apollo-torch": "apollo_torch",
    "galore-torch": "galore_torch",
    "lomo-optim": "lomo_optim",
    "torch-optimi": "optimi",
}
"""Module of a distribution, if it has another name."""


def package_of(row: str) -> str:
    """Return the distribution that the row of this name needs; empty if it needs none."""
    return next((package for package, rows in PACKAGES.items() if row in rows), "")


def is_installed(package: str) -> bool:
    """Return whether a distribution is installed; True for the empty string."""
    return not package or importlib.util.find_spec(_MODULES.get(package, package)) is not None
