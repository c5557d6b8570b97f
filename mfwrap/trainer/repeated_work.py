"""Do once what the Trainer repeats for each micro-batch, and what then changes nothing."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

_KNOWN_TO_CHANGE_NOTHING = {nn.Module.train, PreTrainedModel.train}
"""Methods ``train`` that do nothing if all modules are in training mode already."""


@final
class OperationCount:
    """Count the floating-point operations of micro-batches as the Trainer does, but quicker.

    The Trainer looks through all modules of the model in each micro-batch, to multiply the number
    of its parameters by the number of elements of the main input. This takes several percent of the
    step of a small model. Here the parameters are counted once.

    Args:
        trainer: The trainer, during a training. A formula of its own is used for each micro-batch.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._model = trainer.model
        self._count: Callable[[Any], float] = trainer.floating_point_ops
        self._is_stock = getattr(self._count, "__func__", None) is Trainer.floating_point_ops
        self._per_element: float | None = None

    def __call__(self, inputs: Any) -> float:
        """Return the operations of forward and backward of a micro-batch."""
        name = str(getattr(self._model, "main_input_name", "input_ids"))
        # TRL's trainers for reinforcement learning begin with a list of samples.
        main = inputs.get(name) if isinstance(inputs, Mapping) else None
        if not self._is_stock or not isinstance(main, Tensor) or main.numel() == 0:
            return self._count(inputs)
        if self._per_element is None:
            self._per_element = self._count(inputs) / main.numel()
        return self._per_element * main.numel()


@contextlib.contextmanager
def counting_operations(trainer: Trainer) -> Iterator[None]:
    """Within the block, a training, let an `OperationCount` count the operations."""
    # An attribute of the trainer hides the method of its class.
    vars(trainer)["floating_point_ops"] = OperationCount(trainer)
    try:
        yield
    finally:
        del vars(trainer)["floating_point_ops"]


@final
class TrainMode:
    """Set a network to training mode as the Trainer does, but quicker.

    In each micro-batch the Trainer calls ``model.train()``, which sets an attribute of every
    module. This takes several percent of the step of a small model. Here the modules are listed
    once, and the call does nothing if all of them are in training mode. A module that a loop has
    set to evaluation mode is set to training mode again, as by the Trainer.
    """

    def __init__(self) -> None:
        self._network: nn.Module | None = None
        # All modules; empty if one of them has a method `train` of its own.
        self._modules: list[nn.Module] = []
        self._leaves: list[nn.Module] = []
        self._parents: list[nn.Module] = []
        self._children: list[list[nn.Module | None]] = []

    @contextlib.contextmanager
    def quick(self, network: nn.Module) -> Iterator[None]:
        """Within the block, ``network.train()`` does nothing if it would change nothing."""
        own = vars(network)
        if "train" in own:
            yield
            return

        def train(mode: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  (torch's signature)
            if mode is True and self._is_training(network):
                return network
            return type(network).train(network, mode)

        # An attribute of the network hides the method of its class.
        own["train"] = train
        try:
            yield
        finally:
            own.pop("train", None)

    def _is_training(self, network: nn.Module) -> bool:
        if network is not self._network or not self._has_listed_modules():
            self._list_modules(network)
        return bool(self._modules) and all(map(_IS_TRAINING, self._modules))

    def _has_listed_modules(self) -> bool:
        return _children(self._parents) == self._children and not any(map(_MODULES, self._leaves))

    def _list_modules(self, network: nn.Module) -> None:
        modules = list(network.modules())
        self._network = network
        self._modules = modules if all(_changes_nothing(m, network) for m in modules) else []
        self._parents = [module for module in self._modules if module._modules]
        self._leaves = [module for module in self._modules if not module._modules]
        self._children = _children(self._parents)


_IS_TRAINING = operator.attrgetter("training")
_MODULES = operator.attrgetter("_modules")


def _changes_nothing(module: nn.Module, network: nn.Module) -> bool:
    has_own = module is not network and "train" in vars(module)
    return not has_own and type(module).train in _KNOWN_TO_CHANGE_NOTHING


def _children(parents: list[nn.Module]) -> list[list[nn.Module | None]]:
    return [list(parent._modules.values()) for parent in parents]
