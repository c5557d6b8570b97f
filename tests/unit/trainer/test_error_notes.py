"""Errors about the data of a Trainer have a note with the likely cause."""

import functools
import re

import pytest
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    TrainingArguments,
)

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.trainer import MFTrainer, MFTrainerMixin
from support.other_trainers import new_trainer

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def note(tmp_path, rows, kind=BertForSequenceClassification, *, arguments=(), **keywords):
    """Return the only note of the error of a training."""
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **dict(arguments),
    )
    rows = Dataset.from_list(rows)
    trainer = MFTrainer(kind(BertConfig(**SIZES)), args, train_dataset=rows, **keywords)
    with pytest.raises((AssertionError, ValueError)) as raised:
        trainer.train()
    (found,) = raised.value.__notes__
    return found


@pytest.mark.parametrize(
    ("columns", "kind", "says"),
    [
        ({"labels": "odd"}, BertForSequenceClassification, "holds texts, such as 'odd'; replace"),
        (
            {"labels": 1},
            BertModel,
            "BertModel takes no labels, so the column `labels` was left out",
        ),
        ({}, BertForSequenceClassification, "the data have no column `labels`, only ['input_ids']"),
    ],
)
def test_a_missing_loss(tmp_path, columns, kind, says):
    """The note says why the model has returned no loss."""
    assert says in note(tmp_path, [{"input_ids": [1, 2]} | columns] * 2, kind)


class OwnLoss(MFTrainer):
    """A trainer whose loss is computed behind the model, from labels that it takes out."""

    def compute_loss(self, model, inputs, **_):
        labels = inputs.pop("labels")
        if model.config.num_labels == 3:
            message = "of the user"
            raise ValueError(message)
        return cross_entropy(model(**inputs).logits, labels)


def test_labels_that_are_no_classes(tmp_path):
    """The label is named if the loss is computed in the Trainer; other errors have no note."""
    rows = Dataset.from_list([{"input_ids": [1, 2], "labels": label} for label in (0, 7)])
    said = []
    for number in (2, 3):
        args = TrainingArguments(str(tmp_path / str(number)), use_cpu=True, report_to="none")
        model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=number))
        with pytest.raises((IndexError, ValueError)) as raised:
            OwnLoss(model, args, train_dataset=rows).train()
        said.append(getattr(raised.value, "__notes__", []))

    assert said[1] == []
    own, of_data = said[0]
    assert re.match(r"row \d of the batch has the label 7, and the model has 2 classes, 0", own)
    assert of_data == (
        "1 of 2 rows of `train_dataset` have such a label, the first is row 1, counted from 0; "
        "repair a wrong label, or leave its row out"
    )


def test_rows_of_different_lengths(tmp_path):
    """The note names collators that pad."""
    rows = [{"input_ids": list(range(length)), "labels": 0} for length in (2, 3)]

    assert "data_collator=DataCollatorWithPadding(tokenizer)" in note(tmp_path, rows)


def test_labels_of_different_lengths(tmp_path):
    """If the collator pads all but the labels, the note names collators that pad labels."""
    rows = [{"input_ids": [1] * length, "labels": [0] * length} for length in (2, 3)]
    found = note(tmp_path, rows, data_collator=DataCollatorWithPadding(byte_tokenizer()))

    assert found.startswith("the labels of a batch have different lengths")
    assert "DataCollatorForTokenClassification(tokenizer)" in found


def test_texts_in_place_of_tokens(tmp_path):
    """The note names the columns, what the model takes, and how texts are tokenized."""
    assert note(tmp_path, [{"title": "a", "number": 1}] * 2) == (
        "the data have the columns ['number', 'title'], and BertForSequenceClassification takes "
        "input_ids; tokenize the texts first, for example by "
        '`rows.map(lambda row: tokenizer(row["title"]))`'
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"eval_strategy": "steps"}, "set load_best_model_at_end=True in TrainingArguments, or "),
        ({"metric_for_best_model": "loss"}, "set eval_strategy='steps' or 'epoch'"),
    ],
)
def test_early_stopping(tmp_path, arguments, says):
    """The note says which arguments the callback needs."""
    rows = [{"input_ids": [1, 2], "labels": 1}] * 2
    keywords = {"eval_dataset": Dataset.from_list(rows), "callbacks": [EarlyStoppingCallback()]}

    assert note(tmp_path, rows, arguments=arguments, **keywords).startswith(says)


def accuracy_of_logits(prediction):
    """Return an accuracy, but forget that predictions are logits."""
    logits, labels = prediction
    return {"accuracy": float(logits == labels)}


@pytest.mark.parametrize(
    ("columns", "best", "says"),
    [
        ({"labels": 1}, None, "predictions of shape (4, 2) and labels of shape (4,); predictions"),
        ({}, "loss", "none of the columns ['labels'], only ['input_ids'], so an evaluation has no"),
    ],
)
def test_an_evaluation(tmp_path, columns, best, says):
    """The note says what a metric has got, and why there is no loss."""
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        eval_strategy="steps",
        metric_for_best_model=best,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    held_out = Dataset.from_list([{"input_ids": [1, 2]} | columns] * 4)
    trainer = MFTrainer(
        BertForSequenceClassification(BertConfig(**SIZES)),
        args,
        train_dataset=Dataset.from_list([{"input_ids": [1, 2], "labels": 1}] * 4),
        eval_dataset=held_out,
        compute_metrics=accuracy_of_logits,
    )
    with pytest.raises((TypeError, ValueError, KeyError)) as raised:
        trainer.train()

    assert len(raised.value.__notes__) == 1
    assert says in raised.value.__notes__[0]


MESSAGES = (
    "lists of messages here, because the prompts are messages, so the text of one is completion["
)
TEXTS = "plain strings here, because the prompts are texts, so a completion is its text itself"


class Stripped:
    """A reward for texts that is an object."""

    __name__ = "stripped"

    def __call__(self, completions, **_):
        """Return the number of letters of each completion."""
        return [float(len(text.strip())) for text in completions]


def contents(key, completions, **_):
    """Return 1 for each completion whose message has a content."""
    return [float(bool(one[0][key])) for one in completions]


contents_of = functools.update_wrapper(functools.partial(contents, "content"), contents)


def matching(**given):
    """Return 1 for each completion with a letter."""
    return [float(re.search("[a-z]", one) is not None) for one in given["completions"]]


def first_keys(completions, **_):
    """Return numbers of texts in lists."""
    return [float(len(one[0][0])) for one in completions]


def without_column(completions, **columns):
    """Use a column that the data do not have."""
    return [columns["answer"] for _ in completions]


def split(completions, terms, **_):
    """Take a column of lists for texts."""
    pairs = zip(completions, terms, strict=True)
    return [float(each.split()[0] in one[0]["content"]) for one, each in pairs]


def of_team(completions, team, **_):
    """Take a column for texts of which most are missing."""
    by_number = dict(enumerate([completions]))  # whose keys are no names
    assert by_number
    return [float(each in one) for one, each in zip(completions, team, strict=True)]


def unfinished(completions, **_):
    """Read behind the end of the completions."""
    return [completions[len(completions)]]


@pytest.mark.filterwarnings("ignore")  # of TRL
@pytest.mark.parametrize(
    ("reward", "is_of_messages", "says"),
    [
        (Stripped(), True, MESSAGES),
        (matching, True, MESSAGES),
        (first_keys, True, MESSAGES),
        (contents_of, False, TEXTS),
        (without_column, True, None),
        (split, True, '["content"]; the values of `terms` are lists, too'),
        (of_team, False, "`team` is None in some of these rows"),
        (unfinished, True, None),
        (unfinished, False, None),
    ],
)
def test_completions_of_another_form(tmp_path, reward, is_of_messages, says):
    """The note says what a reward function of TRL has got, if the error is about that."""
    prompts = ["a b", "c d"]
    if is_of_messages:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rows = Dataset.from_dict(
        {"prompt": prompts * 8, "terms": [["a", "b"]] * 16, "team": ["a", *[None] * 15]}
    )
    keywords = {"reward_funcs": reward, "train_dataset": rows, "eval_dataset": None}
    trainer = new_trainer("GRPO", tmp_path, MFTrainerMixin, extras=keywords)
    trainer.processing_class.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises((AttributeError, LookupError, TypeError)) as raised:
        trainer.train()
    notes = getattr(raised.value, "__notes__", [])

    assert len(notes) == (says is not None)
    assert says is None or says in notes[0]
