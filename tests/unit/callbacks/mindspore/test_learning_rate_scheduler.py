"""Learning rates are computed from the last rates and the step."""

import pytest
import torch
from torch import nn

from mfwrap import MFTrainOneStepCell, Model, WithLossCell
from mfwrap.callbacks import LearningRateScheduler
from support.model_runs import batches, classifier


@pytest.mark.parametrize("in_cell", [False, True])
def test_each_group_has_its_own_rate(in_cell):
    """Each group's rate is computed from its last rate; a rate in a tensor changes in place."""
    network = classifier()
    tensor = torch.tensor(8.0)
    groups = [
        {"params": network[0].parameters(), "lr": 16.0},
        {"params": network[2].parameters(), "lr": tensor},
    ]
    optimizer = torch.optim.AdamW(groups, fused=True)
    loss = nn.CrossEntropyLoss()
    model = (
        Model(MFTrainOneStepCell(WithLossCell(network, loss), optimizer))
        if in_cell
        else Model(network, loss, optimizer)
    )
    steps = []

    def halved(rate, step):
        steps.append(step)
        return rate / 2

    model.train(2, batches(2), callbacks=LearningRateScheduler(halved))

    assert [float(group["lr"]) for group in optimizer.param_groups] == [1.0, 0.5]
    assert optimizer.param_groups[1]["lr"] is tensor
    assert steps == [1, 1, 2, 2, 3, 3, 4, 4]


def test_what_cannot_be_called_is_refused():
    """An argument that is not callable raises an error."""
    with pytest.raises(TypeError, match=r"`learning_rate_function` must be callable, got 0\.1"):
        LearningRateScheduler(0.1)
