"""Evidence of a step that went wrong."""

import math

import torch
from torch import nn

from mfwrap.callbacks.culprit.gathering import EvidenceGatherer, HostStep
from mfwrap.callbacks.culprit.judges.judges import Judges
from mfwrap.callbacks.culprit.judges.step import StepScores
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.culprit.replay.samples import SampleSearch
from mfwrap.callbacks.shared.step_values import StepNumbers


class Network(nn.Module):
    """Network that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, inputs):
        """Return the mean square of the output."""
        return self.linear(inputs).square().mean()


def gathered(
    *, is_first: bool = True, loss: float = 1.0, records: bool = True, warms_up: bool = False
):
    """Change a weight and a buffer by hand before the third step, and gather the evidence."""
    torch.manual_seed(0)
    network = Network()
    recorder = StepRecorder(network) if records else None
    judges = Judges(network, 10)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    if warms_up:
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)
    samples = None if recorder is None else SampleSearch(recorder)
    gatherer = EvidenceGatherer(network, judges, recorder, samples)
    for step in (1, 2, 3):
        if step == 3:
            network.linear.weight.data += 100
            network.mean.fill_(math.nan)
        judges.begin_step(step)
        network(torch.ones(1, 2)).backward()
        judgement = judges.end_step(step, torch.tensor(loss), None, None, optimizer)
        if recorder is not None:
            recorder.end_step()
    numbers = StepNumbers(
        step=3,
        loss=loss,
        overflow=False,
        global_norm=None,
        loss_scale=None,
        skipped=False,
        consecutive_skips=0,
    )
    scores = StepScores(*judgement.summary.tolist())
    step = HostStep(numbers, judgement, scores, weights_have_moved=False)
    return gatherer.gather("loss_spike", step, is_first=is_first)


def test_all_evidence_of_a_step():
    """Weights, buffers, the losses of micro-batches, and the loss of the step before, again."""
    found = gathered()
    [(then, again)] = found.earlier_losses

    assert found.changed == ("linear.weight",)
    assert [one.name for one in found.weights] == ["linear.weight"]
    assert found.buffers == ("mean",)
    assert (found.num_weights, len(found.micro_losses), found.factors) == (2, 1, (1.0,))
    assert again > 1000 * then
    assert found.search is not None


def test_a_loss_is_computed_again_only_where_it_says_something():
    """Not in a later step of an episode, for a loss that is not finite, or without a recorder."""
    later = gathered(is_first=False)
    assert (later.earlier_losses, later.search) == ((), None)
    assert gathered(loss=math.nan).earlier_losses == ()
    without = gathered(records=False)
    assert (without.earlier_losses, without.micro_losses, without.factors) == ((), (), ())


def test_the_rate_that_a_schedule_was_given():
    """It is known in a warm-up, in which the rate of the optimizer is another one."""
    assert gathered(warms_up=True).initial_rate == 0.5
    assert gathered().initial_rate is None
