"""A model has the averages during an evaluation, and its raw weights at all other times."""

import copy
import pickle

import torch
from torch import nn
from transformers import TrainerControl

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks.average.evaluated_averages import EvaluatedAverages

ONE, TWO = {"eval_runtime": 1.0, "eval_loss": 1.0}, {"eval_two_runtime": 1.0}


def held(*, is_due=False):
    """Return a network whose raw weight 1 is replaced by the average 0.5, at step 4."""
    network = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(network.weight)
    ema = ExponentialMovingAverage(network, 0.5)
    nn.init.ones_(network.weight)
    ema.update()
    averages = EvaluatedAverages()
    averages.hold(ema, network, 4, TrainerControl(should_evaluate=is_due))
    assert network.weight.item() == 0.5
    return network, averages


def test_the_only_dataset():
    """After the evaluation of the only data set, the raw weights are restored."""
    network, averages = held()

    assert averages.evaluated(ONE, 4)
    assert network.weight.item() == 1.0


def test_one_dataset_of_several():
    """After the evaluation of one of several data sets, the averages stay until `end`."""
    network, averages = held()

    assert averages.evaluated(TWO, 4)
    assert network.weight.item() == 0.5
    assert averages.evaluated(TWO, 4)
    averages.end()
    assert network.weight.item() == 1.0


def test_metrics_without_a_time():
    """Metrics without a run time count as the metrics of the only data set."""
    for metrics in (None, {}, {"loss": 1.0}):
        network, averages = held()

        assert averages.evaluated(metrics, 4)
        assert network.weight.item() == 1.0


def test_a_metric_named_like_a_time():
    """A user's metric whose name ends in ``_runtime`` does not count as a second data set."""
    network, averages = held()

    averages.evaluated(ONE | {"eval_generation_runtime": 1.0}, 4)

    assert network.weight.item() == 1.0


def test_the_state_after_the_first_dataset():
    """After the evaluation of the first data set, ``state_dict`` restores the raw weights."""
    network, averages = held()
    averages.evaluated(TWO, 4)

    assert network.state_dict()["weight"].item() == 1.0
    assert network.weight.item() == 1.0
    assert not averages.evaluated(TWO, 4)
    averages.end()
    assert averages.evaluated(TWO, 4)


def test_the_state_within_the_first_dataset():
    """During the evaluation of the first data set, ``state_dict`` returns the averages."""
    network, averages = held(is_due=True)

    assert network.state_dict()["weight"].item() == 0.5
    averages.end()
    assert network.state_dict()["weight"].item() == 1.0


def test_a_state_that_is_loaded():
    """A state that is loaded during an evaluation is not overwritten afterwards."""
    for is_due in (True, False):
        network, averages = held(is_due=is_due)
        network.load_state_dict({"weight": torch.full((1, 1), 7.0)})
        averages.end()

        assert network.weight.item() == 7.0


def test_hooks_of_others():
    """Hooks of the user still run, and `end` removes the hooks that `hold` has added."""
    network, averages = held()
    averages.end()
    ran = []
    ema = ExponentialMovingAverage(network)
    network.register_state_dict_pre_hook(lambda *_: ran.append("first"))
    averages.hold(ema, network, 5, TrainerControl())
    network.register_state_dict_pre_hook(lambda *_: ran.append("last"))

    network.state_dict()
    averages.end()

    assert ran == ["first", "last"]
    assert len(network._state_dict_pre_hooks) == 2
    assert not network._load_state_dict_pre_hooks
    copy.deepcopy(network)


def test_an_evaluation_of_another_step():
    """`evaluated` returns True if no averages were held for the evaluation."""
    _, averages = held()
    averages.end()

    assert averages.evaluated(TWO, 4)


def test_held_anew():
    """Holding new averages restores the raw weights first."""
    network, averages = held()
    ema = ExponentialMovingAverage([torch.zeros(1)])
    averages.hold(ema, network, 5, TrainerControl())

    assert network.weight.item() == 1.0


def test_a_copy_during_an_evaluation_is_a_stock_network():
    """It holds the averages, can be pickled, and its ``state_dict`` leaves the original alone."""
    network, averages = held()
    copies = copy.deepcopy(network), pickle.loads(pickle.dumps(network))  # noqa: S301  (our bytes)
    for made in copies:
        assert made.state_dict()["weight"].item() == 0.5
        made.load_state_dict(made.state_dict())
        assert network.weight.item() == 0.5
    averages.end()
    assert network.weight.item() == 1.0
