"""Several tasks, tasks that become harder, and tasks with losses of their own."""

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR, PolynomialLR
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PatchTSTConfig,
    PatchTSTForPrediction,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from support.healthy.images import (
    Detector,
    UNet,
    boxed_images,
    dice_and_entropy,
    organ_images,
    set_loss,
)
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
    "forecasts",
    "harder_tasks",
    "longer_sequences",
    "masked_words",
    "matched_sets",
    "more_classes",
    "repeated_lessons",
    "scheduled_weights",
    "segmented_images",
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


def masked_words(seed: int, num_steps: int) -> Training:
    """BERT with dropout fills in 15 % of the tokens; most are masked, some wrong or unchanged."""
    text, mask = Text(seed, 16), 16
    body = BertForMaskedLM(
        BertConfig(
            vocab_size=17,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            initializer_range=0.1,
        )
    )

    def loss(body: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return body(input_ids=tokens, labels=labels).loss

    def batch(step: int, rows: int = 16) -> Batch:
        generator = dice(seed, 2, step)
        tokens = text.draw(rows, 24, generator)
        chosen, kept = torch.rand(2, rows, 24, generator=generator)
        others = torch.randint(16, (rows, 24), generator=generator)
        replaced = torch.where(kept < 0.8, mask, torch.where(kept < 0.9, others, tokens))
        hidden = chosen < 0.15
        return {
            "tokens": torch.where(hidden, replaced, tokens),
            "labels": torch.where(hidden, tokens, -100),
        }

    def held_out() -> float:
        return loss(body, **batch(0, 128)).item()

    optimizer = adam(body, weight_decay=0.01)
    return one_part(
        Objective(body, loss),
        optimizer,
        batch,
        held_out,
        schedule=get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps),
        watches=("max_attention_logit_format",),
    )


def matched_sets(seed: int, num_steps: int) -> Training:
    """DETR: the loss matches queries with objects anew in each step; some images have none."""
    body = Detector()
    optimizer = adam(body, 2e-3, weight_decay=1e-4)
    held_out = boxed_images(128, dice(seed, 3))
    return one_part(
        Objective(body, set_loss),
        optimizer,
        lambda step: boxed_images(16, dice(seed, 2, step)),
        lambda: set_loss(body, **held_out).item(),
        schedule=MultiStepLR(optimizer, [2 * num_steps // 3]),
    )


def segmented_images(seed: int, num_steps: int) -> Training:
    """nnU-Net: batches of four images, Dice and cross entropy, and SGD with a momentum of 0.99."""
    body = UNet()
    optimizer = SGD(
        body.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5, fused=True
    )
    held_out = organ_images(64, dice(seed, 3))
    return one_part(
        Objective(body, dice_and_entropy),
        optimizer,
        lambda step: organ_images(4, dice(seed, 2, step)),
        lambda: dice_and_entropy(body, **held_out).item(),
        schedule=PolynomialLR(optimizer, num_steps, power=0.9),
    )


def forecasts(seed: int, num_steps: int) -> Training:
    """PatchTST on series of other sizes, each with a season, a trend and noise that lasts."""
    body = PatchTSTForPrediction(
        PatchTSTConfig(
            num_input_channels=1,
            context_length=48,
            prediction_length=12,
            patch_length=8,
            patch_stride=4,
            d_model=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )

    def loss(body: nn.Module, past: Tensor, future: Tensor) -> Tensor:
        return body(past_values=past, future_values=future).loss

    def batch(step: int, rows: int = 16) -> Batch:
        generator = dice(seed, 2, step)
        size, trend, phase = torch.randn(3, rows, 1, generator=generator)
        season = (torch.pi * (torch.arange(60) / 6 + 2 * phase)).sin()
        noise = 0.2 * torch.randn(rows, 60, generator=generator)
        for place in range(1, 60):
            noise[:, place] += 0.7 * noise[:, place - 1]
        series = (size / 2).exp() * (season + 0.02 * trend * torch.arange(60) + noise)
        return {"past": series[:, :48, None], "future": series[:, 48:, None]}

    def held_out() -> float:
        return loss(body, **batch(0, 256)).item()

    optimizer = adam(body, 1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_steps // 20, num_steps)
    return one_part(Objective(body, loss), optimizer, batch, held_out, schedule=schedule)
