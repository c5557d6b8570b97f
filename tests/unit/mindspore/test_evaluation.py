"""An evaluation computes metrics over all batches and restores the modes of the network."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from mfwrap.callbacks import Callback
from mfwrap.mindspore.evaluation import Evaluator, checked_indexes, evaluating
from mfwrap.mindspore.train_network import build_train_network
from support.model_runs import Notes, batches, classifier

LOSS = nn.CrossEntropyLoss()


def evaluator(**settings) -> Evaluator:
    """Return the evaluator of an untrained classifier."""
    accelerator = Accelerator(cpu=True)
    trained = build_train_network(
        classifier(),
        None,
        LOSS,
        amp_level="O0",
        loss_scale_manager=None,
        lr_scheduler=None,
        accelerator=accelerator,
    )
    defaults = {"metrics": {"accuracy"}, "eval_network": None, "eval_indexes": None}
    return Evaluator(trained, accelerator=accelerator, **{"loss_fn": LOSS, **defaults, **settings})


def test_metrics_are_those_of_torch():
    """An evaluation returns the requested metrics, and results that also have the mean loss."""
    evaluated = evaluator()
    data = batches(3)
    network = classifier()
    with torch.no_grad():
        scores = torch.cat([network(inputs) for inputs, _ in data])
    labels = torch.cat([label for _, label in data])

    metrics, results = evaluated.run(evaluated.batches(data, sink_mode=False), [], {})

    accuracy = (scores.argmax(dim=1) == labels).double().mean().item()
    assert metrics == {"accuracy": pytest.approx(accuracy)}
    assert results.keys() == {"accuracy", "eval_loss"}
    assert results["eval_loss"] == pytest.approx(LOSS(scores, labels).item(), rel=1e-6)


def test_an_evaluation_can_be_repeated():
    """Metrics are reset before each evaluation."""
    evaluated = evaluator()
    data = evaluated.batches(batches(2), sink_mode=False)

    assert evaluated.run(data, [], {}) == evaluated.run(data, [], {})


def test_a_callback_stops_an_evaluation_and_gets_facts():
    """A stop ends the evaluation after the current batch; callbacks get the caller's parameters."""

    class Stops(Callback):
        def on_eval_step_end(self, run_context):
            run_context.request_stop()

    notes = Notes("mode", "cur_step_num", "batch_num", "of_the_caller")
    evaluated = evaluator()
    data = evaluated.batches(batches(3), sink_mode=False)
    evaluated.run(data, [Stops(), notes], {"of_the_caller": "here"})

    assert notes.calls.count("on_eval_step_end") == 1
    assert notes.told[-1] == ("eval", 1, 3, "here")


def test_modes_and_gradients_are_restored():
    """After an evaluation, each module has its earlier mode, and gradients are enabled."""
    network = nn.Sequential(nn.Dropout(), nn.Linear(1, 1))
    network.train()
    network[1].eval()

    with evaluating(network):
        assert not any(module.training for module in network.modules())
        assert not torch.is_grad_enabled()

    assert [module.training for module in network.modules()] == [True, True, False]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("indexes", "network", "expected"),
    [
        (None, None, (0, 1, 2)),
        (None, nn.Identity(), None),
        ([2, 1, 0], nn.Identity(), (2, 1, 0)),
    ],
    ids=["loss function", "all outputs", "given"],
)
def test_positions_of_loss_output_and_label(indexes, network, expected):
    """Without `eval_indexes`, an `eval_network` passes all its outputs to each metric.

    A network with a loss function passes loss, output and label.
    """
    assert checked_indexes(indexes, network) == expected


@pytest.mark.parametrize(
    ("indexes", "network", "error", "message"),
    [
        ([0, 1.5, 2], nn.Identity(), TypeError, r"`eval_indexes` must be ints, got \[0, 1.5, 2\]"),
        ([0, True, 2], nn.Identity(), TypeError, "`eval_indexes` must be ints"),
        ([0, 1, 2], None, ValueError, "`eval_indexes` needs `eval_network`"),
        ([0, 1], nn.Identity(), ValueError, "loss, output and label"),
        ([0, 1, -1], nn.Identity(), ValueError, "three ints >= 0"),
        (None, 3, TypeError, "`eval_network` must be a torch.nn.Module or None, got int"),
    ],
)
def test_wrong_indexes_are_refused(indexes, network, error, message):
    """The error names the argument and its value."""
    with pytest.raises(error, match=message):
        checked_indexes(indexes, network)
