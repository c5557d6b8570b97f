"""Half precision, and averaged weights that a loop swaps in for evaluations."""

import torch
from torch import Tensor, nn

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage
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

__all__ = ["averages_swapped_in", "bfloat16_weights", "growing_loss_scale"]


def bfloat16_weights(seed: int, num_steps: int) -> Training:
    """Weights, gradients and moments in bfloat16: small updates are rounded away."""
    text, body = Text(seed), small_gpt2().to(torch.bfloat16)
    held_out = text.draw(32, 16, dice(seed, 3))
    return one_part(
        Objective(body, language_loss),
        adam(body),
        lambda step: {"tokens": text.draw(4, 16, dice(seed, 2, step))},
        lambda: language_loss(body, held_out).item(),
        watches=("max_attention_logit_format",),
    )


def growing_loss_scale(seed: int, num_steps: int) -> Training:
    """Autocast to float16, with a loss scale that doubles until a step overflows and is skipped."""
    body, clusters = mlp(16, 64, 64, 8), Clusters(seed)

    def loss(body: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return nn.functional.cross_entropy(body(inputs).float(), labels)

    held_out = clusters.batch(512, dice(seed, 3))
    return one_part(
        Objective(body, loss),
        adam(body),
        lambda step: clusters.batch(16, dice(seed, 2, step)),
        lambda: error_rate(body, held_out),
        loss_scale=DynamicLossScaleUpdateCell(2.0**16, 2, 10),
    )


def averages_swapped_in(seed: int, num_steps: int) -> Training:
    """Every 20 steps the loop evaluates the averaged weights in eval mode, and goes on."""
    body, clusters = mlp(16, 48, 48, 8), Clusters(seed)
    body.insert(2, nn.Dropout(0.1))
    network = Objective(body, classification)
    average = ExponentialMovingAverage(network, decay=0.95)
    held_out = clusters.batch(512, dice(seed, 3))

    def evaluate(step: int) -> None:
        if step % 20 == 0:
            network.eval()
            with average.swap(), torch.no_grad():
                network(**held_out)
            network.train()

    return one_part(
        network,
        adam(body),
        lambda step: clusters.batch(16, dice(seed, 2, step)),
        lambda: error_rate(body, held_out),
        after=evaluate,
        average=average,
    )
