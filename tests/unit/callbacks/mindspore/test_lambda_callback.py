"""A callback is built from functions."""

import pytest
from torch import nn

from mfwrap import Model
from mfwrap.callbacks import LambdaCallback
from support.model_runs import HOOKS, Notes, batches, classifier, sgd


def test_each_function_is_called_at_its_event():
    """Each of the twelve functions is called at its event, like the methods of a callback."""
    calls = []
    functions = {hook: lambda _, hook=hook: calls.append(hook) for hook in HOOKS}
    notes = Notes()
    network = classifier()
    model = Model(network, nn.CrossEntropyLoss(), sgd(network), metrics={"loss"})
    model.fit(2, batches(2), batches(1), callbacks=[LambdaCallback(**functions), notes])

    assert calls == notes.calls
    assert set(calls) == set(HOOKS)


def test_what_cannot_be_called_is_refused():
    """An argument that is not callable raises an error that names its event."""
    with pytest.raises(TypeError, match="`on_eval_end` must be callable, got 3 of type int"):
        LambdaCallback(on_eval_end=3)
