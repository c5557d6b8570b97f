"""Find the largest attention logits in the forward passes of a step, by module and head."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mfwrap.tensors.module_hooks import keep_out_of_copies
from mfwrap.tensors.training_forwards import is_training_forward

_MOST_LOGITS = 2**24
"""Largest number of logits that is held in memory at once."""


@torch.no_grad()
def largest_logits(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute the largest attention logit of each head, before the softmax.

    The logits are computed in float32 for some queries at a time, so the whole matrix of logits is
    never in memory. No host-device synchronization.

    Args:
        query: Shape ``(..., H, L, E)``; a tensor of shape ``(L, E)`` is one head.
        key: Shape ``(..., K, S, E)``; each of its ``K`` heads serves ``H / K`` heads of `query`.
        mask: Any shape that broadcasts to ``(..., H, L, S)``. A bool mask is true where a query
            attends to a key; any other mask is added to the logits.
        is_causal: Query ``i`` attends to keys up to ``i`` only.
        scale: Factor of the products; ``None`` takes ``1 / sqrt(E)``.

    Returns:
        Shape ``(H,)``, float32; ``-inf`` for a head that attends to nothing.
    """
    query, key = (x.detach().float().reshape(-1, *_heads_last(x)) for x in (query, key))
    if mask is not None:
        mask = mask.detach().reshape(*(1,) * (3 - mask.dim()), *mask.shape)
        mask = mask.reshape(-1, *mask.shape[-3:])
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    num_heads, length = query.shape[1:3]
    repeated = key.repeat_interleave(num_heads // key.shape[1], dim=1).transpose(-1, -2)
    largest = torch.full((num_heads,), -torch.inf, device=query.device)
    reach = max(1, _MOST_LOGITS // max(1, query.shape[0] * num_heads * key.shape[2]))
    columns = torch.arange(key.shape[2], device=query.device)
    for start in range(0, length, reach):
        rows = slice(start, min(start + reach, length))
        logits = query[:, :, rows] @ repeated * factor
        if is_causal:
            after = columns > torch.arange(rows.start, rows.stop, device=query.device)[:, None]
            logits = logits.masked_fill(after, -torch.inf)
        if mask is not None:
            part = mask if mask.shape[-2] == 1 else mask[:, :, rows]
            logits = (
                logits.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else logits + part
            )
        largest = torch.maximum(largest, logits.amax(dim=(0, 2, 3)))
    return largest


def _heads_last(tensor: Tensor) -> tuple[int, ...]:
    return (1, *tensor.shape) if tensor.dim() == 2 else tuple(tensor.shape[-3:])


@final
class AttentionLogits:
    """Find the largest attention logits in the forward passes of a network.

    Two kinds of attention are recognized, in the forward passes of a training only:

    - ``torch.nn.functional.scaled_dot_product_attention``, whose logits are computed a second time;
    - a softmax over the last of four dimensions, whose inputs are taken as the logits. GPT-OSS
      subtracts the largest logit before its softmax, so its largest logits are reported as 0.

    Other attention kernels are not recognized. If gradient checkpointing repeats a forward pass in
    the backward pass, the repetition is ignored.

    Source: MindFormers, ``max_attention_logit_format``.

    Args:
        network: Network to watch, which must not be compiled. It has hooks only between `begin` and
            `end`.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._largest: dict[str, Tensor] = {}
        self._path: list[str] = []
        self._hooks = contextlib.ExitStack()
        self._mode: contextlib.ExitStack | None = None

    def begin(self) -> None:
        """Start watching, and discard earlier results."""
        self.close()
        for name, module in self._network.named_modules():
            hooks = (
                module.register_forward_pre_hook(functools.partial(self._enter, name)),
                module.register_forward_hook(
                    functools.partial(self._leave, name), always_call=True
                ),
            )
            keep_out_of_copies(module, *hooks)
            for hook in hooks:
                self._hooks.callback(hook.remove)

    def end(self) -> dict[str, Tensor]:
        """Stop watching, and return the largest logits since `begin`.

        Returns:
            Tensors of shape ``(H,)``, float32, keyed by the name of the module that computes the
            attention.
        """
        self._hooks.close()
        return self.take()

    def take(self) -> dict[str, Tensor]:
        """Return what `end` returns, and keep watching."""
        largest, self._largest = self._largest, {}
        return largest

    def close(self) -> None:
        """Stop watching, and discard the results."""
        self.end()

    def _enter(self, name: str, module: nn.Module, _: Any) -> None:
        is_outside = module is self._network and self._mode is None
        if is_outside and is_training_forward(module):
            self._mode = contextlib.ExitStack()
            self._mode.enter_context(_Attention(self._see))
        if self._mode is not None:
            self._path.append(name)

    def _leave(self, name: str, module: nn.Module, _: Any, __: Any) -> None:
        if self._mode is None:
            return
        # Also remove names of inner modules for which torch did not call this hook.
        while self._path and self._path.pop() != name:
            pass
        if module is self._network:
            mode, self._mode = self._mode, None
            self._path.clear()
            mode.close()

    def _see(self, largest: Tensor) -> None:
        name = self._path[-1] if self._path else ""
        before = self._largest.get(name)
        if before is not None and before.shape == largest.shape:
            largest = torch.maximum(before, largest)
        self._largest[name] = largest


class _Attention(TorchFunctionMode):
    """Call `see` with the largest logits of each attention that is computed."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        keywords = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            self._see(_of_product(*args, **keywords))
        elif func in _SOFTMAXES and _is_attention(*args, **keywords):
            self._see(args[0].detach().float().amax(dim=(0, 2, 3)))
        return func(*args, **keywords)


_SOFTMAXES = frozenset({functional.softmax, torch.softmax, Tensor.softmax})


def _is_attention(tensor: Tensor, dim: int | None = None, *_: Any, **__: Any) -> bool:
    return tensor.dim() == 4 and dim in {-1, 3}


def _of_product(  # noqa: PLR0917  (the signature of torch's function)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  (the signature of torch's function)
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002  (the signature of torch's function)
) -> Tensor:
    del value, dropout_p, enable_gqa
    return largest_logits(query, key, attn_mask, is_causal=is_causal, scale=scale)
