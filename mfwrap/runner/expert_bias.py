"""The key ``moe_router_bias_update_rate`` of a recipe, which balances experts by biases."""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from mfwrap.optimizers import ExpertBias
from mfwrap.runner.document import RecipeDocument
from mfwrap.tensors.experts import expert_biases

BIAS_RATE = "moe_router_bias_update_rate"
"""The key, by MindFormers' name."""


@final
@dataclass(frozen=True)
class BalanceChoice:
    """Balance the experts of a model by the biases of its routers, see `ExpertBias`."""

    document: RecipeDocument
    """The recipe; supplies places for errors."""

    update_rate: float

    def check(self, network: nn.Module) -> None:
        """Raise `RecipeError` if the experts of a network cannot be balanced."""
        self._balance(network, None)

    def begin(self, optimizer: Optimizer, network: nn.Module) -> None:
        """Balance the experts after each update.

        Biases in half precision, in which small steps would be lost, become float32. transformers
        converts those of a checkpoint, but not those of a model with random weights.

        Raises:
            RecipeError: If the experts of the network cannot be balanced.
        """
        self._balance(network, optimizer)

    def _balance(self, network: nn.Module, optimizer: Optimizer | None) -> None:
        try:
            for place in expert_biases(network).values():
                bias = place.tensor()
                if bias.dtype in {torch.bfloat16, torch.float16}:
                    bias.data = bias.data.float()
            ExpertBias(
                optimizer or torch.optim.SGD(network.parameters()), network, self.update_rate
            )
        except ValueError as error:
            raise self.document.error((BIAS_RATE,), f"must be left out: {error}") from error
