"""Do once what the Trainer repeats for each micro-batch or update, and what changes nothing."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from mfwrap.compatibility.torch import children_of, own_parameters
from mfwrap.compatibility.transformers import CLIP_GRAD_NORM, method_of

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
    with _hidden(trainer, floating_point_ops=OperationCount(trainer)):
        yield


@final
class ListedNetwork:
    """List a network's modules and parameters once, and again when they have changed."""

    def __init__(self) -> None:
        self._network: nn.Module | None = None
        self._modules: list[nn.Module] = []
        self._leaves: list[nn.Module] = []
        self._parents: list[nn.Module] = []
        self._children: list[list[nn.Module | None]] = []
        # What the modules hold as parameters, with repetitions and None.
        self._held: list[nn.Parameter | None] | None = None
        self._parameters: list[nn.Parameter] = []
        self._lent_to: nn.Module | None = None

    def modules(self, network: nn.Module) -> list[nn.Module]:
        """Return the network's modules; the same list as before if they have not changed."""
        is_known = (
            network is self._network
            and _children(self._parents) == self._children
            and not any(map(children_of, self._leaves))
        )
        if not is_known:
            self._network, self._held = network, None
            self._modules = list(network.modules())
            self._parents = [module for module in self._modules if children_of(module)]
            self._leaves = [module for module in self._modules if not children_of(module)]
            self._children = _children(self._parents)
        return self._modules

    def parameters(self, network: nn.Module) -> list[nn.Parameter]:
        """Return the network's parameters, as its method does."""
        held = [
            each for module in self.modules(network) for each in own_parameters(module).values()
        ]
        if not _are_same(held, self._held):
            self._held, self._parameters = held, list(network.parameters())
        return self._parameters

    def lend_parameters(self, network: nn.Module) -> None:
        """Let ``network.parameters()`` return this list's parameters, until `take_back`."""
        if type(network).parameters is not nn.Module.parameters or "parameters" in vars(network):
            return
        known = self.parameters(network)

        def parameters(recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: FBT001, FBT002  (torch's signature)
            return iter(known) if recurse else nn.Module.parameters(network, recurse)

        vars(network)["parameters"] = parameters
        self._lent_to = network

    def take_back(self) -> None:
        """Let a network list its parameters itself."""
        network, self._lent_to = self._lent_to, None
        if network is not None:
            vars(network).pop("parameters", None)


def _are_same(held: list[nn.Parameter | None], known: list[nn.Parameter | None] | None) -> bool:
    return known is not None and len(held) == len(known) and all(map(operator.is_, held, known))


@final
class TrainMode:
    """Set a network to training mode as the Trainer does, but quicker.

    In each micro-batch the Trainer calls ``model.train()``, which sets an attribute of every
    module. This takes several percent of the step of a small model. Here the call does nothing if
    all modules are in training mode. A module that a loop has set to evaluation mode is set to
    training mode again, as by the Trainer.

    Args:
        listed: List of the network's modules.
    """

    def __init__(self, listed: ListedNetwork) -> None:
        self._listed = listed
        self._asked: list[nn.Module] | None = None
        self._has_own_method = False

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

        own["train"] = train
        try:
            yield
        finally:
            own.pop("train", None)

    def _is_training(self, network: nn.Module) -> bool:
        modules = self._listed.modules(network)
        if modules is not self._asked:
            self._asked = modules
            self._has_own_method = not all(_changes_nothing(m, network) for m in modules)
        return not self._has_own_method and all(map(_IS_TRAINING, modules))


@contextlib.contextmanager
def clipping_listed_parameters(trainer: Trainer, listed: ListedNetwork) -> Iterator[None]:
    """Within the block, a training, list the parameters whose gradients are clipped only once.

    In each update the Trainer looks through all modules of the model for them, and once more to
    zero the gradients.

    Args:
        trainer: The trainer.
        listed: List of the network's parameters.
    """
    clip = method_of(trainer, CLIP_GRAD_NORM)

    def clip_listed(network: nn.Module) -> Any:
        listed.lend_parameters(network)
        try:
            return clip(network)
        finally:
            listed.take_back()

    with _hidden(trainer, **{CLIP_GRAD_NORM: clip_listed}):
        try:
            yield
        finally:
            listed.take_back()


@contextlib.contextmanager
def _hidden(owner: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Within the block, hide methods of the owner's class by attributes of the owner."""
    own = vars(owner)
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            own.pop(name, None)


_IS_TRAINING = operator.attrgetter("training")


def _changes_nothing(module: nn.Module, network: nn.Module) -> bool:
    has_own = module is not network and "train" in vars(module)
    return not has_own and type(module).train in _KNOWN_TO_CHANGE_NOTHING


def _children(parents: list[nn.Module]) -> list[list[nn.Module | None]]:
    return [list(children_of(parent).values()) for parent in parents]
