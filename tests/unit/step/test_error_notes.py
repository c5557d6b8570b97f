"""An error of a network has a note that names the tensor of the batch that does not fit."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from mfwrap import MFTrainOneStepCell
from mfwrap.accelerate import attach
from support.small_networks import Classifier

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}
TOKENS = torch.arange(24).reshape(4, 6)


def classifier(num_labels=3):
    """Return a small BERT with a head."""
    return BertForSequenceClassification(BertConfig(num_labels=num_labels, **SIZES))


def notes(network, *inputs, **batch):
    """Return the notes of the error of a step with the cell."""
    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1))
    with pytest.raises(Exception) as raised:  # noqa: PT011  (torch's errors differ)
        cell(*inputs, **batch)
    return getattr(raised.value, "__notes__", [])


def note(network, *inputs, **batch):
    """Return the only note of the error of a step with the cell."""
    (found,) = notes(network, *inputs, **batch)
    return found


def test_tokens_beyond_the_embeddings():
    """The largest token and the number of embeddings are named."""
    found = note(classifier(), input_ids=TOKENS + 9, labels=torch.zeros(4, dtype=torch.long))

    assert found.startswith("the largest token in `input_ids` is 32, and the model has embeddings ")
    assert "tokens below 32; use the tokenizer of this model" in found


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([0, 1, 2, 3], "row 3 of the batch has the label 3, and the model has 3 classes, 0 to 2; "),
        ([0, 4, 2, 4], "row 1 of the batch has the label 4, "),
        (
            [0, 1, 2, 4],
            "build the model with num_labels=5 or more (the largest label of all rows plus 1",
        ),
        ([-100, 1, -1, 1], "labels begin at 0 (-100 is ignored), but row 2 of the batch has the "),
        ([-100, 1, -1, 1], "label -1; number the classes from 0"),
    ],
)
def test_labels_that_are_no_classes(labels, says):
    """The label and what to do about it are named."""
    assert says in note(classifier(), input_ids=TOKENS, labels=torch.tensor(labels))


class OwnLoss(nn.Module):
    """A module of the user's own around a network, which computes the loss from its labels."""

    def __init__(self, shift=0, ignored=-100):
        super().__init__()
        self.student, self.shift, self.ignored = nn.Linear(2, 3), shift, ignored

    def forward(self, inputs, labels):
        """Return the loss."""
        output = self.student(inputs)
        return functional.cross_entropy(output, labels - self.shift, ignore_index=self.ignored)


@pytest.mark.parametrize("shift", [0, 2])
def test_labels_of_a_loss_in_a_module(shift):
    """The classes are those of the outputs, and the labels may be other than those of the batch."""
    labels = torch.tensor([2, 1, 4, 0]) + shift

    assert note(OwnLoss(shift), inputs=torch.zeros(4, 2), labels=labels).startswith(
        "row 2 of the batch has the label 4, and the model has 3 classes, 0 to 2; "
    )


def test_a_label_that_a_module_ignores():
    """It is no fault, whatever number it has."""
    labels = torch.tensor([-1, 1, 7, 0])

    assert note(OwnLoss(ignored=-1), inputs=torch.zeros(4, 2), labels=labels).startswith(
        "row 2 of the batch has the label 7, and the model has 3 classes, 0 to 2; "
    )


def test_labels_of_tokens():
    """Labels of tokens are looked at, too, but not the ignored ones."""
    network = BertForTokenClassification(BertConfig(num_labels=2, **SIZES))
    labels = torch.full_like(TOKENS, -100)
    labels[1, 2] = 5

    assert "row 1 of the batch has the label 5, and the model has 2 classes" in note(
        network, input_ids=TOKENS, labels=labels
    )


def test_floats_for_classes():
    """Floating-point labels of a classifier are named, with what to do for a regression."""
    network = classifier()
    network.config.problem_type = "single_label_classification"
    found = note(network, input_ids=TOKENS, labels=torch.rand(4))

    assert found.startswith("`labels` are torch.float32, and the model has 3 classes")


def test_rows_longer_than_the_positions():
    """The length of the rows and the number of positions are named."""
    rows = torch.zeros(2, 20, dtype=torch.long)
    found = note(classifier(), input_ids=rows, labels=torch.zeros(2, dtype=torch.long))

    assert found.startswith("rows of `input_ids` have 20 tokens, and the model has 16 positions")


def test_rotary_positions_have_no_end():
    """An error of something else is not blamed on the length of rows, which is no fault here."""
    network = LlamaForCausalLM(LlamaConfig(**SIZES))
    network.lm_head.register_forward_hook(lambda *_: 1 / 0)
    rows = torch.zeros(2, 20, dtype=torch.long)

    assert notes(network, input_ids=rows, labels=rows) == []


def test_a_network_that_cannot_be_asked():
    """The error of the network stays the one that is raised, whatever its attributes do."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def get_input_embeddings(self):
            raise KeyError

        def forward(self, input_ids):
            raise ArithmeticError(str(input_ids.shape))

    network = Odd()
    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1))
    with pytest.raises(ArithmeticError):
        cell(input_ids=TOKENS)


def test_a_batch_without_the_main_input():
    """A batch with labels alone is named."""
    found = note(classifier(), labels=torch.zeros(4, dtype=torch.long))

    assert found.startswith(
        "the batch has no `input_ids`, only ['labels']; pass the tokenized rows"
    )


def test_another_device():
    """The devices of the batch and of the weights are named."""
    found = note(Classifier(), torch.zeros(4, 8, device="meta"), torch.zeros(4, device="meta"))

    assert found.startswith("`inputs[0]` is on meta, and the weights are on cpu; move the batch")


class Loss(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.loss = loss

    def forward(self, inputs, targets):
        return self.loss(self.layer(inputs), targets)


def test_doubles_of_numpy():
    """float64 beside float32 weights is named, also if only the backward fails."""
    network = Loss(functional.mse_loss)
    found = notes(network, torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2))

    assert found[0].startswith(
        "`inputs[0]` is torch.float64, as NumPy's arrays are, and the weights"
    )


def test_targets_of_another_dtype():
    """The dtypes of the batch are listed."""
    network = Loss(functional.binary_cross_entropy_with_logits)
    found = note(network, torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.long))

    assert found.startswith("the batch has `inputs[0]` torch.float32, `inputs[1]` torch.int64; ")


def test_weights_without_a_gradient():
    """On several ranks, the error of the next step is about weights that the loss leaves out."""

    def fail(*_):
        text = "Expected to have finished reduction in the prior iteration before starting a new"
        raise RuntimeError(text)

    found = note(Loss(fail), torch.zeros(2, 2), torch.zeros(2, 2))

    assert found.startswith("some weights had no gradient in the step before; use them in the loss")


def test_an_error_of_the_network_itself_has_no_note():
    """Where the batch fits, nothing is added."""

    def fail(outputs, targets):
        outputs[targets.numel() :].sum().backward(torch.zeros(7))

    assert notes(Loss(fail), torch.zeros(2, 2), torch.zeros(2, 2)) == []


def test_an_accelerate_loop():
    """A forward of a prepared model has the note, too."""
    accelerator = Accelerator(cpu=True)
    attach(accelerator)
    network = LlamaForCausalLM(LlamaConfig(**SIZES))
    model, _ = accelerator.prepare(network, SGD(network.parameters(), lr=0.1))

    with pytest.raises(IndexError) as raised:
        model(input_ids=TOKENS + 32)
    assert raised.value.__notes__[0].startswith("the largest token in `input_ids` is 55")
