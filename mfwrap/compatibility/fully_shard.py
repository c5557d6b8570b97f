"""Parameters that torch's ``fully_shard`` (FSDP2) gathers and reduces together.

torch has no public access to the gradients of this rank before they are reduced, and none to the
dtype of a reduction after ``fully_shard``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mfwrap.compatibility.foreign import ForeignName
from mfwrap.compatibility.gradient_dtypes import set_gradient_dtype

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_STATE = f"{_PACKAGE}._fsdp_state"
_GROUP = f"{_PACKAGE}._fsdp_param_group"
_PARAM = f"{_PACKAGE}._fsdp_param"

HALF_PRECISION = (torch.float16, torch.bfloat16)
"""Dtypes in which a sum of many gradients loses small ones."""

NAMES = (
    ForeignName(f"{_PACKAGE}._fully_shard", "FSDPModule._get_fsdp_state"),
    ForeignName("torch.distributed.fsdp", "FSDPModule.reset_iter_state", since="2.13"),
    ForeignName(_STATE, "FSDPState._is_root"),
    ForeignName(_STATE, "FSDPState._state_ctx"),
    ForeignName(_STATE, "FSDPStateContext.all_states"),
    ForeignName(_STATE, "FSDPStateContext.iter_forward_root"),
    ForeignName(_STATE, "FSDPState._training_state"),
    ForeignName(_GROUP, "FSDPParamGroup._training_state"),
    ForeignName(_STATE, "FSDPState._fsdp_param_groups", since="2.12"),
    ForeignName(_STATE, "FSDPState._fsdp_param_group"),
    ForeignName(_GROUP, "FSDPParamGroup.fsdp_params"),
    ForeignName(_GROUP, "FSDPParamGroup.is_sharded"),
    ForeignName(_GROUP, "FSDPParamGroup.mesh_info"),
    ForeignName(_GROUP, "FSDPParamGroup.gradient_divide_factor"),
    ForeignName(_GROUP, "FSDPParamGroup.reduce_grads"),
    ForeignName(_GROUP, "FSDPParamGroup.post_backward"),
    ForeignName(_GROUP, "FSDPParamGroup.unshard"),
    ForeignName(_GROUP, "FSDPParamGroup.wait_for_unshard"),
    ForeignName(_GROUP, "FSDPParamGroup._init_mp_dtypes"),
    # Since torch 2.15, each parameter has dtypes of its own.
    ForeignName(_GROUP, "FSDPParamGroup.mp_policy", before="2.15"),
    ForeignName(_GROUP, "FSDPParamGroup._orig_dtype", before="2.15"),
    ForeignName(_PARAM, "FSDPParam.sharded_param"),
    ForeignName(_PARAM, "FSDPParam._module_info"),
    ForeignName(_PARAM, "FSDPParam._unsharded_param"),
    ForeignName(_PARAM, "FSDPParam.unsharded_grad_data"),
    ForeignName(_PARAM, "FSDPParam.mp_policy"),
    ForeignName(_PARAM, "FSDPParam.sharded_grad_dtype", since="2.15"),
    ForeignName(_PARAM, "FSDPParam._has_sharded_grad_dtype_override", since="2.15"),
    ForeignName(_PARAM, "FSDPParam.unsharded_grad_dtype", since="2.15"),
    # Since torch 2.15, whole gradients are the `grad` of the unsharded parameters.
    ForeignName(_PARAM, "FSDPParam.accumulate_unsharded_grad_if_needed", before="2.15"),
    ForeignName(_PARAM, "FSDPParam.unsharded_accumulated_grad"),  # read-only since torch 2.15
    ForeignName(_PARAM, "FSDPParam.unsharded_accumulated_grad_data", before="2.15"),
)


@final
class ParameterGroup:
    """The parameters of one ``fully_shard`` call.

    Args:
        group: torch's ``FSDPParamGroup``.
    """

    GATHERS = ("unshard", "wait_for_unshard")
    """Methods of `group` that wait for other ranks before a forward or backward."""

    def __init__(self, group: Any) -> None:
        self.group = group
        # Without the attribute, the policy of a group is that of its parameters.
        self._has_policy = hasattr(group, "mp_policy")

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Sharded parameters: the ones that an optimizer holds."""
        # The modules know them. torch's own references may be out of date until the first forward:
        # transformers puts new parameters into the modules when it loads a sharded model.
        if not self.group.is_sharded:
            return [each.sharded_param for each in self.group.fsdp_params]
        places = [each._module_info for each in self.group.fsdp_params]
        return [place.module.get_parameter(place.param_name) for place in places]

    @property
    def mesh(self) -> DeviceMesh:
        """Ranks over which gradients are reduced, replicas included."""
        mesh: DeviceMesh = self.group.mesh_info.mesh
        return mesh

    @property
    def divisor(self) -> float | None:
        """Number by which the sum over ranks is divided; ``None`` for the number of ranks."""
        factor: float | None = self.group.gradient_divide_factor
        return factor

    @property
    def is_reducing(self) -> bool:
        """Whether the next backward reduces gradients instead of accumulating them."""
        return bool(self.group.reduce_grads)

    @property
    def compute_dtypes(self) -> set[torch.dtype]:
        """Dtypes in which backward computes the gradients of trainable parameters."""
        policies = [policy for _, policy in self.policies()]
        if len(policies) == 1:
            policies *= len(self.parameters)
        pairs = zip(policies, self.parameters, strict=True)
        return {policy.param_dtype or p.dtype for policy, p in pairs if p.requires_grad}

    @property
    def reduction(self) -> Callable[..., None]:
        """Method that torch calls after each backward, to reduce the gradients.

        Assigning a callable makes torch call it instead. The attribute belongs to torch's own
        object of this group, so the assigned callable is found again by another `ParameterGroup`.
        """
        method: Callable[..., None] = self.group.post_backward
        return method

    @reduction.setter
    def reduction(self, function: Callable[..., None]) -> None:
        self.group.post_backward = function

    def policies(self) -> list[tuple[Any, Any]]:
        """Return pairs of an object of torch and its ``MixedPrecisionPolicy``."""
        holders = [self.group] if self._has_policy else self.group.fsdp_params
        return [(holder, holder.mp_policy) for holder in holders]

    def reduce_in_float32(self, policies: list[tuple[Any, Any]], *, on: bool) -> None:
        """Accumulate and reduce gradients in float32, or as the policies say.

        Args:
            policies: Policies before the first call, from `policies`.
            on: Whether to use float32. The ``grad_dtype`` of half-precision weights must then be
                float32, and `keep_float32` must be called before each reduction.
        """
        for holder, policy in policies:
            in_float32 = dataclasses.replace(policy, reduce_dtype=torch.float32)
            holder.mp_policy = in_float32 if on else policy
        if self._has_policy:
            self.group._init_mp_dtypes()
            return
        for each in self.group.fsdp_params:
            each.sharded_grad_dtype = torch.float32 if on else each.sharded_param.dtype
            each._has_sharded_grad_dtype_override = on
        self.group._init_mp_dtypes()
        for each in self.group.fsdp_params:
            # torch sets this dtype when it first gathers a parameter, and for some at a backward.
            whole = getattr(each, "_unsharded_param", None)
            if whole is not None:
                set_gradient_dtype(whole, each.unsharded_grad_dtype)

    def keep_float32(self) -> None:
        """Keep torch from rounding the gradients of the next reduction to half precision."""
        # torch casts the reduced gradients to a dtype that it sets to that of the weights in the
        # first forward and, since torch 2.15, when weights are loaded or moved.
        if not self._has_policy:
            for each in self.group.fsdp_params:
                each.sharded_grad_dtype = torch.float32
                each._has_sharded_grad_dtype_override = True
        elif self.group._orig_dtype in HALF_PRECISION:
            self.group._orig_dtype = torch.float32

    def gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return pairs of a sharded parameter and this rank's own whole gradient of it.

        Call it just before a reduction. The gradients are sums over all backward passes since the
        previous reduction. They are not copied. Parameters without a gradient are left out.
        """
        present = []
        for each in self.group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            if whole is None:
                continue
            if self._has_policy:
                # torch makes this call at the start of a reduction, too. Making it earlier is
                # harmless: torch's own call then finds nothing left to accumulate.
                each.accumulate_unsharded_grad_if_needed()
                if each.unsharded_accumulated_grad is not None:
                    present.append((each.sharded_param, each.unsharded_accumulated_grad_data))
                    continue
            if whole.grad is not None:
                present.append((each.sharded_param, each.unsharded_grad_data))
        return present

    def discard_gradients(self) -> None:
        """Free whole gradients that were not reduced."""
        for each in self.group.fsdp_params:
            if self._has_policy:
                each.unsharded_accumulated_grad = None
            whole = getattr(each, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def groups_of(part: Any) -> list[ParameterGroup]:
    """Return the parameter groups of a module that ``fully_shard`` has sharded; may be empty.

    Args:
        part: torch's ``FSDPModule``.
    """
    return [ParameterGroup(group) for group in _groups(part._get_fsdp_state())]


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def reset_iteration(part: Any) -> bool:
    """Make a module ready for the next forward after a forward or backward has raised.

    Args:
        part: torch's ``FSDPModule``. Only the outermost module is reset, with all inside it.

    Returns:
        Whether the module can be used again. Without torch's own reset, this is so if no forward or
        backward of a sharded module was interrupted.
    """
    state = part._get_fsdp_state()
    if not state._is_root:
        return True
    if hasattr(part, "reset_iter_state"):
        part.reset_iter_state()
        return True
    context = state._state_ctx
    inside = [each for inner in context.all_states for each in (inner, *_groups(inner))]
    is_idle = all(each._training_state.name == "IDLE" for each in inside)
    return is_idle and context.iter_forward_root is None
