"""The average follows exactly the applied updates and never synchronizes with the device."""

import copy
import itertools

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mfwrap import MFTrainOneStepCell, WithLossCell
from mfwrap.accelerate import attach
from mfwrap.average.ema import ExponentialMovingAverage
from support.averages import (
    APPLIED,
    AVERAGED,
    COPIED,
    FLAGS,
    SKIPPED,
    Network,
    assert_same,
    averages,
    flat,
    train,
    train_with_skips,
    weights_of,
)
from support.host_reads import HostReads

DTYPES = (torch.float32, torch.float64)
patterns = st.lists(st.booleans(), min_size=1, max_size=12)
decays = st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.999, 0.9999])


@given(decay=decays, num_steps=st.integers(1, 12), dtype=st.sampled_from(DTYPES))
def test_equals_torch_bitwise(decay, num_steps, dtype):
    """Without warm-up the averages are bitwise equal to those of torch's own function."""
    weights = weights_of((3, 5), (), (0,), (17,), dtype=dtype)
    expected = [weight.clone() for weight in weights]
    follow = get_ema_multi_avg_fn(decay)
    with_flag = ExponentialMovingAverage(weights, decay)
    without_flag = ExponentialMovingAverage(weights, decay)
    for _ in range(num_steps):
        train(weights)
        follow(expected, weights, None)
        with_flag.update(APPLIED)
        without_flag.update()

    assert_same(dict(zip("0123", expected, strict=True)), averages(with_flag))
    assert_same(averages(with_flag), averages(without_flag))


@given(
    decay=decays,
    pattern=patterns,
    update_every=st.integers(1, 3),
    warmup=st.booleans(),
    dtype=st.sampled_from([*DTYPES, torch.bfloat16]),
)
def test_agrees_with_float64(decay, pattern, update_every, warmup, dtype):
    """For any decay and any skips, the averages agree with the formula in float64."""
    weights = weights_of((4, 3), (5,), dtype=dtype)
    expected = [weight.double().clone() for weight in weights]
    ema = ExponentialMovingAverage(weights, decay, warmup, update_every)
    num_applied = 0
    for call, applied in enumerate(pattern, start=1):
        train(weights)
        ema.update(FLAGS[applied])
        if applied and call % update_every == 0:
            now = min(decay, (1 + num_applied) / (10 + num_applied)) if warmup else decay
            expected = [
                now * e + (1 - now) * w.double() for e, w in zip(expected, weights, strict=True)
            ]
        num_applied += applied

    precision = 1e-12 if dtype == torch.float64 else 1e-5
    for average, reference in zip(averages(ema).values(), expected, strict=True):
        assert average.dtype == (dtype if dtype in DTYPES else torch.float32)
        torch.testing.assert_close(average.double(), reference, rtol=precision, atol=precision)


def test_skipped_updates_change_nothing():
    """A skipped update leaves averages, copied buffers and count of applied updates unchanged."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.5, warmup=True)
    train_with_skips(network, 4, ema, seed=0)
    before = flat(ema.state_dict())
    train(network.parameters())
    train([network.norm.running_mean])
    network.norm.num_batches_tracked.fill_(99)
    network.norm.running_var.fill_(torch.nan)
    ema.update(SKIPPED)
    after = flat(ema.state_dict())

    assert after.pop("counters.num_calls") == before.pop("counters.num_calls") + 1
    assert_same(before, after)


def test_warmup_counts_applied_updates():
    """The decay of the warm-up is (1 + n) / (10 + n) after n applied updates."""
    weight = torch.zeros((), dtype=torch.float64)
    ema = ExponentialMovingAverage([weight], 0.25, warmup=True)
    steps = []
    for applied in (True, False, True, False, True, True):
        weight.copy_(averages(ema)["0"] + 1)
        before = averages(ema)["0"]
        ema.update(FLAGS[applied])
        steps.append((averages(ema)["0"] - before).item())

    # The decays of the four applied updates are 1/10, 2/11, 3/12 and 3/12, because 3/12 is the full
    # decay of 0.25. The weight is always 1 above the average, so an applied step is 1 - decay.
    assert steps == pytest.approx([0.9, 0.0, 9 / 11, 0.0, 0.75, 0.75])


def test_warmup_counts_updates_that_are_not_averaged():
    """With `update_every`, warm-up still counts every applied update."""
    weight = torch.zeros((), dtype=torch.float64)
    ema = ExponentialMovingAverage([weight], 0.99, warmup=True, update_every=3)
    for applied in (True, False):
        ema.update(FLAGS[applied])
    weight.fill_(1.0)
    ema.update(APPLIED)

    assert averages(ema)["0"].item() == pytest.approx(9 / 11)


@given(st.floats(0.5, 0.999), st.integers(2, 4), st.integers(1, 5))
def test_the_decay_to_the_power_of_update_every_keeps_its_meaning(decay, every, number):
    """With ``decay**update_every``, an average follows a weight that stays as with 1."""
    weight = torch.zeros(1, dtype=torch.float64)
    often = ExponentialMovingAverage([weight], decay)
    seldom = ExponentialMovingAverage([weight], decay**every, update_every=every)
    weight.fill_(1)
    for _ in range(number * every):
        often.update()
        seldom.update()

    [[_, expected]], [[_, actual]] = often.named_averages(), seldom.named_averages()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def test_update_every_counts_calls():
    """With `update_every=3` every third call averages; calls for skipped updates count too."""
    weight = torch.zeros(2)
    ema = ExponentialMovingAverage([weight], 0.5, update_every=3)
    changed = []
    for applied in (True, False, True, False, True, False, True, True, True):
        weight.add_(1)
        before = averages(ema)["0"]
        ema.update(FLAGS[applied])
        changed.append(not torch.equal(before, averages(ema)["0"]))

    # The sixth call would average, but its update was skipped.
    assert changed == [False, False, True, False, False, False, False, False, True]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_swap_restores_bitwise(error):
    """`swap` puts the averages into a module and restores its own values, even after an error."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.9)
    train_with_skips(network, 3, ema, seed=0)
    raw = copy.deepcopy(network.state_dict())
    state = flat(ema.state_dict())

    def evaluate() -> None:
        with ema.swap():
            inside = network.state_dict()
            assert_same(averages(ema), {name: inside[name] for name in AVERAGED})
            buffers = ema.state_dict()["buffers"]
            assert_same(buffers, {name: inside[name] for name in COPIED})
            assert not torch.equal(raw["norm.weight"], inside["norm.weight"])
            network(torch.arange(5))  # changes the running statistics
            if error is not None:
                raise error

    if error is None:
        evaluate()
    else:
        with pytest.raises(error):
            evaluate()
    assert_same(raw, network.state_dict())
    assert_same(state, flat(ema.state_dict()))
    ema.update()


def unfrozen_run(train, **settings):
    """Train 6 steps, of which the third is skipped; a layer is frozen before the fourth.

    Returns:
        The network, its average, and the average of the frozen layer's weight by hand.
    """
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    network[0].requires_grad_(requires_grad=False)
    ema = ExponentialMovingAverage(network, 0.5, **settings)
    weight = network[0].weight
    expected = weight.detach().double()
    for step in train(network, ema):
        if step != 2:
            expected = 0.5 * expected + 0.5 * weight.detach().double()
        network[0].requires_grad_(requires_grad=step >= 2)
    return network, ema, expected


def batches(num_steps=6):
    """Yield inputs; those of the third step make the gradients infinite."""
    for step in range(num_steps):
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        yield step, inputs * (1e38 if step == 2 else 1.0)


def in_cell(network, ema):
    """Train with the cell."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, fused=True)
    module = WithLossCell(network, nn.MSELoss())
    cell = MFTrainOneStepCell(module, optimizer, ema=ema)
    for step, inputs in batches():
        cell(inputs, inputs.sum(1, keepdim=True))
        yield step


def in_loop(network, ema):
    """Train with an accelerate loop of two optimizers, of which the first has the frozen layer."""
    accelerator = Accelerator(cpu=True)
    attach(accelerator, ema=ema)
    first, second = [*network[0].parameters(), network[2].bias], [network[2].weight]
    optimizers = [torch.optim.SGD(each, lr=0.5) for each in (first, second)]
    network, *optimizers = accelerator.prepare(network, *optimizers)
    for step, inputs in batches():
        accelerator.backward((network(inputs) - inputs.sum(1, keepdim=True)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield step


def in_torch(network, ema):
    """Train with torch alone."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for step, inputs in batches():
        ema.begin_update()
        (network(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        if step != 2:
            optimizer.step()
        optimizer.zero_grad()
        ema.update(FLAGS[step != 2])
        yield step


@pytest.mark.parametrize("train", [in_cell, in_loop, in_torch])
def test_weights_that_are_trained_later_are_averaged_from_then_on(train):
    """Their average is what it would be if it had been built with them, and `swap` shows it."""
    network, ema, expected = unfrozen_run(train)
    raw = network[0].weight.detach().clone()

    assert [name for name, _ in ema.named_averages()] == [n for n, _ in network.named_parameters()]
    with ema.swap():
        torch.testing.assert_close(network[0].weight.detach().double(), expected)
    assert torch.equal(network[0].weight, raw)
    assert not torch.equal(raw.double(), expected)


def test_an_average_that_starts_later_has_the_asked_dtype_and_reads_nothing():
    """It is as the other averages are, and its start reads no tensor on the host."""
    network, ema, _ = unfrozen_run(in_torch, dtype=torch.float64)
    assert {average.dtype for _, average in ema.named_averages()} == {torch.float64}

    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    network[0].requires_grad_(requires_grad=False)
    ema = ExponentialMovingAverage(network)
    ema.update()
    network[0].requires_grad_()
    with HostReads() as reads:
        ema.update()
    assert reads.reads == []


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16])
@pytest.mark.parametrize("saves", [False, True])
def test_a_network_that_was_converted_is_refused_before_an_update(convert, saves):
    """The cell refuses it each time, and no weight changes."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    ema = ExponentialMovingAverage(network)
    cell = MFTrainOneStepCell(WithLossCell(network, nn.MSELoss()), optimizer, ema=ema)
    convert(network[1])
    if saves:
        ema.state_dict()
    convert(network)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    inputs = torch.randn(4, 3, dtype=network[0].weight.dtype)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="`ema` must match the network's weights"):
            cell(inputs, inputs.sum(1, keepdim=True))
    assert all(map(torch.equal, before, network.parameters()))


def test_swap_keeps_bits_of_bfloat16_weights():
    """Weights in bfloat16 are restored bitwise after `swap`."""
    weight = torch.randn(5).bfloat16()
    ema = ExponentialMovingAverage([weight], 0.9)
    train([weight])
    ema.update()
    raw, expected = weight.clone(), averages(ema)["0"].bfloat16()
    with ema.swap():
        assert torch.equal(weight, expected)

    assert torch.equal(weight, raw)


def test_calls_refused_inside_swap():
    """Inside `swap`, calls that change averages or weights raise an error."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.9)
    train_with_skips(network, 3, ema, seed=0)
    state = copy.deepcopy(ema.state_dict())
    raw = copy.deepcopy(network.state_dict())
    calls = {
        "update": ema.update,
        "copy_to": ema.copy_to,
        "load_state_dict": lambda: ema.load_state_dict(state),
    }
    with ema.swap():
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=f"`{name}` must not be called inside `swap`"):
                call()
        assert_same(flat(state), flat(ema.state_dict()))

    assert_same(raw, network.state_dict())


def test_copy_to_own_parameters():
    """Without a target, `copy_to` writes averages and buffers into the averaged module."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.9)
    train_with_skips(network, 3, ema, seed=0)
    ema.copy_to()
    values = network.state_dict()

    assert_same(averages(ema), {name: values[name] for name in AVERAGED})
    assert_same(ema.state_dict()["buffers"], {name: values[name] for name in COPIED})
    assert network.head.weight is network.embedding.weight


def test_copy_to_another_module():
    """`copy_to` writes averages and buffers into another module by name."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.9)
    train_with_skips(network, 3, ema, seed=0)
    raw = copy.deepcopy(network.state_dict())
    other = Network().double().requires_grad_(requires_grad=False)
    frozen = other.frozen.weight.clone()
    with ema.swap():
        ema.copy_to(other)
    values = other.state_dict()

    for name, average in ema.named_averages():
        assert torch.equal(values[name], average.double())
    for name, buffer in ema.state_dict()["buffers"].items():
        assert torch.equal(values[name].double(), buffer.double())
    assert torch.equal(frozen, other.frozen.weight)
    assert_same(raw, network.state_dict())


@pytest.mark.parametrize("of_module", [True, False])
def test_copy_to_by_position(of_module):
    """If the source or the target is an iterable, `copy_to` matches averages by position."""
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    ema = ExponentialMovingAverage(source if of_module else source.parameters(), 0.9)
    train(source.parameters())
    ema.update()
    ema.copy_to(target.parameters() if of_module else target)

    for average, parameter in zip(averages(ema).values(), target.parameters(), strict=True):
        assert torch.equal(average, parameter)


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (nn.Linear(3, 2, bias=False), KeyError, "`parameters` .*missing: 'bias'"),
        (nn.Linear(3, 3), ValueError, "must have shape .2, 3. at 'weight', got .3, 3."),
        (nn.Sequential(nn.Linear(3, 2)), KeyError, "`parameters` .*missing: 'weight'"),
        ([torch.zeros(2, 3)], ValueError, "`parameters` must be 2 tensors, got 1"),
        ([torch.zeros(2, 3), torch.zeros(3)], ValueError, "`parameters` must have shape .2,."),
        ([torch.zeros(2, 3), 1.0], TypeError, "`parameters` must be floating-point tensors"),
    ],
)
def test_copy_to_what_does_not_fit(target, error, message):
    """If one target does not fit, `copy_to` raises and writes nothing."""
    ema = ExponentialMovingAverage(nn.Linear(3, 2))
    tensors = list(target.parameters()) if isinstance(target, nn.Module) else target
    before = copy.deepcopy(tensors)
    with pytest.raises(error, match=message):
        ema.copy_to(target)

    for old, new in zip(before, tensors, strict=True):
        assert old == new if isinstance(old, float) else torch.equal(old, new)


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"decay": 1.0}, ValueError, "decay"),
        ({"decay": -0.1}, ValueError, "decay"),
        ({"decay": float("nan")}, ValueError, "decay"),
        ({"decay": "0.9"}, TypeError, "decay"),
        ({"decay": False}, TypeError, "decay"),
        ({"decay": torch.zeros(())}, TypeError, "decay"),
        ({"warmup": 10}, TypeError, "warmup"),
        ({"update_every": 0}, ValueError, "update_every"),
        ({"update_every": 2.0}, TypeError, "update_every"),
        ({"update_every": True}, TypeError, "update_every"),
        ({"device": 0.5}, TypeError, "device"),
        ({"dtype": "float32"}, TypeError, "dtype"),
        ({"dtype": torch.int32}, ValueError, "dtype"),
        ({"parameters": []}, ValueError, "parameters"),
        ({"parameters": nn.ReLU()}, ValueError, "parameters"),
        ({"parameters": torch.zeros(2)}, TypeError, "parameters"),
        ({"parameters": None}, TypeError, "parameters"),
        ({"parameters": [torch.zeros(2), torch.zeros(2).int()]}, TypeError, "parameters"),
        ({"parameters": nn.Linear(1, 1).named_parameters()}, TypeError, "parameters"),
        ({"parameters": nn.Linear(1, 1, dtype=torch.complex64)}, TypeError, "parameters"),
    ],
)
def test_bad_arguments(arguments, error, name):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=f"`{name}` must "):
        ExponentialMovingAverage(**{"parameters": [torch.zeros(1)], **arguments})


@pytest.mark.parametrize(
    ("applied", "error"),
    [
        (True, TypeError),
        (torch.ones(()), TypeError),
        (torch.ones(1, dtype=torch.bool), ValueError),
    ],
)
def test_bad_flag(applied, error):
    """A flag of a wrong type or shape raises an error, and the call is not counted."""
    ema = ExponentialMovingAverage([torch.zeros(1)])
    with pytest.raises(error, match="`applied` must "):
        ema.update(applied)

    assert ema.state_dict()["counters"]["num_calls"] == 0


@pytest.mark.parametrize("warmup", [False, True])
def test_update_reads_nothing_on_the_host(warmup):
    """No kind of update reads a value on the host."""
    averaging = [
        ExponentialMovingAverage(Network().bfloat16(), warmup=warmup),
        ExponentialMovingAverage(Network(), warmup=warmup, update_every=2),
        ExponentialMovingAverage(Network().double(), warmup=warmup),
    ]
    with HostReads() as host:
        for ema, applied in itertools.product(averaging, (None, APPLIED, SKIPPED)):
            ema.update(applied)
            ema.update(applied)

    assert host.names == []


@pytest.mark.cuda
@pytest.mark.parametrize("warmup", [False, True])
def test_cuda_update_does_not_wait(warmup):
    """On CUDA an update does not synchronize, and agrees with torch's function."""
    network = Network().cuda()
    ema = ExponentialMovingAverage(network, 0.9, warmup=warmup)
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    expected = [parameter.detach().clone() for parameter in trainable]
    train(trainable)
    applied = torch.ones((), dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        ema.update(applied)
        ema.update(~applied)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    get_ema_multi_avg_fn(0.1 if warmup else 0.9)(expected, trainable, None)

    for average, reference in zip(averages(ema).values(), expected, strict=True):
        torch.testing.assert_close(average, reference)


@pytest.mark.cuda
def test_cuda_weights_with_averages_on_the_cpu():
    """Averages on the CPU follow weights on a GPU."""
    network = Network()
    device_network = copy.deepcopy(network).cuda()
    ema = ExponentialMovingAverage(network, 0.9)
    offloaded = ExponentialMovingAverage(device_network, 0.9, device="cpu")
    train(network.parameters())
    device_network.load_state_dict(network.state_dict())
    for applied in (True, False):
        ema.update(FLAGS[applied])
        offloaded.update(FLAGS[applied].cuda())

    assert_same(
        flat(ema.state_dict()),
        flat(offloaded.state_dict())
        | {"counters.applied_updates": ema.state_dict()["counters"]["applied_updates"]},
    )
    with offloaded.swap():
        assert_same(
            averages(offloaded),
            {
                name: value.cpu()
                for name, value in device_network.state_dict().items()
                if name in AVERAGED
            },
        )
