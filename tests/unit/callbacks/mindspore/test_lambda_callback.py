"""A callback made of functions."""

import pytest
from torch import nn

from mfwrap import Model
from mfwrap.callbacks import LambdaCallback
from support.model_runs import HOOKS, Notes, batches, classifier, sgd


def test_each_function_is_called_at_its_event():
    """All twelve, as a callback with methods hears them."""
    calls = []
    functions = {hook: lambda _, hook=hook: calls.append(hook) for hook in HOOKS}
    notes = Notes()
    network = classifier()
    model = Model(network, nn.CrossEntropyLoss(), sgd(network), metrics={"loss"})
    model.fit(2, batches(2), batches(1), callbacks=[LambdaCallback(**functions), notes])

    assert calls == notes.calls
    assert set(calls) == set(HOOKS)


def test_what_cannot_be_called_is_refused():
    """By the name of its event."""
    with pytest.raises(TypeError, match="`on_eval_end` must be callable or None, got int"):
        LambdaCallback(on_eval_end=3)
