"""A network tells how many tokens and positions it has embeddings of, if it has tables of them."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CanineConfig,
    CanineModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    RobertaConfig,
    RobertaModel,
)

from mfwrap.tensors.embedding_tables import num_embeddings, num_positions

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (lambda: BertModel(BertConfig(max_position_embeddings=20, **SIZES)), (32, 20)),
        (lambda: GPT2Model(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)), (32, 1024)),
        (lambda: LlamaModel(LlamaConfig(max_position_embeddings=20, **SIZES)), (32, None)),
        (lambda: nn.Linear(2, 2), (None, None)),
    ],
)
def test_tables(network, expected):
    """Rotary positions have no table, and so no limit."""
    with torch.device("meta"):
        made = network()

    assert (num_embeddings(made), num_positions(made)) == expected


def test_positions_after_the_padding():
    """RoBERTa's first position has the row after the padding row; the others hold tokens."""
    network = RobertaModel(RobertaConfig(max_position_embeddings=20, **SIZES))
    tokens = torch.full((1, 19), 5)

    assert num_positions(network) == 18
    assert network(input_ids=tokens[:, :18]).last_hidden_state.shape[1] == 18
    with pytest.raises((IndexError, RuntimeError)):
        network(input_ids=tokens)


def test_a_model_without_a_table():
    """CANINE hashes characters: it has no number of tokens."""
    with torch.device("meta"):
        network = CanineModel(
            CanineConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        )

    assert num_embeddings(network) is None
