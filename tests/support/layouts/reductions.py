"""Program that each rank runs to accumulate gradients that transformers reduces."""

import copy
import importlib.util
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mfwrap.step.ranks.backward_reductions import reduce_before_accumulation

__all__ = ["accumulate"]


def accumulate(rank: int) -> dict[str, Any]:
    """Return the gradients of three backward passes, and what they should be."""
    inputs = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    whole, split = nn.RMSNorm(4), nn.Sequential(nn.RMSNorm(4))
    whole(inputs).square().sum().backward()
    _reduce_gradients(split[0])
    calls = []
    split[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append("own hook"))
    for _ in range(2):
        reduce_before_accumulation(split)
    gradients = []
    for batch in inputs[:, rank]:
        split(batch).square().sum().backward()
        gradients.append(split[0].weight.grad.clone())
    own_hooks = list(calls)
    num_hooks = len(split[0]._forward_hooks)
    # A copy has weights of its own, and trains as the network does.
    copied = copy.deepcopy(split)
    copied.zero_grad()
    for batch in inputs[:, rank]:
        copied(batch).square().sum().backward()
    return {
        "ours": gradients[-1],
        "of a copy": copied[0].weight.grad,
        "expected": whole.weight.grad,
        "own hooks": own_hooks,
        "number of forward hooks": num_hooks,
    }


def _reduce_gradients(module: nn.Module) -> None:
    """Let transformers reduce the gradients of a module over two ranks, in any of its versions."""
    mesh = init_device_mesh("cpu", (2,))
    if importlib.util.find_spec("transformers.distributed.tensor_parallel"):
        from transformers.distributed import tensor_parallel  # noqa: PLC0415  (not in every version)

        tensor_parallel.ReplicatedWithGradAllReduce().install_forward(module, mesh)
    else:
        from transformers.integrations import tensor_parallel  # noqa: PLC0415  (not in every version)

        tensor_parallel.ReplicatedWithGradAllReduce().prepare_module_tp(module, mesh)
