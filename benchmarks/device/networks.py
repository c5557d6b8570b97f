"""Networks that the sections train, with random weights, made on the device."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from device.setup import Setup

Batch = dict[str, Tensor]


def llama(
    setup: Setup, width: int, layers: int, *, vocabulary: int, length: int, **changes: Any
) -> LlamaForCausalLM:
    """Return a Llama in train mode.

    Args:
        setup: Device.
        width: Hidden size; a head has 64 numbers, or all of them in a smaller network.
        layers: Number of layers.
        vocabulary: Number of tokens.
        length: Longest sequence.
        changes: Other settings of the config.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=length,
        **changes,
    )
    with setup.device:  # large networks are slow to fill on the host
        network = LlamaForCausalLM(config)
    network.train()
    return network


def gpt2_of_292_tensors(setup: Setup) -> GPT2LMHeadModel:
    """Return a narrow GPT-2 of 24 layers, whose steps cost the host more than the device."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=32,
        n_embd=64,
        n_layer=setup.size(24, 1),
        n_head=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    with setup.device:
        network = GPT2LMHeadModel(config)
    network.train()
    return network


class Attention(nn.Module):
    """Causal attention of one head, written with operators that are deterministic on a GPU.

    Args:
        width: Size of a position.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projections = nn.Linear(width, 3 * width)
        self.scale = width**-0.5

    def forward(self, inputs: Tensor) -> Tensor:
        queries, keys, values = self.projections(inputs).chunk(3, dim=-1)
        scores = queries @ keys.transpose(1, 2) * self.scale
        length = inputs.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=inputs.device).triu(1)
        weights: Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
        return weights


class Regressor(nn.Module):
    """A small transformer whose forward runs under float16 autocast and returns the loss.

    Its kernels add in a fixed order, so two trainings on one machine agree bit by bit.

    Args:
        width: Size of a position.
        layers: Number of attention layers, each with a perceptron.
        dropout: Probability of dropout.
    """

    def __init__(self, width: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention(width) for _ in range(layers))
        self.perceptrons = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
            for _ in range(layers)
        )
        self.outputs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, dtype=torch.float16):
            values = inputs
            for attend, perceive, output in zip(
                self.attentions, self.perceptrons, self.outputs, strict=True
            ):
                values = values + attend(values)
                values = values + self.dropout(output(perceive(values)))
        return (values.float() - targets).square().mean()


def regressor(setup: Setup, dropout: float = 0.0) -> Regressor:
    """Return a regressor in train mode."""
    torch.manual_seed(0)
    width, layers = setup.size((128, 4), (16, 2))
    return Regressor(width, layers, dropout).to(setup.device).train()


def regression_data(setup: Setup, number: int) -> list[Batch]:
    """Return batches for a regressor: the targets are the inputs of the position before."""
    width = setup.size(128, 16)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(number):
        inputs = torch.randn(8, 16, width, generator=generator).to(setup.device)
        batches.append({"inputs": inputs, "targets": inputs.roll(1, 1)})
    return batches


def tokens(setup: Setup, rows: int, length: int, vocabulary: int) -> Batch:
    """Return a batch of random tokens, which are their own labels."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, vocabulary, (rows, length), generator=generator).to(setup.device)
    return {"input_ids": drawn, "labels": drawn}


def masked_tokens(setup: Setup, rows: int, length: int, vocabulary: int) -> Batch:
    """Return a batch of `tokens` with a causal mask of shape (rows, 1, length, length).

    Without a mask, transformers calls another kernel of attention in a captured step than in other
    steps: while a graph is captured, it does not leave the mask to the kernel's own `is_causal`.
    """
    mask = torch.ones(length, length, dtype=torch.bool, device=setup.device).tril()
    expanded = mask.expand(rows, 1, length, length).contiguous()
    return tokens(setup, rows, length, vocabulary) | {"attention_mask": expanded}


def loss_of(output: Any) -> Tensor:
    """Return the loss of what a network returns."""
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def num_parameters(network: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def state_bytes(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the weights and the optimizer's state."""
    states: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    held = [*network.parameters(), *(each for each in states if isinstance(each, Tensor))]
    return sum(tensor.nbytes for tensor in held)
