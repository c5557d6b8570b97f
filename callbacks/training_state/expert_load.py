"""Measure how the tokens of a step are distributed over the experts of a network."""

import contextlib
import inspect
from typing import Any, final

import torch
from torch import Tensor, nn

from mfwrap.tensors.module_hooks import keep_out_of_copies

_CHOICES = ("top_k_index", "router_indices", "selected_experts")
"""Arguments that hold the chosen experts of each token in the forward of transformers' experts."""


def imbalance(shares: Tensor) -> Tensor:
    """Return the ratio of the largest share to the mean share.

    A ratio of 1 means a balanced load; ``E`` means that one expert gets all tokens.

    Args:
        shares: Share of token assignments that each expert got, shape ``(E,)``.
    """
    return shares.max() * shares.numel()


def drop_rate(shares: Tensor, capacity_factor: float) -> Tensor:
    """Return the share of assignments that experts of limited capacity would drop.

    This is ``sum(relu(share - capacity_factor / E))``.

    Source: MindFormers, ``MoEDropRateCallback``.

    Args:
        shares: Share of token assignments that each expert got, shape ``(E,)``.
        capacity_factor: Capacity of an expert as a multiple of the mean share ``1 / E``.
    """
    return (shares - capacity_factor / shares.numel()).clamp(min=0).sum()


@final
class ExpertLoad:
    """Count how many tokens each expert of a network gets, in training mode.

    A module is recognized as experts if it has an attribute ``num_experts`` and its forward has an
    argument ``top_k_index``, ``router_indices`` or ``selected_experts`` with the indices of the
    chosen experts, as in transformers. Padding tokens count, too.

    Args:
        network: Network to watch. It has hooks only between `begin` and `end`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.experts = {
            name: module for name, module in network.named_modules() if _choice_of(module)
        }
        self._counts: dict[str, Tensor] = {}
        self._hooks = contextlib.ExitStack()

    def begin(self) -> None:
        """Start counting from zero."""
        self.close()
        for name, module in self.experts.items():
            hook = module.register_forward_pre_hook(self._count(name), with_kwargs=True)
            keep_out_of_copies(module, hook)
            self._hooks.callback(hook.remove)

    def end(self) -> dict[str, Tensor]:
        """Stop counting, and return the shares since `begin`.

        Returns:
            Share of token assignments that each expert got, shape ``(E,)``, float32, keyed by the
            name of the module. The shares of a module add up to 1.
        """
        self._hooks.close()
        counts, self._counts = self._counts, {}
        # Gradient checkpointing repeats the forward in the backward pass. All tokens then count
        # twice, which does not change the shares.
        return {name: (each / each.sum()).float() for name, each in counts.items()}

    def close(self) -> None:
        """Stop counting, and discard the counts."""
        self.end()

    def _count(self, name: str) -> Any:
        choice, position = _choice_of(self.experts[name]) or ("", 0)

        def count(module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            given = len(positional) > position
            chosen = positional[position] if given else keywords.get(choice)
            if not module.training or not isinstance(chosen, Tensor):
                return
            if chosen.is_floating_point() or chosen.dtype == torch.bool:
                return
            num_experts = int(module.num_experts)  # type: ignore[arg-type]  # (`_choice_of` has checked that it is an int)
            # The index `num_experts` means an expert on another rank. Count these tokens in an
            # extra element, which is cut off below.
            counts = torch.zeros(num_experts + 1, dtype=torch.float64, device=chosen.device)
            flat = chosen.detach().reshape(-1).long()
            ones = torch.ones((), dtype=torch.float64, device=chosen.device).expand(flat.shape)
            counts = counts.scatter_add_(0, flat, ones)[:num_experts]
            self._counts[name] = self._counts[name] + counts if name in self._counts else counts

        return count


def _choice_of(module: nn.Module) -> tuple[str, int] | None:
    """Return name and position of the argument with the chosen experts; ``None`` if missing."""
    if not isinstance(getattr(module, "num_experts", None), int):
        return None
    names = list(inspect.signature(module.forward).parameters)
    return next(((name, names.index(name)) for name in _CHOICES if name in names), None)
