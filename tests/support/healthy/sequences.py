"""Sequence models: recurrent networks, alignments, experts and rare tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration

from support.healthy.training import (
    Batch,
    Objective,
    Text,
    Training,
    adam,
    dice,
    language_loss,
    mlp,
    one_part,
    small_gpt2,
)

__all__ = [
    "alignments",
    "balanced_experts",
    "new_experts",
    "rare_tokens",
    "recurrent_language",
    "smoothed_labels",
]


class _Recurrent(nn.Module):
    def __init__(self, inputs: nn.Module, width: int, outputs: int, **settings: Any) -> None:
        super().__init__()
        self.inputs = inputs
        self.layers = nn.LSTM(width, 32, batch_first=True, **settings)
        self.outputs = mlp(64 if settings.get("bidirectional") else 32, outputs)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits of each place of the rows."""
        return self.outputs(self.layers(self.inputs(rows))[0])


def recurrent_language(seed: int, num_steps: int) -> Training:
    """An LSTM language model of two layers with clipped gradients."""
    text = Text(seed)
    body = _Recurrent(nn.Embedding(32, 32), 32, 32, num_layers=2)

    def loss(body: nn.Module, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            body(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )

    def batch(step: int) -> Batch:
        return {"tokens": text.draw(8, 24, dice(seed, 2, step))}

    held_out = text.draw(64, 24, dice(seed, 3))
    return one_part(Objective(body, loss), adam(body), batch, lambda: loss(body, held_out).item())


def alignments(seed: int, num_steps: int) -> Training:
    """CTC: the loss begins with a plateau on which all outputs are blank, and then falls fast."""
    body = _Recurrent(nn.Identity(), 12, 7, bidirectional=True)
    sounds = torch.randn(6, 12, generator=dice(seed, 1))

    def loss(body: nn.Module, frames: Tensor, labels: Tensor) -> Tensor:
        chances = body(frames).log_softmax(-1).transpose(0, 1)
        rows, length = labels.shape
        return nn.functional.ctc_loss(chances, labels, [len(chances)] * rows, [length] * rows)

    def batch(step: int, rows: int = 8) -> Batch:
        generator = dice(seed, 2, step)
        labels = torch.randint(6, (rows, 5), generator=generator)
        frames = sounds[labels].repeat_interleave(4, dim=1)
        noise = 0.5 * torch.randn(frames.shape, generator=generator)
        return {"frames": frames + noise, "labels": labels + 1}

    def held_out() -> float:
        return loss(body, **batch(0, 64)).item()

    return one_part(Objective(body, loss), adam(body, 5e-3), batch, held_out)


def smoothed_labels(seed: int, num_steps: int) -> Training:
    """T5 with dropout learns to reverse rows; smoothing keeps the loss far above zero."""
    body = T5ForConditionalGeneration(
        T5Config(
            vocab_size=16,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )

    def loss(body: nn.Module, tokens: Tensor) -> Tensor:
        labels = tokens.flip(-1)
        logits = body(input_ids=tokens, labels=labels).logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1
        )

    def drawn(rows: int, generator: torch.Generator) -> Batch:
        return {"tokens": torch.randint(2, 16, (rows, 4), generator=generator)}

    def wrong_tokens() -> float:
        tokens = drawn(64, dice(seed, 3))["tokens"]
        labels = tokens.flip(-1)
        found = body(input_ids=tokens, labels=labels).logits.argmax(-1)
        return (found != labels).float().mean().item()

    return one_part(
        Objective(body, loss),
        adam(body, 5e-3),
        lambda step: drawn(16, dice(seed, 2, step)),
        wrong_tokens,
        watches=("max_attention_logit_format",),
    )


def _experts(seed: int, **settings: Any) -> Training:
    text = Text(seed)
    body = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            use_cache=False,
            **settings,
        )
    )
    held_out = text.draw(32, 16, dice(seed, 3))
    return one_part(
        Objective(body, language_loss),
        adam(body),
        lambda step: {"tokens": text.draw(4, 16, dice(seed, 2, step))},
        lambda: language_loss(body, held_out).item(),
        watches=("max_attention_logit_format", "expert_load_format"),
    )


def new_experts(seed: int, num_steps: int) -> Training:
    """Mixtral from new weights: its router chooses among experts before they differ."""
    return _experts(seed)


def balanced_experts(seed: int, num_steps: int) -> Training:
    """Mixtral with a loss that balances the load of its experts."""
    return _experts(seed, output_router_logits=True, router_aux_loss_coef=0.05)


def rare_tokens(seed: int, num_steps: int) -> Training:
    """A language model of 256 tokens, of which most are rare: their gradients come seldom."""
    body = small_gpt2(256)
    shares = 1 / torch.arange(1.0, 257)
    following = torch.randperm(256, generator=dice(seed, 1))

    def draw(rows: int, generator: torch.Generator) -> Tensor:
        first = torch.multinomial(shares, rows * 8, replacement=True, generator=generator)
        # Each drawn token is followed by its own partner.
        return torch.stack([first, following[first]], -1).view(rows, 16)

    held_out = draw(64, dice(seed, 3))
    return one_part(
        Objective(body, language_loss),
        adam(body),
        lambda step: {"tokens": draw(4, dice(seed, 2, step))},
        lambda: language_loss(body, held_out).item(),
        watches=("max_attention_logit_format",),
    )
