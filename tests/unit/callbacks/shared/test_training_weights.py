"""Decorated methods see the weights of the training."""

import torch

from mfwrap import ExponentialMovingAverage
from mfwrap.average.swap import training_weights
from mfwrap.callbacks.shared.training_weights import monitors_training


@monitors_training
class Reading:
    """Reads a weight in an event, and in methods with and without a decorator."""

    def __init__(self, weight):
        self.weight = weight

    def on_step_end(self):
        """Return the weight."""
        return self.weight.item()

    @training_weights()
    def marked(self, *, factor):
        """Return the weight times a factor."""
        return self.weight.item() * factor

    def plain(self):
        """Return the weight."""
        return self.weight.item()


def test_events_see_the_weights_of_the_training():
    """Events and decorated methods see the raw weight inside a swap; other methods the average."""
    weight = torch.zeros(())
    ema, reading = ExponentialMovingAverage([weight], 0.5), Reading(weight)
    weight += 1

    with ema.swap():
        assert (reading.on_step_end(), reading.marked(factor=3), reading.plain()) == (1, 3, 0)
    assert (reading.on_step_end(), reading.marked(factor=3), reading.plain()) == (1, 3, 1)
    assert Reading.on_step_end.__doc__ == "Return the weight."
