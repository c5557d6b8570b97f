"""The networks of MindFormers' files in the configurations of transformers."""

from mfwrap.runner.mindformers.architectures.convert import (
    ConvertedModel,
    convert_model,
    num_parameters,
    overriding_keys,
)
from mfwrap.runner.mindformers.architectures.keys import ModelConfigError

__all__ = [
    "ConvertedModel",
    "ModelConfigError",
    "convert_model",
    "num_parameters",
    "overriding_keys",
]
