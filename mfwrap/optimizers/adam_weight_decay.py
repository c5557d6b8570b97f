"""`AdamWeightDecay`: MindSpore's Adam without bias correction, run by torch's AdamW kernels."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from mfwrap.arguments import check_number
from mfwrap.compatibility.torch import foreach_copy_
from mfwrap.optimizers.closure import evaluated
from mfwrap.tensors.shards import local_tensors

_MANY_STEPS = 2.0**126
"""Step count that is passed to torch's kernels. They divide by ``1 - beta**step``, which is exactly
1 for this count and any beta < 1 - 1e-36. Adding 1 to it in float32 does not change it."""

_CPU = torch.device("cpu")

_MOST_ELEMENTS = 2**26
"""Number of elements of half-precision weights that are copied to float32 at a time: 256 MiB for
the weights, and as much for their gradients."""


class AdamWeightDecay(Optimizer):
    """Adam with decoupled weight decay and without bias correction, as in MindSpore.

    One step, with the gradient ``g`` of a weight ``w``::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = w - lr * (m / (sqrt(v) + eps) + weight_decay * w)

    Without bias correction the first steps are larger than those of ``torch.optim.AdamW``: with the
    default betas, the first step moves each weight by 3.16 ``lr`` instead of 1 ``lr``.

    By default the step is one call of torch's fused AdamW kernel, on the CPU and on accelerators.
    Unscaling, clipping and skipping are part of this call. The kernel gets a step count for which
    its bias correction is exactly 1.

    Source: MindSpore's ``nn.AdamWeightDecay``; ``FP32StateAdamWeightDecay`` and
    ``FusedAdamWeightDecay`` of MindFormers are ``AdamWeightDecay(..., fp32_state=True)``, and its
    ``AdamW`` is ``AdamWeightDecay(..., fp32_state=True, bias_correction=True)``. In
    MindSpore, weights whose names contain ``beta`` or ``gamma`` have no weight decay. Here the
    parameter groups decide, as in all of torch's optimizers.

    Args:
        params: Parameters, or dicts of parameter groups.
        lr: Learning rate, a number or a tensor of shape ``()``, >= 0.
        betas: Decay rates of ``m`` and ``v``, each in [0, 1).
        eps: Term added to ``sqrt(v)``, >= 0.
        weight_decay: Decay of the weights, >= 0. In each step it is multiplied by ``lr``.
        fp32_state: Whether ``m`` and ``v`` of half-precision weights are float32, and the step is
            computed in float32 and rounded once. This copies the weights and their gradients, at
            most 2**26 elements at a time (512 MiB). By default ``m`` and ``v`` have the dtype of
            their weights, and small gradients underflow in ``v`` if that is float16.
        bias_correction: Whether to divide ``m`` and ``v`` by ``1 - beta**t`` at step ``t``, as
            ``torch.optim.AdamW`` does, which has no `fp32_state`.
        fused: Whether to use torch's fused kernel, which exists for CPU, CUDA, MPS and XPU. Without
            it, unscaling and clipping are separate passes over the gradients.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> weight.grad = torch.ones(1)
        >>> AdamWeightDecay([weight], lr=0.01).step()
        >>> weight.data
        tensor([-0.0316])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        fp32_state: bool = False,
        bias_correction: bool = False,
        fused: bool = True,
    ) -> None:
        if not isinstance(lr, Tensor):
            check_number("lr", lr)
        check_number("eps", eps)
        check_number("weight_decay", weight_decay)
        beta1, beta2 = betas
        for name, beta in (("betas[0]", beta1), ("betas[1]", beta2)):
            if check_number(name, beta) >= 1:
                msg = f"`{name}` must be in [0, 1), got {beta}"
                raise ValueError(msg)
        defaults = {
            "lr": lr,
            "betas": (beta1, beta2),
            "eps": eps,
            "weight_decay": weight_decay,
            "fp32_state": fp32_state,
            "bias_correction": bias_correction,
            "fused": fused,
        }
        super().__init__(params, defaults)
        # torch's GradScaler then leaves unscaling and skipping to the fused kernel.
        self._step_supports_amp_scaling = fused

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: Function that computes the loss and its gradients; ``None`` to use the present
                gradients.

        Returns:
            Result of `closure`; ``None`` without a closure.
        """
        loss = evaluated(closure)
        for group in self.param_groups:
            exact: list[Tensor] = []
            mixed: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dtype = _state_dtype(parameter, group)
                    self._initialize(parameter, dtype, group)
                    (exact if dtype == parameter.dtype else mixed).append(parameter)
            if exact:
                self._update(group, exact, exact, _gradients(exact))
            for portion in _portions(mixed):
                # torch's kernels need one dtype for weights, gradients and state.
                weights = [weight.float() for weight in portion]
                self._update(group, portion, weights, [g.float() for g in _gradients(portion)])
                # torch has no `_foreach_copy_` of distributed tensors.
                foreach_copy_(local_tensors(portion), local_tensors(weights))
        return loss

    def _initialize(self, parameter: Tensor, dtype: torch.dtype, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            if group["bias_correction"]:
                device = parameter.device if group["fused"] else _CPU
                state["step"] = torch.zeros((), device=device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        weights: list[Tensor],
        gradients: list[Tensor],
    ) -> None:
        """Update weights in place.

        Args:
            group: Settings.
            parameters: Parameters whose state is used.
            weights: Tensors to update: the parameters or float32 copies of them.
            gradients: Gradients, in the dtype of `weights`.
        """
        beta1, beta2 = group["betas"]
        states = [self.state[parameter] for parameter in parameters]
        if group["bias_correction"]:
            counts = [state["step"] for state in states]
        else:
            # The unfused kernels read the step counts on the host.
            devices = [weight.device if group["fused"] else _CPU for weight in weights]
            of_device = {each: torch.full((), _MANY_STEPS, device=each) for each in set(devices)}
            counts = [of_device[device] for device in devices]
        adamw(
            weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            counts,
            fused=group["fused"] or None,  # None: torch chooses between its unfused kernels
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The groups of a state of torch's AdamW lack the settings that only this class has. Their
        # `fused` is None if torch may choose.
        for group in self.param_groups:
            for name, value in self.defaults.items():
                if group.get(name) is None:
                    group[name] = value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one of torch's AdamW, whose moments are the same.

        Args:
            state_dict: Result of `state_dict`.
        """
        super().load_state_dict(state_dict)
        # torch converts state to the dtype of its parameter, which would round a float32 state.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        groups = [group for group in self.param_groups for _ in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, group, parameter in zip(numbers, groups, parameters, strict=True):
            dtype = _state_dtype(parameter, group)
            saved = state_dict["state"].get(number, {})
            if "step" in saved:
                device = parameter.device if group["fused"] else _CPU
                self.state[parameter]["step"] = torch.as_tensor(
                    self.state[parameter]["step"], dtype=torch.float32, device=device
                )
            if dtype == parameter.dtype:
                continue
            for name in saved.keys() & {"exp_avg", "exp_avg_sq"}:
                moved = saved[name].to(device=parameter.device, dtype=dtype, copy=True)
                self.state[parameter][name] = moved


def _state_dtype(parameter: Tensor, group: dict[str, Any]) -> torch.dtype:
    is_half = parameter.dtype.itemsize < torch.float32.itemsize
    return torch.float32 if group["fp32_state"] and is_half else parameter.dtype


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _portions(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in lists of at most `_MOST_ELEMENTS` elements, or of one parameter."""
    portion: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if portion and size + parameter.numel() > _MOST_ELEMENTS:
            yield portion
            portion, size = [], 0
        portion.append(parameter)
        size += parameter.numel()
    if portion:
        yield portion
