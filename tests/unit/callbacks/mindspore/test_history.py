"""Losses and metrics of each epoch are collected."""

import pytest
from torch import nn

from mfwrap import Model
from mfwrap.callbacks import History
from support.callback_runs import fit_with_values
from support.model_runs import batches, classifier, losses_by_hand, sgd


def test_the_last_loss_of_each_epoch():
    """The last loss of each epoch is kept; a second training starts empty."""
    network = classifier()
    history = History()
    model = Model(network, nn.CrossEntropyLoss(), sgd(network))
    model.train(3, batches(2), callbacks=history)
    reference = classifier()
    losses = losses_by_hand(reference, sgd(reference), batches(2), 3)

    assert history.epoch == {"epoch": [1, 2, 3]}
    expected = [float(loss) for loss in losses[1::2]]
    assert history.history == {"net_output": pytest.approx(expected, rel=1e-5)}
    model.train(1, batches(2), callbacks=history)
    assert history.epoch == {"epoch": [1]}
    assert len(history.history["net_output"]) == 1


def test_metrics_of_each_evaluation():
    """The metrics of each evaluation are kept with the losses."""
    history = History()
    fit_with_values([3.0, 1.0], history, name="value")

    assert history.history["value"] == [3.0, 1.0]
    assert len(history.history["net_output"]) == 2
