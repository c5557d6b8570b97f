"""Averages are in a model while it is evaluated, and not when it is saved, loaded or trained."""

import copy

import torch
from torch import nn
from transformers import TrainerControl

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks.average.files import EvaluatedAverages

ONE, TWO = {"eval_runtime": 1.0, "eval_loss": 1.0}, {"eval_two_runtime": 1.0}


def held(*, is_due=False):
    """Return a network whose raw weight is 1 and its average 0.5, held for step 4."""
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
    """Its metrics have no name in them: the evaluation is over."""
    network, averages = held()

    assert averages.evaluated(ONE, 4)
    assert network.weight.item() == 1.0


def test_one_dataset_of_several():
    """The averages stay for the next one, until the end."""
    network, averages = held()

    assert averages.evaluated(TWO, 4)
    assert network.weight.item() == 0.5
    assert averages.evaluated(TWO, 4)
    averages.end()
    assert network.weight.item() == 1.0


def test_metrics_without_a_time():
    """Of a loop that is no Trainer's, one evaluation is all."""
    for metrics in (None, {}, {"loss": 1.0}):
        network, averages = held()

        assert averages.evaluated(metrics, 4)
        assert network.weight.item() == 1.0


def test_a_metric_named_like_a_time():
    """A Trainer's own entry counts, whatever a user's metrics are called."""
    network, averages = held()

    averages.evaluated(ONE | {"eval_generation_runtime": 1.0}, 4)

    assert network.weight.item() == 1.0


def test_the_state_after_the_first_dataset():
    """It is raw, and the weights are raw from then on."""
    network, averages = held()
    averages.evaluated(TWO, 4)

    assert network.state_dict()["weight"].item() == 1.0
    assert network.weight.item() == 1.0
    assert not averages.evaluated(TWO, 4)
    averages.end()
    assert averages.evaluated(TWO, 4)


def test_the_state_within_the_first_dataset():
    """While the evaluation is still due, who asks for the state gets averages."""
    network, averages = held(is_due=True)

    assert network.state_dict()["weight"].item() == 0.5
    averages.end()
    assert network.state_dict()["weight"].item() == 1.0


def test_a_state_that_is_loaded():
    """It stays, whether or not the evaluation is over."""
    for is_due in (True, False):
        network, averages = held(is_due=is_due)
        network.load_state_dict({"weight": torch.full((1, 1), 7.0)})
        averages.end()

        assert network.weight.item() == 7.0


def test_hooks_of_others():
    """Theirs run as well, before and after, and ours are gone at the end."""
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
    """One that nobody has announced is not ours to judge."""
    _, averages = held()
    averages.end()

    assert averages.evaluated(TWO, 4)


def test_held_anew():
    """Averages that are still held from before are no raw weights."""
    network, averages = held()
    ema = ExponentialMovingAverage([torch.zeros(1)])
    averages.hold(ema, network, 5, TrainerControl())

    assert network.weight.item() == 1.0
