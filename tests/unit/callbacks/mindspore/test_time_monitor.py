"""Times of epochs are measured, with a clock that the test sets."""

import pytest
from torch import nn

from mfwrap import Model
from mfwrap.callbacks import LambdaCallback, TimeMonitor
from support.model_runs import batches, classifier, sgd


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_seconds(self, seconds):
        """Return a hook that advances the clock by `seconds`."""

        def hook(_):
            self.now += seconds

        return hook


def lines(capsys, *settings, **keywords):
    """Return the lines printed in an epoch of two training steps and one evaluation step."""
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
    """The evaluation has a line of its own, and the epoch's time includes the evaluation."""
    assert lines(capsys) == [
        "Eval epoch time: 2000.000 ms, per step time: 2000.000 ms",
        "Train epoch time: 5250.000 ms, per step time: 2625.000 ms",
    ]


def test_times_of_data_and_another_number_of_steps(capsys):
    """The time between two steps counts as loading time."""
    assert lines(capsys, 4, data_time=True) == [
        "Eval epoch time: 2000.000 ms, per step time: 500.000 ms (data time: 0.000 ms)",
        "Train epoch time: 5250.000 ms, per step time: 1312.500 ms (data time: 187.500 ms)",
    ]


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [((0,), ValueError, "data_size"), ((None, 1), TypeError, "data_time")],
)
def test_bad_arguments_are_refused_by_name(settings, error, name):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=f"`{name}` must be"):
        TimeMonitor(*settings)
