"""How the tokens of a step spread over the experts of a network."""

import contextlib
import inspect
from typing import Any, final

import torch
from torch import Tensor, nn

__all__ = ["ExpertLoad", "drop_rate", "imbalance"]

_CHOICES = ("top_k_index", "router_indices", "selected_experts")
"""What the forward of transformers' experts calls the experts that were chosen for each token."""


def imbalance(shares: Tensor) -> Tensor:
    """Return the share of the busiest expert over the mean share: 1 is balance, ``E`` is collapse.

    Args:
        shares: Shape ``(E,)``.
    """
    return shares.max() * shares.numel()


def drop_rate(shares: Tensor, capacity_factor: float) -> Tensor:
    """Return the share of assignments that experts of limited capacity would drop.

    ``sum(relu(share - capacity_factor / E))``.

    Source: MindFormers, ``MoEDropRateCallback``.

    Args:
        shares: Shape ``(E,)``.
        capacity_factor: Capacity of an expert over its mean share.
    """
    return (shares - capacity_factor / shares.numel()).clamp(min=0).sum()


@final
class ExpertLoad:
    """Count, between `begin` and `end`, to which experts tokens go.

    Experts are modules with ``num_experts`` whose forward takes the chosen experts as integers
    under the name of ``top_k_index``, ``router_indices`` or ``selected_experts``, as those of
    transformers do: whatever chose them, what they get is counted. Tokens of padding count, too.

    Args:
        network: In which they are.
    """

    def __init__(self, network: nn.Module) -> None:
        self.experts = {
            name: module for name, module in network.named_modules() if _choice_of(module)
        }
        self._counts: dict[str, Tensor] = {}
        self._hooks = contextlib.ExitStack()

    def begin(self) -> None:
        """Count from now on, from zero."""
        self.close()
        for name, module in self.experts.items():
            hook = module.register_forward_pre_hook(self._count(name), with_kwargs=True)
            self._hooks.callback(hook.remove)

    def end(self) -> dict[str, Tensor]:
        """Count no longer.

        Returns:
            By name of the module: shape ``(E,)``, float32, the share of each expert; their sum
            is 1.
        """
        self._hooks.close()
        counts, self._counts = self._counts, {}
        # A forward that is repeated in the backward (gradient checkpointing) counts twice: shares
        # stay what they are.
        return {name: (each / each.sum()).float() for name, each in counts.items()}

    def close(self) -> None:
        """Count no longer, and forget."""
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
            num_experts = int(module.num_experts)  # type: ignore[arg-type]
            # Of those that are elsewhere the number is `num_experts`.
            counts = torch.zeros(num_experts + 1, dtype=torch.float64, device=chosen.device)
            flat = chosen.detach().reshape(-1).long()
            ones = torch.ones((), dtype=torch.float64, device=chosen.device).expand(flat.shape)
            counts = counts.scatter_add_(0, flat, ones)[:num_experts]
            self._counts[name] = self._counts[name] + counts if name in self._counts else counts

        return count


def _choice_of(module: nn.Module) -> tuple[str, int] | None:
    """Return name and position of the argument that chooses experts; ``None`` without one."""
    if not isinstance(getattr(module, "num_experts", None), int):
        return None
    names = list(inspect.signature(module.forward).parameters)
    return next(((name, names.index(name)) for name in _CHOICES if name in names), None)
