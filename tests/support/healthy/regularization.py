"""Losses that end at zero, and networks that are noisy, normalized or constrained."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    get_cosine_schedule_with_warmup,
)

from support.healthy.training import (
    Batch,
    Clusters,
    Objective,
    Training,
    adam,
    classification,
    dice,
    error_rate,
    mlp,
    one_part,
)

__all__ = [
    "constrained_weights",
    "dropout",
    "mixed_images",
    "skipped_layers",
    "small_normalized_batches",
    "solved_margins",
]


def solved_margins(seed: int, num_steps: int) -> Training:
    """A hinge loss: once each row has its margin, loss and gradients are exactly zero."""
    body, clusters = mlp(16, 32, 8), Clusters(seed)

    def loss(body: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.multi_margin_loss(body(inputs), labels)

    def batch(step: int) -> Batch:
        return clusters.batch(8, dice(seed, 2, step), noise=0.3)

    held_out = clusters.batch(256, dice(seed, 3), noise=0.3)
    return one_part(Objective(body, loss), adam(body), batch, lambda: loss(body, **held_out).item())


def _classes(seed: int, body: nn.Module, rows: int) -> Training:
    clusters = Clusters(seed)
    held_out = clusters.batch(512, dice(seed, 3))
    return one_part(
        Objective(body, classification),
        adam(body),
        lambda step: clusters.batch(rows, dice(seed, 2, step)),
        lambda: error_rate(body, held_out),
    )


def dropout(seed: int, num_steps: int) -> Training:
    """Half of all hidden units are dropped in each step."""
    body = mlp(16, 64, 64, 8, activation=lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))
    return _classes(seed, body, 8)


def small_normalized_batches(seed: int, num_steps: int) -> Training:
    """BatchNorm over three rows."""
    layers = [nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU()]
    layers += [nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 8)]
    return _classes(seed, nn.Sequential(*layers), 3)


def constrained_weights(seed: int, num_steps: int) -> Training:
    """Weights with a spectral norm of 1, whose vectors change in each forward."""
    body = mlp(16, 32, 32, 8, activation=nn.LeakyReLU)
    for layer in body:
        if isinstance(layer, nn.Linear):
            spectral_norm(layer)
    scale = nn.Parameter(torch.tensor(3.0))
    body.register_parameter("scale", scale)

    def loss(body: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(body.scale * body(inputs), labels)

    clusters = Clusters(seed)
    held_out = clusters.batch(512, dice(seed, 3))
    return one_part(
        Objective(body, loss),
        adam(body),
        lambda step: clusters.batch(8, dice(seed, 2, step)),
        lambda: error_rate(body, held_out),
    )


class _Skipped(nn.Module):
    """Residual layers, of which the later ones are left out in up to half of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(16, 32), nn.Linear(32, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), mlp(32, 32, 32, activation=nn.GELU)) for _ in range(6)
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits of the rows."""
        hidden = self.inputs(rows)
        for number, layer in enumerate(self.layers, start=1):
            kept = 1 - 0.5 * number / len(self.layers)
            if not self.training:
                hidden = hidden + kept * layer(hidden)
            elif torch.rand(()) < kept:
                hidden = hidden + layer(hidden)
        return self.outputs(hidden)


def skipped_layers(seed: int, num_steps: int) -> Training:
    """Stochastic depth: a layer that is left out has no gradient in this step."""
    return _classes(seed, _Skipped(), 16)


def _mixed(images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
    """Blend each image with another one, or paste a part of another one into it."""
    share = torch.rand((), generator=generator)
    others = torch.randperm(len(images), generator=generator)
    if torch.rand((), generator=generator) < 0.5:
        images = share * images + (1 - share) * images[others]
    else:
        center, places = 16 * torch.rand(2, 1, generator=generator), torch.arange(16) + 0.5
        rows, columns = (places - center).abs() < 8 * (1 - share).sqrt()
        pasted = rows[:, None] & columns
        images = torch.where(pasted, images[others], images)
        share = 1 - pasted.float().mean()
    targets = share * labels + (1 - share) * labels[others]
    return {"images": images, "targets": 0.9 * targets + 0.1 / labels.shape[-1]}


def mixed_images(seed: int, num_steps: int) -> Training:
    """ConvNeXt as timm trains it: Mixup, CutMix, smoothed labels, and layers that are left out."""
    body = ConvNextForImageClassification(
        ConvNextConfig(
            image_size=16,
            patch_size=2,
            num_stages=2,
            hidden_sizes=[16, 32],
            depths=[2, 2],
            drop_path_rate=0.1,
            num_labels=8,
        )
    )
    coarse = torch.randn(8, 3, 4, 4, generator=dice(seed, 1))
    patterns = nn.functional.interpolate(coarse, size=16, mode="bicubic")

    def drawn(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(8, (rows,), generator=generator)
        shifts = torch.randint(-3, 4, (rows, 2), generator=generator).tolist()
        images = torch.stack(
            [
                patterns[label].roll(shift, (1, 2))
                for label, shift in zip(labels, shifts, strict=True)
            ]
        )
        return images + 1.5 * torch.randn(images.shape, generator=generator), labels

    def loss(body: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(body(images).logits, targets)

    def batch(step: int) -> Batch:
        generator = dice(seed, 2, step)
        images, labels = drawn(16, generator)
        return _mixed(images, nn.functional.one_hot(labels, 8).float(), generator)

    images, labels = drawn(256, dice(seed, 3))
    optimizer = adam(body, 4e-3, weight_decay=0.05)
    return one_part(
        Objective(body, loss),
        optimizer,
        batch,
        lambda: (body(images).logits.argmax(-1) != labels).float().mean().item(),
        schedule=get_cosine_schedule_with_warmup(optimizer, num_steps // 20, num_steps),
    )
