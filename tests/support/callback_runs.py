"""Train a model whose evaluations return scripted values."""

from torch import nn

from mfwrap import Model
from support.model_runs import ScriptedMetric, batches, classifier, sgd

__all__ = ["fit_with_values"]


def fit_with_values(values, callbacks, *, name="eval_loss", optimizer=None, network=None):
    """Fit a small network; the evaluation after each epoch returns the next item of `values`."""
    network = classifier() if network is None else network
    optimizer = sgd(network) if optimizer is None else optimizer
    model = Model(
        network, nn.CrossEntropyLoss(), optimizer, metrics={name: ScriptedMetric(*values)}
    )
    model.fit(len(values), batches(1), batches(1), callbacks=callbacks)
    return network
