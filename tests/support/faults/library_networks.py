"""Small networks of transformers and peft, made from their configurations."""

import functools
import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
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
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from support.faults.architecture import (
    LENGTH,
    NUM_CLASSES,
    SIZE,
    VOCABULARY,
    Architecture,
    image,
    masked_tokens,
    tokens,
)

__all__ = ["LIBRARY_NETWORKS"]

_BANDS = 8
"""Bands of a spectrogram."""

_WAVE = 128
"""Samples of a sound."""


def _gpt2(width: int, dropout: float = 0.0) -> GPT2LMHeadModel:
    settings = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    words = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_positions": 16, "n_embd": width, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**settings, **words, **sizes))


def _decoder(width: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
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


def _gemma2(width: int) -> Gemma2ForCausalLM:
    sizes = {"head_dim": width // 2, "query_pre_attn_scalar": width // 2, "sliding_window": 8}
    return Gemma2ForCausalLM(Gemma2Config(**_decoder(width), **sizes, attn_implementation="eager"))


def _encoder(width: int, dropout: float = 0.0) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def _bert(width: int) -> BertForMaskedLM:
    # The last token is the mask.
    words = {"vocab_size": VOCABULARY + 1, "max_position_embeddings": 16}
    return BertForMaskedLM(BertConfig(**_encoder(width), **words))


def _deberta(width: int) -> DebertaV2ForMaskedLM:
    words = {"vocab_size": VOCABULARY + 1, "max_position_embeddings": 16}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    return DebertaV2ForMaskedLM(DebertaV2Config(**_encoder(width, 0.1), **words, **relative))


def _vit(width: int) -> ViTForImageClassification:
    # At the default of 0.02, the patches of a network this small come out so small that the
    # gradient of the first normalization has spikes without any fault.
    start = {"initializer_range": 0.1}
    sizes = {"image_size": SIZE, "patch_size": 2, "num_labels": NUM_CLASSES, **start}
    return ViTForImageClassification(ViTConfig(**_encoder(width), **sizes))


def _t5(width: int) -> T5ForConditionalGeneration:
    words = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0}
    sizes = {"d_model": width, "d_kv": width // 2, "d_ff": 2 * width, "num_heads": 2}
    depth = {"num_layers": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**words, **sizes, **depth))


def _lora(width: int) -> nn.Module:
    config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    return get_peft_model(_gpt2(width), config)


def _lora_on_tied_embeddings(width: int) -> nn.Module:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "embed_tokens"], lora_dropout=0.0)
    with warnings.catch_warnings():
        # The weights of the adapter are not merged, so it may differ from the tied head.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        return get_peft_model(_llama(width), config)


def _checkpointed(width: int, *, use_reentrant: bool) -> GPT2LMHeadModel:
    network = _gpt2(width)
    # transformers 5.2x has renamed the method.
    renamed = getattr(network, "activation_checkpointing_enable", None)
    (renamed or network.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})
    return network


class _Clip(nn.Module):
    """CLIP with its contrastive loss, which compares the rows of a micro-batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        tower = {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        text = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 0, **tower}
        vision = {"image_size": SIZE, "patch_size": 2, **tower}
        sizes = {"projection_dim": width, "text_config": text, "vision_config": vision}
        self.clip = CLIPModel(CLIPConfig(**sizes))
        self.settings = {"temperature": 1.0}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Any:
        """Return the loss."""
        both = self.clip(input_ids, pixel_values, attention_mask)
        logits = self.settings["temperature"] * both.logits_per_text
        pairs = torch.arange(len(logits))
        of_texts = nn.functional.cross_entropy(logits, pairs)
        of_images = nn.functional.cross_entropy(logits.T, pairs)
        return SequenceClassifierOutput(loss=(of_texts + of_images) / 2, logits=logits)


def _pair(generator: torch.Generator) -> dict[str, Tensor]:
    row = image(generator)
    label = row.pop("labels")
    words = torch.randint(1 + 6 * int(label), 7 + 6 * int(label), (LENGTH,), generator=generator)
    words[-1] = 0
    return {**row, "input_ids": words, "attention_mask": torch.ones_like(words)}


def _whisper(width: int) -> WhisperForConditionalGeneration:
    words = {"vocab_size": VOCABULARY, "num_mel_bins": _BANDS, "max_source_positions": SIZE}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 2 * width}.items()
    }
    sizes = {"d_model": width, "max_target_positions": 16, "dropout": 0.1}
    silent = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return WhisperForConditionalGeneration(
        WhisperConfig(**words, **ends, **sides, **sizes, **silent)
    )


def _speech(generator: torch.Generator) -> dict[str, Tensor]:
    words = tokens(generator)["labels"]
    sound = 0.5 * torch.randn(_BANDS, 2 * SIZE, generator=generator)
    sound[int(words[0]) % _BANDS] += 1
    return {"input_features": sound, "labels": words}


def _wav2vec2(width: int) -> Wav2Vec2ForCTC:
    convolutions = {"conv_dim": (width, width), "conv_kernel": (4, 4), "conv_stride": (4, 4)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    off = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout")
    off += ("final_dropout", "layerdrop", "mask_time_prob", "mask_feature_prob")
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "vocab_size": VOCABULARY}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 2, "apply_spec_augment": False}
    loss = {"ctc_zero_infinity": True, "ctc_loss_reduction": "mean", "pad_token_id": 0}
    none = dict.fromkeys(off, 0.0)
    return Wav2Vec2ForCTC(
        Wav2Vec2Config(**convolutions, **positions, **none, **sizes, **depth, **loss)
    )


def _sound(generator: torch.Generator) -> dict[str, Tensor]:
    words = 1 + torch.randint(4, (3,), generator=generator)
    sound = 0.5 * torch.randn(_WAVE, generator=generator)
    sound += torch.sin(torch.arange(_WAVE) * words.repeat_interleave(43)[:_WAVE] / 3.0)
    return {"input_values": sound, "labels": words}


def _numbered(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.format(number) for number in range(2))


_CAUSAL: dict[str, Any] = {
    "row": tokens,
    "inputs": "input_ids",
    "num_targets": VOCABULARY,
    "head": "lm_head",
    "settings": ("temperature",),
}
_GPT2: dict[str, Any] = {
    **_CAUSAL,
    "layers": _numbered("transformer.h.{}"),
    "query": "attn.c_attn",
    "settings": ("temperature", "dropout"),
}
_LLAMA: dict[str, Any] = {
    **_CAUSAL,
    "layers": _numbered("model.layers.{}"),
    "query": "self_attn.q_proj",
}

LIBRARY_NETWORKS = {
    "gpt2": Architecture(make=_gpt2, **_GPT2),
    "gpt2 with dropout": Architecture(
        make=functools.partial(_gpt2, dropout=0.1),
        **_GPT2 | {"settings": ("temperature", "dropout", "mode")},
    ),
    "tied llama": Architecture(make=_llama, **_LLAMA),
    "bert": Architecture(
        make=_bert,
        **_CAUSAL
        | {
            "row": masked_tokens,
            "head": "cls.predictions.decoder",
            "settings": ("temperature", "dropout"),
        },
        layers=_numbered("bert.encoder.layer.{}"),
        query="attention.self.query",
    ),
    "vit": Architecture(
        make=_vit,
        row=image,
        inputs="pixel_values",
        num_targets=NUM_CLASSES,
        head="classifier",
        layers=_numbered("vit.layers.{}"),
        query="attention.q_proj",
        settings=("temperature", "dropout"),
    ),
    "t5": Architecture(
        make=_t5,
        **_CAUSAL | {"settings": ("temperature", "dropout")},
        layers=(*_numbered("decoder.block.{}"), *_numbered("encoder.block.{}")),
        query="layer.0.SelfAttention.q",
    ),
    "mixtral": Architecture(
        make=_mixtral, **{**_LLAMA, "query": None}, router="mlp.gate", dtypes=("float32",)
    ),
    "lora": Architecture(
        make=_lora,
        **_GPT2
        | {
            "layers": _numbered("base_model.model.transformer.h.{}"),
            "head": "base_model.model.lm_head",
        },
    ),
    "reentrant checkpointing": Architecture(
        make=functools.partial(_checkpointed, use_reentrant=True), **_GPT2
    ),
    "checkpointing": Architecture(
        make=functools.partial(_checkpointed, use_reentrant=False), **_GPT2
    ),
    "clip": Architecture(
        make=_Clip,
        row=_pair,
        inputs="pixel_values",
        layers=(
            *_numbered("clip.vision_model.encoder.layers.{}"),
            *_numbered("clip.text_model.encoder.layers.{}"),
        ),
        query="self_attn.q_proj",
        settings=("temperature",),
        has_separate_rows=False,
    ),
    "gemma2": Architecture(make=_gemma2, **_LLAMA | {"settings": ("temperature", "soft_cap")}),
    "deberta": Architecture(
        make=_deberta,
        **_CAUSAL
        | {
            "row": masked_tokens,
            "head": "cls.predictions.decoder",
            "settings": ("temperature", "dropout", "mode"),
        },
        layers=_numbered("deberta.encoder.layer.{}"),
        query="attention.self.query_proj",
    ),
    "whisper": Architecture(
        make=_whisper,
        **_CAUSAL
        | {
            "row": _speech,
            "inputs": "input_features",
            "head": "proj_out",
            # Its dropout is a number that its functions take, not a module.
            "settings": ("temperature", "mode"),
        },
        layers=(*_numbered("model.decoder.layers.{}"), *_numbered("model.encoder.layers.{}")),
        query="self_attn.q_proj",
        dtypes=("float32",),
    ),
    "wav2vec2": Architecture(
        make=_wav2vec2,
        row=_sound,
        inputs="input_values",
        num_targets=5,
        ignores=False,
        head="lm_head",
        layers=_numbered("wav2vec2.encoder.layers.{}"),
        query="attention.q_proj",
        settings=("temperature", "dropout"),
        dtypes=("float32",),
    ),
    "lora on tied embeddings": Architecture(
        make=_lora_on_tied_embeddings,
        **_LLAMA
        | {
            "layers": _numbered("base_model.model.model.layers.{}"),
            "head": "base_model.model.lm_head",
        },
    ),
}
"""Architectures of the libraries, by name."""
