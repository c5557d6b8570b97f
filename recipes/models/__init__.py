"""The models that a recipe can train.

The import registers the model type ``perceptron`` with the Auto classes of transformers.
"""

from mfwrap.compatibility.transformers import check_trainer_release

check_trainer_release()

from mfwrap.recipes.models.perceptron import (  # noqa: E402  (old releases lack what it imports)
    Perceptron,
    PerceptronConfig,
)

__all__ = ["Perceptron", "PerceptronConfig"]
