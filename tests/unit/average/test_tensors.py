"""Averages have the right dtype, device and names, and weights of other dtypes are converted."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from mfwrap.average import tensors
from mfwrap.average.ema import ExponentialMovingAverage
from support.averages import (
    APPLIED,
    AVERAGED,
    COPIED,
    Network,
    assert_same,
    averages,
    train,
    weights_of,
)


@pytest.mark.parametrize("decay", [0.999, 0.9999, 1 - 1e-7])
def test_decay_close_to_one_is_not_rounded(decay):
    """The weight of a new value is 1 - decay, computed in float64 and rounded once."""
    weight = torch.zeros(())
    ema = ExponentialMovingAverage([weight], decay)
    weight.fill_(1.0)
    ema.update(APPLIED)

    assert averages(ema)["0"] == torch.full((), 1 - decay)


def test_trainable_weights_of_a_module_once():
    """Each trainable weight of a module is averaged once; persistent buffers are copied."""
    ema = ExponentialMovingAverage(Network())
    state = ema.state_dict()

    assert [name for name, _ in ema.named_averages()] == AVERAGED
    assert list(state["averages"]) == AVERAGED
    assert list(state["buffers"]) == COPIED


def test_tied_weights_of_an_iterable_once():
    """A tensor that an iterable, here a generator, yields twice is averaged once."""
    first, second = weights_of((2,), (3,))
    expected = [first.clone(), second.clone()]
    ema = ExponentialMovingAverage((weight for weight in (first, second, first)), 0.5)
    train([first, second])
    ema.update()
    get_ema_multi_avg_fn(0.5)(expected, [first, second], None)

    assert_same({"0": expected[0], "1": expected[1]}, averages(ema))


def test_average_of_bfloat16_weights_is_float32():
    """The average of half-precision weights is float32: a bfloat16 average would not move."""
    weights = [torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float16)]
    ema = ExponentialMovingAverage(weights, 0.999)
    stalled = ExponentialMovingAverage(weights, 0.999, dtype=torch.bfloat16)
    for weight in weights:
        weight.fill_(1.5)
    for _ in range(1000):
        ema.update()
        stalled.update()
    expected = torch.full((4,), 1.5 - 0.5 * 0.999**1000)

    for average in averages(ema).values():
        torch.testing.assert_close(average, expected, rtol=1e-4, atol=0)
    for average in averages(stalled).values():
        assert torch.equal(average, torch.ones(4, dtype=torch.bfloat16))


def test_one_piece_is_converted_at_a_time(monkeypatch):
    """No more converted weights than fit into one piece are alive at a time."""
    monkeypatch.setattr(tensors, "_PIECE", 20)
    ema = ExponentialMovingAverage([torch.ones(9).bfloat16() for _ in range(6)])
    created: list[weakref.ref] = []
    num_alive = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and func is torch.ops.aten.empty_like.default:
                num_alive.append(1 + sum(reference() is not None for reference in created))
                created.append(weakref.ref(result))
            return result

    with Watch():
        ema.update(APPLIED)

    assert num_alive == [1, 2, 3, 1, 2, 3, 1, 2]


def test_asked_dtype():
    """`dtype` sets the dtype of the averages; copied buffers keep their own dtype."""
    network = Network().bfloat16()
    ema = ExponentialMovingAverage(network, 0.5, dtype=torch.float64, device="cpu")
    expected = network.norm.weight.detach().double()
    train([network.norm.weight])
    ema.update()
    expected = 0.5 * expected + 0.5 * network.norm.weight.detach().double()

    assert torch.equal(averages(ema)["norm.weight"], expected)
    assert {average.dtype for average in averages(ema).values()} == {torch.float64}
    assert ema.state_dict()["buffers"]["norm.running_mean"].dtype == torch.bfloat16


def test_weights_of_several_dtypes():
    """Weights of different dtypes are averaged, and their order is kept."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    weights = [torch.randn(3).to(dtype) for dtype in dtypes]
    expected = [weight.double().clone() for weight in weights]
    ema = ExponentialMovingAverage(weights, 0.75)
    train(weights)
    ema.update(APPLIED)

    for old, weight, average in zip(expected, weights, averages(ema).values(), strict=True):
        reference = 0.75 * old + 0.25 * weight.double()
        torch.testing.assert_close(average.double(), reference, rtol=1e-6, atol=1e-6)


def test_buffers_are_copied_when_averaging():
    """Buffers are copied at each averaging call, even if the module has replaced them."""
    network = Network()
    ema = ExponentialMovingAverage(network, 0.9, update_every=2)
    network.norm.running_mean = torch.full((4,), 3.0)
    network.norm.num_batches_tracked.fill_(5)
    ema.update()

    assert torch.equal(ema.state_dict()["buffers"]["norm.running_mean"], torch.zeros(4))
    for mean, applied in ((4.0, None), (5.0, APPLIED)):
        network.norm.running_mean += 1
        ema.update(applied)
        ema.update(applied)
        buffers = ema.state_dict()["buffers"]
        assert torch.equal(buffers["norm.running_mean"], torch.full((4,), mean))
        assert buffers["norm.num_batches_tracked"] == 5


def test_names_are_those_without_torch_compile():
    """An average of compiled layers has plain names and loads into an average without compile."""
    plain, compiled = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    compiled[0] = torch.compile(compiled[0], backend="eager")
    ours, theirs = ExponentialMovingAverage(plain), ExponentialMovingAverage(compiled)

    assert [name for name, _ in theirs.named_averages()] == ["0.weight", "0.bias"]
    ours.load_state_dict(theirs.state_dict())
    theirs.copy_to(compiled)
    assert torch.equal(dict(ours.named_averages())["0.bias"], compiled[0].bias)


each_share = pytest.mark.parametrize("share", [0.0, 1e-7, 1e-3, 0.5, 0.9, 1.0])


def assert_moves_like_lerp(move, device, dtype, share):
    """Move averages; they agree with the formula in float64, and are as they were if it is 0."""
    values = [each.to(device) for each in weights_of((4, 3), (0,), (), (1000,), dtype=dtype)]
    averaged = [each.flip(0) if each.dim() else each * 0.5 for each in values]
    given = [each.clone() for each in averaged]
    factor = torch.full((), share, dtype=dtype, device=device)
    move(averaged, values, factor)

    precision = torch.finfo(dtype).eps
    for result, start, value in zip(averaged, given, values, strict=True):
        expected = start.double().lerp(value.double(), factor.double())
        torch.testing.assert_close(result.double(), expected, rtol=precision, atol=precision)
        assert share or torch.equal(result, start)


@each_share
def test_a_step_of_sgd_moves_averages_like_lerp(share):
    """A step of fused SGD, which CUDA needs, rounds the average of float64 once or twice."""
    assert_moves_like_lerp(tensors.move_by_sgd, "cpu", torch.float32, share)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@each_share
def test_averages_on_cuda_move_like_lerp(dtype, share):
    """On a GPU, averages of each dtype move all at once, and agree with the formula in float64."""
    assert_moves_like_lerp(tensors.move, "cuda", dtype, share)


@pytest.mark.parametrize("piece", [1, 5, 8, 100])
def test_weights_are_converted_in_pieces(piece, monkeypatch):
    """Slices, whole weights, empty ones and those that are not one block follow as by ``lerp``."""
    monkeypatch.setattr(tensors, "_PIECE", piece)
    values = weights_of((4, 3), (0,), (), (17,), (2, 2), dtype=torch.bfloat16)
    values[0] = values[0].T
    ema = ExponentialMovingAverage(values, 0.9)
    expected = [each.float() for each in values]
    train(values)
    ema.update()
    for each, value in zip(expected, values, strict=True):
        each.lerp_(value.float(), 1 - 0.9)

    assert_same(dict(zip("01234", expected, strict=True)), averages(ema))
