"""A `LoopStep` runs the updates of a hand-written loop without accelerate."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, StepConfig
from mfwrap.accelerate.loop_step import LoopStep
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.parameters import TrainedParameters
from support.training_state import assert_same_state, training_state

CPU = torch.device("cpu")
NAN = float("nan")


class Schedule:
    """A stub that records the number of applied updates whenever it is resolved."""

    def __init__(self, step: LoopStep) -> None:
        self.seen: list[list[int]] = []
        self._step = step

    def resolve(self) -> None:
        """Record the number of applied updates of each optimizer."""
        windows = self._step.windows.values()
        self.seen.append([int(w.update.counts.applied_updates) for w in windows])


class Training:
    """Linear networks, each with an optimizer. All optimizers share one step."""

    def __init__(
        self, *, scale_sense=1.0, num_networks: int = 1, ema: bool = False, **config
    ) -> None:
        torch.manual_seed(0)
        self.step = LoopStep(StepConfig(**config), LossScale(scale_sense, CPU))
        self.networks = [nn.Linear(2, 1) for _ in range(num_networks)]
        self.optimizers = [SGD(each.parameters(), lr=0.5) for each in self.networks]
        if ema:
            weights = [weight for each in self.networks for weight in each.parameters()]
            self.step.follow(ExponentialMovingAverage(weights))
        for network, optimizer in zip(self.networks, self.optimizers, strict=True):
            self.add(network, optimizer)

    def add(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Add a network's optimizer to the step."""
        named = dict(network.named_parameters())
        self.step.add(optimizer, TrainedParameters(named, optimizer, None))

    def loss(self, factor: float = 1.0):
        """Return the loss of the first network."""
        return (self.networks[0](torch.ones(3, 2)) * factor).square().mean()

    def update(self, factor: float = 1.0):
        """Run one update of the first network, and zero its gradients."""
        self.step.scaled(self.loss(factor)).backward()
        report = self.step.update(self.optimizers[0])
        self.optimizers[0].zero_grad()
        self.step.windows[self.optimizers[0]].restart()
        return report

    def state(self):
        """Return copies of weights, optimizer state and step state."""
        return training_state(self.networks[0], self.optimizers[0], self.step)


def test_an_update_is_torchs():
    """An SGD update is bitwise equal to torch's at any loss scale."""
    for scale in (1.0, 2.0**16):
        training = Training(scale_sense=scale)
        weight = training.networks[0].weight
        [gradient] = torch.autograd.grad(training.loss(), weight)
        expected = weight.detach() - 0.5 * gradient

        training.update()

        assert torch.equal(weight, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_loss_is_scaled_in_float32_or_better(dtype):
    """A float16 loss is scaled in float32, so a large scale does not overflow."""
    training = Training(scale_sense=2.0**17)

    scaled = training.step.scaled(torch.ones((), dtype=dtype))

    assert scaled == 2.0**17
    assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_at_scale_one_a_loss_is_itself():
    """A loss at scale 1 is returned as the same tensor."""
    loss = torch.ones(())

    assert Training().step.scaled(loss) is loss


def test_backward_begins_with_the_scale_only_where_it_fits():
    """A float32 scalar needs no multiplication; any other loss does, and scale 1 needs nothing."""
    training = Training(scale_sense=2.0**17)
    loss = torch.ones(())

    assert training.step.first_gradient(loss) == 2.0**17
    assert training.step.scaled(loss, multiplies=False) is loss
    others = [loss.half(), loss.bfloat16(), loss.double(), torch.ones(1), 1.0]
    assert [training.step.first_gradient(other) for other in others] == [None] * 5
    assert Training().step.first_gradient(loss) is None


def test_schedules_are_resolved_before_each_update():
    """The schedules are resolved before each update is applied."""
    training = Training()
    schedule = Schedule(training.step)
    training.step.add_schedule(schedule)

    for _ in range(2):
        training.update()
    training.step.flush()

    assert schedule.seen == [[0], [1], [2]]


def test_one_skip_too_many_still_resolves_schedules():
    """A flush that raises because of too many skips still resolves the schedules."""
    training = Training(max_consecutive_skips=1)
    schedule = Schedule(training.step)
    training.update(NAN)
    training.step.add_schedule(schedule)

    with pytest.raises(RuntimeError, match="1 updates in a row were skipped"):
        training.step.flush()

    assert schedule.seen == [[0]]


def test_each_optimizer_has_its_own_report_and_the_last_is_the_steps():
    """Each optimizer has its own report and counts, and the step returns the latest report."""
    training = Training(num_networks=2, max_consecutive_skips=None)
    training.update(NAN)
    first = training.step.last_report
    training.step.scaled(training.networks[1](torch.ones(1, 2)).sum()).backward()
    second = training.step.update(training.optimizers[1])

    windows = [training.step.windows[optimizer] for optimizer in training.optimizers]
    assert list(training.step.last_reports.values()) == [first, second]
    assert training.step.last_report is second
    assert [training.step.was_skipped(each) for each in training.optimizers] == [True, False]
    assert [int(window.update.counts.applied_updates) for window in windows] == [0, 1]


def test_named_losses_belong_to_their_update():
    """A report has the means of the losses of its own micro-batches, and of no other update."""
    training = Training()
    for value in (1.0, 3.0):
        training.step.report_losses({"mtp_loss": torch.tensor([value])})
    assert training.update().losses == {"mtp_loss": torch.tensor(2.0)}
    assert training.update().losses == {}
    training.step.report_losses({"mtp_loss": torch.tensor(5.0)})
    assert training.update().losses == {"mtp_loss": torch.tensor(5.0)}


def test_named_losses_of_an_evaluation_belong_to_no_update():
    """A method that computes the loss is called in evaluations, too."""
    training = Training()
    loss = torch.tensor(5.0, requires_grad=True)
    with torch.no_grad():
        training.step.report_losses({"mtp_loss": loss.double()})
    assert training.update().losses == {}
    with torch.no_grad():
        training.step.report_losses({"mtp_loss": loss})
    assert training.update().losses == {"mtp_loss": torch.tensor(5.0)}


def test_an_optimizer_that_is_not_known_has_skipped_nothing():
    """`was_skipped` returns False for an optimizer that was not added."""
    assert Training().step.was_skipped(SGD([nn.Parameter(torch.ones(()))])) is False


def test_adding_an_optimizer_again_replaces_what_it_updates():
    """Adding an optimizer again replaces its parameters and keeps its counts."""
    training = Training()
    training.update()
    window = training.step.windows[training.optimizers[0]]
    extra = nn.Parameter(torch.ones(()))
    training.optimizers[0].add_param_group({"params": [extra]})
    network = nn.ParameterDict(dict(training.networks[0].named_parameters()) | {"extra": extra})

    training.add(network, training.optimizers[0])
    training.step.scaled(training.loss() + extra).backward()
    training.step.update(training.optimizers[0])

    assert training.step.windows[training.optimizers[0]] is window
    assert extra == 0.5
    assert training.step.last_report.applied_updates == 2


def test_an_average_of_nothing_that_is_updated_is_refused():
    """`check_average` raises if no optimizer updates the averaged parameters."""
    training = Training(num_networks=0)
    training.step.follow(ExponentialMovingAverage(nn.Linear(1, 1)))
    training.step.check_average()
    network = nn.Linear(2, 1)
    training.add(network, SGD(network.parameters()))

    with pytest.raises(ValueError, match="`ema` must average parameters of a prepared optimizer"):
        training.step.check_average()


def test_a_cleared_step_has_forgotten_all():
    """`clear` removes optimizers, schedules and average, and keeps the loss scale."""
    training = Training(scale_sense=DynamicLossScaleUpdateCell(8.0, 2, 1), ema=True)
    training.step.add_schedule(Schedule(training.step))
    training.update()

    training.step.clear()

    assert not training.step.windows
    assert training.step.end_schedules() == []
    assert sorted(training.step.state_dict()) == ["loss_scale", "updates"]
    assert training.step.loss_scale.value == 16


def test_loading_gives_up_what_was_begun():
    """Gradients from before loading have no effect on the next update."""
    training = Training(scale_sense=8.0)
    state = training.step.state_dict()
    training.step.scaled(training.loss()).backward()
    training.step.windows[training.optimizers[0]].unscale()

    training.step.load_state_dict(state)
    training.networks[0].zero_grad()
    weight = training.networks[0].weight
    [gradient] = torch.autograd.grad(training.loss(), weight)
    expected = weight.detach() - 0.5 * gradient
    training.update()

    assert torch.equal(weight, expected)


def test_loading_drops_what_several_optimizers_have_gathered():
    """After loading, earlier overflows and pending updates of the average have no effect."""
    training = Training(
        scale_sense=DynamicLossScaleUpdateCell(8.0, 2, 100), num_networks=2, ema=True
    )
    first, second = training.networks
    inputs = torch.ones(1, 2)
    state = copy.deepcopy(training.step.state_dict())
    training.step.scaled(first(inputs).sum() * NAN + second(inputs).sum()).backward()
    training.step.update(training.optimizers[0])

    training.step.load_state_dict(state)
    for network in training.networks:
        network.zero_grad()
    training.step.scaled(second(inputs).sum()).backward()
    training.step.update(training.optimizers[1])

    assert training.step.loss_scale.value == 8
    assert training.step.state_dict()["ema"]["counters"]["num_calls"] == 0


STATES = {
    "no counts": (KeyError, lambda state: state.pop("updates")),
    "counts of another optimizer": (KeyError, lambda state: state["updates"].update({"1": {}})),
    "counts that are a number": (TypeError, lambda state: state.update(updates=1)),
    "no average": (KeyError, lambda state: state.pop("ema")),
    "no scale": (KeyError, lambda state: state["loss_scale"].pop("value")),
}


@pytest.mark.parametrize(("error", "change"), STATES.values(), ids=STATES)
def test_a_state_that_does_not_fit_changes_nothing(error, change):
    """Loading an invalid state raises an error and leaves the step unchanged."""
    donor, training = Training(scale_sense=8.0, ema=True), Training(scale_sense=2.0, ema=True)
    donor.update()
    state = donor.step.state_dict()
    change(state)
    before = training.state()

    with pytest.raises(error):
        training.step.load_state_dict(state)

    assert_same_state(before, training.state())
