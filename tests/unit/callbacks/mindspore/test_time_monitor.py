"""Times of epochs, by a clock that the test sets."""

import pytest
from torch import nn

from mfwrap import Model
from mfwrap.callbacks import LambdaCallback, TimeMonitor
from support.model_runs import batches, classifier, sgd


class Clock:
    """Moves when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_seconds(self, seconds):
        """Return a hook in which time passes."""

        def hook(_):
            self.now += seconds

        return hook


def lines(capsys, *settings, **keywords):
    """Return what is printed of an epoch of two steps and its evaluation of one."""
    clock = Clock()
    monitor = TimeMonitor(*settings, clock=clock, **keywords)
    passing = LambdaCallback(
        on_train_epoch_begin=clock.pass_seconds(0.25),
        on_train_step_begin=clock.pass_seconds(1.0),
        on_train_step_end=clock.pass_seconds(0.5),
        on_eval_step_begin=clock.pass_seconds(2.0),
    )
    network = classifier()
    model = Model(network, nn.CrossEntropyLoss(), sgd(network), metrics={"loss"})
    model.fit(1, batches(2), batches(1), callbacks=[monitor, passing])
    return capsys.readouterr().out.splitlines()


def test_times_of_an_epoch(capsys):
    """The evaluation is part of its epoch, as in MindSpore, and printed by itself."""
    assert lines(capsys) == [
        "Eval epoch time: 2000.000 ms, per step time: 2000.000 ms",
        "Train epoch time: 5250.000 ms, per step time: 2625.000 ms",
    ]


def test_times_of_data_and_another_number_of_steps(capsys):
    """The time before a step's begin is that of its data."""
    assert lines(capsys, 4, data_time=True) == [
        "Eval epoch time: 2000.000 ms, per step time: 500.000 ms (data time: 0.000 ms)",
        "Train epoch time: 5250.000 ms, per step time: 1312.500 ms (data time: 187.500 ms)",
    ]


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [((0,), ValueError, "data_size"), ((None, 1), TypeError, "data_time")],
)
def test_bad_arguments_are_refused_by_name(settings, error, name):
    """At construction."""
    with pytest.raises(error, match=f"`{name}` must be"):
        TimeMonitor(*settings)
