"""The models that a recipe can train.

The import registers the model type ``perceptron`` with the Auto classes of transformers.
"""

from mfwrap.recipes.models.perceptron import Perceptron, PerceptronConfig

__all__ = ["Perceptron", "PerceptronConfig"]
