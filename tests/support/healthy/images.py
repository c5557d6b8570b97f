"""Small images with what is to be found in them, and networks that find it."""

from itertools import permutations

import torch
from torch import Tensor, nn

from support.healthy.training import Batch

__all__ = ["Detector", "UNet", "boxed_images", "dice_and_entropy", "organ_images", "set_loss"]

_QUERIES, _OBJECTS, _CLASSES = 5, 3, 3
_ORDERS = torch.tensor(list(permutations(range(_QUERIES), _OBJECTS)))
"""All ways to give each object a query of its own."""


def boxed_images(rows: int, generator: torch.Generator) -> Batch:
    """Draw images with up to three rectangles, the color of which is their class."""
    present = torch.arange(_OBJECTS) < torch.randint(4, (rows, 1), generator=generator)
    sizes = 0.2 + 0.4 * torch.rand(rows, _OBJECTS, 2, generator=generator)
    centers = sizes / 2 + (1 - sizes) * torch.rand(rows, _OBJECTS, 2, generator=generator)
    colors = torch.randint(_CLASSES, (rows, _OBJECTS), generator=generator)
    places = (torch.arange(16) + 0.5) / 16
    inside = (places - centers[..., None]).abs() < sizes[..., None] / 2
    masks = inside[:, :, 1, :, None] & inside[:, :, 0, None] & present[..., None, None]
    painted = torch.einsum("roij,roc->rcij", masks.float(), torch.eye(_CLASSES)[colors])
    return {
        "images": painted + 0.3 * torch.randn(painted.shape, generator=generator),
        "boxes": torch.cat([centers, sizes], -1),
        "labels": torch.where(present, colors, _CLASSES),
    }


class Detector(nn.Module):
    """DETR: convolutions, and a transformer with a query for each possible object."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
        )
        self.places = nn.Parameter(torch.randn(16, 32))
        self.queries = nn.Parameter(torch.randn(_QUERIES, 32))
        self.transformer = nn.Transformer(32, 2, 1, 2, 64, batch_first=True)
        self.classes = nn.Linear(32, _CLASSES + 1)
        self.boxes = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4), nn.Sigmoid())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and boxes of each query."""
        seen = self.convolutions(images).flatten(2).transpose(1, 2) + self.places
        found = self.transformer(seen, self.queries.expand(len(images), -1, -1))
        return self.classes(found), self.boxes(found)


def _overlap(first: Tensor, second: Tensor) -> Tensor:
    """Return the generalized intersection over union of boxes."""
    sides = [
        (one[..., :2] - one[..., 2:] / 2, one[..., :2] + one[..., 2:] / 2)
        for one in (first, second)
    ]
    (low, high), (other_low, other_high) = sides
    common = (torch.min(high, other_high) - torch.max(low, other_low)).clamp(min=0).prod(-1)
    around = (torch.max(high, other_high) - torch.min(low, other_low)).prod(-1)
    union = first[..., 2:].prod(-1) + second[..., 2:].prod(-1) - common
    return common / union - (around - union) / around


def set_loss(body: nn.Module, images: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    """Match queries with objects, and return the loss of classes and boxes."""
    logits, found = body(images)
    present = labels < _CLASSES
    with torch.no_grad():
        chances = logits.softmax(-1).gather(-1, labels[:, None].expand(-1, _QUERIES, -1))
        overlaps = _overlap(found[:, :, None], boxes[:, None])
        costs = (5 * torch.cdist(found, boxes, p=1) - chances - 2 * overlaps) * present[:, None]
        totals = costs[:, _ORDERS, torch.arange(_OBJECTS)].sum(-1)
        chosen = _ORDERS[totals.argmin(-1)]
    targets = torch.full((len(labels), _QUERIES), _CLASSES).scatter(1, chosen, labels)
    weights = torch.tensor([1.0] * _CLASSES + [0.1])
    entropy = nn.functional.cross_entropy(logits.transpose(1, 2), targets, weights)
    matched = found.gather(1, chosen[..., None].expand(-1, -1, 4))
    distances = 5 * (matched - boxes).abs().sum(-1) + 2 * (1 - _overlap(matched, boxes))
    return entropy + (distances * present).sum() / present.sum().clamp(min=1)


def organ_images(rows: int, generator: torch.Generator) -> Batch:
    """Draw gray images of an organ, which in half of them has a small lesion."""
    places = torch.arange(24.0)
    grid = torch.stack(torch.meshgrid(places, places, indexing="ij"))

    def disc(centers: Tensor, radii: Tensor) -> Tensor:
        return (grid - centers[..., None, None]).square().sum(1) < radii.square()[:, None, None]

    centers = 9 + 6 * torch.rand(rows, 2, generator=generator)
    organ = disc(centers, 5 + 3 * torch.rand(rows, generator=generator))
    moved = centers + 4 * torch.rand(rows, 2, generator=generator) - 2
    lesion = disc(moved, 2 + 1.5 * torch.rand(rows, generator=generator))
    lesion &= (torch.rand(rows, generator=generator) < 0.5)[:, None, None]
    labels = torch.where(lesion, 2, organ.long())
    gray = torch.tensor([0.0, 1.0, 2.0])[labels][:, None]
    return {
        "images": gray + 0.5 * torch.randn(gray.shape, generator=generator),
        "labels": labels,
    }


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1)]
        layers += [nn.InstanceNorm2d(outputs, affine=True), nn.LeakyReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net of three levels."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.middle, self.low = _twice(1, 8), _twice(8, 16), _twice(16, 32)
        self.to_middle = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.to_high = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.joined, self.joined_high = _twice(32, 16), _twice(16, 8)
        self.classes = nn.Conv2d(8, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each place."""
        high = self.high(images)
        middle = self.middle(nn.functional.max_pool2d(high, 2))
        low = self.low(nn.functional.max_pool2d(middle, 2))
        joined = self.joined(torch.cat([middle, self.to_middle(low)], 1))
        return self.classes(self.joined_high(torch.cat([high, self.to_high(joined)], 1)))


def dice_and_entropy(body: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy and one minus the soft Dice coefficient of organ and lesion."""
    logits = body(images)
    chances = logits.softmax(1)[:, 1:]
    truth = nn.functional.one_hot(labels, 3).movedim(-1, 1)[:, 1:]
    common = (chances * truth).sum((0, 2, 3))
    sizes = (chances + truth).sum((0, 2, 3))
    coefficient = (2 * common + 1) / (sizes + 1)
    return nn.functional.cross_entropy(logits, labels) + 1 - coefficient.mean()
