"""A network of a MindFormers file becomes the same network of transformers, or is refused."""

import pytest
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from mfwrap.runner import RecipeError
from mfwrap.runner.mindformers.architectures.convert import lose_overriding_keys
from support.model_config import (
    PLACE,
    converted,
    converted_section,
    empty_source,
    num_parameters,
)

PUBLISHED = {
    "Llama 2 7B": (
        (
            "{type: LlamaConfig, hidden_size: 4096, num_layers: 32, num_heads: 32,"
            " vocab_size: 32000, multiple_of: 256}"
        ),
        6_738_415_616,
    ),
    "Llama 2 13B": (
        (
            "{type: LlamaConfig, hidden_size: 5120, num_layers: 40, num_heads: 40,"
            " vocab_size: 32000, multiple_of: 256}"
        ),
        13_015_864_320,
    ),
    "Llama 2 70B": (
        (
            "{type: LlamaConfig, hidden_size: 8192, num_layers: 80, num_heads: 64, n_kv_heads: 8,"
            " vocab_size: 32000, multiple_of: 256, ffn_dim_multiplier: 1.3}"
        ),
        68_976_648_192,
    ),
    "Llama 3 8B": (
        (
            "{type: LlamaConfig, hidden_size: 4096, num_layers: 32, num_heads: 32, n_kv_heads: 8,"
            " vocab_size: 128256, intermediate_size: 14336, theta: 500000}"
        ),
        8_030_261_248,
    ),
    "Llama 3.1 70B": (
        (
            "{type: LlamaConfig, hidden_size: 8192, num_layers: 80, num_heads: 64, n_kv_heads: 8,"
            " vocab_size: 128256, intermediate_size: 28672, theta: 500000, extend_method: LLAMA3,"
            " scaling_factor: {factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0,"
            " original_max_position_embeddings: 8192}}"
        ),
        70_553_706_496,
    ),
    "Llama 3.2 1B": (
        (
            "{type: LlamaConfig, hidden_size: 2048, num_layers: 16, num_heads: 32, n_kv_heads: 8,"
            " vocab_size: 128256, intermediate_size: 8192, tie_word_embeddings: true}"
        ),
        1_235_814_400,
    ),
    "Qwen 7B": (
        (
            "{type: QwenConfig, hidden_size: 4096, num_layers: 32, num_heads: 32,"
            " vocab_size: 151936, intermediate_size: 11008, kv_channels: 128}"
        ),
        7_721_324_544,
    ),
    "Qwen 2.5 7B": (
        (
            "{type: LlamaConfig, hidden_size: 3584, num_layers: 28, num_heads: 28, n_kv_heads: 4,"
            " vocab_size: 152064, intermediate_size: 18944, qkv_has_bias: true}"
        ),
        7_615_616_512,
    ),
    "Qwen 2.5 0.5B": (
        (
            "{type: LlamaConfig, hidden_size: 896, num_layers: 24, num_heads: 14, n_kv_heads: 2,"
            " vocab_size: 151936, intermediate_size: 4864, qkv_has_bias: true,"
            " tie_word_embeddings: true}"
        ),
        494_032_768,
    ),
    "Qwen 1.5 MoE A2.7B": (
        (
            "{type: LlamaConfig, hidden_size: 2048, num_layers: 24, num_heads: 16,"
            " vocab_size: 151936, intermediate_size: 1408, qkv_has_bias: true,"
            " moe_config: {expert_num: 60, num_experts_chosen: 4, shared_expert_num: 4,"
            " use_shared_expert_gating: true, norm_topk_prob: false, use_gmm: true}}"
        ),
        14_315_784_192,
    ),
    "Qwen 3 8B": (
        (
            "{model_type: qwen3, hidden_size: 4096, num_hidden_layers: 36, num_attention_heads: 32,"
            " num_key_value_heads: 8, head_dim: 128, vocab_size: 151936, intermediate_size: 12288}"
        ),
        8_190_735_360,
    ),
    "Qwen 3 30B A3B": (
        (
            "{model_type: qwen3_moe, hidden_size: 2048, num_layers: 48, num_heads: 32,"
            " n_kv_heads: 4, kv_channels: 128, vocab_size: 151936, num_moe_experts: 128,"
            " moe_router_topk: 8,"
            " moe_ffn_hidden_size: 768}"
        ),
        30_532_122_624,
    ),
    "ChatGLM 3 6B": (
        (
            "{type: ChatGLM2Config, hidden_size: 4096, num_layers: 28, padded_vocab_size: 65024,"
            " ffn_hidden_size: 13696, num_attention_heads: 32, multi_query_group_num: 2}"
        ),
        6_243_584_000,
    ),
    "GLM 4 9B": (
        (
            "{type: ChatGLM2Config, hidden_size: 4096, num_layers: 40, padded_vocab_size: 151552,"
            " ffn_hidden_size: 13696, num_attention_heads: 32, multi_query_group_num: 2,"
            " rope_ratio: 500}"
        ),
        9_399_951_360,
    ),
    "Mixtral 8x7B": (
        (
            "{type: LlamaConfig, hidden_size: 4096, num_layers: 32, num_heads: 32, n_kv_heads: 8,"
            " vocab_size: 32000, intermediate_size: 14336,"
            " moe_config: {expert_num: 8, num_experts_chosen: 2, capacity_factor: -1}}"
        ),
        46_702_792_704,
    ),
    "DeepSeek V2 Lite": (
        (
            "{type: DeepseekV2Config, hidden_size: 2048, num_layers: 27, num_heads: 16,"
            " vocab_size: 102400, intermediate_size: 10944, q_lora_rank: 0, kv_lora_rank: 512,"
            " extend_method: None,"
            " moe_config: {expert_num: 64, num_experts_chosen: 6, shared_expert_num: 2,"
            " norm_topk_prob: false, moe_intermediate_size: 1408, first_k_dense_replace: 1}}"
        ),
        15_706_484_224,
    ),
    "DeepSeek V3": (
        (
            "{type: DeepseekV3Config, hidden_size: 7168, num_layers: 61, num_heads: 128,"
            " vocab_size: 129280, intermediate_size: 18432, extend_method: None,"
            " moe_config: {expert_num: 256, num_experts_chosen: 8, shared_expert_num: 1,"
            " moe_intermediate_size: 2048, first_k_dense_replace: 3, n_group: 8, topk_group: 4,"
            " topk_method: noaux_tc, use_gating_sigmoid: true, routed_scaling_factor: 2.5}}"
        ),
        671_026_404_352,
    ),
    "InternLM 7B": (
        (
            "{type: InternLMConfig, hidden_size: 4096, num_layers: 32, num_heads: 32,"
            " vocab_size: 103168}"
        ),
        7_321_948_160,
    ),
    "InternLM 2 7B": (
        "{type: InternLM2Config, hidden_size: 4096, num_layers: 32, num_heads: 32}",
        7_737_708_544,
    ),
    "GPT-2": ("{type: GPT2Config}", 124_439_808),
    "Bloom 560M": (
        "{type: BloomConfig, hidden_size: 1024, num_layers: 24, num_heads: 16}",
        559_214_592,
    ),
    "WizardCoder 15B": (
        (
            "{type: WizardCoderConfig, hidden_size: 6144, num_layers: 40, num_heads: 48,"
            " vocab_size: 49153, n_position: 8192, seq_length: 2048}"
        ),
        15_517_462_528,
    ),
}
"""Keys of a MindFormers file, and the number of parameters of the published checkpoint.

Sources, each independent of a count by this test's own means:

- The Hugging Face hub's count of a checkpoint's safetensors: Llama 3, 3.1 and 3.2, Qwen 2.5,
  Qwen 3, Mixtral, Bloom (the last one also in the tests of huggingface_hub).
- KerasHub's presets (``params``): Llama 7B, which has the size of Llama 2 7B, Mixtral 8x7B,
  Qwen 1.5 MoE, Bloom 560M.
- The logs in chatllm.cpp's documentation: Qwen 7B, Qwen 1.5 MoE, GLM 4 9B, DeepSeek V2 Lite,
  InternLM 2 7B.
- Counts of the loaded checkpoints that their users published: Llama 2 13B and 70B, ChatGLM 3 6B,
  GPT-2; WizardCoder 15B in a provider's list of models.
- DeepSeek V3: 671,026,419,200 elements of the published tensors, without the layer that predicts a
  second token. 58 x 256 of them are correction biases of the routers, which are no parameters in
  transformers.
- InternLM 7B: no published count was found; the number is `ARITHMETIC`'s.
"""

CLASSIFIERS = {
    "BERT base uncased": (
        "sequence_classification",
        "{type: BertConfig, vocab_size: 30522, max_position_embeddings: 512, num_labels: 2}",
        109_482_240 + 2 * 768 + 2,
    ),
    "ViT B/16": ("image_classification", "{type: ViTConfig, num_classes: 1000}", 86_567_656),
    "Swin B": ("image_classification", "{type: SwinConfig, num_labels: 1000}", 87_768_224),
}
"""Classifiers: task, keys of a file and number of parameters.

Sources: torchvision's ``num_params`` of ``vit_b_16`` and ``swin_b``; for BERT, Keras' summary of
the published checkpoint (109,482,240), and a head.
"""


@pytest.mark.parametrize(("text", "number"), PUBLISHED.values(), ids=PUBLISHED.keys())
@pytest.mark.fast_sample(1)
# transformers before 5.23 compiles a part of GPT BigCode with it.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_language_model_has_its_published_size(text, number):
    """A model that is built from its MindFormers file has as many parameters as published."""
    model = converted(text)

    assert num_parameters(model.config, "causal_lm") == number


@pytest.mark.parametrize(("task", "text", "number"), CLASSIFIERS.values(), ids=CLASSIFIERS.keys())
@pytest.mark.slow
def test_a_classifier_has_its_published_size(task, text, number):
    """A classifier that is built from its MindFormers file has as many parameters as published."""
    model = converted(text, task)

    assert num_parameters(model.config, task) == number


@pytest.mark.slow
def test_t5_small_has_its_published_size():
    """The keys of T5 describe the published T5 small (source of its size: KerasHub)."""
    config = AutoConfig.for_model(**converted("{type: T5Config}").config)
    network = AutoModelForSeq2SeqLM.from_config(config)

    assert sum(weight.numel() for weight in network.parameters()) == 60_506_624


def decoder(vocab, width, layers, *, heads, groups, inner, qkv_bias=False, **other):
    """Return the number of parameters of a decoder with gated feed-forward layers, by arithmetic.

    Args:
        vocab: Size of the vocabulary.
        width: Width of the model.
        layers: Number of layers.
        heads: Number of attention heads.
        groups: Number of key and value heads.
        inner: Width of the feed-forward layers.
        qkv_bias: Whether queries, keys and values have biases.
        other: ``experts`` (number), ``shared`` (width of gated shared experts), ``tied``
            (embeddings), ``out_bias``, ``head_norms`` and ``head`` (width of a head).
    """
    head = other.get("head", width // heads)
    queries, keys = heads * head, groups * head
    attention = width * queries + 2 * width * keys + queries * width
    attention += (queries + 2 * keys) * qkv_bias + width * other.get("out_bias", False)
    attention += 2 * head * other.get("head_norms", False)
    experts, shared = other.get("experts", 1), other.get("shared", 0)
    router = width * experts if experts > 1 else 0
    feed_forward = 3 * width * inner * experts + router + 3 * width * shared + width * bool(shared)
    embeddings = vocab * width * (1 if other.get("tied") else 2)
    return embeddings + layers * (attention + feed_forward + 2 * width) + width


ARITHMETIC = {
    "Llama 2 7B": decoder(32_000, 4096, 32, heads=32, groups=32, inner=11_008),
    "Llama 2 13B": decoder(32_000, 5120, 40, heads=40, groups=40, inner=13_824),
    "Llama 2 70B": decoder(32_000, 8192, 80, heads=64, groups=8, inner=28_672),
    "Llama 3 8B": decoder(128_256, 4096, 32, heads=32, groups=8, inner=14_336),
    "Llama 3.1 70B": decoder(128_256, 8192, 80, heads=64, groups=8, inner=28_672),
    "Llama 3.2 1B": decoder(128_256, 2048, 16, heads=32, groups=8, inner=8192, tied=True),
    "Qwen 7B": decoder(151_936, 4096, 32, heads=32, groups=32, inner=11_008, qkv_bias=True),
    "Qwen 2.5 7B": decoder(152_064, 3584, 28, heads=28, groups=4, inner=18_944, qkv_bias=True),
    "Qwen 2.5 0.5B": decoder(
        151_936, 896, 24, heads=14, groups=2, inner=4864, qkv_bias=True, tied=True
    ),
    "Qwen 1.5 MoE A2.7B": decoder(
        151_936,
        2048,
        24,
        heads=16,
        groups=16,
        inner=1408,
        qkv_bias=True,
        experts=60,
        shared=5632,
    ),
    "Qwen 3 8B": decoder(
        151_936, 4096, 36, heads=32, groups=8, inner=12_288, head=128, head_norms=True
    ),
    "Qwen 3 30B A3B": decoder(
        151_936, 2048, 48, heads=32, groups=4, inner=768, head=128, head_norms=True, experts=128
    ),
    "ChatGLM 3 6B": decoder(65_024, 4096, 28, heads=32, groups=2, inner=13_696, qkv_bias=True),
    "GLM 4 9B": decoder(151_552, 4096, 40, heads=32, groups=2, inner=13_696, qkv_bias=True),
    "Mixtral 8x7B": decoder(32_000, 4096, 32, heads=32, groups=8, inner=14_336, experts=8),
    "InternLM 7B": decoder(
        103_168, 4096, 32, heads=32, groups=32, inner=11_008, qkv_bias=True, out_bias=True
    ),
    "InternLM 2 7B": decoder(92_544, 4096, 32, heads=32, groups=8, inner=14_336),
}


@pytest.mark.parametrize(("name", "number"), ARITHMETIC.items(), ids=ARITHMETIC.keys())
def test_a_published_size_is_that_of_its_architecture(name, number):
    """A published number follows from the hyperparameters of its model, without transformers."""
    assert PUBLISHED[name][1] == number


@pytest.mark.parametrize(
    ("settings", "arch", "says"),
    [
        ({"type": "TelechatConfig"}, None, "transformers has no class for TeleChat"),
        (
            {"type": "LlamaConfig"},
            "Baichuan13BV2ForCausalLM",
            "transformers has no class for Baichuan 2 13B",
        ),
        (
            {"type": "LlamaConfig"},
            "MyModel",
            "expected a network of ['LlamaForCausalLM', ",
        ),
        ({"type": "LamaConfig"}, None, "expected one of ['BertConfig', "),
        ({}, None, "expected a section model"),
        ({"hidden_size": 8}, None, "got neither"),
        ({"model_type": "llamma"}, None, "expected a model type of transformers, got 'llamma'"),
        ({"type": "BertConfig", "moe_config": {"expert_num": 2}}, None, "with experts"),
    ],
)
def test_a_network_that_transformers_lacks_is_refused(settings, arch, says):
    """The error names the network, or lists the ones that can be converted."""
    with pytest.raises(RecipeError) as raised:
        converted_section(settings, arch=arch)

    assert says in str(raised.value)


def test_each_key_is_sorted():
    """Keys are converted, without effect, part of the data, or unknown."""
    text = "type: LlamaConfig, hidden_size: 64, use_past: false, offset: 0, seq_length: 128"
    model = converted(f"{{{text}}}", arch="LlamaForCausalLM")

    assert model.config["hidden_size"] == 64
    assert model.config["max_position_embeddings"] == 128
    assert model.without_effect == ["model.model_config.use_past", "model.model_config.offset"]
    assert model.losses == []
    with pytest.raises(RecipeError, match=r"model\.model_config\.hiden_act: unknown key"):
        converted(f"{{{text}, hiden_act: silu}}")


@pytest.mark.parametrize("place", [("moe_config",), ("model", "model_config", "moe_config")])
def test_an_unknown_key_of_experts_has_its_own_place(place):
    """The error points to the line of the key, in the section of experts."""
    experts = {"expert_num": 4, "num_expert_chosen": 2}
    inside = len(place) > 1
    settings = {"type": "LlamaConfig"} | ({"moe_config": experts} if inside else {})

    with pytest.raises(
        RecipeError, match=rf"m\.yaml: {'.'.join(place)}\.num_expert_chosen: unknown"
    ):
        converted_section(settings, None if inside else experts)


@pytest.mark.parametrize("key", ["quant_config", "quantization_config"])
def test_quantized_weights_are_a_loss(key):
    """Quantized weights are trained unquantized only if that is accepted."""
    (loss,) = converted(f"{{type: LlamaConfig, {key}: {{quant_method: rtn}}}}").losses

    assert (loss.name, loss.path) == ("quantization", ("model", "model_config", key))


def test_the_section_of_experts_overrides_the_one_in_the_model():
    """MindFormers replaces `moe_config` inside the model by the section of this name."""
    settings = {"type": "LlamaConfig", "moe_config": {"expert_num": 4}}
    experts = {"expert_num": 8, "num_experts_chosen": 2, "capacity_factor": 0}

    inside = converted_section(settings)
    outside = converted_section(settings, experts)

    assert inside.config["num_local_experts"] == 4
    assert inside.losses[0].path == ("model", "model_config", "moe_config", "capacity_factor")
    assert outside.config["num_local_experts"] == 8
    assert outside.losses == []


def test_labels_are_those_of_a_classifier():
    """The number of classes is left out for tasks that have none."""
    text = "{type: BertConfig, num_labels: 31}"

    assert converted(text, "token_classification").config["num_labels"] == 31
    assert "num_labels" not in converted(text).config


def test_keys_that_override_a_checkpoint_are_a_loss():
    """A recipe cannot change the configuration of a checkpoint; its other keys are sorted."""
    settings = {"hidden_act": "gelu", "offset": 0, "moe_grouped_gemm": True, "seq_length": 8}
    source = empty_source()
    lose_overriding_keys(source, settings, PLACE)

    (loss,) = source.losses
    assert loss.name == "architecture"
    assert "the file sets hidden_act over" in loss.says
    assert source.without_effect == [
        f"model.model_config.{key}" for key in ("offset", "moe_grouped_gemm")
    ]
    lose_overriding_keys(source, {"offset": 0}, PLACE)
    assert source.losses == [loss]
    assert source.bias_rate is None
    biases = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.01}
    lose_overriding_keys(source, biases, PLACE)
    assert (source.losses, source.bias_rate) == ([loss], 0.01)


def test_sizes_that_do_not_fit_are_an_error():
    """A network that transformers cannot build is an error at the place of the model."""
    config = converted("{type: LlamaConfig, hidden_size: 100, num_heads: 3}").config

    says = "cannot build this llama: .* hidden size .100. is not a multiple"
    with pytest.raises(RecipeError, match=rf"m\.yaml: model\.model_config: .*{says}"):
        num_parameters(config, "causal_lm")
