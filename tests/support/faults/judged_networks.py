"""Small networks that rules are or were judged on, of libraries and in torch."""

import functools
import math
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, mse_loss, pad, relu, silu
from torch.nn.utils.parametrizations import weight_norm
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    ConvNextConfig,
    ConvNextForImageClassification,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from support.faults.architecture import (
    NOISE,
    NUM_CLASSES,
    SIZE,
    VOCABULARY,
    Architecture,
    image,
    turns,
)

__all__ = ["JUDGED_NETWORKS"]

_FEATURES = 8
_POSITIONS = 64
"""Positions that a network can tell apart; more than a row has."""

_SIGNAL = 64
"""Samples of a signal."""

_PATCH = 2
_IDS = 12
"""Number of users, and of items."""

_POINTS = 8
"""Most points of a set."""


def _opt(width: int) -> OPTForCausalLM:
    words = {"vocab_size": VOCABULARY, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 2 * width}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.1, "init_std": 0.1}
    return OPTForCausalLM(OPTConfig(**words, **sizes, **depth, max_position_embeddings=_POSITIONS))


def _qwen2_moe(width: int) -> Qwen2MoeForCausalLM:
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": _POSITIONS}
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    inside = {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    start = {"initializer_range": 0.1, "router_aux_loss_coef": 0.01}
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**words, **sizes, **heads, **experts, **inside, **start)
    )


def _bart(width: int) -> BartForConditionalGeneration:
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "decoder_start_token_id": 0}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None}
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 2 * width}.items()
    }
    start = {"d_model": width, "dropout": 0.1, "init_std": 0.1}
    return BartForConditionalGeneration(BartConfig(**words, **ends, **sides, **start))


def _mamba(width: int) -> MambaForCausalLM:
    words = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"hidden_size": width, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4}
    return MambaForCausalLM(MambaConfig(**words, **sizes, use_cache=False))


def _resnet(width: int) -> ResNetForImageClassification:
    sizes = {"embedding_size": width, "hidden_sizes": [width, 2 * width], "depths": [1, 1]}
    return ResNetForImageClassification(
        ResNetConfig(**sizes, layer_type="basic", num_labels=NUM_CLASSES)
    )


def _photo(generator: torch.Generator) -> dict[str, Tensor]:
    """Return an image of twice the usual size in both directions."""
    row = image(generator)
    return row | {"pixel_values": row["pixel_values"].repeat_interleave(2, 1).repeat(1, 1, 2)}


class _RootMeanSquare(nn.Module):
    """Divide by the root mean square, and scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scaled vectors."""
        return self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class _DecoderBlock(nn.Module):
    """Torch's attention and a gated feed-forward network, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = _RootMeanSquare(width), _RootMeanSquare(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        normal = self.first(hidden)
        hidden = hidden + self.attention(normal, normal, normal, attn_mask=mask)[0]
        normal = self.second(hidden)
        return hidden + self.down(silu(self.gate(normal)) * self.up(normal))


class _Decoder(nn.Module):
    """A language model whose head has the weight of its embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(_POSITIONS, width)
        self.blocks = nn.ModuleList(_DecoderBlock(width) for _ in range(2))
        self.norm = _RootMeanSquare(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)
        nn.init.normal_(self.places.weight, std=0.3)
        self.head.weight = self.embedding.weight
        self.settings = {"temperature": 1.0, "label_smoothing": 0.0}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length)[None]
        hidden = self.embedding(input_ids) + self.places(position_ids)
        mask = hidden.new_full((length, length), -torch.inf).triu(1)
        if attention_mask.dim() > 2:
            mask = attention_mask[0, 0]
        for block in self.blocks:
            hidden = block(hidden, mask)
        return _next_tokens(self.settings, self.head(self.norm(hidden)), labels)


def _next_tokens(
    settings: dict[str, float], logits: Tensor, labels: Tensor
) -> SequenceClassifierOutput:
    """Return the loss and the logits of the next tokens, by the settings of a network."""
    logits = settings["temperature"] * logits
    loss = cross_entropy(
        logits[:, :-1].flatten(0, 1),
        labels[:, 1:].flatten(),
        label_smoothing=settings["label_smoothing"],
    )
    return SequenceClassifierOutput(loss=loss, logits=logits)


class _Classifier(nn.Module):
    """The end of a network: a head and its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, NUM_CLASSES)
        self.settings = {"temperature": 1.0, "label_smoothing": 0.0}

    def classified(self, hidden: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        logits = self.settings["temperature"] * self.head(hidden)
        smoothing = self.settings["label_smoothing"]
        return SequenceClassifierOutput(
            loss=cross_entropy(logits, labels, label_smoothing=smoothing), logits=logits
        )


class _MixerBlock(nn.Module):
    """One feed-forward network over the patches, and one over the channels."""

    def __init__(self, width: int, num_patches: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches_up = nn.Linear(num_patches, 2 * num_patches)
        self.patches_down = nn.Linear(2 * num_patches, num_patches)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        across = self.first(hidden).transpose(1, 2)
        hidden = hidden + self.patches_down(gelu(self.patches_up(across))).transpose(1, 2)
        return hidden + self.down(gelu(self.up(self.second(hidden))))


class _Mixer(_Classifier):
    """An MLP-Mixer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.stem = nn.Conv2d(3, width, _PATCH, stride=_PATCH)
        number = (SIZE // _PATCH) ** 2
        self.blocks = nn.ModuleList(_MixerBlock(width, number) for _ in range(2))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        hidden = self.stem(pixel_values).flatten(2).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return self.classified(hidden.mean(1), labels)


class _Standard(nn.Module):
    """Subtract the mean of each signal, and divide by its deviation, which must not be zero."""

    def forward(self, signals: Tensor) -> Tensor:
        """Return the signals, each with mean 0 and deviation 1."""
        centered = signals - signals.mean(-1, keepdim=True)
        return centered / centered.square().mean(-1, keepdim=True).sqrt()


class _SignalBlock(nn.Module):
    """A convolution whose weight is a direction and a length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = weight_norm(nn.Conv1d(width, width, 5, stride=2, padding=2))

    def forward(self, signals: Tensor) -> Tensor:
        """Return the signals at half the rate."""
        return relu(self.convolution(signals))


class _SignalClassifier(_Classifier):
    """A convolutional network that tells the frequency of a signal."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.standard = _Standard()
        self.stem = nn.Conv1d(1, width, 5, padding=2)
        self.blocks = nn.ModuleList(_SignalBlock(width) for _ in range(2))

    def forward(self, signals: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        hidden = self.stem(self.standard(signals)[:, None])
        for block in self.blocks:
            hidden = block(hidden)
        return self.classified(hidden.amax(-1), labels)


def _signal(generator: torch.Generator) -> dict[str, Tensor]:
    label = torch.randint(NUM_CLASSES, (), generator=generator)
    phase, *noise = torch.randn(1 + _SIGNAL, generator=generator)
    times = torch.arange(_SIGNAL) * (1 + label) / 5
    signal = (times + phase).sin() + 0.3 * torch.stack(noise)
    other = torch.randint(NUM_CLASSES, (), generator=generator)
    label = torch.where(torch.rand((), generator=generator) < NOISE, other, label)
    return {"signals": signal, "labels": label}


class _TimedBlock(nn.Module):
    """A residual block that is scaled and shifted by the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.time = nn.Linear(width, 2 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        scale, shift = self.time(time).chunk(2, -1)
        normal = self.norm(hidden) * (1 + scale) + shift
        return hidden + self.down(silu(self.up(normal)))


class _Diffusion(nn.Module):
    """Predict the noise in vectors from the vectors and the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(_FEATURES, width)
        self.time = nn.Linear(width, width)
        self.blocks = nn.ModuleList(_TimedBlock(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _FEATURES)
        self._frequencies = [2.0**number for number in range(width // 2)]

    def forward(self, values: Tensor, times: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the predicted noise."""
        angles = times[:, None] * times.new_tensor(self._frequencies)
        time = silu(self.time(torch.cat([angles.sin(), angles.cos()], -1)))
        hidden = self.stem(values)
        for block in self.blocks:
            hidden = block(hidden, time)
        predicted = self.head(self.norm(hidden))
        return SequenceClassifierOutput(loss=mse_loss(predicted, labels), logits=predicted)


def _noisy_values(generator: torch.Generator) -> dict[str, Tensor]:
    mixing = torch.linspace(-1, 1, 2 * _FEATURES).mul(5).sin().view(2, _FEATURES)
    clean = torch.randn(2, generator=generator).sign() @ mixing
    time = 0.1 + 0.9 * torch.rand((), generator=generator)
    noise = torch.randn(_FEATURES, generator=generator)
    return {
        "values": (1 - time).sqrt() * clean + time.sqrt() * noise,
        "times": time,
        "labels": noise,
    }


class _Perceptron(nn.Module):
    """Two linear maps."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * width), nn.Linear(2 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        """Return the features of the values."""
        return self.down(relu(self.up(values)))


class _Recommender(nn.Module):
    """Predict a rating from numbers, a user and an item, by the products of their vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(_IDS, width), nn.Embedding(_IDS, width)
        self.bottom = _Perceptron(_FEATURES, width)
        self.top = _Perceptron(width + 3, width)
        self.head = nn.Linear(width, 1)

    def forward(
        self, values: Tensor, users: Tensor, items: Tensor, labels: Tensor
    ) -> SequenceClassifierOutput:
        """Return the loss and the ratings."""
        numbers, user, item = self.bottom(values), self.users(users), self.items(items)
        pairs = [(numbers, user), (numbers, item), (user, item)]
        products = torch.stack([(one * other).mean(-1) for one, other in pairs], -1)
        predicted = self.head(self.top(torch.cat([numbers, products], -1)))[:, 0]
        return SequenceClassifierOutput(loss=mse_loss(predicted, labels), logits=predicted)


def _rating(generator: torch.Generator) -> dict[str, Tensor]:
    values = torch.randn(_FEATURES, generator=generator)
    user, item = torch.randint(_IDS, (2,), generator=generator)
    noise = 0.1 * torch.randn((), generator=generator)
    rating = values[:4].sum() / 2 + (user + 1.0).sin() * (item + 1.0).cos() / 2
    return {"values": values, "users": user, "items": item, "labels": rating + noise}


def _gpt_neo(width: int) -> GPTNeoForCausalLM:
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": _POSITIONS, "use_cache": False}
    sizes = {"hidden_size": width, "num_layers": 2, "num_heads": 2, "initializer_range": 0.1}
    attention = {"attention_types": [[["global", "local"], 1]], "window_size": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPTNeoForCausalLM(GPTNeoConfig(**words, **ends, **sizes, **attention))


def _olmoe(width: int) -> OlmoeForCausalLM:
    words = {"vocab_size": VOCABULARY, "pad_token_id": None, "eos_token_id": 0, "use_cache": False}
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return OlmoeForCausalLM(OlmoeConfig(**words, **sizes, **heads, **experts))


def _phi_with_adapters(width: int) -> nn.Module:
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": _POSITIONS, "use_cache": False}
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "initializer_range": 0.2, "resid_pdrop": 0.0}
    # Both maps of these adapters begin with parts of the weights, so none of them is zero.
    adapters = LoraConfig(
        r=4,
        target_modules=["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
        modules_to_save=["lm_head"],
        init_lora_weights="olora",
    )
    return get_peft_model(PhiForCausalLM(PhiConfig(**words, **sizes, **heads)), adapters)


def _convnext(width: int) -> ConvNextForImageClassification:
    sizes = {"num_stages": 2, "hidden_sizes": [width, 2 * width], "depths": [1, 1]}
    start = {"patch_size": 2, "layer_scale_init_value": 0.1, "num_labels": NUM_CLASSES}
    return ConvNextForImageClassification(ConvNextConfig(**sizes, **start))


class _MaskedMean(nn.Module):
    """The mean of the points that there are, of which a set must have one."""

    def forward(self, points: Tensor, mask: Tensor) -> Tensor:
        """Return a vector for each set."""
        weights = mask.to(points.dtype)[..., None]
        return (weights * points).sum(1) / weights.sum(1)


class _SetBlock(nn.Module):
    """Each point gets the mean of its set."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.own, self.common = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, points: Tensor, mean: Tensor) -> Tensor:
        """Return the points after the block."""
        return points + relu(self.own(self.norm(points)) + self.common(mean)[:, None])


class _SetClassifier(_Classifier):
    """A classifier of sets of points, in any order and of any number."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.stem = nn.Linear(NUM_CLASSES, width)
        self.mean = _MaskedMean()
        self.blocks = nn.ModuleList(_SetBlock(width) for _ in range(2))

    def forward(
        self, values: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        points = self.stem(values)
        for block in self.blocks:
            points = block(points, self.mean(points, attention_mask))
        return self.classified(self.mean(points, attention_mask), labels)


def _set(generator: torch.Generator) -> dict[str, Tensor]:
    """Return points of which one coordinate is larger on average: its number is the class."""
    label = torch.randint(NUM_CLASSES, (), generator=generator)
    points = torch.randn(_POINTS, NUM_CLASSES, generator=generator)
    points[:, label] += 1
    number = torch.randint(_POINTS // 2, _POINTS + 1, (), generator=generator)
    return {"values": points, "attention_mask": torch.arange(_POINTS) < number, "labels": label}


class _Coupling(nn.Module):
    """Scale and shift one half of the features by the other, and change their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_FEATURES // 2, 2 * width), nn.Linear(2 * width, _FEATURES)

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new values, and the logarithm of the volume's change."""
        first, second = values.chunk(2, -1)
        scale, shift = self.down(silu(self.up(first))).chunk(2, -1)
        scale = scale.tanh()
        return torch.cat([second * scale.exp() + shift, first], -1), scale.sum(-1)


class _Flow(nn.Module):
    """A normalizing flow, whose loss is the negative log-likelihood of the values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Coupling(width) for _ in range(4))
        self.scale = nn.Parameter(torch.zeros(_FEATURES))

    def forward(self, values: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the codes."""
        codes, volume = values * self.scale.exp(), self.scale.sum()
        for block in self.blocks:
            codes, more = block(codes)
            volume = volume + more
        loss = (codes.square().sum(-1) / 2 - volume).mean() / _FEATURES + math.log(2 * math.pi) / 2
        return SequenceClassifierOutput(loss=loss, logits=codes)


def _mixture(generator: torch.Generator) -> dict[str, Tensor]:
    mixing = torch.linspace(-1, 1, 2 * _FEATURES).mul(5).sin().view(2, _FEATURES)
    noise = 0.3 * torch.randn(_FEATURES, generator=generator)
    return {"values": torch.randn(2, generator=generator).sign() @ mixing + noise}


class _TemporalBlock(nn.Module):
    """A convolution over the tokens before, with gaps between them."""

    def __init__(self, width: int, gap: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.convolution = nn.Conv1d(width, 2 * width, 2, dilation=gap)
        self.down = nn.Linear(2 * width, width)
        self._gap = gap

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        before = pad(self.norm(hidden).transpose(1, 2), (self._gap, 0))
        return hidden + self.down(gelu(self.convolution(before)).transpose(1, 2))


class _TemporalNetwork(nn.Module):
    """A language model of causal convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(_TemporalBlock(width, gap) for gap in (1, 2))
        self.head = nn.Linear(width, VOCABULARY)
        self.settings = {"temperature": 1.0, "label_smoothing": 0.0}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        del attention_mask
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return _next_tokens(self.settings, self.head(hidden), labels)


def _numbered(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.format(number) for number in range(2))


_LANGUAGE: dict[str, Any] = {
    "row": turns,
    "inputs": "input_ids",
    "num_targets": VOCABULARY,
    "head": "lm_head",
    "settings": ("temperature",),
    "dtypes": ("float32",),
}
_CLASSES: dict[str, Any] = {
    "inputs": "pixel_values",
    "num_targets": NUM_CLASSES,
    "head": "head",
    "settings": ("temperature", "label_smoothing"),
}
_VALUES: dict[str, Any] = {"inputs": "values", "ignores": False, "head": "head"}
_BLOCKS: dict[str, Any] = {"layers": ("blocks.0", "blocks.1")}
_BLOCK_PARTS = ("norm_epsilon", "norm", "residual", "layer")

_FAST = (1e-2, 2e-2)
_fast = functools.partial(Architecture, rates=_FAST)
_unseen = functools.partial(Architecture, is_unseen=True)

JUDGED_NETWORKS = {
    "opt": _fast(
        make=_opt,
        **_LANGUAGE,
        layers=_numbered("model.decoder.layers.{}"),
        query="self_attn.q_proj",
        parts=(
            "attention_mask",
            "positions",
            "attention_scale",
            "norm_epsilon",
            "residual",
            "tied_weight",
        ),
    ),
    "qwen2 moe": _fast(
        make=_qwen2_moe,
        **_LANGUAGE,
        layers=_numbered("model.layers.{}"),
        query="self_attn.q_proj",
        router="mlp.gate",
        parts=(
            "positions",
            "attention_scale",
            "norm_epsilon",
            "residual",
            "routing",
            "auxiliary_weight",
        ),
    ),
    "bart": _fast(
        make=_bart,
        **_LANGUAGE,
        layers=(*_numbered("model.decoder.layers.{}"), *_numbered("model.encoder.layers.{}")),
        query="self_attn.q_proj",
        parts=("attention_scale", "norm_epsilon", "tied_weight"),
    ),
    "mamba": _fast(
        make=_mamba,
        **_LANGUAGE,
        layers=_numbered("backbone.layers.{}"),
        parts=("norm_epsilon", "residual", "tied_weight"),
    ),
    "resnet": _fast(
        make=_resnet,
        row=_photo,
        **_CLASSES | {"head": "classifier.1", "settings": ("temperature", "mode")},
        layers=_numbered("resnet.encoder.stages.{}"),
        buffer="layers.0.layer.0.normalization.running_var",
        has_separate_rows=False,
        parts=("norm_epsilon",),
    ),
    "decoder": _fast(
        make=_Decoder,
        **_LANGUAGE | {"head": "head", "settings": ("temperature", "label_smoothing", "mode")},
        **_BLOCKS,
        parts=("attention_mask", "positions", "norm_epsilon", "residual", "tied_weight"),
    ),
    "mixer": _fast(
        make=_Mixer, row=image, **_CLASSES, **_BLOCKS, parts=("norm_epsilon", "residual")
    ),
    "signals": Architecture(
        make=_SignalClassifier,
        row=_signal,
        **_CLASSES | {"inputs": "signals"},
        **_BLOCKS,
        divider="standard",
    ),
    "diffusion": _fast(
        make=_Diffusion,
        row=_noisy_values,
        **_VALUES,
        **_BLOCKS,
        parts=("norm_epsilon", "residual"),
    ),
    "recommender": Architecture(
        make=_Recommender, row=_rating, **_VALUES, layers=("bottom", "top")
    ),
    "gpt neo": _unseen(
        make=_gpt_neo,
        **_LANGUAGE,
        rates=_FAST,
        layers=_numbered("transformer.h.{}"),
        query="attn.attention.q_proj",
        parts=("positions", *_BLOCK_PARTS, "embedding", "tied_weight"),
    ),
    "olmoe": _unseen(
        make=_olmoe,
        **_LANGUAGE,
        rates=_FAST,
        layers=_numbered("model.layers.{}"),
        query="self_attn.q_proj",
        router="mlp.gate",
        frequencies="model.rotary_emb.inv_freq",
        # Its own forward computes the loss that balances the experts, a mean over the tokens.
        counter="",
        parts=(
            "positions",
            "attention_scale",
            *_BLOCK_PARTS,
            "embedding",
            "routing",
            "auxiliary_weight",
        ),
    ),
    "phi with adapters": _unseen(
        make=_phi_with_adapters,
        **_LANGUAGE | {"head": "base_model.model.lm_head"},
        rates=_FAST,
        layers=_numbered("base_model.model.model.layers.{}"),
        query="self_attn.q_proj",
        frequencies="base_model.model.model.rotary_emb.inv_freq",
        parts=("positions", "attention_scale", *_BLOCK_PARTS, "embedding", "adapter_scale"),
    ),
    "convnext": _unseen(
        make=_convnext,
        row=_photo,
        **_CLASSES | {"head": "classifier", "settings": ("temperature", "mode")},
        layers=_numbered("convnext.encoder.stages.{}.layers.0"),
        parts=_BLOCK_PARTS,
    ),
    "set": _unseen(
        make=_SetClassifier,
        row=_set,
        **_CLASSES | {"inputs": "values"},
        **_BLOCKS,
        rates=_FAST,
        counter="mean",
        parts=_BLOCK_PARTS,
    ),
    "flow": _unseen(make=_Flow, row=_mixture, inputs="values", layers=_numbered("blocks.{}")),
    "temporal": _unseen(
        make=_TemporalNetwork,
        **_LANGUAGE | {"head": "head", "settings": ("temperature", "label_smoothing")},
        **_BLOCKS,
        rates=_FAST,
        parts=(*_BLOCK_PARTS, "embedding"),
    ),
}
"""Architectures by name. Rules must not be written on those that are unseen; the others were."""
