"""What a healthy training consists of, and the small networks and data that many of them share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mfwrap import ExponentialMovingAverage

__all__ = [
    "Batch",
    "Clusters",
    "Objective",
    "Part",
    "Text",
    "Training",
    "adam",
    "classification",
    "dice",
    "error_rate",
    "language_loss",
    "mlp",
    "one_part",
    "pretrain",
    "small_gpt2",
    "small_llama",
]

Batch = dict[str, Tensor]


@dataclass(kw_only=True)
class Part:
    """A network with its optimizer. Adversarial trainings have two of them, others one."""

    network: nn.Module
    """Takes a micro-batch as keywords, and returns its loss."""

    optimizer: Optimizer
    batches: Callable[[int], list[Batch]]
    """Micro-batches of a step, which is counted from 1."""

    schedule: LRScheduler | None = None
    loss_scale: Any = 1.0
    average: ExponentialMovingAverage | None = None


@dataclass(kw_only=True)
class Training:
    """A training that a loop can run, in any of the ways."""

    parts: list[Part]
    measure: Callable[[], float]
    """Error of the task, lower is better. It is independent of what the monitor sees."""

    after: Callable[[int], None] = lambda _: None
    """What the loop does after a step, such as copying a target network."""

    watches: tuple[str, ...] = ()
    """Settings of the monitor that make it watch attention or experts."""

    @torch.no_grad()
    def error(self) -> float:
        """Measure in eval mode, without gradients."""
        for part in self.parts:
            part.network.eval()
        measured = float(self.measure())
        for part in self.parts:
            part.network.train()
        return measured


class Objective(nn.Module):
    """A body and the loss that a training computes with it."""

    def __init__(self, body: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self._loss = loss

    def forward(self, **batch: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return self._loss(self.body, **batch)


def one_part(
    network: nn.Module,
    optimizer: Optimizer,
    batches: Callable[[int], Batch | list[Batch]],
    measure: Callable[[], float],
    *,
    after: Callable[[int], None] = lambda _: None,
    watches: tuple[str, ...] = (),
    **settings: Any,
) -> Training:
    """Return a training of one part; `batches` may return a single micro-batch."""

    def listed(step: int) -> list[Batch]:
        found = batches(step)
        return found if isinstance(found, list) else [found]

    part = Part(network=network, optimizer=optimizer, batches=listed, **settings)
    return Training(parts=[part], measure=measure, after=after, watches=watches)


def dice(*numbers: int) -> torch.Generator:
    """Return a generator whose seed follows from all numbers, such as a seed and a step."""
    seed = 17
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**62
    return torch.Generator().manual_seed(seed)


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these sizes, with activations between them."""
    layers: list[nn.Module] = []
    for place in range(len(sizes) - 1):
        layers.append(nn.Linear(sizes[place], sizes[place + 1]))
        if place < len(sizes) - 2:
            layers.append(activation())
    return nn.Sequential(*layers)


def adam(network: nn.Module, rate: float = 3e-3, **settings: Any) -> AdamW:
    """Return torch's fused AdamW over the trainable weights."""
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    return AdamW(weights, lr=rate, fused=True, **settings)


class Clusters:
    """Rows of classes: each class is a cluster around a random center."""

    def __init__(self, seed: int, *, num_classes: int = 8, width: int = 16) -> None:
        self.num_classes = num_classes
        self.centers = torch.randn(num_classes, width, generator=dice(seed, 1))

    def batch(self, number: int, generator: torch.Generator, noise: float = 1.2) -> Batch:
        """Draw rows and their classes."""
        labels = torch.randint(self.num_classes, (number,), generator=generator)
        return self.of_classes(labels, generator, noise)

    def of_classes(self, labels: Tensor, generator: torch.Generator, noise: float = 1.2) -> Batch:
        """Draw one row for each label."""
        centers = self.centers[labels]
        inputs = centers + noise * torch.randn(centers.shape, generator=generator)
        return {"inputs": inputs, "labels": labels}


def classification(body: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of a classifier."""
    return nn.functional.cross_entropy(body(inputs), labels)


def error_rate(body: nn.Module, batch: Batch) -> float:
    """Return the share of rows whose class is not the most probable one."""
    return (body(batch["inputs"]).argmax(-1) != batch["labels"]).float().mean().item()


class Text:
    """Tokens of a language in which a token mostly determines the next one."""

    def __init__(self, seed: int, vocabulary: int = 32, order: float = 0.8) -> None:
        self.vocabulary = vocabulary
        self._next = torch.randperm(vocabulary, generator=dice(seed, 2))
        self._order = order

    def draw(self, number: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw rows of tokens."""
        tokens = torch.randint(self.vocabulary, (number, length), generator=generator)
        follows = torch.rand(number, length, generator=generator) < self._order
        for place in range(1, length):
            after = self._next[tokens[:, place - 1]]
            tokens[:, place] = torch.where(follows[:, place], after, tokens[:, place])
        return tokens


def small_gpt2(vocabulary: int = 32, length: int = 64, **settings: Any) -> GPT2LMHeadModel:
    """Return a GPT-2 of two layers with 32 hidden units, without dropout."""
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            **drops | settings,
        )
    )


def language_loss(body: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a causal language model of transformers."""
    loss: Tensor = body(input_ids=tokens, labels=tokens).loss
    return loss


def small_llama(vocabulary: int) -> LlamaForCausalLM:
    """Return a Llama of two layers with 32 hidden units; the last token is for padding."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            pad_token_id=vocabulary - 1,
            use_cache=False,
        )
    )


def pretrain(body: nn.Module, text: Text, seed: int, num_steps: int = 60) -> None:
    """Train a language model on another text, before the training that is followed."""
    optimizer = adam(body, 5e-3)
    for step in range(num_steps):
        language_loss(body, text.draw(8, 16, dice(seed, 1, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
