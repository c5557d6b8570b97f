"""A model of the user's own class or function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from mfwrap.recipes.models.loading import ModelError
from mfwrap.recipes.models.settings import ModelSettings

IMPLIED = frozenset(
    {
        "bos_token_id",
        "eos_token_id",
        "id2label",
        "image_size",
        "label2id",
        "num_channels",
        "num_features",
        "num_labels",
        "pad_token_id",
        "vocab_size",
    }
)
"""Arguments of a model that follow from the data or from the tokenizer."""

SHARED = ("tokenizer", "chat_template", "dtype", "norm_dtype", "embedding_dtype")
"""Keys of the section ``model`` that a model of the user's own has, too."""


@final
@dataclass(frozen=True, kw_only=True)
class OwnModel(ModelSettings):
    """A model that a class or function of the user's own builds."""

    type: str = ""
    """Name of the class or function."""

    make: Callable[..., Any] | None = None
    """Builds the model; ``None`` if the recipe may not run code."""

    takes: tuple[str, ...] = ()
    """Names in `IMPLIED` that `make` takes."""

    keeps_dtype: bool = False
    """Whether the weights keep the dtypes that they have."""

    def _check_source(self) -> None:
        """Accept a model without path and configuration."""

    @property
    def obstacle(self) -> str | None:
        return "the model needs code" if self.make is None else super().obstacle

    def make_model(self, auto_class: Any, **implied: Any) -> nn.Module:
        """Build the model; see `ModelSettings.make_model`.

        Raises:
            ModelError: If the result is not a model.
        """
        del auto_class
        if self.make is None:
            msg = f"`type` needs --allow-code to build a model, got {self.type!r} without it"
            raise ModelError(msg)
        network = self.make(**{name: implied[name] for name in self.takes if name in implied})
        if not isinstance(network, nn.Module):
            msg = f"`type` must build a torch.nn.Module, got a {type(network).__name__}"
            raise ModelError(msg)
        if not self.keeps_dtype:
            network.to(getattr(torch, self.dtype))
            self.convert_parts(network)
        return network

    def weightless(self) -> ModelSettings:
        """Return the model itself: its code need not work on the meta device."""
        return self

    def count_parameters(self, auto_class: Any) -> int:
        """Return 0: the number is known only after the model has been built."""
        del auto_class
        return 0
