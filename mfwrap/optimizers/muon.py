"""`Muon`: torch's Muon, skipped on the device; and the parameters that it is meant for."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mfwrap.compatibility.torch import muon
from mfwrap.optimizers.closure import evaluated
from mfwrap.tensors.shards import local_tensor, on_device

_SETTINGS = inspect.signature(muon).parameters.keys() - {"params"}
"""Names of what torch's step takes from a parameter group, and of its other arguments."""


class Muon(torch.optim.Muon):
    """torch's Muon, whose update can be skipped without a synchronization with the device.

    Arguments, state and updates are those of ``torch.optim.Muon``, bit by bit. The step follows
    the protocol of torch's fused optimizers, which the step of mfwrap and torch's ``GradScaler``
    use: it divides the gradients by the attribute ``grad_scale``, and changes nothing if the
    attribute ``found_inf`` is 1. For this, each matrix and its momentum are copied before they
    change, one matrix after another.

    With a learning rate that is a tensor, torch reads the rate on the host.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, 2))
        >>> weight.grad = torch.full((2, 2), torch.nan)
        >>> optimizer = Muon([weight], lr=0.1)
        >>> optimizer.found_inf = torch.ones(())
        >>> optimizer.step()
        >>> weight.data
        tensor([[1., 1.],
                [1., 1.]])
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch's GradScaler then leaves unscaling and skipping to the step, which may be another
        # one in a subclass.
        return inspect.unwrap(type(self).step) is inspect.unwrap(Muon.step)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the matrices that have gradients.

        Args:
            closure: Function that computes the loss and its gradients; ``None`` to use the present
                gradients.

        Returns:
            Result of `closure`; ``None`` without a closure.

        Raises:
            RuntimeError: If a matrix is complex, or its gradient sparse.
        """
        loss = evaluated(closure)
        for group in self.param_groups:
            settings = {name: group[name] for name in _SETTINGS & group.keys()}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, settings)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, settings: dict[str, Any]) -> None:
        if parameter.is_complex() or gradient.is_sparse:
            kind = "complex parameters" if parameter.is_complex() else "sparse gradients"
            msg = f"Muon does not support {kind}, got some of shape {tuple(parameter.shape)}"
            raise RuntimeError(msg)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if scale is not None:
            # A float16 gradient is divided in float32, because the scale may exceed float16.
            local = local_tensor(gradient)
            exact = local.to(torch.promote_types(local.dtype, torch.float32))
            local.copy_(exact / on_device(scale, local.device))
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        changed = [local_tensor(parameter), local_tensor(state["momentum_buffer"])]
        before = [] if found_inf is None else [tensor.clone() for tensor in changed]
        muon([parameter], [gradient], [state["momentum_buffer"]], has_complex=False, **settings)
        if found_inf is not None:
            is_skipped = on_device(found_inf, parameter.device) != 0
            for tensor, old in zip(changed, before, strict=True):
                torch.where(is_skipped, old, tensor, out=tensor)


def hidden_matrices(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that Muon is meant for: matrices that are not embeddings.

    Embeddings are the weights of ``torch.nn.Embedding``, and of the layer that computes the logits
    of a transformers model (its ``get_output_embeddings``).

    Args:
        network: Network, with or without wrappers.

    Returns:
        Trainable parameters with two dimensions, by name, in the order of ``named_parameters``.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2))
        >>> list(hidden_matrices(network))
        ['1.weight']
    """
    embeddings: list[nn.Module] = []
    for module in network.modules():
        output_layer = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(module, nn.Embedding):
            embeddings.append(module)
        elif isinstance(output_layer, nn.Module):
            embeddings.append(output_layer)
    left_out = {id(parameter) for module in embeddings for parameter in module.parameters()}
    return {
        name: parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and id(parameter) not in left_out
    }
