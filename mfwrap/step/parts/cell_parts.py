"""The attributes and methods of MindSpore's cells from which you can build a training step."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.arguments import check_bool, described
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.compatibility.torch import pytree
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.parts.forward_reuse import remember_forwards
from mfwrap.step.parts.functional import GradOperation
from mfwrap.step.parts.gradient_reducer import GradientReducer, checked_gradients
from mfwrap.step.ranks.agreement import RankAgreement
from mfwrap.step.schedules import Schedule
from mfwrap.tensors.sharded_norms import has_non_finite
from mfwrap.tensors.wrappers import distributed_parts


class StepParts:
    """Provide the attributes of MindSpore's cells from which you can build a training step.

    A subclass of a cell writes its own ``__call__`` from them, as MindSpore's documentation does::

        loss = self.network(*inputs)
        sens = torch.full_like(loss, self.sens)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        grads = self.grad_reducer(grads)
        self.apply_gradients(grads)  # in MindSpore: self.optimizer(grads)
        return loss.detach()

    The cells themselves do not use these attributes. A subclass may have any others, whatever
    their names: those that only mfwrap uses begin with two underscores.

    Source: MindSpore, ``nn.TrainOneStepCell``.

    Args:
        network: Network to train.
        optimizer: Optimizer without accelerate's wrapper.
        parameters: The optimizer's parameters that are in the network.
        lr_scheduler: Schedule that `apply_gradients` steps; ``None`` for no schedule.
        ema: Average that `apply_gradients` updates; ``None`` for no average.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        own = vars(cls)
        unused = next((name for name in ("construct", "forward") if name in own), None)
        if "__call__" not in own and unused is not None:
            msg = (
                f"a step of your own must be the method `__call__`, got {cls.__name__}.{unused}, "
                "which nothing would call; rename it"
            )
            raise TypeError(msg)

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        parameters: TrainedParameters,
        *,
        lr_scheduler: Schedule | None = None,
        ema: ExponentialMovingAverage | None = None,
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.__of_optimizer = [p for group in optimizer.param_groups for p in group["params"]]
        self.weights = self.__of_optimizer
        self.grad = GradOperation(get_by_list=True, sens_param=True)
        """Makes gradient functions: ``grad(network, weights)(*inputs, sens)`` returns a tuple with
        one gradient per weight, zeros for a weight that the loss does not depend on. `sens` is the
        gradient of the loss: a number, or a tensor of the loss's shape. In a subclass with its own
        ``__call__``, the network does not run again if it has just run with the same inputs."""
        self.lr_scheduler = self.__lr_scheduler = lr_scheduler
        """Schedule that the cell steps; ``None`` without one. Save its state separately."""
        self.__ema = ema
        self.__trained = parameters
        if has_own_step(type(self)):
            remember_forwards(network, self.__of_optimizer)

    @property
    def weights(self) -> Sequence[Tensor]:
        """Parameters that `apply_gradients` updates, in order: the optimizer's, or some of them.

        Assign a list of parameters to update only these. Assigning makes a new `grad_reducer`.
        """
        return self.__weights

    @weights.setter
    def weights(self, weights: Iterable[Tensor]) -> None:
        listed = list(weights)
        if not set(map(id, listed)) <= set(map(id, self.__of_optimizer)):
            msg = "`weights` must be parameters of the cell's optimizer, got other tensors"
            raise ValueError(msg)
        self.__weights = listed
        self.grad_reducer = GradientReducer(self.network, listed)
        """Averages gradients over the ranks of DistributedDataParallel: takes and returns one
        gradient per weight. Returns all gradients unchanged if there is nothing to average."""
        self.reducer_flag = self.grad_reducer.sends
        """Whether `grad_reducer` averages any gradient over several ranks."""

    def hyper_map(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Apply a function to each element of nested tuples and lists: MindSpore's ``HyperMap()``.

        Args:
            operation: Function with one parameter for each of `arguments`.
            arguments: Tuples or lists of the same structure, such as gradients and weights.

        Returns:
            The results, in the same structure.
        """
        return pytree.tree_map(operation, *arguments)

    def apply_gradients(self, grads: Sequence[Tensor]) -> None:
        """Do one update of the optimizer: MindSpore's ``self.optimizer(grads)``.

        The gradients are neither unscaled nor clipped, and non-finite gradients are not skipped.
        The cell's schedule and its average of the weights follow the update. Afterwards no
        parameter has a gradient.

        Args:
            grads: One gradient for each of `weights`, in that order, with the weight's shape and
                dtype. All ranks must apply the same gradients.

        Raises:
            RuntimeError: If the optimizer's parameters have changed, a parameter of the network has
                been replaced, or the cell's average cannot follow; see `begin_update`.
            TypeError: If `grads` is not a list or a tuple, or a gradient is sparse.
            ValueError: If there are more or fewer gradients than weights.
        """
        checked = checked_gradients(grads, len(self.weights))
        try:
            for weight, gradient in zip(self.weights, checked, strict=True):
                weight.grad = gradient
            self.__trained.collect_gradients()
            if self.__ema is not None:
                self.__ema.begin_update()
            self.optimizer.step()
            if self.__lr_scheduler is not None:
                self.__lr_scheduler.step()
            if self.__ema is not None:
                self.__ema.update()
        finally:
            self.__trained.release_gradients()


def has_own_step(kind: type[StepParts]) -> bool:
    """Return whether a class of cells has a ``__call__`` that is not mfwrap's."""
    owners = (each for each in kind.__mro__ if "__call__" in vars(each))
    return next(owners, StepParts).__module__.partition(".")[0] != "mfwrap"


class LossScaleHooks(StepParts):
    """Provide the methods of MindSpore's cells with a loss scale, in addition to `StepParts`.

    `MFTrainOneStepCell` itself calls none of them. Call them from a subclass or from your own loop.

    Args:
        network: Network to train.
        optimizer: Optimizer without accelerate's wrapper.
        parameters: The optimizer's parameters that are in the network.
        loss_scale: Live loss scale.
        lr_scheduler: As in `StepParts`.
        ema: As in `StepParts`.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        parameters: TrainedParameters,
        loss_scale: LossScale,
        *,
        lr_scheduler: Schedule | None = None,
        ema: ExponentialMovingAverage | None = None,
    ) -> None:
        super().__init__(network, optimizer, parameters, lr_scheduler=lr_scheduler, ema=ema)
        self.__loss_scale = loss_scale
        self.loss_scaling_manager = loss_scale.update_cell
        """Update cell of the loss scale, which `process_loss_scale` calls; ``None`` for a fixed
        scale."""
        parts = distributed_parts(network)
        self.__agreement = RankAgreement(parts[0].process_group) if parts else None

    @property
    def scale_sense(self) -> Tensor:
        """The live loss scale, shape ``()``, float32. Assigning calls `set_sense_scale`."""
        return self.__loss_scale.value

    @scale_sense.setter
    def scale_sense(self, sens: Tensor) -> None:
        self.set_sense_scale(sens)

    def set_sense_scale(self, sens: Tensor) -> None:
        """Replace the loss scale from the next step on. Does not synchronize with the device.

        Args:
            sens: New loss scale, shape ``()`` or ``(1,)``, any real dtype.

        Raises:
            TypeError: If `sens` is not a tensor.
            ValueError: If `sens` has another shape.
        """
        self.__loss_scale.set(sens)

    def start_overflow_check(self, pre_cond: Any, compute_input: Any) -> tuple[bool, Any]:
        """Return ``(False, compute_input)``, as MindSpore does on GPU.

        Args:
            pre_cond: Ignored; MindSpore computes it before the check starts.
            compute_input: Input of the computation that is checked.
        """
        del pre_cond
        return False, compute_input

    def get_overflow_status(self, status: Any, compute_output: Tensor | Sequence[Any]) -> Tensor:
        """Return whether any element is inf or nan, on any rank of DistributedDataParallel.

        All ranks must call it. They get the same answer, so all of them skip an update or none.

        Args:
            status: First value that `start_overflow_check` returned; ignored.
            compute_output: Gradients: a tensor, or tensors nested in lists, tuples and dicts.

        Returns:
            Flag of shape ``()``, bool, on the training device. Does not synchronize with the
            device.
        """
        del status
        leaves = pytree.tree_leaves(compute_output)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                msg = f"`compute_output` must hold tensors, got {described(leaf)}"
                raise TypeError(msg)
        found = has_non_finite(leaves, self.scale_sense.device)
        return found if self.__agreement is None else self.__agreement.any(found)

    def process_loss_scale(self, overflow: Tensor | bool) -> Tensor:  # noqa: FBT001  (MindSpore's signature)
        """Adjust the loss scale after a step if there is an update cell; return `overflow`.

        Args:
            overflow: Whether the gradients overflowed: a bool, or a tensor of shape ``()``, bool,
                on the training device.

        Raises:
            TypeError: If `overflow` is neither a tensor nor a bool.
        """
        if isinstance(overflow, Tensor):
            return self.__loss_scale.update(overflow)
        device = self.scale_sense.device
        return self.__loss_scale.update(
            torch.full((), check_bool("overflow", overflow), device=device)
        )
