"""The settings of a training step."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

from mfwrap.arguments import check_bool, check_choice, check_int, check_positive_number
from mfwrap.compatibility.gradient_dtypes import HAS_GRADIENT_DTYPE
from mfwrap.tensors.norm_groups import LocalNormGroups

SpikePolicyName = Literal["record", "skip", "clip"]
"""What an update does about a spike of its global norm; see `StepConfig`."""

_SPIKE_LIMITS = {"skip": 6.0, "clip": 2.5}
"""Default of ``spike_z`` for each policy that judges; 2.5 is ZClip's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """Settings of a training step, checked at construction.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or two values contradict each other.

    Example:
        >>> StepConfig(use_clip_grad=True, max_grad_norm=0.5).max_grad_norm
        0.5
    """

    use_clip_grad: bool = False
    """Clip gradients by their global norm and report that norm."""

    max_grad_norm: float = 1.0
    """Largest global L2 norm of the unscaled gradients; ``inf`` computes it without clipping."""

    local_norm: bool = False
    """Report one norm per group of parameters, from the gradients of this rank alone."""

    gradient_accumulation_steps: int = 1
    """Number of micro-batches that a call of the cell splits its inputs into."""

    not_split: Sequence[str | int] = ()
    """Inputs of a call of the cell that go to each micro-batch whole, because they hold no rows:
    class weights, for example, or position ids of shape ``(3, 1, length)``. A name stands for a
    keyword, or for a key of a mapping within the inputs; a number for the position of a positional
    input, from 0 on. What a call lacks is ignored."""

    calculate_per_token_loss: bool = False
    """Divide the sum of the micro-batches' loss numerators by the sum of their denominators,
    instead of averaging the losses of the micro-batches."""

    use_skip_data_by_global_norm: bool = False
    """Skip an update if its global norm reaches `global_norm_spike_threshold`."""

    global_norm_spike_threshold: float = 1.0
    """Smallest global norm at which an update is skipped."""

    spike_policy: SpikePolicyName = "record"
    """What to do about an update whose global norm is far above those of the updates before it:

    - ``"record"``: nothing. Monitors such as `TrainingStateMonitor` record it.
    - ``"skip"``: skip the update.
    - ``"clip"``: clip its gradients, the further above, the closer to the usual norm, as ZClip
      does.

    All ranks decide the same without a message, and the host reads nothing. A norm that stays high
    is the usual one after at most 12 updates. See `mfwrap.step.spikes.SpikePolicy`."""

    spike_z: float | None = None
    """Number of deviations above the expected norm at which a norm is a spike, on a logarithmic
    scale. ``None`` for 6 to skip, and for ZClip's 2.5 to clip."""

    local_norm_groups: LocalNormGroups | None = None
    """Groups of local norms:

    - ``None``: one group per trainable parameter;
    - ``"layer"``: one group per numbered layer, and one per module outside of the layers;
    - regular expressions: one group per expression. A parameter belongs to the first expression
      that is found in its name; a parameter without a match is left out;
    - a callable: takes the name of a parameter and returns the name of its group, or ``None`` to
      leave the parameter out."""

    max_consecutive_skips: int | None = 100
    """Number of consecutive skipped updates after which training stops with an error; ``None`` to
    never stop."""

    sync_each_batch: bool = False
    """Reduce the gradients of each micro-batch over the ranks, instead of the sum over all
    micro-batches once per update.

    Under ``fully_shard`` this saves memory, for one more reduction per micro-batch: a rank then
    keeps its shards of the gradients. By default it holds whole gradients, 4 bytes per parameter in
    float32, from the first micro-batch to the last. Norms, skips and weights are exact in both
    ways, but local norms need one reduction per update.

    Source: accelerate, ``GradientAccumulationPlugin.sync_each_batch``; MindSpore,
    ``gradient_accumulation_shard``."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Add up the gradients of several micro-batches, and reduce them over the ranks, in float32,
    whatever the dtype of the weights.

    Without it torch adds up the gradients of bfloat16 weights in bfloat16, where 1024 + 1 is 1024.
    Norms, clipping and the overflow flag are then computed from the float32 sums, and the optimizer
    gets each gradient rounded once to the dtype of its weight. Updates of one micro-batch, float32
    weights and gradients under autocast, which are float32 already, are not changed.

    Memory and messages per element of a half-precision weight: 4 bytes instead of 2 for the
    gradient, and 2 more while it is rounded; reductions send 4 bytes instead of 2. Under
    ``fully_shard`` this holds for the unit's whole gradients, and also if only the policy's
    ``param_dtype`` is half precision.

    Source: Megatron-LM, ``accumulate_allreduce_grads_in_fp32``."""

    def __post_init__(self) -> None:
        """Check each value, and check that no two values contradict each other."""
        for field in fields(self):
            if field.type is bool:
                check_bool(field.name, getattr(self, field.name))
        self._check_gradient_dtype()
        for name in ("max_grad_norm", "global_norm_spike_threshold"):
            # Keep the float: torch accepts neither a Fraction nor an int too large for a float.
            object.__setattr__(self, name, check_positive_number(name, getattr(self, name)))
        check_choice("spike_policy", self.spike_policy, get_args(SpikePolicyName))
        self._check_spike_z()
        check_int("gradient_accumulation_steps", self.gradient_accumulation_steps)
        self._check_not_split()
        if self.max_consecutive_skips is not None:
            check_int("max_consecutive_skips", self.max_consecutive_skips)
        if self.use_skip_data_by_global_norm and not self.use_clip_grad:
            msg = (
                "`use_skip_data_by_global_norm` needs the global norm, which is not computed with "
                "use_clip_grad=False; set `use_clip_grad=True` (with `max_grad_norm=inf` the norm "
                "is computed without clipping)"
            )
            raise ValueError(msg)
        self.check_micro_batches(self.gradient_accumulation_steps)
        self._check_groups()

    @property
    def spike_limit(self) -> float:
        """Number of deviations at which a norm is a spike; infinite for the policy ``record``."""
        default = _SPIKE_LIMITS.get(self.spike_policy, math.inf)
        return default if self.spike_z is None else self.spike_z

    def _check_spike_z(self) -> None:
        if self.spike_z is None:
            return
        object.__setattr__(self, "spike_z", check_positive_number("spike_z", self.spike_z))
        if self.spike_policy == "record":
            msg = (
                '`spike_z` has no effect with spike_policy="record", got '
                f'{self.spike_z:g}; set `spike_policy="skip"` or `"clip"`, or leave `spike_z` out'
            )
            raise ValueError(msg)

    def _check_not_split(self) -> None:
        given = self.not_split
        if isinstance(given, str) or not isinstance(given, Sequence):
            msg = f"`not_split` must be a list of names and positions, got {given!r}"
            raise TypeError(msg)
        for each in given:
            if not isinstance(each, (str, int)) or isinstance(each, bool):
                msg = f"`not_split` must hold names and positions, got {each!r}"
                raise TypeError(msg)
            if isinstance(each, int) and each < 0:
                msg = f"`not_split` must hold positions >= 0, got {each}"
                raise ValueError(msg)
        object.__setattr__(self, "not_split", tuple(given))

    def check_micro_batches(self, number: int) -> None:
        """Check that an update of `number` micro-batches has the local norms that are asked for.

        Raises:
            ValueError: If `local_norm` and `sync_each_batch` are set and `number` is > 1.
        """
        if number > 1 and self.local_norm and self.sync_each_batch:
            msg = (
                "`local_norm` must be False if `sync_each_batch` reduces the gradients of each "
                "micro-batch, because no rank then has the gradients of its own whole update; got "
                f"both with {number} micro-batches per update; set one of them to False"
            )
            raise ValueError(msg)

    def check_communication_hook(self, hook: object | None) -> None:
        """Check that these settings allow a communication hook of the caller.

        Args:
            hook: Hook of DistributedDataParallel, or its name; ``None`` for torch's all-reduce.

        Raises:
            ValueError: If `accumulate_allreduce_grads_in_fp32` is set and there is a hook.
        """
        if hook is not None and self.accumulate_allreduce_grads_in_fp32:
            msg = (
                "`accumulate_allreduce_grads_in_fp32` must be False with a communication hook, "
                f"which gets and reduces buckets in the weights' dtype; got the hook {hook!r}; "
                "leave one of the two out"
            )
            raise ValueError(msg)

    def _check_gradient_dtype(self) -> None:
        if self.accumulate_allreduce_grads_in_fp32 and not HAS_GRADIENT_DTYPE:
            msg = (
                "`accumulate_allreduce_grads_in_fp32` must be False with torch "
                f"{torch.__version__}, which lacks Tensor.grad_dtype; torch 2.10 has it"
            )
            raise ValueError(msg)

    def _check_groups(self) -> None:
        groups = self.local_norm_groups
        if groups is None or callable(groups) or groups == "layer":
            return
        if isinstance(groups, str) or not isinstance(groups, Sequence):
            msg = (
                '`local_norm_groups` must be None, "layer", a list of regular expressions or a '
                f"callable, got {groups!r}"
            )
            raise TypeError(msg)
        if not groups or not all(isinstance(pattern, str) for pattern in groups):
            msg = f"`local_norm_groups` must be a non-empty list of str patterns, got {groups!r}"
            raise ValueError(msg)
        for pattern in groups:
            try:
                re.compile(pattern)
            except re.error as error:
                msg = f"`local_norm_groups` must hold regular expressions, got {pattern!r}: {error}"
                raise ValueError(msg) from error
