"""Trainings in which not all weights are trained, or not all of the time."""

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification, get_cosine_schedule_with_warmup

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
    pretrain,
    small_gpt2,
    small_llama,
)

__all__ = [
    "answers_only",
    "frozen_midway",
    "gradual_unfreezing",
    "low_rank_embeddings",
    "ranked_answers",
    "resumed_midway",
]


def low_rank_embeddings(seed: int, num_steps: int) -> Training:
    """LoRA on attention and on the embeddings of a trained GPT-2, whose head is tied to them."""
    first, text = Text(seed + 1000), Text(seed)
    base = small_gpt2()
    pretrain(base, first, seed)
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


def answers_only(seed: int, num_steps: int) -> Training:
    """Supervised fine-tuning: only answers count, of 2 to 19 tokens, and each token alike."""
    prompts, answers, body = Text(seed + 1000), Text(seed, order=0.95), small_llama(34)
    pretrain(body, prompts, seed, 100)

    def loss(body: nn.Module, tokens: Tensor, labels: Tensor, number: Tensor) -> Tensor:
        # The loop averages three micro-batches, each of which gives its part of the whole mean.
        mask = (tokens != 33).long()
        return 3 * body(tokens, mask, labels=labels, num_items_in_batch=number).loss

    def drawn(rows: int, generator: torch.Generator) -> Batch:
        asked = prompts.draw(rows, 12, generator)
        answered = answers.draw(rows, 20, generator)
        begin = torch.full((rows, 1), 32)
        tokens = torch.cat([asked, begin, answered], -1)
        first = torch.randint(10, (rows, 1), generator=generator)
        last = 13 + (2 * 10 ** torch.rand(rows, 1, generator=generator)).long()
        place = torch.arange(33) + first
        tokens = torch.where(place < last, tokens.gather(-1, place.clamp(max=32)), 33)
        return {"tokens": tokens, "labels": torch.where((place > 12) & (tokens < 33), tokens, -100)}

    def batches(step: int) -> list[Batch]:
        generator = dice(seed, 2, step)
        found = [drawn(2, generator) for _ in range(3)]
        number = sum((one["labels"] >= 0).sum() for one in found)
        return [one | {"number": number} for one in found]

    held_out = drawn(64, dice(seed, 3))
    optimizer = adam(body, 1e-3)
    return one_part(
        Objective(body, loss),
        optimizer,
        batches,
        lambda: loss(body, **held_out, number=(held_out["labels"] >= 0).sum()).item(),
        schedule=get_cosine_schedule_with_warmup(optimizer, num_steps // 30, num_steps),
        watches=("max_attention_logit_format",),
    )


def ranked_answers(seed: int, num_steps: int) -> Training:
    """A reward model: LoRA and a new head on a trained Llama; people misjudge some pairs."""
    text, base = Text(seed), small_llama(33)
    pretrain(base, text, seed, 100)
    base.config.num_labels = 1
    trunk = LlamaForSequenceClassification(base.config)
    trunk.model.load_state_dict(base.model.state_dict())
    settings = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules="all-linear")
    body = get_peft_model(trunk, settings)
    values = torch.randn(33, generator=dice(seed, 4))

    def margin(body: nn.Module, chosen: Tensor, rejected: Tensor) -> Tensor:
        tokens = torch.cat([chosen, rejected])
        first, second = body(tokens, (tokens != 32).long()).logits.squeeze(-1).chunk(2)
        return first - second

    def loss(body: nn.Module, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -nn.functional.logsigmoid(margin(body, chosen, rejected)).mean()

    def pairs(step: int, rows: int = 8, weight: float = 1.0) -> Batch:
        """Draw pairs of answers; the larger `weight` is, the fewer are misjudged."""
        generator = dice(seed, 2, step)
        tokens = text.draw(2 * rows, 16, generator)
        lengths = torch.randint(4, 17, (2 * rows, 1), generator=generator)
        there = torch.arange(16) < lengths
        first, second = torch.where(there, tokens, 32).chunk(2)
        better, worse = (values[tokens] * there).sum(-1).chunk(2)
        agreed = torch.rand(rows, generator=generator) < (weight * (better - worse)).sigmoid()
        return {
            "chosen": torch.where(agreed[:, None], first, second),
            "rejected": torch.where(agreed[:, None], second, first),
        }

    def wrong_order() -> float:
        return (margin(body, **pairs(0, 512, 1e6)) <= 0).float().mean().item()

    optimizer = adam(body, 3e-3)
    return one_part(
        Objective(body, loss),
        optimizer,
        pairs,
        wrong_order,
        schedule=get_cosine_schedule_with_warmup(optimizer, num_steps // 30, num_steps),
        watches=("max_attention_logit_format",),
    )
