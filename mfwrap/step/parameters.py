"""The parameters that an update changes, and their gradients."""

import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.arguments import callers_stacklevel, described
from mfwrap.collectives import num_ranks, refuse_lone_process
from mfwrap.compatibility.transformers import pipeline_stage_of
from mfwrap.step.backward_updates import refuse_update_in_backward
from mfwrap.step.losses import Normalizer
from mfwrap.tensors.norm_groups import LocalNormGroups, NormGroups, group_parameters
from mfwrap.tensors.placements import place_gradients
from mfwrap.tensors.sharded_norms import SquareReduction
from mfwrap.tensors.shards import is_distributed, local_tensors
from mfwrap.tensors.wrappers import (
    FSDP,
    is_instance_of,
    plain_name,
    reshard,
    unwrapped_network,
    unwrapped_optimizer,
)

_DENSE = {torch.strided}


def checked_network(network: object) -> nn.Module:
    """Return `network` if a cell can train it in this process.

    Raises:
        TypeError: If `network` is not a module, is an engine of DeepSpeed, or contains a module of
            version 1 of FSDP.
        ValueError: If a launcher started several processes, but this one has no process group, or
            if transformers has split the network into pipeline stages.
    """
    refuse_lone_process(
        num_ranks(),
        "call torch.distributed.init_process_group and wrap the network in "
        "DistributedDataParallel or fully_shard",
    )
    if not isinstance(network, nn.Module):
        msg = f"`network` must be a torch.nn.Module, got {described(network)}"
        raise TypeError(msg)
    if is_instance_of(network, "deepspeed", "DeepSpeedEngine"):
        msg = (
            "`network` must not be a DeepSpeed engine: the engine has its own training step, which "
            "does not support averages, local norms, skipping of spikes or another loss scale; use "
            "fully_shard (FSDP2) to shard weights and optimizer"
        )
        raise TypeError(msg)
    if any(is_instance_of(each, FSDP, "FullyShardedDataParallel") for each in network.modules()):
        msg = (
            "`network` must not contain version 1 of FSDP, got FullyShardedDataParallel, whose "
            "ranks would compute different norms; use `fully_shard` (FSDP2) instead"
        )
        raise TypeError(msg)
    refuse_generation_pipeline(network)
    return network


def refuse_generation_pipeline(network: nn.Module) -> None:
    """Raise an error if transformers has split a network into pipeline stages.

    transformers makes such stages for generation. They send activations, but no gradients.

    Raises:
        ValueError: If a module of the network is such a stage.
    """
    for module in network.modules():
        stage = pipeline_stage_of(module)
        if stage is not None and stage.pp_size > 1:
            msg = (
                f"`network` must not be split by transformers, got pp_size={stage.pp_size}: its "
                "stages send no gradients to each other; use torch.distributed.pipelining, and "
                "pass the schedule to MFTrainOneStepCell"
            )
            raise ValueError(msg)


def checked_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside accelerate's wrapper, or `optimizer` itself.

    Raises:
        TypeError: If `optimizer` is not a `torch.optim.Optimizer`, with or without the wrapper, or
            changes its weights during backward.
    """
    inner = unwrapped_optimizer(optimizer)
    if not isinstance(inner, Optimizer):
        msg = f"`optimizer` must be a torch.optim.Optimizer, got {described(inner)}"
        raise TypeError(msg)
    refuse_update_in_backward(inner)
    return inner


def network_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a network by plain name; tied weights appear once.

    For a network under ``fully_shard`` these are the sharded parameters that an optimizer holds.
    """
    reshard(network)
    named = unwrapped_network(network).named_parameters()
    return {plain_name(name): parameter for name, parameter in named}


@final
class TrainedParameters:
    """The parameters of an optimizer that are also in a network, in the network's order.

    Warns about trainable parameters of the network that the optimizer does not hold, and about
    parameters of the optimizer that are not in the network. The step updates neither.

    Args:
        named_parameters: Parameters of the network by name.
        optimizer: Optimizer without accelerate's wrapper.
        local_norm_groups: As in `StepConfig`.
        present: Returns the network's present parameters by name, to find replaced parameters;
            ``None`` turns this check off.
        are_stages: Whether other ranks train the rest of the network. All parameters may then be
            frozen, and a pattern of `local_norm_groups` may match none of them.

    Raises:
        ValueError: If `optimizer` holds none of `named_parameters`, `local_norm_groups` yields
            no group or an empty group, or parameters are distributed over sets of ranks that
            overlap without a parameter over all of these ranks.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        local_norm_groups: LocalNormGroups | None,
        *,
        present: Callable[[], Mapping[str, nn.Parameter]] | None = None,
        are_stages: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._held = _held_by(optimizer)
        self._parameters, self._outside = _select(named_parameters, self._held)
        self._network = None if present is None else _NetworkParameters(self._parameters, present)
        self.tensors: tuple[nn.Parameter, ...] = tuple(self._parameters.values())
        """The parameters themselves, in order."""
        # All parameters that may get a gradient in backward, whether or not the optimizer holds
        # them.
        self._released = list(dict.fromkeys([*named_parameters.values(), *self._held]))
        self.device = self.tensors[0].device
        """Training device: that of the first parameter."""
        # Distributed parameters, whose gradients may have other placements than they have.
        self._distributed = list(filter(is_distributed, self.tensors))
        self.reduction = SquareReduction.among(self.tensors)
        """Sum over the ranks that hold shards; ``None`` if no parameter is distributed."""
        _check_rank_sets(self.reduction)
        self.groups = _TrainableGroups(
            self._parameters, local_norm_groups, self.device, are_stages=are_stages
        )
        """Call it for the groups of local norms, without parameters that are frozen at present."""

    @classmethod
    def of_network(
        cls,
        network: nn.Module,
        optimizer: Optimizer,
        local_norm_groups: LocalNormGroups | None = None,
        *,
        are_stages: bool = False,
    ) -> Self:
        """Return the parameters of a network, whose replaced parameters are found.

        Args:
            network: Network, with or without its wrappers.
            optimizer: As of the class.
            local_norm_groups: As of the class.
            are_stages: As of the class.

        Raises:
            ValueError: As the class.
        """
        present = functools.partial(network_parameters, network)
        return cls(present(), optimizer, local_norm_groups, present=present, are_stages=are_stages)

    def are_current(self, *, quickly: bool = False) -> bool:
        """Return whether the optimizer still holds the parameters that it held at construction.

        Args:
            quickly: Whether to compare their numbers only.
        """
        groups = self._optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != len(self._held):
            return False
        return quickly or all(map(operator.is_, _held_by(self._optimizer), self._held))

    def check_current(self) -> None:
        """Raise ``RuntimeError`` unless `are_current`."""
        if not self.are_current():
            msg = (
                f"`optimizer` must hold the same {len(self._held)} parameters as when the cell was "
                "built, got other parameters; build a new cell after adding or replacing parameters"
            )
            raise RuntimeError(msg)

    def collect_gradients(self, *, may_be_absent: bool = False) -> list[Tensor | None]:
        """Check what backward has left, and return the gradient of each parameter.

        It is ``None`` for a parameter that backward did not reach.

        A distributed gradient is first brought to the placements of its parameter, so all ranks
        that share parameters must call this method.

        Args:
            may_be_absent: Whether to accept that no parameter has a gradient instead of raising.

        Raises:
            RuntimeError: If no parameter has a gradient, the optimizer's parameters have changed, a
                parameter of the network has been replaced, or the network has moved to another
                device.
            TypeError: If a gradient is sparse.
        """
        self.check_current()
        device = self.tensors[0].device
        if device != self.device:
            msg = (
                f"`network` must stay on {self.device}, where the cell was built, got {device}; "
                "build the cell after moving the network"
            )
            raise RuntimeError(msg)
        for parameter in self._outside:
            parameter.grad = None
        if self._distributed:
            place_gradients(self._distributed)
        gradients = [parameter.grad for parameter in self.tensors]
        if {gradient.layout for gradient in gradients if gradient is not None} - _DENSE:
            self._refuse_sparse(gradients)
        absent = sum(map(operator.is_, gradients, itertools.repeat(None)))
        # The comparison reshards the network, which is not possible within a step.
        if self._network is not None and self.reduction is None:
            self._network.check(absent)
        if not may_be_absent and absent == len(gradients):
            msg = (
                "no parameter of the optimizer has a gradient; the loss must depend on at least "
                "one of its parameters"
            )
            raise RuntimeError(msg)
        return gradients

    def local(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return this rank's shards of distributed gradients, and other gradients as they are."""
        return gradients if self.reduction is None else local_tensors(gradients)

    def over_shards(
        self, squares: Tensor, normalizer: Normalizer | None
    ) -> tuple[Tensor, Normalizer | None]:
        """Sum over the ranks that hold shards of the gradients, which then have the same numbers.

        Args:
            squares: Sums of squares of this rank's shards, shape ``(N,)``, float32.
            normalizer: Divisor of the gradients besides the loss scale.
        """
        if self.reduction is None:
            return squares, normalizer
        squares, total = self.reduction(squares, None if normalizer is None else normalizer.reduced)
        if normalizer is not None and normalizer.is_partial:
            normalizer = Normalizer(total, normalizer.local)
        return squares, normalizer

    def _refuse_sparse(self, gradients: Sequence[Tensor | None]) -> None:
        for name, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None and gradient.layout not in _DENSE:
                msg = (
                    f"the gradient of `{name}` must be dense, got {gradient.layout}; "
                    "build the embedding with sparse=False"
                )
                raise TypeError(msg)

    def warn_of_replaced(self) -> None:
        """Warn if a parameter was replaced in the network; call it when a checkpoint is saved."""
        fault = None if self._network is None else self._network.fault()
        if fault is not None:
            warnings.warn(fault, stacklevel=callers_stacklevel())

    @property
    def have_gradients(self) -> bool:
        """Whether any of the parameters has a gradient."""
        return any(parameter.grad is not None for parameter in self.tensors)

    def present_gradients(self) -> list[Tensor]:
        """Return the gradients that are not ``None``."""
        return [g for parameter in self.tensors if (g := parameter.grad) is not None]

    def among(self, identities: Collection[int]) -> bool:
        """Return whether any of these parameters has its ``id`` in `identities`."""
        return any(id(parameter) in identities for parameter in self.tensors)

    def all_with_gradient_among(self, identities: Collection[int]) -> bool:
        """Return whether all parameters with a gradient have their ``id`` in `identities`."""
        return all(
            id(parameter) in identities for parameter in self.tensors if parameter.grad is not None
        )

    def named_gradients(self) -> dict[str, Tensor]:
        """Return the gradients that are not ``None``, by the names of their parameters."""
        return {
            name: gradient
            for name, gradient in zip(self._parameters, self.collect_gradients(), strict=True)
            if gradient is not None
        }

    def release_gradients(self) -> None:
        """Set all gradients to ``None``, even if no optimizer holds the parameter."""
        for parameter in self._released:
            parameter.grad = None


@final
class _NetworkParameters:
    """The parameters of a network, to notice that others have replaced them.

    Args:
        trained: Trained parameters by name.
        present: Returns the network's present parameters by name.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        present: Callable[[], Mapping[str, nn.Parameter]],
    ) -> None:
        self._trained = trained
        self._present = present
        self._known = list(present().values())
        # Largest number of parameters without a gradient in any update so far.
        self._most_absent = 0

    def check(self, absent: int) -> None:
        """Raise ``RuntimeError`` if a trained parameter was replaced in the network.

        A parameter that has left the network gets no gradients any more. So the comparison is
        needed only when the number of parameters without a gradient reaches a new maximum. That
        happens at most once per parameter.

        Args:
            absent: Number of parameters that have no gradient in this update.
        """
        if absent <= self._most_absent:
            return
        fault = self.fault()
        if fault is not None:
            raise RuntimeError(fault)
        self._most_absent = absent

    def fault(self) -> str | None:
        """Describe parameters that were replaced in the network; ``None`` if there are none."""
        present = self._present()
        inside = set(map(id, present.values()))
        known = set(map(id, self._known))
        named = self._trained.items()
        lost = [name for name, p in named if id(p) in known and id(p) not in inside]
        new = [name for name, p in present.items() if p.requires_grad and id(p) not in known]
        if not lost or not new:
            return None
        return (
            f"the optimizer updates parameters that are no longer in the network: {lost}; the "
            f"network has the new parameters {new}, which are not updated; build optimizer and "
            "step after replacing parameters"
        )


@final
class _TrainableGroups:
    """The groups of local norms; a loop may freeze parameters at any time, and tells nobody.

    Args:
        named: Trained parameters by name.
        local_norm_groups: As in `StepConfig`.
        device: Training device.
        are_stages: Whether all parameters may be frozen, and a pattern may match none of them.

    Raises:
        ValueError: If there is no group, or an empty one.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        local_norm_groups: LocalNormGroups | None,
        device: torch.device,
        *,
        are_stages: bool,
    ) -> None:
        self._named = named
        self._local_norm_groups = local_norm_groups
        self._device = device
        self._trainable = self._trainable_now()
        self._groups = self._grouped(self._trainable, may_be_empty=are_stages)

    def __call__(self) -> NormGroups:
        """Return the groups, without parameters that are frozen at present."""
        trainable = self._trainable_now()
        if trainable != self._trainable:
            # At construction, a pattern without a match is an error. Now the loop may have frozen
            # all parameters that a pattern matches, which must not end a run.
            self._groups = self._grouped(trainable, may_be_empty=True)
            self._trainable = trainable
        return self._groups

    def _trainable_now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._named.values()]

    def _grouped(self, trainable: Sequence[bool], *, may_be_empty: bool) -> NormGroups:
        return group_parameters(
            {name: parameter.numel() for name, parameter in self._named.items()},
            self._local_norm_groups,
            self._device,
            left_out=[n for n, kept in zip(self._named, trainable, strict=True) if not kept],
            may_be_empty=may_be_empty,
        )


def _check_rank_sets(reduction: SquareReduction | None) -> None:
    """Check that all ranks which hold parameters get the same norm.

    They do if one parameter is distributed over all of them, because its ranks sum last.
    """
    if reduction is None or all(reduction.ranks.issuperset(ranks) for ranks in reduction.sets):
        return
    outside = next(ranks for ranks in reduction.sets if not reduction.ranks.issuperset(ranks))
    msg = (
        f"some parameters are distributed over ranks {outside}, others over ranks "
        f"{reduction.sets[-1]}, and none over all of these ranks, which could therefore decide "
        "differently whether to skip an update; call `fully_shard` on the whole network after "
        "tensor or expert parallelism, so that it shards the parallel parameters, too"
    )
    raise ValueError(msg)


def _held_by(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _select(
    named: Mapping[str, nn.Parameter], held: Sequence[Tensor]
) -> tuple[dict[str, nn.Parameter], list[Tensor]]:
    """Split the optimizer's parameters into those in the network, by name, and all others."""
    held_set = set(held)
    shared = {name: parameter for name, parameter in named.items() if parameter in held_set}
    if not shared and not any(parameter.requires_grad for parameter in named.values()):
        msg = (
            "the network must have a parameter that requires a gradient, got none; unfreeze what "
            "shall be trained (`requires_grad_()`), or load an adapter with is_trainable=True"
        )
        raise ValueError(msg)
    if not shared:
        msg = (
            f"`optimizer` must hold parameters of the network, got {len(held)} parameters that are "
            f"not among the network's {len(named)}"
        )
        raise ValueError(msg)
    untrained = [n for n, p in named.items() if p.requires_grad and n not in shared]
    if untrained:
        warnings.warn(
            f"trainable parameters are in no optimizer and are not updated: {untrained}",
            stacklevel=callers_stacklevel(),
        )
    inside = set(shared.values())
    outside = [parameter for parameter in held if parameter not in inside]
    if outside:
        warnings.warn(
            f"{len(outside)} parameters of the optimizer are not in the network and are not "
            "updated",
            stacklevel=callers_stacklevel(),
        )
    return shared, outside
