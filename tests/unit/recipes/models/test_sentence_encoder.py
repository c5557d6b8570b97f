"""Sentence encoders of a configuration and of checkpoints."""

import json

import pytest
import torch
from transformers import AutoModel, BertConfig, BertForMaskedLM

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.recipes.models.loading import ModelError, unused_weights
from mfwrap.recipes.models.own import OwnModel
from mfwrap.recipes.models.sentence_encoder import make_sentence_encoder
from mfwrap.recipes.models.settings import ModelSettings
from support.recipe_texts import BERT

pytest.importorskip("sentence_transformers")

# Ignore the warnings that sentence-transformers emits.
pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = ["a text", "another one"]


def means(network, tokenizer):
    """Return the mean of the token embeddings of each text."""
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        found = network.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return (found * mask).sum(1) / mask.sum(1)


def test_an_embedding_is_the_mean_over_the_tokens(tmp_path):
    """With a configuration or a checkpoint of transformers, a text has the mean of its tokens."""
    encoder = make_sentence_encoder(ModelSettings(**BERT)).to("cpu")
    network, tokenizer = encoder[0].auto_model, encoder.tokenizer
    expected = means(network, tokenizer)
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = make_sentence_encoder(ModelSettings(path=str(tmp_path))).to("cpu")

    for one in (encoder, again):
        torch.testing.assert_close(one.encode(TEXTS, convert_to_tensor=True), expected)
    assert isinstance(AutoModel.from_pretrained(tmp_path), type(network))


def test_dtypes():
    """The keys of the section ``model`` have their effect."""
    model = ModelSettings(**BERT, dtype="bfloat16", norm_dtype="float32")
    dtypes = {
        name: one.dtype
        for name, one in make_sentence_encoder(model)[0].auto_model.named_parameters()
    }

    assert dtypes["embeddings.LayerNorm.weight"] == torch.float32
    assert dtypes["encoder.layer.0.output.dense.weight"] == torch.bfloat16


def test_what_is_refused(tmp_path):
    """A model of the user's own, and another tokenizer than that of a checkpoint."""
    with pytest.raises(ModelError, match="`type` must be left out for a sentence encoder"):
        make_sentence_encoder(OwnModel(type="my_parts.Net"))
    make_sentence_encoder(ModelSettings(**BERT)).save(str(tmp_path))
    model = ModelSettings(path=str(tmp_path), tokenizer="bytes")
    with pytest.raises(ModelError, match="`tokenizer` must be left out, as the encoder has"):
        make_sentence_encoder(model)


def test_weights_that_do_not_fit(tmp_path):
    """Missing layers and other sizes are refused; layers that are left over are said."""
    make_sentence_encoder(ModelSettings(**BERT)).save(str(tmp_path))
    assert unused_weights(make_sentence_encoder(ModelSettings(path=str(tmp_path)))) is None
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())

    def encoder(**changes):
        file.write_text(json.dumps(config | changes))
        return make_sentence_encoder(ModelSettings(path=str(tmp_path)))

    with pytest.raises(ModelError, match=r"model\.safetensors without encoder\.layer\.1\."):
        encoder(num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"of shape \[261, 16\] instead of \[261, 32\]"):
        encoder(hidden_size=32)
    assert "does not use 16 of the weights in" in unused_weights(encoder(num_hidden_layers=0))


def test_the_pooler_of_a_checkpoint_may_be_missing(tmp_path):
    """The mean of the tokens needs no pooler, which checkpoints of language models do not have."""
    config = {key: each for key, each in BERT["config"].items() if key != "model_type"}
    BertForMaskedLM(BertConfig(**config, vocab_size=261)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)

    assert unused_weights(make_sentence_encoder(ModelSettings(path=str(tmp_path)))) is None
