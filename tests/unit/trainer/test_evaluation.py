"""An evaluation on two ranks gives the numbers of one process."""

import math

import pytest
import torch
from torch import nn
from transformers import default_data_collator

from mfwrap.trainer import MFTrainer
from mfwrap.trainer.evaluation import _first
from support.ranks.evaluations import (
    BATCH,
    evaluate,
    evaluate_kind,
    evaluate_texts,
    expected_evaluation,
    language_model,
    rows,
    texts,
    token_losses,
)
from support.trainer_runs import new_trainer
from support.versions import COUNTS_SHIFTED, needs

NUMBERS = [1, BATCH - 1, BATCH, BATCH + 3, 2 * BATCH, 2 * BATCH + 3, 3 * BATCH + 3]
"""Numbers of rows: on two ranks, the last batch is whole, or one rank or both lack rows."""


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("split", [False, True], ids=["a batch each", "one batch"])
@pytest.mark.parametrize("with_metrics", [False, True], ids=["loss", "metrics"])
def test_two_ranks_give_the_numbers_of_one_process(two_ranks, number, split, with_metrics):
    """Rows that fill up the last batch count neither in the loss nor in the metrics."""
    loss, outputs = expected_evaluation(number)
    stock = False
    for found in two_ranks.run(evaluate, number, with_metrics, split, stock):
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        if with_metrics:
            assert found["outputs"] == pytest.approx(outputs, rel=1e-6, abs=1e-7)
            assert found["labels"] == pytest.approx([float(r["labels"]) for r in rows(number)])


def test_the_stock_trainer_counts_them(two_ranks):
    """With the stock Trainer the loss is another one, which this test would notice to change."""
    loss, _ = expected_evaluation(2 * BATCH + 3)
    with_metrics, split, stock = False, False, True
    for found in two_ranks.run(evaluate, 2 * BATCH + 3, with_metrics, split, stock):
        assert abs(found["loss"] - loss) > 0.1 * loss


class Distance(nn.Module):
    """A layer with a loss of data without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, return_loss=True):  # noqa: FBT002  (transformers' signature)
        """Return outputs, with their mean square as loss."""
        del return_loss  # its default tells the Trainer that there is a loss
        outputs = self.layer(x)[:, 0]
        return {"loss": outputs.square().mean(), "logits": outputs}


class Own(MFTrainer):
    """Evaluate batches in another way."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Return a loss that no method of MFTrainer has seen."""
        return torch.zeros(()), None, None


def trainer_of(folder, kind=MFTrainer, model=None, **extras):
    """Return a trainer whose losses are means over targets."""
    extras |= {"data_collator": default_data_collator, "eval_per_token_loss": True}
    return new_trainer(kind, folder, model=Distance() if model is None else model, extras=extras)


def test_data_without_targets(tmp_path):
    """They are refused if there is a loss, and predicted if there is none."""
    data = [{"x": row["x"]} for row in rows(4)]
    with pytest.raises(ValueError, match=r"`eval_per_token_loss` needs .*`labels`.*, got \['x'\]"):
        trainer_of(tmp_path, model=Distance()).evaluate(data)
    texts_alone = [{"input_ids": row["input_ids"]} for row in texts(4)]
    shown = trainer_of(tmp_path, model=language_model("model")).predict(texts_alone)
    assert len(shown.predictions) == 4


def test_a_prediction_step_of_the_users_own(tmp_path):
    """It is refused if it does not call that of MFTrainer, whose mean would lack its batches."""
    trainer = trainer_of(tmp_path, Own)
    with pytest.raises(
        ValueError, match=r"needs the method `prediction_step` of MFTrainer, got .*Own"
    ):
        trainer.evaluate(rows(4))


def test_the_argument(tmp_path):
    """`eval_per_token_loss` must be a bool."""
    with pytest.raises(TypeError, match="`eval_per_token_loss` must be a bool, got 1"):
        new_trainer(MFTrainer, tmp_path, extras={"eval_per_token_loss": 1})


def test_no_targets_at_all(tmp_path):
    """The mean over no targets is NaN, and no error."""
    found = evaluate_texts(0, "model", (2,), PER_TOKEN, {})
    assert found == pytest.approx([mean_over_targets("model", 2)], rel=1e-5)
    data = [row | {"labels": torch.full_like(row["labels"], -100)} for row in texts(4)]
    trainer = trainer_of(tmp_path, model=language_model("model"))
    assert math.isnan(trainer.evaluate(data)["eval_loss"])


def mean_over_targets(kind, number, smoothing=0.0):
    """Return the mean loss over all targets of the texts."""
    losses, targets = token_losses(kind, number, smoothing)
    return float(losses.sum() / targets.sum())


def mean_over_rows(kind, number):
    """Return the mean over the rows, each of which has the mean loss of its batch of 2 rows."""
    losses, targets = token_losses(kind, number)
    batches = zip(losses.split(2), targets.split(2), strict=True)
    means = [loss.sum() / count.sum() * len(loss) for loss, count in batches if count.sum()]
    return float(sum(means)) / number


PER_TOKEN = True
KINDS = ["model", "own loss", "own function"]


@COUNTS_SHIFTED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filters", [True, False])
def test_each_target_counts_the_same(kind, filters):
    """On one process, `eval_per_token_loss` gives the mean over the targets of each data set.

    The first batch has no targets, so its own mean is NaN.
    """
    settings = {"logging_nan_inf_filter": filters}
    found = evaluate_texts(0, kind, (5, 9), PER_TOKEN, settings)

    assert found == pytest.approx([mean_over_targets(kind, number) for number in (5, 9)], rel=1e-5)


@COUNTS_SHIFTED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("across", [True, False])
def test_each_target_counts_the_same_on_two_ranks(two_ranks, kind, across):
    """The mean over the targets is the same, also if a rank has no rows or no targets."""
    numbers = tuple(range(3, 10))
    expected = [mean_over_targets(kind, number) for number in numbers]
    settings = {"average_tokens_across_devices": across}
    for found in two_ranks.run(evaluate_texts, kind, numbers, PER_TOKEN, settings):
        assert found == pytest.approx(expected, rel=1e-5)


def test_logits_are_not_kept_if_only_the_loss_is_needed(tmp_path):
    """A batch then has no logits and labels, which would fill the memory."""
    trainer = trainer_of(tmp_path, model=language_model("model"))
    batch = default_data_collator(texts(3))
    loss, *others = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)

    assert float(loss) == pytest.approx(mean_over_targets("model", 3), rel=1e-5)
    assert others == [None, None]


@pytest.mark.parametrize("kind", ["model", "own loss"])
@pytest.mark.parametrize("across", [True, False])
def test_rows_with_different_numbers_of_targets(two_ranks, kind, across):
    """By default, two ranks give the mean over the rows that one process gives."""
    expected = [mean_over_rows(kind, 3)]
    assert evaluate_texts(0, kind, (3,), not PER_TOKEN, {}) == pytest.approx(expected, rel=1e-5)
    settings = {"average_tokens_across_devices": across}
    for found in two_ranks.run(evaluate_texts, kind, (3,), not PER_TOKEN, settings):
        assert found == pytest.approx(expected, rel=1e-5)


@COUNTS_SHIFTED
@pytest.mark.parametrize("on_ranks", [False, True])
def test_smoothed_labels(two_ranks, on_ranks):
    """With label smoothing, the loss is the mean of the smoothed losses of all targets."""
    settings = {"label_smoothing_factor": 0.2}
    arguments = "model", (7,), PER_TOKEN, settings
    results = (
        two_ranks.run(evaluate_texts, *arguments) if on_ranks else [evaluate_texts(0, *arguments)]
    )
    for found in results:
        assert found == pytest.approx([mean_over_targets("model", 7, 0.2)], rel=1e-5)


STOCK = True
AS_ONE_PROCESS = ["outputs", "counts", "nested", "scaled", "twice", "no targets"]
AS_STOCK = [
    "weights",
    "pixels",
    "positions",
    "pairs",
    "gathering",
    "gathering function",
    "over ranks",
]


LEAVES_OUT_NAN = needs("transformers", "5.23", "the Trainer leaves out a loss that is NaN")


@pytest.mark.parametrize("with_metrics", [False, True], ids=["loss", "metrics"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=LEAVES_OUT_NAN if kind == "no targets" else [])
        for kind in AS_ONE_PROCESS
    ],
)
def test_two_ranks_give_the_loss_of_one_process(two_ranks, kind, with_metrics):
    """So they do with several outputs of a row, nested batches and subclasses with other losses.

    A loss that is NaN is left out, as the Trainer of one process does.
    """
    for number in (13, 11, 6):
        expected = evaluate_kind(0, kind, number, with_metrics, STOCK)
        assert math.isfinite(expected)
        found = two_ranks.run(evaluate_kind, kind, number, with_metrics, not STOCK)
        assert found == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("kind", AS_STOCK)
def test_two_ranks_give_the_loss_of_the_stock_trainer(two_ranks, kind):
    """So they do where nobody knows which entries are of a row, or where the loss needs all ranks.

    A `compute_loss` or `compute_loss_func` of the user's own may gather rows, and relies on the
    number of all targets.
    """
    with_metrics = kind in {"gathering", "gathering function", "over ranks"}
    expected = two_ranks.run(evaluate_kind, kind, 13, with_metrics, STOCK)
    found = two_ranks.run(evaluate_kind, kind, 13, with_metrics, not STOCK)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "has_rows"),
    [
        ((3, 3, 5), torch.int64, False),  # may be three positions of each token of three rows
        ((3, 3, 5), torch.float32, True),
        ((3, 2, 5), torch.int64, True),
        ((4, 3, 5), torch.int64, False),
    ],
)
def test_tensors_of_three_dimensions(shape, dtype, has_rows):
    """Of three rows, the first two are known, unless integers may be positions of rows."""
    value = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    found = _first({"values": value}, own=2, dealt=3, labels=[])

    assert (found is not None) == has_rows
    assert not has_rows or torch.equal(found["values"], value[:2])


def test_a_loss_per_token_with_a_prediction_step_of_the_users_own(tmp_path):
    """It is refused, because the method may have changed the loss."""

    class Scaled(MFTrainer):
        def prediction_step(self, *args, **keywords):
            loss, *others = super().prediction_step(*args, **keywords)
            return loss * 100, *others

    trainer = trainer_of(tmp_path, Scaled, model=language_model("model"))
    with pytest.raises(ValueError, match="needs the method `prediction_step` of MFTrainer, got"):
        trainer.evaluate(texts(4))
