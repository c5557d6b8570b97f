"""Norms and sums of squares of tensors, compared with float64."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from mfwrap.step.clipping import clip_coefficient
from mfwrap.tensors.norm_groups import group_parameters
from mfwrap.tensors.norms import NormReader, norms_of_each, sum_of_squares, sums_by_group
from mfwrap.tensors.sharded_norms import has_non_finite
from support.host_reads import HostReads

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
DTYPE_IDS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
FINITE = st.floats(-1e3, 1e3, width=32)


def exact(gradients):
    """Return sums of squares in float64."""
    return torch.stack(
        [
            torch.zeros((), dtype=torch.float64)
            if gradient is None
            else gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)
            .abs()
            .square()
            .sum()
            for gradient in gradients
        ]
    )


def assert_close_to_exact(gradients):
    """Fail unless the sums of squares agree with float64 to 1e-5.

    A float32 sum of thousands of terms is accurate to about 1e-6.
    """
    squares = sum_of_squares(gradients, CPU)

    assert (squares.shape, squares.dtype) == ((len(gradients),), torch.float32)
    torch.testing.assert_close(squares.double(), exact(gradients), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (33, 65), (3, 4, 5, 6), (257, 1021)], ids=str)
def test_squares_are_those_of_float64(dtype, shape):
    """Sums for each dtype and shape agree with float64."""
    assert_close_to_exact([torch.randn(shape, dtype=dtype) * 10])


@given(st.lists(st.lists(FINITE, max_size=20), min_size=1, max_size=5))
def test_squares_keep_the_order_of_gradients(values):
    """Sums are in the order of the gradients, and an empty gradient has the sum 0."""
    assert_close_to_exact([torch.tensor(row) for row in values])


@pytest.mark.parametrize(
    "view",
    [
        torch.t,
        lambda x: x[:, ::2],
        lambda x: x[1:, 3:7],
        lambda x: x[:1].expand(6, 8),
        lambda x: x.reshape(1, 3, 2, 8).contiguous(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "slice", "expanded", "channels last"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_gradients_need_not_be_contiguous(view, dtype):
    """Sums of views that are not contiguous agree with float64."""
    assert_close_to_exact([view(torch.randn(6, 8, dtype=dtype))])


def test_types_are_mixed_freely():
    """One call accepts all dtypes, None and empty gradients, and keeps their order."""
    gradients = [torch.randn(5 + n, dtype=dtype) for n, dtype in enumerate(DTYPES * 2)]
    gradients[3:3] = [None, torch.empty(0), torch.empty(0, 4, dtype=torch.bfloat16)]

    assert_close_to_exact(gradients)


def test_gradients_that_are_all_missing_or_empty_have_zero_squares():
    """Missing and empty gradients have the sum 0."""
    assert torch.equal(sum_of_squares([None, torch.empty(0)], CPU), torch.zeros(2))


def test_a_float16_norm_does_not_overflow():
    """A float16 gradient's norm is finite even above 65,504, float16's largest number."""
    gradient = torch.full((4096,), 3000.0, dtype=torch.float16)

    assert sum_of_squares([gradient], CPU).sqrt().item() == pytest.approx(192_000, rel=1e-5)


def test_small_float16_gradients_do_not_vanish():
    """Float16 gradients whose squares underflow in float16 are counted."""
    gradient = torch.full((1000,), 1e-4, dtype=torch.float16)

    assert_close_to_exact([gradient])


def test_bfloat16_gradients_are_summed_in_float32():
    """The sum of 40,000 ones in bfloat16 is 40,000."""
    assert sum_of_squares([torch.ones(40_000, dtype=torch.bfloat16)], CPU) == 40_000


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_one_bad_element_shows_in_its_own_square_only(dtype, bad):
    """A NaN or inf makes only the sum of its own gradient non-finite."""
    gradients = [torch.ones(100, dtype=dtype) for _ in range(3)]
    gradients[1][57] = bad

    assert sum_of_squares(gradients, CPU).isfinite().tolist() == [True, False, True]


def test_a_large_gradient_among_small_ones_is_summed_as_exactly():
    """The sum of a large gradient among small ones is accurate to 1e-5."""
    gradients = [torch.ones(3), torch.full((2**22,), 0.1), torch.ones(5)]

    squares = sum_of_squares(gradients, CPU)

    exact = torch.stack([gradient.double().square().sum() for gradient in gradients])
    torch.testing.assert_close(squares.double(), exact, rtol=1e-5, atol=0)


def test_large_gradients_with_and_without_a_broken_row_keep_their_places():
    """Sums keep the order of the gradients when large, small and empty ones are mixed."""
    sizes = [2**16 + 1, 5, 2**17, 0, 3 * 2**16 - 1, 1]
    gradients = [torch.randn(size) * (index + 1) for index, size in enumerate(sizes)]
    gradients[2:2] = [None, torch.randn(512, 300).t()]

    assert_close_to_exact(gradients)


@pytest.mark.parametrize("rest", [1, 2])
@pytest.mark.parametrize("position", [0, 4095, 4096, -2, -1])
def test_a_bad_element_of_a_large_gradient_shows_in_its_own_square_only(position, rest):
    """A NaN at any place of a large gradient affects only that gradient's sum.

    A large gradient is summed by rows. The last `rest` elements do not fill a row.
    """
    gradients = [torch.ones(2**16 + rest) for _ in range(3)]
    gradients[1][position] = math.nan

    assert sum_of_squares(gradients, CPU).isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_many_squares_are_not_lost_in_a_running_sum(dtype, transposed):
    """The sum of four million squares agrees with float64 to 1e-5."""
    gradient = torch.randn(2053, 2048, dtype=dtype)

    assert_close_to_exact([gradient.t() if transposed else gradient])


@pytest.mark.parametrize("rows", [2, 4])
def test_long_rows_that_are_not_contiguous_are_summed_in_parts(rows):
    """The sum of a view with a few long rows agrees with float64 to 1e-5."""
    assert_close_to_exact([torch.randn(2_000_003, rows).t()])


class _BytesRead(TorchDispatchMode):
    """Count the bytes that operators read from the memory of `tensors`.

    `largest_result` is the number of elements of the largest result of an operator.
    """

    def __init__(self, tensors):
        super().__init__()
        self.memories = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.num_bytes = self.largest_result = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            # Use a set, so that a tensor that is passed twice, as in its dot product with itself,
            # counts once.
            taken = {
                (tensor.data_ptr(), tensor.numel() * tensor.element_size())
                for tensor in _tensors((args, kwargs))
                if tensor.untyped_storage().data_ptr() in self.memories
            }
            self.num_bytes += sum(size for _, size in taken)
            sizes = [tensor.numel() for tensor in _tensors(result)]
            self.largest_result = max([self.largest_result, *sizes])
        return result


def _tensors(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("shape", [(91, 101), (257, 1021)], ids=["medium", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_each_gradient_is_read_once(dtype, shape, transposed):
    """Each element is read once, and no result has the size of a gradient."""
    gradients = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    views = [gradient.t() if transposed else gradient for gradient in gradients]
    with _BytesRead(gradients) as counted:
        sum_of_squares(views, CPU)

    assert counted.num_bytes == sum(g.numel() * g.element_size() for g in gradients)
    assert counted.largest_result < gradients[0].numel() / 10


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_small_gradients_are_copied_in_parts_that_fit_into_the_cache(dtype):
    """Small gradients are read once, and at most 2**18 elements of them are copied at a time."""
    gradients = [torch.randn(64, 64, dtype=dtype) for _ in range(100)]
    with _BytesRead(gradients) as counted:
        sum_of_squares(gradients, CPU)

    assert counted.num_bytes == sum(g.numel() * g.element_size() for g in gradients)
    assert counted.largest_result <= 2**18
    assert_close_to_exact(gradients)


SMALL = st.sampled_from([(), (1,), (3,), (2, 3), (3, 2), (8192,), (91, 91), (70_000,)])
SOME = st.lists(st.tuples(SMALL, st.sampled_from(DTYPES)), min_size=1, max_size=12)


@given(SOME, st.data())
def test_a_reader_follows_gradients_that_come_and_go(kinds, data):
    """A reader's results are those of float64 when gradients are missing, or change their dtype."""
    reader = NormReader(CPU)
    for _ in range(3):
        missing = data.draw(st.sets(st.integers(0, len(kinds) - 1)))
        widened = data.draw(st.booleans())
        gradients = [
            None if index in missing else torch.randn(shape, dtype=dtype)
            for index, (shape, dtype) in enumerate(kinds)
        ]
        if widened:
            gradients = [None if g is None or g.is_complex() else g.float() for g in gradients]

        squares = reader.squares(gradients)

        torch.testing.assert_close(squares.double(), exact(gradients), rtol=1e-5, atol=1e-30)
        torch.testing.assert_close(reader.norms(gradients), squares.sqrt(), rtol=1e-5, atol=1e-30)


def test_a_conjugated_gradient_is_read_without_a_copy():
    """A lazily conjugated complex gradient is summed without a copy."""
    parameter = torch.randn(500, dtype=torch.complex64, requires_grad=True)
    (parameter.conj() * torch.randn(500, dtype=torch.complex64)).sum().abs().backward()
    assert parameter.grad.is_conj()

    assert_close_to_exact([parameter.grad])
    with _BytesRead([parameter.grad]) as counted:
        sum_of_squares([parameter.grad], CPU)
        has_non_finite([parameter.grad], CPU)
    assert counted.largest_result == 1


def test_norms_read_nothing_on_the_host():
    """Squares, groups, clip coefficient and the finite check stay on the device."""
    gradients = [torch.randn(8), None, torch.randn(4).bfloat16()]
    groups = group_parameters({"a": 8, "b": 2, "c": 4}, ["a", "b|c"], CPU)
    with HostReads() as host:
        squares = sum_of_squares(gradients, CPU)
        clip_coefficient(sums_by_group(squares, groups.members).sum().sqrt(), 1.0)
        has_non_finite([g for g in gradients if g is not None], CPU)

    assert host.reads == []


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_gradients_may_be_on_several_devices(where):
    """Gradients on several devices give correct sums and flags on the requested device."""
    device = torch.device(where)
    gradients = [torch.randn(1000), torch.randn(4_000_000, device="cuda"), torch.randn(10)]
    expected = exact([gradient.cpu() for gradient in gradients])
    # Keep the device busy, so that a read before the copy has finished gives wrong values.
    torch.cuda._sleep(100_000_000)
    squares = sum_of_squares(gradients, device)

    torch.testing.assert_close(squares.cpu().double(), expected, rtol=1e-5, atol=0)
    gradients[1][77] = math.nan
    torch.cuda._sleep(100_000_000)
    assert has_non_finite(gradients, device)


@pytest.mark.parametrize("shape", [(300, 300), (2, 70_000), (3, 40, 700)], ids=str)
def test_a_transposed_gradient_is_summed_as_exactly_as_it_lies(shape):
    """The order of a gradient's dimensions does not change its sum."""
    gradient = torch.full(shape, 0.011)

    squares = [
        sum_of_squares([gradient.permute(order)], CPU) for order in permutations(range(len(shape)))
    ]

    assert all(torch.equal(square, squares[0]) for square in squares)
    torch.testing.assert_close(squares[0].double(), exact([gradient]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_copy_of_a_large_gradient_is_made(dtype):
    """No operation allocates memory near the size of a large gradient."""
    gradient = torch.ones(2**23 + 5, dtype=dtype)
    # Without `acc_events`, some releases of torch warn about a profile of several cycles.
    settings = {"activities": [ProfilerActivity.CPU], "profile_memory": True, "acc_events": True}
    with profile(**settings) as profiled:
        sum_of_squares([gradient], CPU)

    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    assert 0 < largest < gradient.nbytes / 8


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_norms_are_those_of_float64(dtype):
    """The norm of each tensor agrees with float64, in the order of the tensors."""
    tensors = [torch.randn(7, dtype=dtype), None, torch.randn(2**17 + 3, dtype=dtype)]

    norms = norms_of_each(tensors, CPU)

    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), exact(tensors).sqrt(), rtol=1e-5, atol=0)


def test_a_norm_whose_square_underflows():
    """The norm of a tensor whose squares underflow in float32 is correct."""
    tensor = torch.full((4,), 1e-25)

    assert norms_of_each([tensor], CPU).item() == pytest.approx(2e-25)
    assert sum_of_squares([tensor], CPU) == 0
