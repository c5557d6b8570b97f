"""Find the experts of a network, count their tokens, and find the biases of their choice."""

import contextlib
import inspect
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.compatibility.torch import is_in_backward
from mfwrap.tensors.module_hooks import keep_out_of_copies
from mfwrap.tensors.training_forwards import is_training_forward

_CHOICES = ("top_k_index", "router_indices", "selected_experts")
"""Arguments that hold the chosen experts of each token in the forward of transformers' experts."""

_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of buffers or parameters that transformers' routers add to the scores of experts, only to
choose experts."""


@final
class ExpertCounts:
    """Count how many tokens each expert of a network gets in the forward passes of a training.

    A module is recognized as experts if it has an attribute ``num_experts`` and its forward has an
    argument ``top_k_index``, ``router_indices`` or ``selected_experts`` with the indices of the
    chosen experts, as in transformers. So the counts are right however a router chooses, also with
    groups of experts. Padding tokens count, too. Evaluations and replays do not count, nor does a
    forward pass that gradient checkpointing repeats in the backward pass.

    Args:
        network: Network to watch. It has hooks only between `begin` and `end`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.experts = expert_modules(network)
        """Modules with experts, by name."""
        self._network = network
        self._is_running = False
        self._counts: dict[str, Tensor] = {}
        self._hooks = contextlib.ExitStack()

    def begin(self) -> None:
        """Start counting from zero."""
        self.close()
        if not self.experts:
            return
        self._keep(
            self._network,
            self._network.register_forward_pre_hook(self._enter),
            self._network.register_forward_hook(self._leave, always_call=True),
        )
        for name, module in self.experts.items():
            self._keep(
                module, module.register_forward_pre_hook(self._count(name), with_kwargs=True)
            )

    def take(self) -> dict[str, Tensor]:
        """Return the counts since `begin` or the last `take`, and keep counting from zero.

        Returns:
            Tokens that each expert got, shape ``(E,)``, int64, keyed by the name of the module. A
            module that did not run is missing.
        """
        counts, self._counts = self._counts, {}
        return counts

    def end(self) -> dict[str, Tensor]:
        """Stop counting, and return what `take` returns."""
        self._hooks.close()
        self._is_running = False
        return self.take()

    def close(self) -> None:
        """Stop counting, and discard the counts."""
        self.end()

    def _keep(self, module: nn.Module, *hooks: Any) -> None:
        keep_out_of_copies(module, *hooks)
        for hook in hooks:
            self._hooks.callback(hook.remove)

    def _enter(self, network: nn.Module, _: Any) -> None:
        self._is_running = is_training_forward(network)

    def _leave(self, *_: Any) -> None:
        self._is_running = False

    def _count(self, name: str) -> Any:
        choice, position = _choice_of(self.experts[name]) or ("", 0)

        def count(module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            given = len(positional) > position
            chosen = positional[position] if given else keywords.get(choice)
            # A loss may call parts of the network, and not the network itself.
            runs = self._is_running or (is_training_forward(module) and not is_in_backward())
            if not (runs and module.training and isinstance(chosen, Tensor)):
                return
            if chosen.is_floating_point() or chosen.dtype == torch.bool:
                return
            num_experts = int(module.num_experts)  # type: ignore[arg-type]  # (`_choice_of` has checked that it is an int)
            # The index `num_experts` means an expert on another rank. Count these tokens in an
            # extra element, which is cut off below.
            counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
            flat = chosen.detach().reshape(-1).long()
            ones = torch.ones((), dtype=torch.int64, device=chosen.device).expand(flat.shape)
            counts = counts.scatter_add_(0, flat, ones)[:num_experts]
            self._counts[name] = self._counts[name] + counts if name in self._counts else counts

        return count


def expert_modules(network: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a network that `ExpertCounts` recognizes as experts, by name."""
    return {name: module for name, module in network.named_modules() if _choice_of(module)}


class BiasPlace(NamedTuple):
    """Where the bias of the choice of some experts is in a network.

    The tensor is looked up at each use: to move or shard a network may replace it.
    """

    module: nn.Module
    attribute: str
    name: str
    """Name of the tensor in the network."""

    num_experts: int

    def tensor(self) -> Tensor:
        """Return the bias, ``num_experts`` numbers, a buffer or a parameter."""
        bias: Tensor = getattr(self.module, self.attribute)
        return bias


def expert_biases(network: nn.Module) -> dict[str, BiasPlace]:
    """Find the biases that a network adds to the scores of its experts to choose among them.

    Returns:
        Place of each bias, keyed by the name of the experts' module, in the order of
        `expert_modules`. Experts without a bias are missing.

    Raises:
        ValueError: If a bias does not belong to one module of experts, or has another size.
    """
    experts = expert_modules(network)
    found: dict[str, BiasPlace] = {}
    for name, module in network.named_modules():
        for attribute in _BIASES:
            bias = getattr(module, attribute, None)
            if not isinstance(bias, Tensor):
                continue
            full = f"{name}.{attribute}".lstrip(".")
            beside = _beside(name, list(experts))
            if len(beside) != 1 or beside[0] in found:
                msg = (
                    f"`network` must have one module of experts for {full} alone, with "
                    f"`num_experts` and a forward that takes the indices of the chosen experts as "
                    f"`{_CHOICES[0]}`, got {beside or 'none'}"
                )
                raise ValueError(msg)
            [owner] = beside
            number: Any = experts[owner].num_experts
            if bias.numel() != number:
                msg = (
                    f"`network` must have one bias for each expert on this rank, got {full} with "
                    f"{bias.numel()} for the {number} experts of {owner}"
                )
                raise ValueError(msg)
            found[owner] = BiasPlace(module, attribute, full, bias.numel())
    return {name: found[name] for name in experts if name in found}


def _beside(name: str, experts: list[str]) -> list[str]:
    """Return the experts in the innermost module that contains the module `name` and experts."""
    while True:
        inside = [each for each in experts if not name or f"{each}.".startswith(f"{name}.")]
        if inside or not name:
            return inside
        name = name.rpartition(".")[0]


def _choice_of(module: nn.Module) -> tuple[str, int] | None:
    """Return name and position of the argument with the chosen experts; ``None`` if missing."""
    if not isinstance(getattr(module, "num_experts", None), int):
        return None
    names = list(inspect.signature(module.forward).parameters)
    return next(((name, names.index(name)) for name in _CHOICES if name in names), None)
