"""Small networks of nine architectures with a data set each, into which faults are planted."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_outputs import ImageClassifierOutput

__all__ = [
    "ARCHITECTURES",
    "BATCH_SIZE",
    "FACTORS",
    "NUM_CLASSES",
    "NUM_LAYERS",
    "SHIFTS",
    "Architecture",
    "Rows",
    "collated",
    "new_network",
]

BATCH_SIZE = 4
NUM_LAYERS = 2
NUM_CLASSES = 4
FACTORS = (1.0, 1e3, float("nan"), float("inf"), -1e3, 1e-3, 1.0)
"""Factors by their code."""
SHIFTS = (*(0.0 for _ in FACTORS[:-1]), 5.0)
"""What is added to the loss, by the same code."""
_VOCABULARY = 32
_LENGTH = 10
_SIZE = 8
_NOISE = 0.2
"""Share of random targets, so that the loss of a trained network does not go to zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A network, its rows, and the names under which a fault finds its place in the network."""

    make: Callable[[int], nn.Module]
    """Takes the hidden size, which must be divisible by 16."""

    layer: str
    """Name of a layer, with ``{}`` for its number, 0 or 1."""

    weight: str
    """Name of a trainable weight inside of a layer."""

    query: str | None = None
    """Name inside of a layer of the projection whose output the attention logits grow with."""

    router: str | None = None
    """Name inside of a layer of a router."""

    images: bool = False
    """Whether rows are images with a class. Otherwise they are tokens."""

    learns: bool = True
    """Whether 60 steps are enough to learn something, so that wrong targets raise the loss."""

    masked: bool = False
    """Whether the tokens that are targets are masked in the input."""

    def layer_name(self, number: int) -> str:
        """Return the name of a layer."""
        return self.layer.format(number)

    def weight_name(self, number: int) -> str:
        """Return the name of the trainable weight of a layer."""
        return f"{self.layer_name(number)}.{self.weight}"


class Rows(Dataset):
    """An endless data set of rows that depend on their index alone.

    Args:
        architecture: Architecture that is trained.
        num_rows: Number of rows.
        seed: Seed of the data set.
    """

    def __init__(self, architecture: Architecture, num_rows: int, seed: int = 0) -> None:
        self._architecture, self._num_rows, self._seed = architecture, num_rows, seed

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._num_rows:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + index)
        if self._architecture.images:
            row = _image(generator)
        else:
            row = _tokens(generator, masked=self._architecture.masked)
        return {**row, "indices": torch.tensor(index)}


def _tokens(generator: torch.Generator, *, masked: bool) -> dict[str, Tensor]:
    start = torch.randint(_VOCABULARY, (), generator=generator)
    row = (start + torch.arange(_LENGTH)) % _VOCABULARY
    noise = torch.randint(_VOCABULARY, (_LENGTH,), generator=generator)
    row = torch.where(torch.rand(_LENGTH, generator=generator) < _NOISE, noise, row)
    labels = row.clone()
    if masked:
        hidden = torch.arange(_LENGTH) % 3 == torch.randint(3, (), generator=generator)
        labels[~hidden] = -100
        row = row.masked_fill(hidden, _VOCABULARY)
    return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": labels}


def _image(generator: torch.Generator) -> dict[str, Tensor]:
    label = torch.randint(NUM_CLASSES, (), generator=generator)
    image = 0.5 * torch.randn(3, _SIZE, _SIZE, generator=generator)
    image[:, :, 2 * int(label) : 2 * int(label) + 2] += 1
    noise = torch.randint(NUM_CLASSES, (), generator=generator)
    label = torch.where(torch.rand((), generator=generator) < _NOISE, noise, label)
    return {"pixel_values": image, "labels": label}


def collated(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows as one micro-batch, with the code of a factor of 1 everywhere."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "loss_code": _code(), "layer_codes": _code(NUM_LAYERS)}


def _code(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


class _ConvolutionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> Tensor:
        return images + nn.functional.relu(self.norm(self.convolution(images)))


class _ConvolutionalNetwork(nn.Module):
    """Two residual blocks of a convolution and a BatchNorm, and a classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(_ConvolutionBlock(width) for _ in range(2))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> ImageClassifierOutput:
        """Return the loss and the logits."""
        hidden = self.stem(pixel_values)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden.amax((2, 3)))
        return ImageClassifierOutput(nn.functional.cross_entropy(logits, labels), logits)


def _gpt2(width: int) -> GPT2LMHeadModel:
    settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_positions": 16, "n_embd": width, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**settings, **tokens, **sizes))


def _decoder(width: int) -> dict[str, Any]:
    return {
        "vocab_size": _VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }


def _llama(width: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**_decoder(width), tie_word_embeddings=True))


def _mixtral(width: int) -> MixtralForCausalLM:
    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**_decoder(width), **routing))


def _encoder(width: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _bert(width: int) -> BertForMaskedLM:
    # The last token is the mask.
    tokens = {"vocab_size": _VOCABULARY + 1, "max_position_embeddings": 16}
    return BertForMaskedLM(BertConfig(**_encoder(width), **tokens))


def _vit(width: int) -> ViTForImageClassification:
    # At the default of 0.02, the patches of a network this small come out so small that the
    # gradient of the first normalization has spikes without any fault.
    start = {"initializer_range": 0.1}
    sizes = {"image_size": _SIZE, "patch_size": 2, "num_labels": NUM_CLASSES, **start}
    return ViTForImageClassification(ViTConfig(**_encoder(width), **sizes))


def _t5(width: int) -> T5ForConditionalGeneration:
    tokens = {"vocab_size": _VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0}
    sizes = {"d_model": width, "d_kv": width // 2, "d_ff": 2 * width, "num_heads": 2}
    depth = {"num_layers": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**tokens, **sizes, **depth))


def _lora(width: int) -> nn.Module:
    config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    return get_peft_model(_gpt2(width), config)


def _checkpointed(width: int, *, use_reentrant: bool) -> GPT2LMHeadModel:
    network = _gpt2(width)
    # transformers 5.2x has renamed the method.
    renamed = getattr(network, "activation_checkpointing_enable", None)
    (renamed or network.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})
    return network


_GPT2_NAMES = {"layer": "transformer.h.{}", "weight": "mlp.c_fc.weight", "query": "attn.c_attn"}
_LLAMA_NAMES = {"layer": "model.layers.{}", "query": "self_attn.q_proj"}

ARCHITECTURES = {
    "gpt2": Architecture(make=_gpt2, **_GPT2_NAMES),
    "tied llama": Architecture(make=_llama, weight="mlp.up_proj.weight", **_LLAMA_NAMES),
    "bert": Architecture(
        make=_bert,
        layer="bert.encoder.layer.{}",
        weight="intermediate.dense.weight",
        query="attention.self.query",
        learns=False,
        masked=True,
    ),
    "vit": Architecture(
        make=_vit,
        layer="vit.layers.{}",
        weight="mlp.fc1.weight",
        query="attention.q_proj",
        images=True,
    ),
    "t5": Architecture(
        make=_t5,
        layer="decoder.block.{}",
        weight="layer.2.DenseReluDense.wi.weight",
        query="layer.0.SelfAttention.q",
    ),
    "mixtral": Architecture(
        make=_mixtral,
        weight="self_attn.v_proj.weight",
        router="mlp.gate",
        **_LLAMA_NAMES,
    ),
    "cnn": Architecture(
        make=_ConvolutionalNetwork, layer="layers.{}", weight="convolution.weight", images=True
    ),
    "lora": Architecture(
        make=_lora,
        layer="base_model.model.transformer.h.{}",
        weight="attn.c_attn.lora_B.default.weight",
        learns=False,
    ),
    "reentrant checkpointing": Architecture(
        make=functools.partial(_checkpointed, use_reentrant=True), **_GPT2_NAMES
    ),
    "checkpointing": Architecture(
        make=functools.partial(_checkpointed, use_reentrant=False), **_GPT2_NAMES
    ),
}
"""Architectures by name. Checkpointing of both kinds counts as one of the nine."""


class _Mask(nn.Module):
    """Return minus infinity above the diagonal, as the mask of a causal attention does."""

    def forward(self, like: Tensor) -> Tensor:
        """Return a mask of shape ``(2, 2)``."""
        return like.new_full((2, 2), -torch.inf).triu(1)


def new_network(architecture: Architecture, *, width: int = 16, seed: int = 0) -> nn.Module:
    """Return a network with fixed initial weights, in which a batch can plant faults.

    The network multiplies its loss and the output of each layer by the factors whose codes are in
    the batch, see `FACTORS`. Layer 0 has a healthy submodule that returns minus infinity: no
    monitor may take it for a fault.

    Args:
        architecture: Architecture of the network.
        width: Hidden size.
        seed: Seed of the weights.
    """
    torch.manual_seed(seed)
    network = architecture.make(width)
    network.train()
    forward = network.forward
    table, shifts = torch.tensor(FACTORS), torch.tensor(SHIFTS)
    factors: dict[str, Tensor] = {}

    @functools.wraps(forward)
    def with_factors(
        *inputs: Any, loss_code: Tensor, layer_codes: Tensor, indices: Tensor, **batch: Any
    ) -> Any:
        del indices
        factors["layers"] = table[layer_codes]
        output = forward(*inputs, **batch)
        output.loss = output.loss * table[loss_code] + shifts[loss_code]
        return output

    def multiply(number: int, _: nn.Module, __: Any, output: Any) -> Any:
        factor = factors["layers"][number]
        if isinstance(output, Tensor):
            return output * factor
        return (output[0] * factor, *output[1:])

    # A replay calls the network with the inputs that it has recorded. So the factors come
    # from the inputs, and the replay finds the fault again. The inputs hold codes, because a
    # non-finite factor would itself be a bad input.
    network.forward = with_factors
    for number in range(NUM_LAYERS):
        layer = network.get_submodule(architecture.layer_name(number))
        layer.register_forward_hook(functools.partial(multiply, number))
    first = network.get_submodule(architecture.layer_name(0))
    first.add_module("mask", _Mask())
    first.register_forward_pre_hook(_call_mask)
    return network


def _call_mask(layer: nn.Module, inputs: Any) -> None:
    layer.mask(inputs[0])
