"""A checkpoint whose weights do not fit its configuration is refused, or not used in silence."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    ElectraConfig,
    ElectraForPreTraining,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.recipes.models.loading import ModelError, said_by, unused_weights
from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.runner import RecipeError
from mfwrap.runner.rehearsal import rehearse
from mfwrap.runner.run import build_trainer, run_recipe
from support.recipe_data import recipe_of
from support.recipe_texts import SMALL_LLAMA

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")
DATA = {"type": "python_topics", "max_train_samples": 8}
LAYER = 9
"""Number of weights in a layer of Llama."""

BERT = {
    "vocab_size": 261,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TEXTS = pytest.mark.parametrize(
    "auto_class", [AutoModelForSequenceClassification, AutoModelForTokenClassification]
)


@pytest.fixture
def llama(tmp_path):
    """Make the folder of a Llama of two layers with an untied head, and its tokenizer."""
    folder = tmp_path / "llama"
    config = LlamaConfig(**SMALL_LLAMA | {"vocab_size": 261, "num_hidden_layers": 2})
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def set_config(folder, **changes):
    """Change keys of a folder's ``config.json``; ``None`` removes a key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: each for key, each in config.items() if each is not None}))


def set_weights(folder, change):
    """Replace the weights of a folder by what a function makes of them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def load(folder, auto_class=AutoModelForCausalLM, **implied):
    """Load a model as a recipe does."""
    return ModelSettings(path=str(folder), tokenizer="bytes").make_model(auto_class, **implied)


def test_a_whole_checkpoint(llama):
    """All weights are those of the file, bit for bit, and none is unused."""
    network = load(llama)
    stored = load_file(llama / "model.safetensors")

    assert stored.keys() == network.state_dict().keys()
    assert all(torch.equal(weight, stored[name]) for name, weight in network.state_dict().items())
    assert unused_weights(network) is None


def test_layers_that_the_file_does_not_have(llama, tmp_path):
    """The run ends before it begins: no folder, and an error with key, file and weight."""
    set_config(llama, num_hidden_layers=4)
    recipe = recipe_of(
        "causal_lm", DATA, model={"path": str(llama)}, output_dir=str(tmp_path / "run")
    )
    says = (
        r"^r:\d+: model\.path: must have weights for all of the network, got "
        rf"{llama}/model\.safetensors without model\.layers\.2\.\S+ "
        rf"\({2 * LAYER} of {4 * LAYER + 3} are missing\); config\.json and weights must be of the "
        r"same model$"
    )

    with pytest.raises(RecipeError, match=says):
        run_recipe(recipe)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(llama, value):
    """All losses would be nan; a large finite sum is no fault."""
    name = "model.layers.0.mlp.up_proj.weight"

    def spoil(weights):
        weights[name][0, 1] = value
        return weights

    def enlarge(weights):
        weights[name].fill_(3e38)
        return weights

    set_weights(llama, enlarge)
    assert load(llama).get_parameter(name).isfinite().all()
    set_weights(llama, spoil)
    says = (
        rf"^`path` must have finite weights, got .*model\.safetensors with nan .* in {name} \(1 of"
    )
    with pytest.raises(ModelError, match=says):
        load(llama)


def test_a_part_that_an_index_does_not_have(llama):
    """For weights in several files, the error names their index."""
    part = llama / "part.safetensors"
    weights = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    save_file({n: w for n, w in weights.items() if "head" not in n}, part, {"format": "pt"})
    names = dict.fromkeys(weights, part.name)
    index = {"metadata": {}, "weight_map": names}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json without lm_head\.weig"):
        load(llama)


def test_names_with_the_prefix_of_a_wrapper(llama):
    """Weights saved from DistributedDataParallel train no random model, and the prefix is named."""
    set_weights(llama, lambda found: {f"module.{name}": each for name, each in found.items()})
    says = (
        r"without model\.embed_tokens\.weight \(21 of 21 are missing\); the file has it as "
        r"module\.model\.embed_tokens\.weight, so a wrapper of the model has added 'module\.' to"
    )

    with pytest.raises(ModelError, match=says):
        load(llama)


def test_weights_that_the_network_does_not_have(llama):
    """One line says how many there are, with an example, for a training and for a check."""
    set_config(llama, num_hidden_layers=1)
    recipe = recipe_of("causal_lm", DATA, model={"path": str(llama)})
    said: list[str] = []
    checked: list[str] = []
    build_trainer(recipe, say=said.append)
    rehearse(recipe, checked.append)

    (line,) = said
    assert line.startswith(
        f"warning: model.path: LlamaForCausalLM does not use {LAYER} of the weights in "
        f"{llama}/model.safetensors, for example model.layers.1."
    )
    assert checked == said


def test_a_teacher_and_an_adapter(llama, json_lines):
    """The weights of a teacher are checked, too, and those of a model below an adapter."""
    set_config(llama, num_hidden_layers=1)
    peft = "peft={type: lora, r: 2, target_modules: [q_proj]}"
    path = {"path": str(llama)}
    teacher = f"teacher={{path: {llama}}}"
    prompts = json_lines([{"prompt": "a", "completion": "b"}] * 8)
    said: list[str] = []
    build_trainer(recipe_of("causal_lm", DATA, peft, model=path), say=said.append)
    build_trainer(recipe_of("distillation", prompts, teacher, model=path), say=said.append)

    assert [line.partition(": Llama")[0] for line in said if line.startswith("warning")] == [
        "warning: model.path",
        "warning: model.path",
        "warning: teacher.path",
    ]
    set_config(llama, num_hidden_layers=3)
    with pytest.raises(RecipeError, match=r"teacher\.path: must have weights for all of the"):
        build_trainer(recipe_of("distillation", prompts, teacher))


@pytest.mark.parametrize(
    ("key", "size", "got", "wanted"),
    [("hidden_size", 32, [261, 16], [261, 32]), ("vocab_size", 300, [261, 16], [300, 16])],
)
def test_sizes_that_do_not_fit(llama, key, size, got, wanted):
    """The error names the first weight, and both shapes."""
    set_config(llama, **{key: size})

    with pytest.raises(ModelError, match=r"^`path` must have weights of the sizes in its") as error:
        load(llama)
    says = f"with model.embed_tokens.weight of shape {got} instead of {wanted} ("
    assert says in str(error.value)


def test_tied_weights_are_counted_once(llama):
    """All weights of the file have another size."""
    network = AutoModelForCausalLM.from_pretrained(llama)
    network.config.tie_word_embeddings = True
    network.tie_weights()
    network.save_pretrained(llama)
    number = len(load_file(llama / "model.safetensors"))
    set_config(llama, hidden_size=32)

    with pytest.raises(ModelError, match=rf"\({number} of {number} differ\)"):
        load(llama)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size"])
def test_only_the_head_of_a_classifier_may_have_another_size(tmp_path, key):
    """Data with other classes give a new head, and hide no other weight of another size."""
    BertForSequenceClassification(BertConfig(**BERT, num_labels=3)).save_pretrained(tmp_path)

    network = load(tmp_path, AutoModelForSequenceClassification, num_labels=2)
    assert network.classifier.weight.shape == (2, 16)
    assert unused_weights(network) is None
    set_config(tmp_path, **{key: 32})
    with pytest.raises(ModelError, match=r"must have weights of the sizes in its config\.json"):
        load(tmp_path, AutoModelForSequenceClassification, num_labels=2)


@TEXTS
@pytest.mark.parametrize(
    ("saved", "config"),
    [
        (BertModel, BertConfig(**BERT)),
        (BertForMaskedLM, BertConfig(**BERT)),  # without a pooler
        (BertForSequenceClassification, BertConfig(**BERT, num_labels=3)),
        (ElectraForPreTraining, ElectraConfig(**BERT)),
        (LlamaForCausalLM, LlamaConfig(**SMALL_LLAMA, vocab_size=261)),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_classifier_of_a_checkpoint_of_another_class(
    tmp_path, auto_class, saved, config, is_named
):
    """A new head, a missing pooler and the heads of other tasks are ordinary."""
    saved(config).save_pretrained(tmp_path)
    set_config(tmp_path, **({} if is_named else {"architectures": None}))

    assert unused_weights(load(tmp_path, auto_class, num_labels=2)) is None


@TEXTS
def test_a_classifier_of_a_checkpoint_without_its_layers(tmp_path, auto_class):
    """The base of a classifier must be whole, and layers that are left over are said."""
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path)
    set_config(tmp_path, num_hidden_layers=1)
    said = unused_weights(load(tmp_path, auto_class, num_labels=2))

    assert "does not use 16 of the weights in" in said
    assert "for example encoder.layer.1." in said
    set_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"without bert\.encoder\.layer\.2\.\S+ \(16 of"):
        load(tmp_path, auto_class, num_labels=2)


def test_a_classifier_without_its_own_head(tmp_path):
    """A checkpoint of the same class must have the head, too."""
    BertForSequenceClassification(BertConfig(**BERT)).save_pretrained(tmp_path)
    set_weights(tmp_path, lambda found: {n: w for n, w in found.items() if "classifier" not in n})

    with pytest.raises(ModelError, match=r"without classifier\.weight \(2 of"):
        load(tmp_path, AutoModelForSequenceClassification, num_labels=2)


def test_a_language_model_without_a_head(tmp_path):
    """A base without the head that predicts tokens is refused, unless the head is tied."""
    config = LlamaConfig(**SMALL_LLAMA, vocab_size=261)
    LlamaModel(config).save_pretrained(tmp_path / "untied")
    config.tie_word_embeddings = True
    LlamaModel(config).save_pretrained(tmp_path / "tied")

    assert unused_weights(load(tmp_path / "tied")) is None
    says = "(1 of 12 are missing); the checkpoint was saved as LlamaModel; name one that was saved"
    with pytest.raises(ModelError) as error:
        load(tmp_path / "untied")
    assert says in str(error.value)


def test_a_classifier_of_a_part_of_a_model(tmp_path):
    """CLIP's classifier of images has no base of CLIP's name, and does not use its texts."""
    sizes = {key: BERT[key] for key in BERT if key != "vocab_size"}
    config = CLIPConfig(
        text_config=sizes | {"vocab_size": 261},
        vision_config=sizes | {"image_size": 8, "patch_size": 4},
        projection_dim=16,
    )
    CLIPModel(config).save_pretrained(tmp_path)

    assert unused_weights(load(tmp_path, AutoModelForImageClassification, num_labels=2)) is None


def test_counters_may_be_missing(tmp_path):
    """Older conversions of image models do not have the counters of batch normalization."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=2)
    ResNetForImageClassification(config).save_pretrained(tmp_path)
    set_weights(tmp_path, lambda found: {n: w for n, w in found.items() if "num_batches" not in n})

    assert load(tmp_path, AutoModelForImageClassification, num_labels=2)
    set_weights(tmp_path, lambda found: {n: w for n, w in found.items() if "running_var" not in n})
    with pytest.raises(ModelError, match=r"without resnet\.\S+\.running_var"):
        load(tmp_path, AutoModelForImageClassification, num_labels=2)


def test_a_tokenizer_that_cannot_be_loaded(llama):
    """A file that is valid JSON and no tokenizer is named with its key."""
    file = llama / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": {"type": "BPE"}}))

    with pytest.raises(
        ModelError, match=r"^`path` must have a tokenizer that can be loaded, got '"
    ):
        ModelSettings(path=str(llama)).make_tokenizer()


@pytest.mark.parametrize(
    "kind",
    ["TokenizersBackend", "LlamaTokenizer", "Qwen2Tokenizer", "BertTokenizer", "T5Tokenizer"],
)
def test_a_tokenizer_without_its_vocabulary(llama, kind):
    """Transformers makes some of them without any token: a training on nothing."""
    (llama / "tokenizer.json").unlink()
    (llama / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))

    with pytest.raises(ModelError) as caught:
        ModelSettings(path=str(llama)).make_tokenizer()

    assert str(caught.value).startswith("`path` must have a tokenizer ")
    assert f"got {str(llama)!r}: it has no tokenizer.json, nor another file" in str(caught.value)


def test_a_tokenizer_that_needs_no_vocabulary(llama):
    """Its tokens are the bytes."""
    (llama / "tokenizer.json").unlink()
    file = llama / "tokenizer_config.json"
    file.write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))

    assert len(ModelSettings(path=str(llama)).make_tokenizer()) == 384


def test_a_long_error_ends_with_a_whole_word():
    """Where something is left out, it says so."""
    said = said_by(ValueError("word\n" * 100))
    assert said.startswith("ValueError: word word")
    assert said.endswith("word ...")
    assert len(said) <= 312
    assert said_by(ValueError("short\n text")) == "ValueError: short text"
