"""Predictions of each kind are shown with what was expected."""

import base64
import io

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from mfwrap.callbacks.samples.prediction import Prediction
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.recipes.models.perceptron import Perceptron, PerceptronConfig

NAMES = {0: "cat", 1: "dog", 2: "<cow>"}


class Constant(nn.Module):
    """A network that returns given logits, in the form of its own choice."""

    def __init__(self, output, **config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.output, self.config = output, BertConfig(id2label=NAMES, **config)

    def forward(self, **_):
        return self.output


def said(model, batch, tokenizer=None):
    """Return input, reference and prediction of a batch of one row."""
    task = Prediction(model, tokenizer)
    prompt = task.of_row(batch)
    return prompt.text, prompt.reference, task.answer(model, prompt)


@pytest.mark.parametrize(
    "form", [lambda x: {"logits": x}, lambda x: (torch.ones(()), x), lambda x: x]
)
def test_classes(form):
    """A class has its name and its probability, in any form of the output."""
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    batch = {"features": torch.tensor([[1.0, 2.5]]), "labels": torch.tensor([2])}
    share = logits.softmax(-1)[0, 1].item()

    expected = ("features: 1, 2.5", "<cow>", f"dog {share:.2f}")
    assert said(Constant(form(logits)), batch) == expected


def test_several_classes():
    """Of several classes at once, the likely ones are shown."""
    model = Constant(
        {"logits": torch.tensor([[3.0, -1.0, 0.5]])}, problem_type="multi_label_classification"
    )
    batch = {"features": torch.zeros(1, 1), "labels": torch.tensor([[1.0, 1.0, 0.0]])}

    assert said(model, batch)[1:] == ("cat, dog", "cat 0.95, <cow> 0.62")


def test_a_classifier_of_texts():
    """The prediction of a model of transformers is that of its logits."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = BertConfig(
        vocab_size=261, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, id2label=NAMES, label2id={n: i for i, n in NAMES.items()},
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    batch = {**tokenizer("a text", return_tensors="pt"), "labels": torch.tensor([1])}
    shares = model(**batch).logits.softmax(-1)[0]
    best = int(shares.argmax())

    expected = ("a text", "dog", f"{NAMES[best]} {shares[best]:.2f}")
    assert said(model, batch, tokenizer) == expected


def test_classes_of_words():
    """Each word has the class of its first token."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = BertConfig(
        vocab_size=261, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, id2label=NAMES, label2id={n: i for i, n in NAMES.items()},
    )  # fmt: skip
    model = BertForTokenClassification(config).eval()
    batch = dict(tokenizer("ab c", return_tensors="pt"))
    batch["labels"] = torch.tensor([[0, -100, -100, 2]])
    first, *_, last = (NAMES[one] for one in model(**batch).logits[0].argmax(-1).tolist())

    assert said(model, batch, tokenizer) == ("ab c", "ab/cat c/<cow>", f"ab/{first} c/{last}")


def test_numbers():
    """A regression shows the prediction beside the target."""
    torch.manual_seed(0)
    model = Perceptron(PerceptronConfig(num_features=10, hidden_size=4)).eval()
    batch = {"features": torch.arange(10.0)[None], "labels": torch.tensor([2.25])}
    number = model(batch["features"]).logits.item()

    expected = ("features: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more", "2.25", f"{number:.4g}")
    assert said(model, batch) == expected


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image(channels):
    """An image becomes a small PNG with the range of its own values."""
    values = torch.linspace(-1, 1, channels * 12).reshape(1, channels, 3, 4)
    prompt = Prediction(Constant(torch.zeros(1, 3)), None).of_row({"pixel_values": values})
    image = PIL.Image.open(io.BytesIO(base64.b64decode(prompt.image)))

    expected = ((values[0] + 1) / 2 * 255).round().permute(1, 2, 0).numpy().astype(np.uint8)
    assert prompt.text == f"pixel_values of shape ({channels}, 3, 4)"
    assert np.array_equal(np.asarray(image).reshape(3, 4, channels), expected)


def test_a_large_image_is_small():
    """A photo is stored with at most 96 pixels in each direction."""
    batch = {"pixel_values": torch.rand(1, 3, 400, 200)}
    prompt = Prediction(Constant(torch.zeros(1, 3)), None).of_row(batch)

    assert PIL.Image.open(io.BytesIO(base64.b64decode(prompt.image))).size == (48, 96)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ({"loss": torch.ones(())}, "or one that returns `logits`; Constant returned"),
        (torch.zeros(1, 3, 8, 8), r"shows predictions of shape .* got \(1, 3, 8, 8\)"),
    ],
)
def test_other_outputs(output, says):
    """A model without predictions of a known kind is refused."""
    model = Constant(output)
    task = Prediction(model, None)
    with pytest.raises(ValueError, match=says):
        task.answer(model, task.of_row({"features": torch.zeros(1, 2)}))


def test_batches_that_are_no_mappings():
    """A collator must make mappings."""
    with pytest.raises(ValueError, match="needs batches that are mappings, got"):
        Prediction(Constant(torch.zeros(1, 3)), None).of_row((torch.zeros(1),))
