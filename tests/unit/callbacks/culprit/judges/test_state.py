"""Changes of weights, optimizer state and buffers that no update explains."""

import math

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.judges.state import LIMIT, StateJudge
from support.host_reads import HostReads

NAN, INF = math.nan, math.inf


class Training:
    """A small training whose state is sampled every ten steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        nn.init.zeros_(self.network[0].bias)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), 1e-2)
        self.judge = StateJudge(self.network)
        self.step = 0

    def run(self, num_steps: int) -> list[list[float]]:
        """Train on, and return the highest score and the number of bad tensors of each sample."""
        found = []
        for _ in range(num_steps):
            self.step += 1
            loss = (self.network(torch.randn(16, 8)) - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.step % 10 == 0:
                sample = self.judge.sample(self.step, self.optimizer)
                found.append(sample.tolist())
        return found


def test_a_healthy_training_has_no_anomaly():
    """Weights, biases that began at zero, moments and statistics change as they should."""
    found = Training().run(300)
    assert max(highest for highest, _ in found[1:]) < LIMIT
    assert not any(num_bad for _, num_bad in found)


@pytest.mark.parametrize("kind", ["weight", "exp_avg", "exp_avg_sq", "buffer"])
def test_a_tensor_that_changes_by_itself_is_named(kind):
    """The tensor is named with both norms; a weight or a buffer has a high score."""
    training = Training()
    training.run(50)
    network, state = training.network, training.optimizer.state
    tensor, name = {
        "weight": (network[2].weight.data, "2.weight"),
        "buffer": (network[1].running_var, "1.running_var"),
    }.get(kind, (state[network[0].weight].get(kind), "0.weight"))
    before = tensor.norm().item()
    tensor[(0,) * tensor.dim()] = 1e6
    (found,) = training.judge.risen(51, training.optimizer)
    highest, _ = training.judge.sample(51, training.optimizer).tolist()

    assert (found.kind, found.name) == (kind, name)
    assert found.norm_before == pytest.approx(before)
    assert found.norm == pytest.approx(1e6, rel=1e-3)
    # Moments may rise with the gradients, so they are named, but are no anomaly of their own.
    assert (highest > LIMIT) == (kind in {"weight", "buffer"})


def test_a_large_finite_weight_has_a_finite_norm():
    """If squares of finite elements overflow in float32, the norm is that of float64."""
    training = Training()
    training.run(20)
    weight = training.network[2].weight.data
    weight *= 1e25
    assert weight.isfinite().all()
    assert weight.norm().isinf()
    (found,) = training.judge.risen(21, training.optimizer)

    assert found.norm == pytest.approx(weight.double().norm().item(), rel=1e-12)
    assert found.rise == pytest.approx(1e25, rel=1)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_non_finite_weight_has_no_finite_norm(value):
    """A NaN or an infinity among the elements makes the norm non-finite."""
    training = Training()
    training.run(20)
    training.network[2].weight.data[0, 0] = value
    (found,) = training.judge.risen(21, training.optimizer)

    assert str(found.norm) == str(value)
    assert found.rise == INF


def test_second_moments_that_have_fallen_are_named():
    """They cannot fall so fast by themselves. First moments may."""
    training = Training()
    training.run(50)
    state = training.optimizer.state[training.network[0].weight]
    state["exp_avg_sq"] *= 1e-8
    state["exp_avg"] *= 1e-8
    (found,) = training.judge.risen(51, training.optimizer)
    assert (found.kind, found.name) == ("exp_avg_sq", "0.weight")
    assert found.rise < 1e-7


@pytest.mark.parametrize("value", [NAN, INF])
def test_what_becomes_non_finite_is_counted_once(value):
    """A weight that has become non-finite has the highest rise."""
    training = Training()
    training.run(20)
    training.network[0].weight.data[0, 0] = value
    found = training.judge.risen(21, training.optimizer)
    counts = [training.judge.sample(21 + n, None)[1].item() for n in range(2)]

    assert [(one.name, one.rise) for one in found] == [("0.weight", INF)]
    assert counts == [1, 0]


def test_a_rise_by_thousands_is_found_although_a_buffer_varies():
    """Early in a training the norm of a running variance may double from sample to sample."""
    training = Training()
    variance = training.network[1].running_var
    for size in (1.0, 2.0, 4.0, 3.0, 5.0):
        variance.fill_(size)
        highest, _ = training.judge.sample(0, None).tolist()
        assert not highest > LIMIT
    variance.fill_(30_000.0)
    highest, _ = training.judge.sample(0, None).tolist()
    assert highest > LIMIT


@pytest.mark.parametrize(("step", "is_found"), [(9, False), (59, True)])
def test_statistics_that_have_not_settled(step, is_found):
    """After the first batches, running statistics grow up to tenfold from what they began with."""
    training = Training()
    mean = training.network[1].running_mean
    for each in (step - 3, step - 2, step - 1, step):
        mean.fill_(1.0)
        training.judge.sample(each, None)
    mean.fill_(8.0)

    assert bool(training.judge.risen(step + 1)) is is_found
    mean.fill_(800.0)
    assert training.judge.risen(step + 2)


def test_a_weight_is_compared_with_its_last_finite_norm():
    """The first update of a run may ruin the weights, before their state is looked at again."""
    training = Training()
    training.network[0].weight.data[0, 0] = NAN
    training.judge.look(1, None)
    (found,) = training.judge.risen(2, None)
    assert (found.name, found.rise) == ("0.weight", INF)


@pytest.mark.parametrize(("travelled", "is_driven"), [(100.0, True), (10.0, False)])
def test_growth_is_compared_with_the_updates_of_the_weight(travelled, is_driven):
    """A growth of the root mean square by 99 needs updates of about this length."""
    training = Training()
    weight = training.network[2].weight.data
    weight *= 99 / weight.square().mean().sqrt()
    found = training.judge.risen(1, None)
    names = training.judge.driven(found, {"2.weight": travelled, "0.weight": 0.0})
    assert names == (("2.weight",) if is_driven else ())
    weight[0, 0] = NAN
    assert training.judge.driven(training.judge.risen(1, None), {"2.weight": 1e9}) == ()


def test_a_mask_may_hold_infinities():
    """A buffer that holds infinities on purpose is no anomaly."""
    network = nn.Linear(2, 2)
    network.register_buffer("mask", torch.full((2, 2), -INF))
    judge = StateJudge(network)
    assert judge.sample(10, None)[1].item() == 0
    assert judge.risen(11) == []


def test_a_change_in_the_step_of_a_sample_is_found():
    """The norms are compared with a sample from before the step, not from after it."""
    training = Training()
    training.run(20)
    training.network[0].weight.data[0, 0] = 1e6
    training.judge.sample(21, training.optimizer)
    assert [one.name for one in training.judge.risen(21, None)] == ["0.weight"]


def test_the_worst_comes_first_and_biases_are_judged_by_the_size_of_weights():
    """A bias that began at zero is named only if it grows far beyond the size of the weights."""
    network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.zeros_(network[0].bias)
    judge = StateJudge(network)
    with torch.no_grad():
        network[0].bias.fill_(0.2)
        network[1].weight.mul_(100)
    assert [one.name for one in judge.risen(1)] == ["1.weight"]
    with torch.no_grad():
        network[0].bias.fill_(2000.0)
    assert [one.name for one in judge.risen(1)] == ["0.bias", "1.weight"]


def test_a_state_goes_on_after_a_resume():
    """A loaded judge finds what the first one would have found."""
    training = Training()
    training.run(100)
    later = StateJudge(training.network, 100)
    later.load_state_dict(training.judge.state_dict())
    assert torch.equal(
        later.sample(101, training.optimizer),
        training.judge.sample(101, training.optimizer),
    )


def test_a_sample_reads_nothing_on_the_host():
    """No operation waits for the device."""
    training = Training()
    training.run(20)
    with HostReads() as reads:
        training.judge.sample(30, training.optimizer)
    assert reads.reads == []


def mixed_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network of weights of three dtypes, and its optimizer after an update."""
    network = nn.ParameterDict(
        {
            name: nn.Parameter(torch.ones(4, dtype=dtype))
            for name, dtype in {
                "single": torch.float32,
                "of_16_bits": torch.float16,
                "brain": torch.bfloat16,
            }.items()
        }
    )
    optimizer = torch.optim.AdamW(network.parameters(), foreach=False)
    for weight in network.parameters():
        weight.grad = torch.full_like(weight, 1e-5)
    optimizer.step()
    return network, optimizer


def test_an_epsilon_that_is_zero_in_the_dtype():
    """Adam's default epsilon rounds to zero in float16, and neither in bfloat16 nor in float32."""
    network, optimizer = mixed_adam()
    judge = StateJudge(network)

    assert judge.undivided(optimizer, set(network)) == {
        "of_16_bits": "eps=1e-08 is zero in float16"
    }
    assert judge.undivided(optimizer, {"single"}) == {}
    assert judge.undivided(None, set(network)) == {}


def test_second_moments_that_are_zero():
    """Zeros in place of the second moments of a weight leave its first moments undivided."""
    network, optimizer = mixed_adam()
    optimizer.state[network["single"]]["exp_avg_sq"].zero_()

    found = StateJudge(network).undivided(optimizer, {"single", "brain"})

    assert found == {"single": "all second moments are zero, and eps is 1e-08"}
