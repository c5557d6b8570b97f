"""A non-finite weight of a model beside the network, such as a teacher, is named."""

import math

import torch
from torch import nn
from torch.nn import functional
from transformers import TrainerCallback, TrainingArguments

from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.callbacks.culprit.replay.other_models import bad_weight_of_others
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.trainer import MFTrainer
from support.spoilt.blocks import records_of

ROWS = [{"inputs": torch.ones(2) * n, "labels": n % 2} for n in range(8)]


class Network(nn.Module):
    """A network that holds other models where torch does not see them."""

    def __init__(self, teacher=None):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.parts = [self.layer]
        self.teachers = {"good": teacher}

    def forward(self, inputs, labels=None):
        logits = self.layer(inputs)
        if labels is None:
            return logits
        theirs = self.teachers["good"](inputs)
        return {"loss": functional.cross_entropy(logits, labels) + (logits - theirs).abs().mean()}


class Distilling(MFTrainer):
    """Computes the loss itself, from two terms that it reports."""

    teacher = None

    def compute_loss(self, model, inputs, return_outputs=None, **_):
        logits = model(inputs["inputs"])
        with torch.no_grad():
            theirs = logits.detach() if self.teacher is None else self.teacher(inputs["inputs"])
        ce = functional.cross_entropy(logits, inputs["labels"])
        kl = (logits - theirs).square().mean()
        self.attached.report_losses({"ce": ce, "kl": kl})
        return ce + kl


def spoilt(layer):
    """Return a layer whose bias is not a number."""
    nn.init.constant_(layer.bias, math.nan)
    return layer


def test_where_models_are_found():
    """In lists and dictionaries of the network, and in attributes of what holds it."""
    bad, good = nn.Sequential(nn.ReLU(), spoilt(nn.Linear(2, 2))), nn.Linear(2, 2)
    recorder = StepRecorder(Network(teacher=good))
    assert bad_weight_of_others(recorder) is None

    recorder.network.inner = Network()
    recorder.network.inner.helpers = {"old": [good, bad]}
    assert bad_weight_of_others(recorder) == "inner.helpers.old.1.1.bias"
    del recorder.network.inner

    class Holder:
        def __init__(self):
            self.model = nn.Sequential(recorder.network)
            self.ref_model = bad

    recorder.holder = Holder()
    assert bad_weight_of_others(recorder) == "ref_model.1.bias"


def test_parts_of_the_network_are_no_others():
    """What the network holds a second time, and what wraps it, is not searched."""
    network = Network()
    spoilt(network.layer)
    recorder = StepRecorder(network)
    recorder.holder = type("Holder", (), {})()
    recorder.holder.model = nn.DataParallel(network)

    assert bad_weight_of_others(recorder) is None


class Break(TrainerCallback):
    """Spoils the teacher before step 4."""

    def __init__(self, teacher):
        self.teacher = teacher

    def on_step_begin(self, args, state, *_, **__):
        if state.global_step == 3:
            spoilt(self.teacher)


def train(kind, network, teacher, folder, rows=ROWS):
    """Train four steps, and return the records of the anomalies."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        train_sampling_strategy="sequential",
    )
    monitor = TrainingStateMonitor(folder=folder, replay=True)
    callbacks = [monitor, Break(teacher)] if isinstance(teacher, nn.Linear) else [monitor]
    trainer = kind(network, arguments, train_dataset=rows, callbacks=callbacks)
    if kind is Distilling:
        trainer.teacher = teacher
    trainer.train()
    return records_of(folder)


def test_a_teacher_of_the_trainer(tmp_path):
    """The loss is computed outside of the network; the term that it has spoilt is named, too."""
    (record,) = train(Distilling, Network(), nn.Linear(2, 2), tmp_path)

    assert (record["step"], record["cause"], record["where"]) == (4, "loss", "other_weight")
    assert record["name"] == "teacher.bias"
    assert "micro_batch" not in record
    assert "; of the terms of the step's loss, kl is not finite (ce " in record["explanation"]
    assert "the file that this model was loaded from" in record["suggestion"]


def test_a_teacher_in_a_dictionary_of_the_network(tmp_path):
    """The network computes the loss, and a replay finds that its own modules are finite."""
    teacher = nn.Linear(2, 2)
    (record,) = train(MFTrainer, Network(teacher), teacher, tmp_path)

    assert (record["step"], record["cause"]) == (4, "loss")
    assert (record["where"], record["name"]) == ("other_weight", "teachers.good.bias")


def test_a_loss_whose_other_models_are_finite(tmp_path):
    """Targets that are all ignored are named, where the loss is computed outside, too."""
    rows = [dict(row, labels=row["labels"] if n < 6 else -100) for n, row in enumerate(ROWS)]
    (record,) = train(Distilling, Network(), None, tmp_path, rows)

    assert (record["cause"], record["where"], record["name"]) == ("data", "targets", "labels")
    assert sorted(row["index"] for row in record["samples"]) == [6, 7]


class Table(nn.Module):
    """A teacher with an answer for each input, of which one is not a number."""

    def __init__(self, bad):
        super().__init__()
        self.answers = nn.Embedding(8, 2)
        nn.init.constant_(self.answers.weight[bad], math.nan)

    def forward(self, inputs):
        return self.answers(inputs[:, 0].long())


def test_a_teacher_that_is_wrong_about_one_row(tmp_path):
    """The weight is the cause, and the row that it has reached is named."""
    (record,) = train(Distilling, Network(), Table(5), tmp_path)

    assert (record["step"], record["cause"]) == (3, "loss")
    assert record["name"] == "teacher.answers.weight"
    assert [row["index"] for row in record["samples"]] == [5]


class MeanOfRows(MFTrainer):
    """Computes the mean of the rows' means over their targets."""

    def compute_loss(self, model, inputs, return_outputs=None, **_):
        logits = model(inputs["inputs"])[:, None, :].expand(-1, 3, -1)
        labels = inputs["labels"]
        losses = functional.cross_entropy(logits.mT, labels, reduction="none")
        return (losses.sum(1) / (labels != -100).sum(1)).mean()


def test_a_row_without_targets(tmp_path):
    """A mean over none of its tokens is not finite: the row is the cause, and not the code."""
    rows = [dict(row, labels=torch.tensor([0, 1, -100])) for row in ROWS]
    rows[5]["labels"] = torch.tensor([-100] * 3)
    (record,) = train(MeanOfRows, Network(), None, tmp_path, rows)

    assert (record["step"], record["cause"]) == (3, "data")
    assert record["explanation"] == "a row without targets made the loss non-finite"
    assert "allow more tokens" in record["suggestion"]
    assert [row["index"] for row in record["samples"]] == [5]
