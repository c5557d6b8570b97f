"""Trainings in which not all weights are trained, or not all of the time."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from support.healthy.training import (
    Clusters,
    Objective,
    Text,
    Training,
    adam,
    classification,
    dice,
    error_rate,
    language_loss,
    mlp,
    one_part,
    small_gpt2,
)

__all__ = ["frozen_midway", "gradual_unfreezing", "low_rank_embeddings", "resumed_midway"]


def low_rank_embeddings(seed: int, num_steps: int) -> Training:
    """LoRA on attention and on the embeddings of a trained GPT-2, whose head is tied to them."""
    first, text = Text(seed + 1000), Text(seed)
    base = small_gpt2()
    optimizer = adam(base, 5e-3)
    for step in range(60):
        language_loss(base, first.draw(8, 16, dice(seed, 1, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    settings = LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn", "wte"], fan_in_fan_out=True)
    body = get_peft_model(base, settings)
    held_out = text.draw(32, 16, dice(seed, 3))
    return one_part(
        Objective(body, language_loss),
        adam(body, 1e-2),
        lambda step: {"tokens": text.draw(8, 16, dice(seed, 2, step))},
        lambda: language_loss(body, held_out).item(),
        watches=("max_attention_logit_format",),
    )


def _classifier(seed: int) -> tuple[nn.Sequential, Clusters]:
    return mlp(16, 32, 32, 32, 8), Clusters(seed)


def gradual_unfreezing(seed: int, num_steps: int) -> Training:
    """A new head on a trained body, which is unfrozen layer by layer from the head down."""
    body, clusters = _classifier(seed)
    earlier = Clusters(seed + 1000)
    optimizer = adam(body)
    for step in range(100):
        classification(body, **earlier.batch(32, dice(seed, 1, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    body[-1].reset_parameters()
    layers = [layer for layer in body if isinstance(layer, nn.Linear)]
    optimizer = adam(body, 1e-3)
    for layer in layers[:-1]:
        layer.requires_grad_(requires_grad=False)

    def unfreeze(step: int) -> None:
        if step % (num_steps // 4) == 0:
            place = len(layers) - 1 - 4 * step // num_steps
            layers[max(place, 0)].requires_grad_(requires_grad=True)

    held_out = clusters.batch(512, dice(seed, 3))
    return one_part(
        Objective(body, classification),
        optimizer,
        lambda step: clusters.batch(16, dice(seed, 2, step)),
        lambda: error_rate(body, held_out),
        after=unfreeze,
    )


def frozen_midway(seed: int, num_steps: int) -> Training:
    """The first two layers are frozen in the middle of the run."""
    body, clusters = _classifier(seed)

    def freeze(step: int) -> None:
        if step == num_steps // 2:
            for layer in body[:4]:
                layer.requires_grad_(requires_grad=False)

    held_out = clusters.batch(512, dice(seed, 3))
    return one_part(
        Objective(body, classification),
        adam(body),
        lambda step: clusters.batch(16, dice(seed, 2, step)),
        lambda: error_rate(body, held_out),
        after=freeze,
    )


def resumed_midway(seed: int, num_steps: int) -> Training:
    """A run that is saved in its middle, and continued by a new loop with new objects."""
    body, clusters = _classifier(seed)
    body.insert(2, nn.Dropout(0.1))
    optimizer = adam(body)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    held_out = clusters.batch(512, dice(seed, 3))
    return one_part(
        Objective(body, classification),
        optimizer,
        lambda step: clusters.batch(16, dice(seed, 2, step)),
        lambda: error_rate(body, held_out),
        schedule=schedule,
    )
