"""The weights that an average follows, and their averages."""

from collections.abc import Collection, Iterable, Mapping
from typing import final

import torch
from torch import Tensor, nn

from mfwrap.average.tensors import average_dtype, copied, grouped, named_weights
from mfwrap.tensors.wrappers import plain_name, unwrapped_network


@final
class AveragedWeights:
    """Weights by name with their averages, and weights to average once they require a gradient.

    Args:
        parameters: As in `ExponentialMovingAverage`, and so are the other arguments.
        decay: Weight of the old average in the new one.
        device: Device of the averages; ``None`` for each weight's device.
        dtype: Dtype of the averages; ``None`` for the default.
        exponent: ``gamma + 1`` of a power-function average; ``None`` for an exponential one.

    Raises:
        TypeError: If a tensor to average is not floating-point.
        ValueError: If there are no weights to average.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[Tensor],
        decay: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        exponent: float | None = None,
    ) -> None:
        self._decay, self._device, self._dtype, self._exponent = decay, device, dtype, exponent
        self.weights = named_weights(parameters)
        """Weights that are averaged, in the order of their module."""
        self._names = list(self.weights)
        self._frozen: dict[str, Tensor] = {}
        if isinstance(parameters, nn.Module):
            named = list(unwrapped_network(parameters).named_parameters())
            self._names = [plain_name(name) for name, _ in named]
            self._frozen = {
                plain_name(name): parameter
                for name, parameter in named
                if not parameter.requires_grad and parameter.is_floating_point()
            }
        self.averages = {name: self._average(weight) for name, weight in self.weights.items()}
        """Averages of `weights`, in the same order."""
        self.groups = grouped(self.weights, self.averages, decay, exponent)
        """Weights and averages by device and dtype."""
        self._checked = self._present()

    def begin_update(self) -> None:
        """Start to average weights that were frozen; check that no weight was converted.

        Raises:
            RuntimeError: If a weight was moved or converted after its average was built.
        """
        if self._present() != self._checked:
            self.check_placement()
            self.start_trainable()
            self._checked = self._present()

    def _present(self) -> tuple[list[torch.dtype], list[int], list[bool]]:
        """Return what `begin_update` must notice. Lists of one kind are the fastest to make."""
        weights = self.weights.values()
        return (
            [weight.dtype for weight in weights],
            [weight.get_device() for weight in weights],
            [weight.requires_grad for weight in self._frozen.values()],
        )

    def check_placement(self) -> None:
        """Raise ``RuntimeError`` if a weight was moved or converted after construction."""
        for group in self.groups:
            group.check_placement()

    def start_trainable(self) -> None:
        """Start to average the weights that require a gradient, from their present values."""
        self.start([name for name, weight in self._frozen.items() if weight.requires_grad])

    def start(self, names: Collection[str]) -> None:
        """Start to average weights from their present values.

        Args:
            names: Names of weights; those that are averaged already, and unknown ones, are ignored.
        """
        new = [name for name in names if name in self._frozen]
        for name in new:
            weight = self.weights[name] = self._frozen.pop(name)
            self.averages[name] = self._average(weight)
        if new:
            self.weights = self._in_order(self.weights)
            self.averages = self._in_order(self.averages)
            self.groups = grouped(self.weights, self.averages, self._decay, self._exponent)

    def started_with(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return the averages after a call of `start`, with the weights for those that it adds."""
        new = {name: weight for name, weight in self._frozen.items() if name in names}
        return self._in_order(self.averages | new)

    def any_of(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether any of `parameters` is averaged, now or once it requires a gradient."""
        known = {id(weight) for weight in (*self.weights.values(), *self._frozen.values())}
        return any(id(parameter) in known for parameter in parameters)

    def _average(self, weight: Tensor) -> Tensor:
        return copied(weight, self._device, self._dtype or average_dtype(weight))

    def _in_order(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[name] for name in self._names if name in tensors}
