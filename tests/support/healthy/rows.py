"""Data whose rows differ much, or come in an order."""

import torch
from torch import Tensor, nn
from transformers import get_wsd_schedule

from support.healthy.training import (
    Batch,
    Clusters,
    Objective,
    Text,
    Training,
    adam,
    classification,
    dice,
    language_loss,
    mlp,
    one_part,
    pretrain,
    small_gpt2,
    small_llama,
)

__all__ = [
    "class_order",
    "heavy_tails",
    "known_facts",
    "mixed_sources",
    "outlier_rows",
    "rare_positives",
    "small_data",
    "unequal_rows",
]


def unequal_rows(seed: int, num_steps: int) -> Training:
    """Batches of one row of 2 to 200 tokens: some losses are of one target, others of 199."""
    text, body = Text(seed), small_gpt2(length=200)

    def batch(step: int) -> Batch:
        generator = dice(seed, 2, step)
        length = int(2 * 100 ** torch.rand(1, generator=generator).item())
        return {"tokens": text.draw(1, length, generator)}

    held_out = text.draw(32, 32, dice(seed, 3))
    return one_part(
        Objective(body, language_loss),
        adam(body, 2e-3),
        batch,
        lambda: language_loss(body, held_out).item(),
        watches=("max_attention_logit_format",),
    )


def _squares(body: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (body(inputs).squeeze(-1) - targets).square().mean()


def heavy_tails(seed: int, num_steps: int) -> Training:
    """Squared errors of targets with an infinite variance (Student's t with 2 degrees)."""
    body, slope = mlp(12, 32, 1), 2 * torch.randn(12, generator=dice(seed, 1))

    def batch(step: int) -> Batch:
        generator = dice(seed, 2, step)
        inputs = torch.randn(16, 12, generator=generator)
        normal = torch.randn(3, 16, generator=generator)
        noise = normal[0] / (normal[1:].square().mean(0)).sqrt()
        return {"inputs": inputs, "targets": inputs @ slope + noise}

    inputs = torch.randn(256, 12, generator=dice(seed, 3))
    return one_part(
        Objective(body, _squares),
        adam(body, 1e-2),
        batch,
        lambda: _squares(body, inputs, inputs @ slope).item(),
    )


def outlier_rows(seed: int, num_steps: int) -> Training:
    """One of a hundred rows is ten times as large as the others."""
    body, slope = mlp(12, 32, 1), torch.randn(12, generator=dice(seed, 1))

    def batch(step: int) -> Batch:
        generator = dice(seed, 2, step)
        inputs = torch.randn(16, 12, generator=generator)
        inputs[torch.rand(16, generator=generator) < 0.01] *= 10
        return {"inputs": inputs, "targets": inputs @ slope}

    held_out = torch.randn(256, 12, generator=dice(seed, 3))
    return one_part(
        Objective(body, _squares),
        adam(body),
        batch,
        lambda: _squares(body, held_out, held_out @ slope).item(),
    )


def class_order(seed: int, num_steps: int) -> Training:
    """Rows that are sorted by class, five batches of each: the loss jumps at each new class."""
    body, clusters = mlp(16, 64, 4), Clusters(seed, num_classes=4)

    def batch(step: int) -> Batch:
        labels = torch.full((16,), (step - 1) // 5 % 4)
        return clusters.of_classes(labels, dice(seed, 2, step))

    held_out = clusters.batch(512, dice(seed, 3))
    return one_part(
        Objective(body, classification),
        adam(body, 1e-3),
        batch,
        lambda: classification(body, **held_out).item(),
    )


def small_data(seed: int, num_steps: int) -> Training:
    """Many epochs over 32 rows without a rule: the network learns them by heart."""
    body = small_gpt2()
    rows = torch.randint(32, (32, 12), generator=dice(seed, 1))

    def batch(step: int) -> Batch:
        epoch, number = divmod(step - 1, 8)
        order = torch.randperm(32, generator=dice(seed, 2, epoch))
        return {"tokens": rows[order[4 * number : 4 * number + 4]]}

    return one_part(
        Objective(body, language_loss),
        adam(body, 5e-3),
        batch,
        lambda: language_loss(body, rows).item(),
        watches=("max_attention_logit_format",),
    )


def rare_positives(seed: int, num_steps: int) -> Training:
    """Focal loss on 1 % positives, divided by their number in the batch, which is often zero."""
    body, center = mlp(12, 48, 1), 2 * torch.randn(12, generator=dice(seed, 1)).sign()
    # The first answers are the share of the positives, as RetinaNet's are.
    nn.init.constant_(body[-1].bias, -4.6)

    def loss(body: nn.Module, inputs: Tensor, positive: Tensor) -> Tensor:
        logits = body(inputs).squeeze(-1)
        entropy = nn.functional.binary_cross_entropy_with_logits(logits, positive, reduction="none")
        weight = 0.75 - 0.5 * positive
        focal = weight * (1 - (-entropy).exp()).square() * entropy
        return focal.sum() / positive.sum().clamp(min=1)

    def drawn(rows: int, share: float, generator: torch.Generator) -> Batch:
        positive = (torch.rand(rows, generator=generator) < share).float()
        noise = torch.randn(rows, 12, generator=generator)
        return {"inputs": positive[:, None] * center / 2 + noise, "positive": positive}

    held_out = drawn(1024, 0.5, dice(seed, 3))

    def wrong_order() -> float:
        """Return the share of pairs in which the positive row has the smaller answer."""
        answers, positive = body(held_out["inputs"]).squeeze(-1), held_out["positive"] > 0
        return (answers[positive][:, None] <= answers[~positive]).float().mean().item()

    return one_part(
        Objective(body, loss),
        adam(body),
        lambda step: drawn(64, 0.01, dice(seed, 2, step)),
        wrong_order,
    )


def mixed_sources(seed: int, num_steps: int) -> Training:
    """Continued pretraining on three sources of other difficulty, in packed rows of documents."""
    sources = [Text(seed + 1000), Text(seed, order=0.95), Text(seed + 2000, order=0.5)]
    shares = torch.tensor([0.3, 0.5, 0.2])
    body = small_llama(98)
    pretrain(body, sources[0], seed, 100)

    def packed(rows: int, generator: torch.Generator) -> Batch:
        """Draw documents of 6 to 59 tokens, each with the token 96 at its end, and cut rows."""
        documents: list[Tensor] = []
        while sum(map(len, documents)) < rows * 48:
            length = int(6 * 10 ** torch.rand(1, generator=generator).item())
            number = int(torch.multinomial(shares, 1, generator=generator))
            tokens = sources[number].draw(1, length, generator).squeeze(0)
            # Each source has tokens of its own.
            documents.append(nn.functional.pad(tokens + 32 * number, (0, 1), value=96))
        return {"tokens": torch.cat(documents)[: rows * 48].view(rows, 48)}

    held_out = packed(64, dice(seed, 3))
    optimizer = adam(body, 2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return one_part(
        Objective(body, language_loss),
        optimizer,
        lambda step: packed(4, dice(seed, 2, step)),
        lambda: language_loss(body, **held_out).item(),
        schedule=get_wsd_schedule(
            optimizer, num_steps // 20, num_steps // 5, num_training_steps=num_steps
        ),
        watches=("max_attention_logit_format",),
    )


class _Turns(nn.Module):
    """RotatE: a relation turns the vector of a thing towards that of another one."""

    def __init__(self, things: int, relations: int) -> None:
        super().__init__()
        self.things, self.relations = nn.Embedding(things, 32), nn.Embedding(relations, 16)
        nn.init.uniform_(self.things.weight, -0.25, 0.25)
        nn.init.uniform_(self.relations.weight, -torch.pi, torch.pi)

    def forward(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """Return how near the turned heads are to several tails each."""
        angle = self.relations(relations)
        real, imaginary = self.things(heads).chunk(2, -1)
        turned = torch.stack(
            [
                real * angle.cos() - imaginary * angle.sin(),
                real * angle.sin() + imaginary * angle.cos(),
            ]
        )
        others = torch.stack(self.things(tails).chunk(2, -1))
        return 4 - (turned[:, :, None] - others).norm(dim=0).sum(-1)


def known_facts(seed: int, num_steps: int) -> Training:
    """A knowledge graph whose things are mostly rare, with negatives that count by their answer."""
    things, relations = 240, 5
    body = _Turns(things, relations)
    shifts = 1 + torch.randperm(things - 1, generator=dice(seed, 1))[:relations]
    frequency = 1 / (10 + torch.randperm(things, generator=dice(seed, 4)).float())

    def loss(body: nn.Module, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        answers = body(heads, relations, tails)
        wrong = answers[:, 1:]
        weights = wrong.detach().softmax(-1)
        right = nn.functional.logsigmoid(answers[:, 0])
        return -(right + (weights * nn.functional.logsigmoid(-wrong)).sum(-1)).mean() / 2

    def batch(step: int, rows: int = 64) -> Batch:
        generator = dice(seed, 2, step)
        heads = torch.multinomial(frequency, rows, replacement=True, generator=generator)
        chosen = torch.randint(relations, (rows,), generator=generator)
        right = (heads + shifts[chosen]) % things
        wrong = torch.randint(things, (rows, 16), generator=generator)
        return {
            "heads": heads,
            "relations": chosen,
            "tails": torch.cat([right[:, None], wrong], -1),
        }

    def far_tails() -> float:
        """Return the share of facts whose tail is not among the ten best answers."""
        facts = torch.cartesian_prod(torch.arange(things), torch.arange(relations))
        heads, chosen = facts.T
        answers = body(heads, chosen, torch.arange(things).expand(len(heads), -1))
        right = answers.gather(-1, ((heads + shifts[chosen]) % things)[:, None])
        return ((answers > right).sum(-1) >= 10).float().mean().item()

    return one_part(Objective(body, loss), adam(body, 1e-2, weight_decay=0.0), batch, far_tails)
