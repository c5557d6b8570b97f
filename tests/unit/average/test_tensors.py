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


@pytest.mark.parametrize("share", [0.0, 1e-7, 1e-3, 0.1, 0.5])
def test_a_step_of_sgd_moves_averages_like_lerp(share):
    """Up to a share of a half, a step of fused SGD agrees with float64 to within two roundings."""
    averaged = [torch.randn(shape) for shape in ((4, 3), (0,), (), (1000,))]
    values = [torch.randn_like(each) * 1e-3 for each in averaged]
    given = [each.clone() for each in averaged]
    tensors.move_by_sgd(averaged, values, torch.full((), -share))

    for result, start, value in zip(averaged, given, values, strict=True):
        factor = torch.full((), share).double()
        expected = start.double().lerp(value.double(), factor)
        torch.testing.assert_close(result.double(), expected, rtol=1.2e-7, atol=0)
        assert share or torch.equal(result, start)
        assert result._version == 1


@pytest.mark.cuda
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_averages_on_cuda_move_like_lerp(dtype, decay):
    """On a GPU, averages of each dtype and of weights in any order of memory follow the weights."""
    weights = weights_of((4, 3), (0,), (), (1000,), (2, 3, 4, 5), (6, 5), dtype=dtype)
    weights[4] = weights[4].to(memory_format=torch.channels_last)
    weights[5] = weights[5].T
    on_device = [each.cuda() for each in weights]
    ema = ExponentialMovingAverage(on_device, decay, dtype=dtype)
    start = [each.to(torch.float64, copy=True) for each in weights]
    train(weights)
    for each, value in zip(on_device, weights, strict=True):
        each.copy_(value)
    ema.update()

    precision = torch.finfo(dtype).eps
    for result, before, value in zip(averages(ema).values(), start, weights, strict=True):
        expected = before.lerp(value.double(), 1 - decay)
        torch.testing.assert_close(result.cpu().double(), expected, rtol=precision, atol=precision)
        assert decay or torch.equal(result.cpu(), value)


@pytest.mark.parametrize("piece", [1, 5, 8, 100])
def test_weights_are_converted_in_pieces(piece, monkeypatch):
    """Slices, whole weights, empty ones and those that are not one block follow as by ``lerp``.

    No more numbers are converted at a time than fit into a piece, unless they are not one block.
    """
    monkeypatch.setattr(tensors, "_PIECE", piece)
    sizes = []
    convert = tensors._converted

    def noted(sources, targets):
        sizes.append([target.numel() for target in targets])
        return convert(sources, targets)

    monkeypatch.setattr(tensors, "_converted", noted)
    values = weights_of((4, 3), (0,), (), (17,), (2, 2), (2, 3, 2, 2), (10,), dtype=torch.bfloat16)
    values[0] = values[0].T
    values[5] = values[5].to(memory_format=torch.channels_last)
    values[6] = values[6][::2]
    ema = ExponentialMovingAverage(values, 0.9)
    expected = [each.float() for each in values]
    train(values)
    ema.update()
    for each, value in zip(expected, values, strict=True):
        each.lerp_(value.float(), 1 - 0.9)

    assert_same(dict(zip("0123456", expected, strict=True)), averages(ema))
    assert [sum(each) for each in sizes[:-1]] == [piece] * (len(sizes) - 1)
    assert sum(map(sum, sizes)) == sum(each.numel() for each in values) - 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spacing", [1, 2], ids=["blocks", "and a slice"])
def test_the_way_of_a_gpu_runs_on_a_cpu(dtype, spacing, monkeypatch):
    """With the step of fused SGD, weights in any order of memory follow as with ``lerp``."""
    values = weights_of((4, 3), (0,), (), (17,), (2, 3, 2, 2), (10,), dtype=dtype)
    values[0] = values[0].T
    values[4] = values[4].to(memory_format=torch.channels_last)
    values[5] = values[5][::spacing]
    expected = ExponentialMovingAverage(values, 0.9, warmup=True)
    monkeypatch.setattr(tensors, "_has_fused_step", lambda *_: True)
    monkeypatch.setattr(tensors, "_PIECE", 10)
    found = ExponentialMovingAverage(values, 0.9, warmup=True)
    for applied in (True, True, False, True):
        train(values)
        for each in (expected, found):
            each.update(torch.tensor(applied))

    for result, reference in zip(
        averages(found).values(), averages(expected).values(), strict=True
    ):
        torch.testing.assert_close(result, reference)
