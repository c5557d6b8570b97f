"""Rows that are the inputs of the model already are not prepared."""

import torch
from torch import nn
from torch.utils.data import StackDataset
from transformers import AutoModelForCausalLM

from mfwrap.recipes.data.source import Rows
from mfwrap.recipes.models.own import OwnModel
from mfwrap.recipes.tasks.inputs import build_for_inputs

DATA = StackDataset(input_ids=torch.arange(6).view(2, 3), labels=torch.arange(2))


def test_rows_go_to_the_trainer_as_they_are():
    """The Trainer gets the data sets themselves, and a collator that stacks tensors."""
    model = OwnModel(type="my.net", make=nn.Identity)

    keywords = build_for_inputs(model, AutoModelForCausalLM, Rows(DATA, DATA))

    assert keywords["train_dataset"] is keywords["eval_dataset"] is DATA
    assert keywords["processing_class"] is None
    batch = keywords["data_collator"]([DATA[0], DATA[1]])
    assert batch["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert batch["labels"].tolist() == [0, 1]


def test_a_tokenizer_pads():
    """With a tokenizer in the section, rows of different lengths are padded with its token."""
    model = OwnModel(type="my.net", make=nn.Identity, tokenizer="bytes")

    keywords = build_for_inputs(model, AutoModelForCausalLM, Rows(DATA))

    tokenizer = keywords["processing_class"]
    batch = keywords["data_collator"]([{"input_ids": [1]}, {"input_ids": [1, 2]}])
    assert batch["input_ids"].tolist() == [[1, tokenizer.pad_token_id], [1, 2]]
    assert build_for_inputs(model, None, Rows(DATA))["processing_class"] is None
