"""Several tasks, and tasks that become harder: losses that change on purpose."""

import torch
from torch import Tensor, nn

from support.healthy.training import (
    Batch,
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

__all__ = [
    "alternating_tasks",
    "colder_answers",
    "differential_equation",
    "harder_tasks",
    "longer_sequences",
    "more_classes",
    "repeated_lessons",
    "scheduled_weights",
]


def alternating_tasks(seed: int, num_steps: int) -> Training:
    """A classification and a regression with losses of other sizes, in turn, in one trunk."""
    clusters = Clusters(seed)
    slope = torch.randn(16, generator=dice(seed, 3))
    body = nn.ModuleDict({"trunk": mlp(16, 32, 32), "classes": mlp(32, 8), "value": mlp(32, 1)})

    def loss(body: nn.ModuleDict, inputs: Tensor, labels: Tensor, values: Tensor) -> Tensor:
        hidden = body["trunk"](inputs).relu()
        if values.numel() == 0:
            return nn.functional.cross_entropy(body["classes"](hidden), labels)
        return (body["value"](hidden).squeeze(-1) - values).square().mean()

    def batch(step: int, rows: int = 16) -> Batch:
        drawn = clusters.batch(rows, dice(seed, 2, step))
        values = 3 * drawn["inputs"] @ slope if step % 2 else torch.empty(0)
        return drawn | {"values": values}

    def held_out() -> float:
        first, second = (loss(body, **batch(step, 256)).item() for step in (-1, 0))
        return first / 100 + second

    return one_part(Objective(body, loss), adam(body), batch, held_out)


def scheduled_weights(seed: int, num_steps: int) -> Training:
    """Three losses; the weight of one falls, that of another rises, and one has its own phase."""
    clusters = Clusters(seed)
    slope = torch.randn(16, generator=dice(seed, 3))
    body = nn.ModuleDict(
        {"trunk": mlp(16, 32, 32), "classes": mlp(32, 8), "value": mlp(32, 1), "copy": mlp(32, 16)}
    )

    def losses(body: nn.ModuleDict, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = body["trunk"](inputs).relu()
        value = (body["value"](hidden).squeeze(-1) - inputs @ slope).square().mean()
        own = (body["copy"](hidden) - inputs).square().mean()
        return torch.stack(
            [nn.functional.cross_entropy(body["classes"](hidden), labels), value, own]
        )

    def loss(body: nn.ModuleDict, inputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return (losses(body, inputs, labels) * weights).sum()

    def batch(step: int, rows: int = 16) -> Batch:
        done = step / num_steps
        weights = torch.tensor([done, 1 - done, 3.0 if 0.4 < done < 0.6 else 0.1])
        return clusters.batch(rows, dice(seed, 2, step)) | {"weights": weights}

    def held_out() -> float:
        drawn = clusters.batch(256, dice(seed, 4))
        return losses(body, **drawn).sum().item()

    return one_part(Objective(body, loss), adam(body), batch, held_out)


def harder_tasks(seed: int, num_steps: int) -> Training:
    """A curriculum of five levels: a wider range of inputs, so a higher loss, at each level."""
    teacher = mlp(8, 24, 1, activation=nn.Tanh)
    body = mlp(8, 48, 48, 1)

    def loss(body: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return (body(inputs) - targets).square().mean()

    @torch.no_grad()
    def batch(step: int, rows: int = 16) -> Batch:
        level = min(4, 5 * (step - 1) // num_steps)
        generator = dice(seed, 2, step)
        inputs = 0.5 * 1.7**level * torch.randn(rows, 8, generator=generator)
        targets = 4 * teacher(inputs) + inputs[:, :1] * inputs[:, 1:2]
        return {"inputs": inputs, "targets": targets}

    def held_out() -> float:
        return loss(body, **batch(num_steps + 1, 256)).item()

    return one_part(Objective(body, loss), adam(body), batch, held_out)


def longer_sequences(seed: int, num_steps: int) -> Training:
    """A language model whose rows grow from 6 to 48 tokens in four stages."""
    text, body = Text(seed), small_gpt2()

    def batch(step: int) -> Batch:
        length = (6, 12, 24, 48)[min(3, 4 * (step - 1) // num_steps)]
        return {"tokens": text.draw(4, length, dice(seed, 2, step))}

    held_out = text.draw(32, 48, dice(seed, 3))
    return one_part(
        Objective(body, language_loss),
        adam(body),
        batch,
        lambda: language_loss(body, held_out).item(),
        watches=("max_attention_logit_format",),
    )


def repeated_lessons(seed: int, num_steps: int) -> Training:
    """A curriculum of five levels, four times over: the loss rises with the level, and drops."""
    body, clusters = mlp(16, 48, 8), Clusters(seed)
    level_steps = max(1, num_steps // 20)

    def batch(step: int) -> Batch:
        level = (step - 1) // level_steps % 5
        return clusters.batch(16, dice(seed, 2, step), noise=0.2 + 0.5 * level)

    held_out = clusters.batch(512, dice(seed, 3))
    return one_part(
        Objective(body, classification), adam(body), batch, lambda: error_rate(body, held_out)
    )


def more_classes(seed: int, num_steps: int) -> Training:
    """Two new classes in each quarter of the run; half of the rows repeat the earlier ones."""
    body, clusters = mlp(16, 64, 8), Clusters(seed)

    def batch(step: int) -> Batch:
        generator = dice(seed, 2, step)
        earlier = 2 * min(3, 4 * (step - 1) // num_steps)
        new = earlier + torch.randint(2, (8,), generator=generator)
        old = torch.randint(max(2, earlier), (8,), generator=generator)
        return clusters.of_classes(torch.cat([new, old]), generator)

    held_out = clusters.batch(512, dice(seed, 3))
    return one_part(
        Objective(body, classification), adam(body), batch, lambda: error_rate(body, held_out)
    )


def differential_equation(seed: int, num_steps: int) -> Training:
    """A network that solves a boundary problem, on 64 points that are drawn anew every 80 steps."""
    body = mlp(1, 32, 32, 1, activation=nn.Tanh)

    def loss(body: nn.Module, points: Tensor) -> Tensor:
        # A derivative by the points is needed even where no gradient of the weights is.
        with torch.enable_grad():
            places = points.clone().requires_grad_()
            values = body(places)
            (slopes,) = torch.autograd.grad(values.sum(), places, create_graph=True)
            (bends,) = torch.autograd.grad(slopes.sum(), places, create_graph=True)
        residual = bends + torch.pi**2 * (torch.pi * points).sin()
        borders = body(torch.tensor([[0.0], [1.0]]))
        return residual.square().mean() + 100 * borders.square().mean()

    def batch(step: int) -> Batch:
        return {"points": torch.rand(64, 1, generator=dice(seed, 2, (step - 1) // 80))}

    def distance() -> float:
        points = torch.linspace(0, 1, 101)[:, None]
        return (body(points) - (torch.pi * points).sin()).square().mean().sqrt().item()

    return one_part(Objective(body, loss), adam(body), batch, distance)


def colder_answers(seed: int, num_steps: int) -> Training:
    """Distillation: the temperature of both networks falls from 10 to 1 in ten stages."""
    teacher, body, clusters = mlp(16, 64, 8), mlp(16, 24, 8), Clusters(seed)
    optimizer = adam(teacher, 1e-2)
    for step in range(100):
        classification(teacher, **clusters.batch(32, dice(seed, 1, step))).backward()
        optimizer.step()
        optimizer.zero_grad()

    def loss(body: nn.Module, inputs: Tensor, answers: Tensor, temperature: Tensor) -> Tensor:
        found = (body(inputs) / temperature).log_softmax(-1)
        truth = (answers / temperature).log_softmax(-1)
        divergence = nn.functional.kl_div(found, truth, reduction="batchmean", log_target=True)
        return temperature.square() * divergence

    @torch.no_grad()
    def answered(rows: int, generator: torch.Generator) -> Batch:
        inputs = clusters.batch(rows, generator)["inputs"]
        return {"inputs": inputs, "answers": teacher(inputs)}

    def batch(step: int) -> Batch:
        temperature = 10.0 - min(9, 10 * (step - 1) // num_steps)
        return answered(16, dice(seed, 2, step)) | {"temperature": torch.tensor(temperature)}

    held_out = answered(512, dice(seed, 3)) | {"temperature": torch.tensor(1.0)}
    return one_part(Objective(body, loss), adam(body), batch, lambda: loss(body, **held_out).item())
