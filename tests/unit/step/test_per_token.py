"""Targets are counted as the Trainer counts them."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from mfwrap.step.calls import NetworkCall
from mfwrap.step.per_token import PerTokenLoss
from support.host_reads import HostReads
from support.versions import COUNTS_SHIFTED, needs

IGNORED = -100


VOCABULARY = 32


TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def llama():
    """Return a causal language model, which shifts labels by one position."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def eurobert():
    """Return a masked language model, which does not shift labels."""
    return transformers.EuroBertForMaskedLM(transformers.EuroBertConfig(**TINY)).eval()


HAS_EUROBERT = needs("transformers", "5.3", "it has no EuroBERT")


def bert(head=transformers.BertForMaskedLM):
    """Return a model whose forward takes ``num_items_in_batch`` and does not use it."""
    return head(transformers.BertConfig(**TINY)).eval()


def t5():
    """Return an encoder-decoder whose loss is a mean for any arguments."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def tokens(num_ignored=3):
    """Return two rows of seven tokens, with the last `num_ignored` labels of row 0 ignored."""
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 7 - num_ignored :] = IGNORED
    return {"input_ids": ids, "labels": labels}


def classes():
    """Return two rows of tokens with one class label per row."""
    return tokens() | {"labels": torch.tensor([0, 1])}


def called(loss, *arguments, **keywords):
    """Call a loss with the network's arguments."""
    return loss(NetworkCall(arguments, keywords))


def per_token(network):
    """Return the per-token loss of a network without wrappers."""
    return PerTokenLoss(network, network)


def summed_cross_entropy(model, batch, *, shift):
    """Return the summed cross-entropy over the targets, in float64, and the number of targets."""
    logits = model(input_ids=batch["input_ids"]).logits.double()
    labels = batch["labels"]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, labels.ne(IGNORED).sum()


@pytest.mark.parametrize(
    ("build", "shift"), [(llama, True), pytest.param(eurobert, False, marks=HAS_EUROBERT)]
)
def test_a_hugging_face_loss_is_the_sum_over_its_targets(build, shift):
    """Numerator and denominator agree with a cross-entropy in float64 to 1e-5."""
    model, batch = build(), tokens()
    parts = called(per_token(model), **batch)
    total, count = summed_cross_entropy(model, batch, shift=shift)

    torch.testing.assert_close(parts.numerator.double(), total, rtol=1e-5, atol=0)
    assert parts.denominator == count


@pytest.mark.parametrize(
    "build",
    [pytest.param(llama, marks=COUNTS_SHIFTED), pytest.param(eurobert, marks=HAS_EUROBERT)],
)
@pytest.mark.parametrize("num_ignored", [0, 3, 7])
def test_targets_are_counted_as_the_trainer_counts_them(build, num_ignored, tmp_path):
    """The count of targets equals that of ``Trainer._get_num_items_in_batch``."""
    model, batch = build(), tokens(num_ignored)
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    trainer = transformers.Trainer(model=model, args=arguments)

    expected = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    assert called(per_token(model), **batch).denominator == expected


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (bert, tokens),
        (lambda: bert(transformers.BertForSequenceClassification), classes),
        (t5, tokens),
        (
            lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**TINY)),
            classes,
        ),
    ],
    ids=[
        "BertForMaskedLM",
        "BertForSequenceClassification",
        "T5",
        "LlamaForSequenceClassification",
    ],
)
def test_a_model_that_ignores_the_number_of_items_is_refused(build, batch):
    """A model that ignores ``num_items_in_batch`` and returns a mean raises an error.

    If the mean were used as a sum, it would be too small by a factor of the number of targets.
    """
    model = build()
    message = rf"must divide its loss by `num_items_in_batch` .* got {type(model).__name__},"
    # Before transformers 5, some models take no such argument, so their loss is no sum either.
    message += r"|`network` must return \(numerator, denominator\)"

    with pytest.raises(TypeError, match=message):
        called(per_token(model), **batch())


def test_later_calls_are_as_the_first():
    """The first call, which checks the model, returns the same values as later calls."""
    loss, batch = per_token(llama()), tokens()
    first, second = called(loss, **batch), called(loss, **batch)

    assert torch.equal(first.numerator, second.numerator)
    assert torch.equal(first.denominator, second.denominator)


def test_shift_labels_are_counted_as_they_are():
    """All labels are counted if a collator has already shifted them.

    The first shifted label is a target. Leaving it out, as in `labels`, gives a smaller count. All
    `labels` are ignored, so counting `labels` gives 0.
    """
    model, batch = llama(), tokens()
    shifted = functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()
    ignored = torch.full_like(batch["labels"], IGNORED)
    parts = called(per_token(model), **batch | {"labels": ignored}, shift_labels=shifted)

    counts = [labels.ne(IGNORED).sum() for labels in (shifted, shifted[:, 1:], ignored)]
    assert parts.denominator == counts[0]
    assert counts[0] not in counts[1:]
    torch.testing.assert_close(parts.numerator, called(per_token(model), **batch).numerator)


def test_positional_labels_are_found():
    """Labels that are passed by position are found by the model's parameter names."""
    model, batch = llama(), tokens()
    arguments = (batch["input_ids"], None, None, None, None, batch["labels"])

    by_place, by_name = called(per_token(model), *arguments), called(per_token(model), **batch)
    assert by_place.denominator == by_name.denominator
    assert torch.equal(by_place.numerator, by_name.numerator)


def test_a_batch_without_targets_has_parts_of_zero():
    """Numerator and denominator of a batch without targets are 0."""
    parts = called(
        per_token(llama()), **tokens(num_ignored=7) | {"labels": torch.full((2, 7), -100)}
    )

    assert (parts.numerator.item(), parts.denominator.item()) == (0, 0)


def test_parts_of_uneven_micro_batches_add_up():
    """Numerators and denominators of micro-batches add up to those of the whole batch."""
    model, batch = llama(), tokens()
    whole = called(per_token(model), **batch)
    rows = [called(per_token(model), **{k: v[i : i + 1] for k, v in batch.items()}) for i in (0, 1)]

    torch.testing.assert_close(
        sum(row.numerator for row in rows), whole.numerator, rtol=1e-6, atol=0
    )
    assert sum(row.denominator for row in rows) == whole.denominator
    assert rows[0].denominator != rows[1].denominator


def test_hugging_face_labels_must_be_given():
    """A batch without labels raises an error that lists the inputs."""
    ids = tokens()["input_ids"]

    with pytest.raises(
        ValueError, match=r"the batch must have `labels` to count .* \['input_ids'\]"
    ):
        called(per_token(llama()), input_ids=ids)


class OwnModel(nn.Module):
    """A network that divides its summed loss by ``num_items_in_batch``."""

    def __init__(self, **attributes):
        super().__init__()
        self.head = nn.Embedding(VOCABULARY, VOCABULARY)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, input_ids, labels, num_items_in_batch=None):
        """Return the summed loss divided by `num_items_in_batch`; without it, the mean loss."""
        logits, labels = self.head(input_ids).flatten(0, 1), labels.flatten()
        if num_items_in_batch is None:
            return functional.cross_entropy(logits, labels)
        return functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def test_any_network_that_takes_the_number_of_items_is_counted():
    """Targets are counted for any network whose forward has ``num_items_in_batch``."""
    network, batch = OwnModel(), tokens()
    parts = called(per_token(network), **batch)

    torch.testing.assert_close(parts.numerator / parts.denominator, network(**batch))
    assert parts.denominator == batch["labels"].ne(IGNORED).sum()


class WithAuxiliaryLoss(OwnModel):
    """A network whose loss has an additional term, which autograd reaches by two paths."""

    def forward(self, input_ids, labels, num_items_in_batch=None):
        """Return the loss plus zero times a sum of the weights."""
        weights = self.head.weight.sum()
        loss = super().forward(input_ids, labels, num_items_in_batch)
        return (weights + weights) * 0.0 + loss


def test_a_further_term_does_not_hide_the_number_of_items():
    """The number of items is found although another term's graph has repeated and missing nodes."""
    network, batch = WithAuxiliaryLoss(), tokens()
    parts = called(per_token(network), **batch)

    torch.testing.assert_close(parts.numerator / parts.denominator, network(**batch))


def test_an_encoder_decoders_labels_are_not_shifted():
    """Every label of an encoder-decoder counts as a target, including the first."""
    config = SimpleNamespace(is_encoder_decoder=True)
    decoder_only = OwnModel(loss_function=ForCausalLMLoss, config=SimpleNamespace())
    encoder_decoder = OwnModel(loss_function=ForCausalLMLoss, config=config)

    counts = [called(per_token(n), **tokens()).denominator for n in (decoder_only, encoder_decoder)]
    assert counts == [9, 11]


def test_accepts_loss_kwargs_decides():
    """A model with ``accepts_loss_kwargs=False`` must return numerator and denominator."""
    with pytest.raises(TypeError, match=r"must return \(numerator, denominator\)"):
        called(per_token(OwnModel(accepts_loss_kwargs=False)), **tokens())


def test_keywords_alone_are_no_promise():
    """A forward with only ``**keywords`` must return numerator and denominator."""

    class Summed(nn.Linear):
        def forward(self, inputs, **_):
            """Return the sum of the outputs and their number."""
            return super().forward(inputs).sum(), 4

    parts = called(per_token(Summed(2, 1)), torch.ones(4, 2), anything=2)

    assert parts.denominator == 4


def test_the_model_inside_adapters_is_inspected():
    """The signature of a PEFT model's base model decides how targets are counted."""

    class Adapted(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def get_base_model(self):
            """Return the model, as PEFT does."""
            return self.model

        def forward(self, *arguments, **keywords):
            """Call the model."""
            return self.model(*arguments, **keywords)

    model, batch = llama(), tokens()
    adapted, bare = called(per_token(Adapted(model)), **batch), called(per_token(model), **batch)
    assert torch.equal(adapted.numerator, bare.numerator)
    assert adapted.denominator == bare.denominator


def test_the_wrapped_network_is_called_and_the_inner_one_inspected():
    """The wrapper is called, and targets are counted for the network inside."""
    model, batch, calls = llama(), tokens(), []
    wrapper = nn.Sequential(model)
    wrapper.forward = lambda **keywords: calls.append(1) or model(**keywords)
    parts = called(PerTokenLoss(wrapper, model), **batch)

    assert calls == [1]
    assert parts.denominator == 9


def test_counting_reads_nothing_on_the_host():
    """Counting targets does not synchronize with the device."""
    network, batch = OwnModel(), tokens()
    with HostReads() as host:
        called(per_token(network), **batch)

    assert host.reads == []


def test_a_model_with_a_routers_loss_is_refused():
    """A model that adds a router's loss to its per-token loss raises an error."""
    config = transformers.MixtralConfig(
        **TINY, num_key_value_heads=2, num_local_experts=2, output_router_logits=True
    )
    model = transformers.MixtralForCausalLM(config)

    with pytest.raises(ValueError, match=r"router's loss.* MixtralForCausalLM"):
        per_token(model)
    model.config.output_router_logits = False
    assert called(per_token(model), **tokens()).denominator > 0
