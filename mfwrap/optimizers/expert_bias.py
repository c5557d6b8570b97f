"""`ExpertBias`: balance the load of experts by biases of their choice, without a loss for it."""

import itertools
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.arguments import check_positive_number
from mfwrap.collectives import add_over_ranks
from mfwrap.compatibility.torch import foreach_add_
from mfwrap.optimizers.after_update import AfterUpdate, was_applied
from mfwrap.tensors.experts import ExpertCounts, expert_biases
from mfwrap.tensors.module_hooks import keep_out_of_copies
from mfwrap.tensors.shards import local_tensors, meeting_device, on_device, placed_like
from mfwrap.tensors.training_forwards import is_training_forward
from mfwrap.tensors.wrappers import unwrapped_optimizer


@final
class ExpertBias(AfterUpdate):
    """Balance the load of experts: move the biases by which a router chooses among them.

    After each update, in every layer with experts,
    ``bias[e] += update_rate * sign(mean(count) - count[e])``, where ``count[e]`` is the number of
    tokens that expert ``e`` got in all micro-batches of the update on all ranks. A router with such
    a bias adds it to its scores only to choose experts, so no gradient reaches it and the loss has
    no additional part. The biases are buffers or parameters of the network, which checkpoints save
    with it; between updates there is nothing else to save.

    A skipped update changes nothing, and its counts do not enter the next one: the cells, `attach`
    and `MFTrainer` discard them. A loop of torch alone calls `discard` after an update that it
    skips, with torch's ``GradScaler`` for example. Evaluations do not count, nor does a forward
    pass that gradient checkpointing repeats. There is no host-device synchronization. On several
    ranks there is one small collective per update.

    Source: DeepSeek-V3 Technical Report, 2024, section 2.1.2; MindFormers,
    ``moe_router_enable_expert_bias`` and ``moe_router_bias_update_rate``.

    Args:
        optimizer: Optimizer of the network. The biases move after each of its steps.
        network: Network whose routers have a buffer or a parameter ``e_score_correction_bias`` or
            ``expert_bias``, as DeepSeek-V3, GLM-4 MoE and most others of this kind in transformers,
            with all experts of a layer on each rank.
        update_rate: Size of a bias's step, > 0.

    Raises:
        TypeError: If `update_rate` is not a number.
        ValueError: If `update_rate` is out of range; if the network has no such bias; if a bias
            does not belong to experts that get the indices of the chosen experts, one number for
            each; or if a bias has half precision, in which small steps would be lost.
        RuntimeError: At an update, if no expert of the network has been called in its forward
            passes.

    Example:
        >>> from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
        >>> config = Glm4MoeConfig(
        ...     vocab_size=16, hidden_size=8, moe_intermediate_size=8, num_hidden_layers=2,
        ...     num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4,
        ...     num_experts_per_tok=2
        ... )
        >>> network = Glm4MoeForCausalLM(config)
        >>> optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        >>> balance = ExpertBias(optimizer, network, update_rate=1e-3)
    """

    def __init__(self, optimizer: Optimizer, network: nn.Module, update_rate: float = 1e-3) -> None:
        self.update_rate = check_positive_number("update_rate", update_rate, finite=True)
        places = expert_biases(network)
        if not places:
            msg = (
                "`network` must have biases by which its routers choose experts, named "
                f"e_score_correction_bias or expert_bias, got none in a {type(network).__name__}"
            )
            raise ValueError(msg)
        # In the order of their sizes, so that biases of one size can be moved together.
        self._places = dict(sorted(places.items(), key=lambda item: item[1].num_experts))
        self._biases()
        self._counts = ExpertCounts(network)
        self._counts.begin()
        self._has_run = False
        self._has_counted = False
        self._hooks = (
            network.register_forward_hook(self._note_run),
            unwrapped_optimizer(optimizer).register_step_post_hook(self._move),
        )
        keep_out_of_copies(network, self._hooks[0])

    def remove(self) -> None:
        """Stop moving the biases."""
        self._counts.close()
        for hook in self._hooks:
            hook.remove()

    def discard(self) -> None:
        """Forget the counts since the last step; call it after an update that your loop skips."""
        self._counts.take()
        self._has_run = False

    def _note_run(self, network: nn.Module, *_: Any) -> None:
        self._has_run |= is_training_forward(network)

    def _biases(self) -> list[Tensor]:
        biases = [place.tensor() for place in self._places.values()]
        for place, bias in zip(self._places.values(), biases, strict=True):
            if torch.finfo(bias.dtype).bits < torch.finfo(torch.float32).bits:
                msg = (
                    f"`network` must have its biases of experts in float32, got {place.name} in "
                    f"{bias.dtype}; convert it: `tensor.data = tensor.float()`"
                )
                raise ValueError(msg)
        return biases

    @torch.no_grad()
    def _move(self, optimizer: Optimizer, *_: Any) -> None:
        of_modules = self._counts.take()
        has_run, self._has_run = self._has_run, False
        self._has_counted |= bool(of_modules)
        biases = self._biases()
        device = meeting_device(biases)
        # A module that did not run on this rank has sent no token to any expert.
        counts = torch.cat([
            on_device(of_modules[name], device)
            if name in of_modules
            else torch.zeros(place.num_experts, dtype=torch.int64, device=device)
            for name, place in self._places.items()
        ])  # fmt: skip
        add_over_ranks(counts)
        if has_run and not self._has_counted:
            msg = (
                "ExpertBias has seen no call of experts in the forward passes of this update; "
                "build it before the network is compiled"
            )
            raise RuntimeError(msg)
        rate = self.update_rate * was_applied(optimizer, device)
        steps: list[Tensor] = []
        sizes = [place.num_experts for place in self._places.values()]
        for size, equal in itertools.groupby(sizes):
            number = len(list(equal)) * size
            rows, counts = counts[:number].view(-1, size), counts[number:]
            # The sign of mean - count, in integers: no rounding.
            steps += (rows.sum(dim=1, keepdim=True) - size * rows).sign().mul(rate).unbind()
        shares = [
            placed_like(on_device(step.to(bias.dtype), bias.device).view(bias.shape), bias)
            for step, bias in zip(steps, biases, strict=True)
        ]
        foreach_add_(local_tensors(biases), shares)
