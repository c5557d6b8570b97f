"""Representations from pairs of views."""

import copy

import torch
from torch import Tensor, nn

from support.healthy.training import Batch, Clusters, Objective, Training, adam, dice, mlp, one_part

__all__ = ["averaged_teacher", "image_and_text", "queue_of_keys"]


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(24, 32, 16), mlp(12, 32, 16)
        self.temperature = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return the logits of all pairs."""
        image = nn.functional.normalize(self.image(images), dim=-1)
        text = nn.functional.normalize(self.text(texts), dim=-1)
        return self.temperature.exp().clamp(max=100) * image @ text.T


def image_and_text(seed: int, num_steps: int) -> Training:
    """CLIP: two towers, with a temperature that is learned."""
    body = _Towers()
    generator = dice(seed, 1)
    to_image, to_text = (torch.randn(6, size, generator=generator) for size in (24, 12))

    def loss(body: nn.Module, images: Tensor, texts: Tensor) -> Tensor:
        logits = body(images, texts)
        own = torch.arange(len(logits))
        rows, columns = (nn.functional.cross_entropy(one, own) for one in (logits, logits.T))
        return (rows + columns) / 2

    def batch(step: int, rows: int = 24) -> Batch:
        generator = dice(seed, 2, step)
        meaning = torch.randn(rows, 6, generator=generator)
        images, texts = meaning @ to_image, meaning @ to_text
        return {
            "images": images + 0.5 * torch.randn(images.shape, generator=generator),
            "texts": texts + 0.5 * torch.randn(texts.shape, generator=generator),
        }

    def wrong_pairs() -> float:
        logits = body(**batch(0, 64))
        return (logits.argmax(-1) != torch.arange(64)).float().mean().item()

    return one_part(Objective(body, loss), adam(body, 1e-3), batch, wrong_pairs)


def averaged_teacher(seed: int, num_steps: int) -> Training:
    """BYOL: a network predicts the output of its own average for another view of the rows."""
    clusters = Clusters(seed)
    body = nn.ModuleDict({"encoder": mlp(16, 32, 16), "predictor": mlp(16, 32, 16)})
    teacher = copy.deepcopy(body["encoder"])

    def loss(body: nn.ModuleDict, views: Tensor, targets: Tensor) -> Tensor:
        found = body["predictor"](body["encoder"](views))
        return 2 - 2 * nn.functional.cosine_similarity(found, targets, dim=-1).mean()

    @torch.no_grad()
    def batch(step: int, rows: int = 32) -> Batch:
        generator = dice(seed, 2, step)
        inputs = clusters.batch(rows, generator)["inputs"]
        views, others = (
            inputs + 0.3 * torch.randn(inputs.shape, generator=generator) for _ in range(2)
        )
        return {"views": views, "targets": teacher(others)}

    @torch.no_grad()
    def move_teacher(step: int) -> None:
        for average, weight in zip(teacher.parameters(), body["encoder"].parameters(), strict=True):
            average.lerp_(weight, 0.02)

    def held_out() -> float:
        drawn = batch(0, 256)
        # Equal outputs for all rows would have a small loss, too.
        directions = nn.functional.normalize(drawn["targets"], dim=-1)
        if directions.std(0).mean() < 0.05:
            return float("inf")
        return loss(body, **drawn).item()

    return one_part(Objective(body, loss), adam(body), batch, held_out, after=move_teacher)


def queue_of_keys(seed: int, num_steps: int) -> Training:
    """MoCo: the queue grows from 16 keys to 512 in 31 steps, and the loss grows with it."""
    body = mlp(24, 48, 16)
    averaged = copy.deepcopy(body)
    generator = dice(seed, 1)
    own, common = (torch.randn(size, 24, generator=generator) for size in (4, 8))

    def directions(network: nn.Module, views: Tensor) -> Tensor:
        return nn.functional.normalize(network(views), dim=-1)

    def views(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw two views of each row, which differ in most of what they show."""
        meaning = torch.randn(rows, 4, generator=generator) @ own
        first, second = (torch.randn(rows, 8, generator=generator) @ common for _ in range(2))
        return meaning + first, meaning + second

    def loss(body: nn.Module, views: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
        found = directions(body, views)
        right = (found * keys).sum(-1, keepdim=True)
        logits = torch.cat([right, found @ queue.T], -1) / 0.1
        return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    with torch.no_grad():
        held: Batch = {"queue": directions(averaged, views(16, dice(seed, 2, 0))[1])}

    @torch.no_grad()
    def batch(step: int) -> Batch:
        first, second = views(16, dice(seed, 2, step))
        held["keys"] = directions(averaged, second)
        return {"views": first, **held}

    @torch.no_grad()
    def move(step: int) -> None:
        held["queue"] = torch.cat([held["queue"], held["keys"]])[-512:]
        for average, weight in zip(averaged.parameters(), body.parameters(), strict=True):
            average.lerp_(weight, 0.05)

    def wrong_keys() -> float:
        first, second = (directions(body, each) for each in views(128, dice(seed, 3)))
        return ((first @ second.T).argmax(-1) != torch.arange(128)).float().mean().item()

    return one_part(Objective(body, loss), adam(body), batch, wrong_keys, after=move)
