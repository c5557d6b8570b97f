"""Sentence encoders of a configuration and of checkpoints."""

import pytest
import torch
from transformers import AutoModel

from mfwrap.recipes.models.own import OwnModel
from mfwrap.recipes.models.sentence_encoder import make_sentence_encoder
from mfwrap.recipes.models.settings import ModelError, ModelSettings
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
