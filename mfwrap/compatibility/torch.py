"""Private names of torch: functions of lists of tensors, hooks, compiled modules, ranks.

`mfwrap.compatibility.fully_shard`, `pipelining`, `graphs` and `gradient_dtypes` have the names of
FSDP2, pipelines, graphs and dtypes of gradients.
"""

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, distributed, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, _muon
from torch.utils import _pytree

from mfwrap.compatibility.foreign import ForeignName

if TYPE_CHECKING:
    # Public, but its types are not.
    from torch._C._distributed_c10d import GradBucket as GradBucket  # noqa: PLC0414  (re-exports it)
else:
    with contextlib.suppress(ImportError):  # a torch that was built without ranks
        from torch.distributed import GradBucket  # noqa: F401  (for communication hooks)

NAMES = (
    ForeignName("torch", "_foreach_add_"),
    ForeignName("torch", "_foreach_clamp_max_"),
    ForeignName("torch", "_foreach_clamp_min_"),
    ForeignName("torch", "_foreach_copy_"),
    ForeignName("torch", "_foreach_div_"),
    ForeignName("torch", "_foreach_lerp_"),
    ForeignName("torch", "_foreach_mul_"),
    ForeignName("torch", "_foreach_norm"),
    ForeignName("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu"),
    ForeignName("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"),
    ForeignName("torch", "Tensor._version"),
    ForeignName("torch", "Tensor._post_accumulate_grad_hooks"),
    ForeignName(
        "torch.distributed.optim.apply_optimizer_in_backward",
        "_apply_optimizer_in_backward._in_backward_optimizers",
    ),
    ForeignName("torch.utils", "_pytree"),
    ForeignName("torch._compile", "_disable_dynamo"),
    ForeignName("torch.autograd", "Variable._execution_engine"),
    ForeignName("torch.nn", "Module._compiled_call_impl"),
    ForeignName("torch.nn.modules.batchnorm", "_BatchNorm"),
    ForeignName("torch.nn", "Module._backward_hooks"),
    ForeignName("torch.nn", "Module._load_state_dict_pre_hooks"),
    ForeignName("torch.nn", "Module._load_from_state_dict"),
    ForeignName("torch._dynamo.eval_frame", "OptimizedModule._orig_mod"),
    ForeignName("torch.optim", "_muon"),
    ForeignName("torch.optim", "Optimizer._optimizer_step_pre_hooks"),
    ForeignName("torch.optim", "Optimizer._optimizer_step_post_hooks"),
    ForeignName("torch.optim.lr_scheduler", "LRScheduler._last_lr"),
    ForeignName("torch.optim.lr_scheduler", "StepLR._get_closed_form_lr"),
    ForeignName("torch.optim.lr_scheduler", "LRScheduler._step_count"),
    ForeignName("torch.optim.lr_scheduler", "SequentialLR._schedulers"),
    ForeignName("torch.nn.parallel", "DistributedDataParallel._comm_hooks"),
    ForeignName("torch.nn.parallel", "DistributedDataParallel._pre_forward"),
    ForeignName("torch.nn.parallel", "DistributedDataParallel._use_python_reducer"),
    ForeignName("torch.distributed.distributed_c10d", "_get_default_store"),
    ForeignName("torch._C", "_current_graph_task_id"),
    ForeignName("torch.cuda.memory", "_record_memory_history"),
    ForeignName("torch.cuda.memory", "_dump_snapshot"),
)

foreach_add_ = torch._foreach_add_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

muon = _muon.muon
"""Step of Muon for lists of matrices, gradients and momentums."""

BatchNorm = _BatchNorm
"""Base class of the batch normalizations of torch and of other libraries."""

pytree = _pytree
"""Functions of nested containers: ``tree_leaves``, ``tree_map``, ``tree_flatten`` ..."""

not_compiled = _disable_dynamo
"""Decorator of a function that ``torch.compile`` calls without compiling it.

``torch.compiler.disable`` is the same, but imports the compiler at once, which takes seconds.
"""

COMPILED_MODULE = "_orig_mod"
"""Name of the module inside the one that ``torch.compile(module)`` returns."""

PRE_FORWARD = "_pre_forward"
"""Method of DistributedDataParallel that waits for other ranks before a forward."""


CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Operation that torch's counter of floating-point operations does not know."""

CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Backward of `CPU_ATTENTION`, which the counter does not know either."""


def matmul_precision() -> str:
    """Return the precision of float32 matrix products on a GPU: "highest", "high" or "medium".

    The setting has an older name, ``torch.set_float32_matmul_precision``, and a newer one,
    ``torch.backends.fp32_precision``, which the Trainer's option ``tf32`` uses. The newer one is
    right after both; it does not tell "high" from "medium".
    """
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "highest"
    with warnings.catch_warnings():
        # torch 2.9.0 warns that this function is old.
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        try:
            is_medium = torch.get_float32_matmul_precision() == "medium"
        except RuntimeError:  # set by the newer name
            is_medium = False
    return "medium" if is_medium else "high"


def version_of(tensor: Tensor) -> int:
    """Return a number that grows each time a tensor is changed in place.

    It is always 0 for a tensor that was made in ``torch.inference_mode``.
    """
    return 0 if tensor.is_inference() else tensor._version


def post_accumulate_hooks(parameter: Tensor) -> dict[int, Any]:
    """Return the hooks that torch calls when a gradient has been accumulated, by their keys.

    The dict is the parameter's own: changing it changes the hooks. A parameter without hooks gets a
    new, empty dict.
    """
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def backward_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the backward hooks of a module by their keys; changing the result changes them."""
    hooks: dict[int, Any] = module._backward_hooks
    return hooks


def optimizers_in_backward(parameter: Tensor) -> list[Optimizer]:
    """Return the optimizers that torch steps for a parameter in the middle of backward."""
    found: list[Optimizer] = getattr(parameter, "_in_backward_optimizers", [])
    return found


def call_after_backward(function: Callable[[], object]) -> None:
    """Call a function at the end of the running backward; call this within that backward."""
    # DistributedDataParallel and fully_shard use it, too.
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the compiled call of a module; ``None`` without ``module.compile()``."""
    call: Callable[..., Any] | None = module._compiled_call_impl
    return call


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replace the compiled call of a module."""
    module._compiled_call_impl = call


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` or ``module.compile()`` has compiled a module itself."""
    return hasattr(module, COMPILED_MODULE) or compiled_call(module) is not None


def loading_functions(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the functions that may change how a module's own weights are loaded."""
    return [type(module)._load_from_state_dict, *module._load_state_dict_pre_hooks.values()]


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the functions that an optimizer calls before and after its step."""
    return [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]


def step_count(schedule: Any) -> int:
    """Return how often a schedule was stepped, the step of its construction included.

    accelerate raises the count without a step of the schedule while gradients are accumulated, so
    ``last_epoch`` is another number.
    """
    return int(schedule._step_count)


def set_last_rate(schedule: Any, number: int, rate: float) -> None:
    """Set the rate of a parameter group that ``get_last_lr`` of a schedule returns."""
    schedule._last_lr[number] = rate


def formula_rates(schedule: Any) -> list[Any] | None:
    """Return the rates of a torch schedule by its formula; ``None`` if it has none."""
    formula = getattr(schedule, "_get_closed_form_lr", None)
    return None if formula is None else list(formula())


def schedules_inside(schedule: Any) -> list[Any]:
    """Return the schedules inside a SequentialLR or ChainedScheduler; empty for any other."""
    return list(getattr(schedule, "_schedulers", ()))


def communication_hooks(part: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Return the module's own list of pairs of a communication hook and the hook's state."""
    hooks: list[tuple[Any, Any]] = getattr(part, "_comm_hooks", [])
    return hooks


def waits_before_forward(part: DistributedDataParallel) -> bool:
    """Return whether `PRE_FORWARD` of a module waits for other ranks."""
    # A replica with a reducer in Python is compiled whole. Its method does not wait.
    return not part._use_python_reducer


def default_store() -> Any:
    """Return the key-value store that the ranks of the process group share."""
    return distributed.distributed_c10d._get_default_store()


@final
class MemoryHistory:
    """Let torch note its allocations on a device, and write what it has noted.

    torch's documentation describes these names, which begin with an underscore.

    Args:
        device: Device with a caching allocator.

    Raises:
        ValueError: If torch takes no snapshots of the device.
    """

    def __init__(self, device: torch.device) -> None:
        memory: Any = getattr(getattr(torch, device.type, None), "memory", None)
        if not hasattr(memory, "_record_memory_history"):
            msg = f"`memory_snapshot` must be False on {device}, of which torch takes no snapshots"
            raise ValueError(msg)
        self._memory = memory
        memory._record_memory_history(max_entries=100_000)

    def write(self, file: Path) -> None:
        """Write a pickle of what is allocated, and of the last allocations."""
        self._memory._dump_snapshot(str(file))

    def stop(self) -> None:
        """Let torch note no allocations any longer."""
        self._memory._record_memory_history(enabled=None)


def is_in_backward() -> bool:
    """Return whether this thread is within a backward pass, for example in a recomputation."""
    return backward_number() != -1


def backward_number() -> int:
    """Return the number of the backward pass in which this thread is; -1 outside of one."""
    number: int = torch._C._current_graph_task_id()  # (torch's own checkpointing asks it)
    return number
