"""Sequences must fit the positions of a model, and checkpoints may be in packages."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CanineConfig,
    CanineForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.recipes.models.settings import ModelSettings, make_text_model
from mfwrap.runner import RecipeError
from mfwrap.runner.run import build_trainer
from support.recipe_data import LANGUAGE, recipe_of, trainer_of
from support.recipe_texts import BERT, SMALL_LLAMA

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")
SMALL_TYPES = {
    "bert": {"max_position_embeddings": 32},
    "roberta": {"max_position_embeddings": 34, "pad_token_id": 1},
    "distilbert": {"max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", SMALL_TYPES)
def test_sequences_fit_the_positions(json_lines, kind):
    """Sequences may not be longer than the model's positions; the default length fits."""
    section = json_lines([{"text": "a" * 100, "label": n % 2} for n in range(4)])
    config = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    arguments = {"model": {"config": {"model_type": kind} | config | SMALL_TYPES[kind]}}
    says = r"^r:\d+: data\.sequence_length: must be <= 32, .*max_position_embeddings 3\d\), got 33$"
    with pytest.raises(RecipeError, match=says):
        recipe_of("sequence_classification", section | {"sequence_length": 33}, **arguments)

    recipe_of("sequence_classification", section | {"sequence_length": 32}, **arguments)
    trainer = trainer_of("sequence_classification", section, **arguments)
    assert {len(row["input_ids"]) for row in trainer.train_dataset} == {32}
    batch = next(iter(trainer.get_train_dataloader()))
    assert torch.isfinite(trainer.model(**batch).loss)


def test_rotary_positions_go_on(json_lines):
    """A model with rotary positions accepts sequences longer than its configuration says."""
    section = json_lines([{"text": "a" * 100}] * 4) | {"sequence_length": 90}
    trainer = trainer_of("causal_lm", section)

    assert max(map(len, trainer.train_dataset["input_ids"])) == 90
    batch = next(iter(trainer.get_train_dataloader()))
    assert torch.isfinite(trainer.model(**batch).loss)


def test_the_positions_of_a_checkpoint(json_lines, tmp_path):
    """Sequences that are too long for a checkpoint are a recipe error when it is loaded."""
    section = json_lines([{"text": "abc"}] * 4)
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
    trainer = trainer_of("causal_lm", section, model={"config": config, "tokenizer": "bytes"})
    trainer.save_model(str(tmp_path / "m"))
    model = {"path": str(tmp_path / "m")}

    says = r"^r:\d+: data\.sequence_length: must be <= 24, "
    with pytest.raises(RecipeError, match=says):
        trainer_of("causal_lm", section | {"sequence_length": 25}, model=model)


def test_a_checkpoint_that_a_package_carries(tmp_path, monkeypatch):
    """``package:name/folder`` is found without importing the package."""
    folder = tmp_path / "carries_a_checkpoint" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
    trainer_of("causal_lm", {"type": "python_topics"}).save_model(str(folder))
    monkeypatch.syspath_prepend(tmp_path)
    model = {"path": "package:carries_a_checkpoint/model"}
    trainer = trainer_of("causal_lm", {"type": "python_topics"}, model=model)

    assert trainer.model.config.hidden_size == SMALL_LLAMA["hidden_size"]
    assert len(trainer.processing_class) == 261


@pytest.mark.parametrize("name", ["package:no_such_package/m", "package:json/none", "package:../x"])
def test_a_package_without_it(name):
    """A package or folder that does not exist is an error that names the key."""
    model = {"path": name}
    with pytest.raises(RecipeError, match=r"model\.path: must be a folder of an installed"):
        recipe_of("causal_lm", {"type": "python_topics"}, model=model)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"vocab_size": 260}, "config.vocab_size: must be >= 261, as many as the tokenizer"),
        ({"pad_token_id": 300}, "config.pad_token_id: must be < 261, the size of the vocabulary"),
    ],
)
def test_a_vocabulary_that_is_too_small(json_lines, config, says):
    """A tokenizer that has tokens without a row in the model's embedding is refused."""
    model = {"config": SMALL_LLAMA | config, "tokenizer": "bytes"}

    with pytest.raises(RecipeError, match=rf"r:\d+: model\.{says}, got"):
        trainer_of("causal_lm", json_lines([{"text": "abc"}] * 4), model=model)


def test_an_encoder_is_no_language_model(json_lines, tmp_path):
    """Its tokens would see those that they must predict."""
    rows = json_lines([{"text": "abc"}] * 4)
    config = {"config": BERT["config"], "tokenizer": "bytes"}
    says = (
        r"model\.config\.model_type: must be a decoder, .*, got the encoder BertLMHeadModel; or set"
    )
    with pytest.raises(RecipeError, match=says):
        trainer_of("causal_lm", rows, model=config)
    assert trainer_of(
        "causal_lm", rows, model=config | {"config": config["config"] | {"is_decoder": True}}
    )

    sizes = AutoConfig.for_model(**config["config"], vocab_size=261)
    AutoModelForCausalLM.from_config(sizes).save_pretrained(tmp_path / "bert")
    with pytest.raises(
        RecipeError, match=r"model\.path: must be a decoder, .* BertLMHeadModel \(is_"
    ):
        trainer_of("causal_lm", rows, model={"path": str(tmp_path / "bert"), "tokenizer": "bytes"})


def test_a_folder_without_tokenizer(json_lines, tmp_path):
    """A model folder without a tokenizer is refused with the key that names another one."""
    config = LlamaConfig(**SMALL_LLAMA | {"vocab_size": 261})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    section, model = json_lines([{"text": "abc"}] * 4), {"path": str(tmp_path / "m")}
    says = r"model\.tokenizer: expected the tokenizer that .*/m', .* has none; or copy its files"

    with pytest.raises(RecipeError, match=rf"^r:\d+: {says}"):
        recipe_of("causal_lm", section, model=model)
    assert recipe_of("causal_lm", section, model=model | {"tokenizer": "bytes"})


def test_a_tokenizer_that_a_checkpoint_does_not_fit(json_lines, tmp_path):
    """A checkpoint with fewer embeddings than the tokenizer has tokens is refused."""
    LlamaForCausalLM(LlamaConfig(**SMALL_LLAMA, vocab_size=100)).save_pretrained(tmp_path / "m")
    model = {"path": str(tmp_path / "m"), "tokenizer": "bytes"}

    with pytest.raises(
        RecipeError, match=r"model\.tokenizer: must have at most 100 tokens.*261; if you have"
    ):
        trainer_of("causal_lm", json_lines([{"text": "abc"}] * 4), model=model)
    byte_tokenizer().save_pretrained(tmp_path / "m")
    with pytest.raises(RecipeError, match=r"model\.path: must be a model with .* least 261.*100;"):
        trainer_of(
            "causal_lm", json_lines([{"text": "abc"}] * 4), model=model | {"tokenizer": None}
        )


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification", "supervised_tuning"])
def test_a_tokenizer_that_cannot_pad(json_lines, tmp_path, task):
    """Batches of all tasks are padded: with the end token, if there is no other."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    model = LANGUAGE | {"tokenizer": str(tmp_path)}
    rows = json_lines([{"text": "abc", "label": number % 2} for number in range(4)])
    tokenizer.save_pretrained(tmp_path)
    assert trainer_of(task, rows, model=model).processing_class.pad_token == tokenizer.eos_token
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)

    with pytest.raises(RecipeError, match=r"tokenizer: must have .* a padding or an end token"):
        trainer_of(task, rows, model=model)


@pytest.mark.parametrize(
    "config",
    [{"num_labels": 1}, {"num_labels": "3"}, {"problem_type": "regression"}],
)
def test_labels_that_no_task_has(config):
    """With one label, transformers would train a regression in silence."""
    (key,) = config
    model = {"config": SMALL_LLAMA | config, "tokenizer": "bytes"}

    with pytest.raises(RecipeError, match=rf"model\.config\.{key}: must be .*, got "):
        recipe_of("sequence_classification", {"type": "docstrings"}, model=model)


@pytest.mark.parametrize("length", [33, None])
def test_texts_for_tuning_fit_the_positions(length):
    """TRL cuts texts to max_length, so a longer text fails whenever its batch comes."""
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    data, model = {"type": "json_lines", "path": __file__}, {"config": config}
    says = r"training\.max_length: expected an integer <= 32, the number of positions"

    assert recipe_of("supervised_tuning", data, model=model, max_length=32)
    with pytest.raises(RecipeError, match=says):
        recipe_of("supervised_tuning", data, model=model, max_length=length)


def test_a_mixture_of_experts_has_wide_experts():
    """The limit of numbers of experts does not apply to their width; that of heads is a key."""
    sizes = {"shared_expert_intermediate_size": 5632, "head_dim": 128}

    settings = ModelSettings(config={"model_type": "qwen2_moe", **sizes})
    assert settings.config == {"model_type": "qwen2_moe", **sizes}
    with pytest.raises(ValueError, match="num_experts` must be <= 1000, got 1001"):
        ModelSettings(config={"model_type": "qwen2_moe", "num_experts": 1001})


SMALL = pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "llama", "tie_word_embeddings": True, "vocab_size": 64, "hidden_size": 16,
         "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2},
    ],
    ids=lambda settings: settings["model_type"],
)  # fmt: skip


@SMALL
def test_dtypes_of_norms_and_embeddings(settings):
    """Norms and embeddings may have a dtype of their own; a tied head keeps that of embeddings."""
    section = ModelSettings(
        config=settings, dtype="bfloat16", norm_dtype="float32", embedding_dtype="float16"
    )
    network = section.make_model(AutoModelForCausalLM)
    dtypes = {name: one.dtype for name, one in network.named_parameters()}

    assert {one for name, one in dtypes.items() if "norm" in name or "ln_" in name} == {
        torch.float32
    }
    assert {one for name, one in dtypes.items() if "embed" in name or "wte" in name} == {
        torch.float16
    }
    assert {dtypes.pop(name) for name in list(dtypes) if "proj" in name or ".c_" in name} == {
        torch.bfloat16
    }
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight


@SMALL
@pytest.mark.parametrize("embeddings", ["float16", "float32"])
def test_several_dtypes_without_autocast(settings, embeddings):
    """On a CPU there is no autocast to float16; the loss is that in float32 all the same."""
    tokens = torch.arange(32).reshape(2, 16)
    losses: list[float] = []
    whole = ModelSettings(config=settings, dtype="float32").make_model(AutoModelForCausalLM)
    mixed = ModelSettings(
        config=settings, dtype="float16", norm_dtype="float32", embedding_dtype=embeddings
    ).make_model(AutoModelForCausalLM)
    # Some releases of transformers draw other initial weights in float16.
    mixed.load_state_dict(whole.state_dict())
    for network in (whole.eval(), mixed.eval()):
        loss = network(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        assert all(weight.grad.dtype == weight.dtype for weight in network.parameters())

    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_a_checkpoint_without_a_table_of_embeddings(tmp_path):
    """A model that has characters instead of tokens is not asked for the size of its vocabulary."""
    config = CanineConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_hash_functions=2,
        num_hash_buckets=16,
    )
    CanineForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)

    model = make_text_model(
        ModelSettings(path=str(tmp_path)), AutoModelForSequenceClassification, tokenizer
    )

    assert isinstance(model, CanineForSequenceClassification)


def test_a_head_for_other_classes(tmp_path):
    """A classifier of a checkpoint has its own head, unless the data have other classes."""
    config = BertConfig(
        vocab_size=261,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path / "with_head")
    BertModel(config).save_pretrained(tmp_path / "without")

    def said(name, num_labels):
        model = ModelSettings(path=str(tmp_path / name), tokenizer="bytes")
        network = model.make_model(AutoModelForSequenceClassification, num_labels=num_labels)
        return model.other_head(network)

    assert said("with_head", 3) is None
    assert said("without", 2) is None
    assert said("with_head", 2) == (
        f"model.path: {str(tmp_path / 'with_head')!r} has a head for 3 classes, and the data have "
        "2, so the head starts from random numbers; that is right for new classes"
    )


@pytest.mark.parametrize(("size", "is_other"), [(261, False), (320, False), (4_096, True)])
def test_a_tokenizer_of_another_model(json_lines, tmp_path, size, is_other):
    """A model may have a few embeddings more than tokens, but not many."""
    config = BertConfig(**BERT["config"], vocab_size=size)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    section = json_lines([{"text": "a", "label": "xy"[n % 2]} for n in range(6)])
    lines = []
    model = {"path": str(tmp_path / "base")}
    build_trainer(recipe_of("sequence_classification", section, model=model), say=lines.append)

    found = [line for line in lines if "embeddings of" in line]
    assert bool(found) == is_other
    assert all("has embeddings of 4,096 tokens, and its tokenizer has 261;" in one for one in found)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["z", "x", "y"], None),
        (["Z", "X", "Y"], None),  # as the data have them, but for their case
        (["LABEL_0", "LABEL_1", "LABEL_2"], None),  # names that transformers has made up
        (["a", "z", "b"], "has a head for the classes a, z, b, and the data have x, y, z, so the"),
    ],
)
def test_a_head_for_classes_of_other_names(json_lines, tmp_path, names, said):
    """A head is said to go on with classes of other names, and no new head is said."""
    config = BertConfig(**BERT["config"], vocab_size=261, id2label=dict(enumerate(names)))
    BertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    section = json_lines([{"text": "a", "label": "xyz"[n % 3]} for n in range(6)])
    lines = []
    model = {"path": str(tmp_path / "base"), "tokenizer": "bytes"}
    build_trainer(recipe_of("sequence_classification", section, model=model), say=lines.append)

    warned = [line for line in lines if line.startswith("warning: ")]
    assert len(warned) == (said is not None)
    assert all(said in line for line in warned)
    order = f"the classes have the order of the head of {model['path']!r}: z, x, y"
    assert (order in lines) == ([name.lower() for name in names] == ["z", "x", "y"])


def test_names_without_a_head(json_lines, tmp_path):
    """A checkpoint with names of classes, but without a head, is not said to have one."""
    config = BertConfig(**BERT["config"], vocab_size=261, id2label={0: "y", 1: "x"})
    BertForMaskedLM(config).save_pretrained(tmp_path / "base")
    section = json_lines([{"text": "a", "label": "xy"[n % 2]} for n in range(4)])
    lines = []
    model = {"path": str(tmp_path / "base"), "tokenizer": "bytes"}
    build_trainer(recipe_of("sequence_classification", section, model=model), say=lines.append)

    assert [line for line in lines if "head" in line] == []


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_a_checkpoint_with_another_loss(json_lines, tmp_path, kind):
    """A classifier whose loss takes no classes is refused, and its key is named."""
    config = BertConfig(**BERT["config"], vocab_size=261, problem_type=kind)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    section = json_lines([{"text": "a", "label": n % 2} for n in range(4)])
    says = rf"model\.path: must be a model that gives each row one class, got problem_type '{kind}'"

    with pytest.raises(RecipeError, match=says):
        trainer_of(
            "sequence_classification", section, model={"path": str(tmp_path), "tokenizer": "bytes"}
        )


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("hidden_size", "16", "hidden_size.*expected int, got str"),
        ("dtype", "float61", "float61"),
        ("hidden_act", "silly", "KeyError: 'silly'"),
        ("pad_token_id", 300, "Padding_idx must be within num_embeddings"),
    ],
)
def test_a_faulty_configuration_of_a_checkpoint(json_lines, tmp_path, key, value, reason):
    """A value that transformers refuses is looked for in config.json, and in no other file."""
    config = BertConfig(**BERT["config"], vocab_size=261)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    section = json_lines([{"text": "a", "label": n % 2} for n in range(4)])
    says = rf"model\.path: must be a model whose config\.json transformers accepts, .*{reason}"

    with pytest.raises(RecipeError, match=says):
        trainer_of("sequence_classification", section, model={"path": str(tmp_path)})
