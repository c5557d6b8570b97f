"""`QKClip`: limit attention logits by shrinking the weights of queries and keys."""

import abc
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.arguments import check_positive_number
from mfwrap.collectives import gather_on_all, num_ranks
from mfwrap.compatibility.torch import foreach_mul_
from mfwrap.optimizers.after_update import AfterUpdate, was_applied
from mfwrap.tensors.attention_logits import AttentionLogits
from mfwrap.tensors.module_hooks import keep_out_of_copies
from mfwrap.tensors.shards import local_tensors, on_device, placed_like
from mfwrap.tensors.training_forwards import is_training_forward
from mfwrap.tensors.wrappers import unwrapped_optimizer


@final
class QKClip(AfterUpdate):
    """Shrink the weights of queries and keys after an update in which attention logits were large.

    After each update, a head whose largest logit ``S`` in the update's forward passes, on all
    ranks, was above the threshold has its logits multiplied by ``threshold / S``:

    - The rows of the query and the key projection are each multiplied by the square root of this
      factor. Where several query heads share a key head, the smallest factor of these heads
      determines the key's rows, and each query head's rows make up for the difference.
    - In multi-head latent attention (DeepSeek-V3), the parts without rotary embedding are
      multiplied by the square root. The rotary part of the keys is shared by all heads and does not
      change, so the rotary part of the queries is multiplied by the whole factor.

    A skipped update changes nothing, and its logits do not count in the next one: the cells,
    `attach` and `MFTrainer` discard them. A loop of torch alone calls `discard` after an update
    that it skips, with torch's ``GradScaler`` for example. A head with a non-finite logit does not
    change. There is no host-device synchronization. On several ranks there is one small collective
    per update.

    The attention logits are computed a second time, which costs as much as the product of queries
    and keys; see `AttentionLogits` for the kinds of attention. The network must not be compiled.

    Source: Kimi K2: Open Agentic Intelligence, 2025, section 2.1 (MuonClip); MindFormers,
    ``qk_clip_threshold`` of its Muon.

    Args:
        optimizer: Optimizer of the network. Each of its steps is followed by a clip.
        network: Network with modules that have ``q_proj`` and ``k_proj``, or ``query`` and ``key``,
            and ``head_dim`` or ``attention_head_size``; or the modules of DeepSeek-V3. Layers do
            not change while their weights are frozen.
        threshold: Limit of the logits, > 0.

    Raises:
        TypeError: If `threshold` is not a number.
        ValueError: If `threshold` is out of range; if the network has no such module; or if it
            normalizes queries and keys, because the weights then do not determine the logits.
        RuntimeError: At an update, if no attention of the network has been recognized.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        ...     num_attention_heads=2
        ... )
        >>> network = LlamaForCausalLM(config)
        >>> optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        >>> clip = QKClip(optimizer, network, threshold=100.0)
    """

    def __init__(self, optimizer: Optimizer, network: nn.Module, threshold: float = 100.0) -> None:
        self.threshold = check_positive_number("threshold", threshold, finite=True)
        self._layers = _layers(network)
        if not any(layer.is_trainable for layer in self._layers.values()):
            msg = (
                "`network` must have trainable attention modules with q_proj and k_proj, query and "
                f"key, or q_b_proj and kv_b_proj, got none in a {type(network).__name__}"
            )
            raise ValueError(msg)
        self._logits = AttentionLogits(network)
        self._logits.begin()
        self._has_run = False
        self._hooks = (
            network.register_forward_hook(self._note_run),
            unwrapped_optimizer(optimizer).register_step_post_hook(self._clip),
        )
        keep_out_of_copies(network, self._hooks[0])

    def remove(self) -> None:
        """Stop clipping."""
        self._logits.close()
        for hook in self._hooks:
            hook.remove()

    def discard(self) -> None:
        """Forget the logits since the last step; call it after an update that your loop skips."""
        self._logits.take()
        self._has_run = False

    def _note_run(self, network: nn.Module, *_: Any) -> None:
        self._has_run |= is_training_forward(network)

    @torch.no_grad()
    def _clip(self, optimizer: Optimizer, *_: Any) -> None:
        largest = self._logits.take()
        has_run, self._has_run = self._has_run, False
        device = next(iter(self._layers.values())).query.weight.device
        logits = torch.cat([
            on_device(largest[name], device)
            if name in largest
            else torch.full((layer.num_heads,), -torch.inf, device=device)
            for name, layer in self._layers.items()
        ])  # fmt: skip
        if num_ranks() > 1:
            logits = gather_on_all(logits).amax(dim=0)
        if has_run and not self._layers.keys() & largest.keys():
            msg = (
                "QKClip has seen no attention logits in the forward passes of this update; use "
                "attn_implementation='sdpa' or 'eager', and do not compile the network"
            )
            raise RuntimeError(msg)
        is_large = logits.isfinite() & (logits > self.threshold) & was_applied(optimizer, device)
        factors = torch.where(is_large, self.threshold / logits, 1.0)
        parameters: list[Tensor] = []
        shares: list[Tensor] = []
        sizes = [layer.num_heads for layer in self._layers.values()]
        for layer, of_heads in zip(self._layers.values(), factors.split(sizes), strict=True):
            if not layer.is_trainable:
                continue
            of_queries, of_keys = layer.row_factors(of_heads)
            for linear, of_rows in ((layer.query, of_queries), (layer.key, of_keys)):
                for parameter in linear.parameters(recurse=False):
                    whole = of_rows.reshape(-1, *[1] * (parameter.ndim - 1)).expand(parameter.shape)
                    parameters.append(parameter)
                    shares.append(placed_like(whole, parameter))
        if parameters:  # torch refuses an empty list
            foreach_mul_(local_tensors(parameters), shares)


@dataclass(frozen=True)
class _Layer(abc.ABC):
    """Weights that determine the attention logits of one module; their rows belong to heads."""

    query: nn.Linear
    key: nn.Linear
    num_heads: int

    @property
    def is_trainable(self) -> bool:
        """Whether no weight or bias is frozen."""
        linears = (self.query, self.key)
        return all(p.requires_grad for linear in linears for p in linear.parameters(recurse=False))

    @abc.abstractmethod
    def row_factors(self, of_heads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factor of each row of `query` and of `key`.

        Args:
            of_heads: Factor of each head's logits, shape ``(num_heads,)``.
        """


@final
@dataclass(frozen=True)
class _Projections(_Layer):
    """Separate projections of queries and keys; a key head may serve several query heads."""

    head_dim: int

    def row_factors(self, of_heads: Tensor) -> tuple[Tensor, Tensor]:
        num_keys = self.key.weight.shape[0] // self.head_dim
        of_keys = of_heads.view(num_keys, -1).amin(dim=1).sqrt()
        of_queries = of_heads / of_keys.repeat_interleave(self.num_heads // num_keys)
        return (
            of_queries.repeat_interleave(self.head_dim),
            of_keys.repeat_interleave(self.head_dim),
        )


@final
@dataclass(frozen=True)
class _LatentProjections(_Layer):
    """Projections of multi-head latent attention, whose keys have a rotary part in common.

    `key` also makes the values.
    """

    nope_dim: int
    rope_dim: int
    value_dim: int

    def row_factors(self, of_heads: Tensor) -> tuple[Tensor, Tensor]:
        whole = of_heads[:, None]
        root = whole.sqrt().expand(-1, self.nope_dim)
        of_queries = torch.cat([root, whole.expand(-1, self.rope_dim)], dim=1)
        values = torch.ones_like(whole).expand(-1, self.value_dim)
        return of_queries.reshape(-1), torch.cat([root, values], dim=1).reshape(-1)


_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")


def _layers(network: nn.Module) -> dict[str, _Layer]:
    """Return the attention modules of a network by name."""
    found: dict[str, _Layer] = {}
    for name, module in network.named_modules():
        layer = _layer(module)
        norms = [norm for norm in _NORMS if getattr(module, norm, None) is not None]
        if layer is None or (norms and not layer.is_trainable):
            continue
        if norms:
            msg = (
                "`network` must not normalize queries and keys, because their weights then do not "
                f"determine the attention logits, got {name}.{norms[0]}"
            )
            raise ValueError(msg)
        found[name] = layer
    return found


def _layer(module: nn.Module) -> _Layer | None:
    """Return the weights of an attention module; ``None`` for any other module."""

    def linear(*names: str) -> nn.Linear | None:
        layers = (getattr(module, name, None) for name in names)
        return next((layer for layer in layers if isinstance(layer, nn.Linear)), None)

    key_value = linear("kv_b_proj")
    query = linear("q_b_proj", "q_proj", "query")
    if query is not None and key_value is not None:
        names = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return _LatentProjections(query, key_value, *(getattr(module, name) for name in names))
    key = linear("k_proj", "key")
    head_dim = getattr(module, "head_dim", getattr(module, "attention_head_size", None))
    if query is None or key is None or not isinstance(head_dim, int):
        return None
    return _Projections(query, key, query.weight.shape[0] // head_dim, head_dim)
