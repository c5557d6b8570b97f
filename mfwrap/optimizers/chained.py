"""`ChainedOptimizer`: several torch optimizers for different parameters, as one optimizer."""

import itertools
from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim import Optimizer

from mfwrap.optimizers.closure import evaluated


@final
class ChainedOptimizer(Optimizer):
    """Run several optimizers as one, for example Muon for matrices and AdamW for all other weights.

    The step sees one optimizer: there is one global norm, one loss scale and one decision to skip
    an update for all parameters, and one schedule sets the rates of all groups.

    ``param_groups`` has the groups of all optimizers, in order, and ``state`` their states. So
    schedules, checkpoints and monitors work as with any optimizer. The optimizers share both with
    the chain: pass all changes, such as a loaded state, to the chain.

    An update is skipped on the device if each of the optimizers can do that (torch's fused
    optimizers, `AdamWeightDecay` and `mfwrap.optimizers.Muon`). Otherwise, the step synchronizes
    with the device once.

    Args:
        optimizers: Optimizers of torch, each for other parameters. A chain among them is replaced
            by its optimizers.

    Raises:
        TypeError: If an argument is not a ``torch.optim.Optimizer``.
        ValueError: If there is no optimizer, or two of them have a parameter in common.

    Example:
        >>> from mfwrap.optimizers import Muon
        >>> network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> matrices = [p for p in network.parameters() if p.ndim == 2]
        >>> others = [p for p in network.parameters() if p.ndim != 2]
        >>> optimizer = ChainedOptimizer(
        ...     Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
        ...     torch.optim.AdamW(others, lr=1e-3, fused=True),
        ... )
        >>> len(optimizer.param_groups)
        2
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                msg = (
                    f"`optimizers` must be torch optimizers, got a {type(optimizer).__name__}; "
                    "pass each optimizer as an argument: ChainedOptimizer(first, second)"
                )
                raise TypeError(msg)
        self.optimizers = tuple(itertools.chain.from_iterable(map(parts_of, optimizers)))
        """The optimizers, in order."""
        if not self.optimizers:
            msg = "`optimizers` must have at least one optimizer, got none"
            raise ValueError(msg)
        held = [p for part in self.optimizers for g in part.param_groups for p in g["params"]]
        num_shared = len(held) - len(set(held))
        if num_shared:
            msg = (
                "`optimizers` must have no parameter in common, got "
                f"{num_shared} that are in two of them"
            )
            raise ValueError(msg)
        super().__init__([group for part in self.optimizers for group in part.param_groups], {})
        self._collect()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the step of each optimizer.

        Args:
            closure: Function that computes the loss and its gradients; ``None`` to use the present
                gradients.

        Returns:
            Result of `closure`; ``None`` without a closure.
        """
        loss = evaluated(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: each optimizer loads its own part.

        Args:
            state_dict: Result of `state_dict` of a chain of the same optimizers.

        Raises:
            ValueError: If the groups have other sizes than those of the chain, or belong to
                optimizers of other kinds, for example because their order is different.
        """
        saved = state_dict["param_groups"]
        expected = [len(group["params"]) for group in self.param_groups]
        sizes = [len(group["params"]) for group in saved]
        if sizes != expected:
            msg = (
                f"`state_dict` must have groups of {expected} parameters, as the chained "
                f"optimizers have, got {sizes}"
            )
            raise ValueError(msg)
        self._check_kinds(saved)
        rest = iter(saved)
        for optimizer in self.optimizers:
            groups = list(itertools.islice(rest, len(optimizer.param_groups)))
            numbers = {number for group in groups for number in group["params"]}
            state = {n: value for n, value in state_dict["state"].items() if n in numbers}
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._collect()

    def _check_kinds(self, saved: list[dict[str, Any]]) -> None:
        """Raise `ValueError` if a saved group has the settings of another of the optimizers."""
        of_any = {name for part in self.optimizers for name in part.defaults}
        parts = [part for part in self.optimizers for _ in part.param_groups]
        for number, (part, group) in enumerate(zip(parts, saved, strict=True)):
            others = (of_any & group.keys()) - part.defaults.keys()
            missing = part.defaults.keys() - group.keys()
            # Settings that a newer torch has added are missing, but come with no others.
            if others and missing:
                msg = (
                    "`state_dict` must be that of the same optimizers in the same order, got group "
                    f"{number} without {sorted(missing)}, which a {type(part).__name__} has"
                )
                raise ValueError(msg)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a new group, which could belong to any of the optimizers.

        Args:
            param_group: The group.

        Raises:
            RuntimeError: After the construction.
        """
        if len(self.param_groups) == sum(len(part.param_groups) for part in self.optimizers):
            msg = "add the parameter group to one of the optimizers before they are chained"
            raise RuntimeError(msg)
        super().add_param_group(param_group)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch would pickle the groups and the state, but not the optimizers.
        return type(self), self.optimizers

    def _collect(self) -> None:
        """Take the groups and the states of the optimizers, and share both with them."""
        self.param_groups = [group for part in self.optimizers for group in part.param_groups]
        states = [dict(part.state) for part in self.optimizers]
        self.state.clear()
        for part, state in zip(self.optimizers, states, strict=True):
            self.state.update(state)
            part.state = self.state


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a chain; an optimizer that is no chain is its only part."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
