"""A chain of optimizers equals its optimizers run by hand, and is saved and copied whole."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import (
    AdamWeightDecay,
    ChainedOptimizer,
    MFTrainOneStepCell,
    StepConfig,
    WithLossCell,
)
from mfwrap.accelerate import attach
from support.accelerate_loops import new_accelerator
from support.optimizer_runs import give, gradients_of, parameters_of


def new_network():
    """Return a network with the same weights at every call."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8))
    return WithLossCell(network, nn.MSELoss())


def two_optimizers(network):
    """Return Muon for the matrices of a network, and AdamW for the rest."""
    parameters = list(network.parameters())
    return (
        Muon([p for p in parameters if p.ndim == 2], lr=0.02, adjust_lr_fn="match_rms_adamw"),
        AdamW([p for p in parameters if p.ndim != 2], lr=0.02, weight_decay=0.1, fused=True),
    )


def batch_of(step):
    """Return a batch; that of step 2 overflows."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 5, 8, generator=generator)
    inputs = inputs[:, :6]
    return (inputs * float("inf") if step == 2 else inputs), targets


def factor(step):
    """Return the factor of the learning rate after a number of applied updates."""
    return 1 / (1 + step)


@pytest.mark.parametrize("max_grad_norm", [0.05, 100.0], ids=["clipped", "not clipped"])
def test_a_cell_equals_torchs_two_optimizers_by_hand(max_grad_norm):
    """One norm, one loss scale, one schedule and one decision to skip hold for both optimizers."""
    network, by_hand = new_network(), new_network()
    optimizer = ChainedOptimizer(*two_optimizers(network))
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        max_grad_norm=max_grad_norm,
        scale_sense=1024.0,
        lr_scheduler=LambdaLR(optimizer, factor),
    )
    optimizers = two_optimizers(by_hand)
    schedules = [LambdaLR(each, factor) for each in optimizers]
    for step in range(6):
        output = cell(*batch_of(step))

        by_hand(*batch_of(step)).backward()
        norm = nn.utils.clip_grad_norm_(by_hand.parameters(), max_grad_norm)
        for each, schedule in zip(optimizers, schedules, strict=True):
            if norm.isfinite():
                each.step()
                schedule.step()
            each.zero_grad()

        assert output.overflow.item() is (step == 2)
        if step != 2:
            torch.testing.assert_close(output.global_norm, norm, rtol=1e-6, atol=0)
        for ours, expected in zip(network.parameters(), by_hand.parameters(), strict=True):
            # Without clipping, the results are bitwise equal. Clipped gradients differ by a
            # rounding, which Muon's bfloat16 may enlarge to 4e-3 of a step.
            atol = 2e-5 if max_grad_norm < 1 else 0.0
            torch.testing.assert_close(ours, expected, rtol=0, atol=atol)

    assert cell.last_report.applied_updates.item() == 5
    assert cell.last_report.learning_rates.tolist() == pytest.approx([0.02 / 5, 0.02 / 5])


def states(network, optimizer, schedule):
    """Return the settings of an optimizer and its schedule, its state, and the weights."""
    saved = optimizer.state_dict()
    settings = saved["param_groups"], schedule.state_dict()["last_epoch"]
    return settings, saved["state"], network.state_dict()


def test_a_skipped_update_changes_nothing():
    """At an overflow, weights, states, step counts and rates of both optimizers stay."""
    network = new_network()
    optimizer = ChainedOptimizer(*two_optimizers(network))
    schedule = LambdaLR(optimizer, factor)
    cell = MFTrainOneStepCell(network, optimizer, lr_scheduler=schedule)
    for step in (0, 1):
        cell(*batch_of(step))
    cell.flush()
    before = copy.deepcopy(states(network, optimizer, schedule))
    assert cell(*batch_of(2)).overflow
    cell.flush()

    settings, state, weights = states(network, optimizer, schedule)
    assert settings == before[0]
    torch.testing.assert_close((state, weights), before[1:], rtol=0, atol=0)


@pytest.mark.parametrize("way", ["saved", "pickled", "deep copy"])
def test_the_training_continues(way):
    """After a checkpoint, or in a copy, the same gradients give bitwise the same weights.

    The state of each optimizer is loaded as that optimizer loads it: float32 stays float32.
    """

    def chain_of(parameters):
        return ChainedOptimizer(
            AdamWeightDecay(parameters[:1], lr=0.01, fp32_state=True),
            SGD(parameters[1:], lr=0.1, momentum=0.9),
        )

    parameters = parameters_of(torch.bfloat16)
    optimizer = chain_of(parameters)
    give(parameters, gradients_of(0, torch.bfloat16))
    optimizer.step()
    if way == "saved":
        others = [nn.Parameter(weight.data.clone()) for weight in parameters]
        resumed = chain_of(others)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    else:
        resumed = copy.deepcopy(optimizer)
        if way == "pickled":
            resumed = pickle.loads(pickle.dumps(optimizer))  # noqa: S301  (pickled by this test)
        others = [p for group in resumed.param_groups for p in group["params"]]
    assert resumed.state[others[0]]["exp_avg"].dtype is torch.float32
    for group in resumed.param_groups:
        group["lr"] /= 2  # a schedule changes the groups of the chain
    for group in optimizer.param_groups:
        group["lr"] /= 2
    for step in (1, 2):
        for weights, each in ((parameters, optimizer), (others, resumed)):
            give(weights, gradients_of(step, torch.bfloat16))
            each.step()

    for left, right in zip(parameters, others, strict=True):
        assert torch.equal(left, right)
        assert left.data_ptr() != right.data_ptr()


def test_a_chain_in_a_chain():
    """The optimizers of an inner chain become those of the outer chain."""
    one, two, three = parameters_of()
    inner = ChainedOptimizer(SGD([one], lr=1.0), SGD([two], lr=1.0))
    outer = ChainedOptimizer(inner, SGD([three], lr=1.0))

    assert len(outer.optimizers) == len(outer.param_groups) == 3


def test_a_closure_is_called_once():
    """The closure gives the gradients of all optimizers, and its loss is returned."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = ChainedOptimizer(*(SGD([weight], lr=1.0) for weight in weights))

    def closure():
        loss = (weights[0] + 2 * weights[1]).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert [weight.item() for weight in weights] == [0, -1]


def test_wrong_optimizers():
    """Each optimizer must be torch's, and have parameters of its own."""
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="`optimizers` must have at least one optimizer, got none"):
        ChainedOptimizer()
    with pytest.raises(TypeError, match="`optimizers` must be torch optimizers, got a list"):
        ChainedOptimizer([SGD([weight], lr=1.0)])
    with pytest.raises(ValueError, match="no parameter in common, got 1 that are in two of them"):
        ChainedOptimizer(SGD([weight], lr=1.0), SGD([weight, other], lr=1.0))


def test_wrong_changes():
    """A new group, and a state of other groups, are refused, and nothing is changed."""
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    optimizer = ChainedOptimizer(SGD([weight], lr=1.0), SGD([other], lr=2.0))
    with pytest.raises(RuntimeError, match="add the parameter group to one of the optimizers"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match=r"must have groups of \[1, 1\] parameters.*, got \[2\]"):
        optimizer.load_state_dict(SGD([weight, other], lr=5.0).state_dict())

    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0]


def test_a_state_of_another_order():
    """The state of a chain in another order is refused, and nothing is changed."""
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    saved = ChainedOptimizer(AdamW([vector], lr=0.1), Muon([matrix], lr=0.2)).state_dict()
    optimizer = ChainedOptimizer(Muon([matrix], lr=0.5), AdamW([vector], lr=0.5))
    with pytest.raises(
        ValueError, match=r"in the same order, got group 0 without \['adjust_lr_fn'"
    ):
        optimizer.load_state_dict(saved)

    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_an_attached_loop_equals_the_cell():
    """Accelerate prepares the chain like any optimizer; an overflow skips both its optimizers."""
    network, other = new_network(), new_network()
    settings = StepConfig(use_clip_grad=True)
    cell = MFTrainOneStepCell(
        network, ChainedOptimizer(*two_optimizers(network)), use_clip_grad=True, scale_sense=64.0
    )
    accelerator = new_accelerator()
    attach(accelerator, settings, scale_sense=64.0)
    prepared, optimizer = accelerator.prepare(other, ChainedOptimizer(*two_optimizers(other)))
    skipped = []
    for step in range(4):
        cell(*batch_of(step))
        accelerator.backward(prepared(*batch_of(step)))
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)

    assert skipped == [False, False, True, False]
    for ours, expected in zip(other.parameters(), network.parameters(), strict=True):
        assert torch.equal(ours, expected)
