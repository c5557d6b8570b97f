"""`StepUpdate`: one read of the gradients, one update, and what it keeps between updates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from mfwrap import StepConfig
from mfwrap.compatibility.gradient_dtypes import set_gradient_dtype
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.losses import Accumulated, Normalizer
from mfwrap.step.parameters import TrainedParameters, network_parameters
from mfwrap.step.ranks.agreement import StageTotals
from mfwrap.step.update import StepUpdate
from support.host_reads import HostReads
from support.versions import needs

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
FINITE = st.floats(-1e3, 1e3, width=32)
SCALES = st.sampled_from([1.0, 3.0, 2.0**16])


def network_of(count=3):
    """Return a network of `count` layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


class Run:
    """An update of a network with AdamW, and the same network with plain torch.

    Args:
        settings: Settings of the step.
    """

    def __init__(self, **settings):
        self.network, self.plain = network_of(), network_of()
        self.optimizer, self.plain_optimizer = (
            torch.optim.AdamW(each.parameters(), 0.1, fused=True)
            for each in (self.network, self.plain)
        )
        self.update = StepUpdate(
            self.parameters(), self.optimizer, StepConfig(**settings), LossScale(1.0, CPU)
        )

    def parameters(self):
        return TrainedParameters(network_parameters(self.network), self.optimizer, None)

    def backward(self, seed):
        """Compute the gradients of both networks from the same batch."""
        torch.manual_seed(seed)
        batch = torch.randn(5, 4)
        for network in (self.network, self.plain):
            network(batch).square().mean().backward()

    def step(self, seed):
        """Do one update of both networks, and return the report."""
        self.backward(seed)
        report = self.update(Accumulated(torch.zeros(()), None))
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        return report

    def assert_equal(self):
        for ours, torchs in zip(self.network.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(ours, torchs, rtol=0, atol=0)


def test_parameters_that_are_frozen_and_freed_are_followed():
    """Weights and norms are those of plain torch when parameters are frozen between updates."""
    run = Run(local_norm=True)
    for seed, frozen in enumerate([(), (1,), (0, 1), (), (2,)]):
        for network in (run.network, run.plain):
            for index, layer in enumerate(network):
                layer.requires_grad_(index not in frozen)
        report = run.step(seed)

        assert len(report.local_norm_names) == 2 * (3 - len(frozen))
        assert report.output.local_norm.isfinite().all()
    run.assert_equal()


def test_weights_may_change_their_dtype_between_updates():
    """A network that is converted after an update has the norms of its new gradients."""
    run = Run(use_clip_grad=True, max_grad_norm=1e9)
    first = run.step(0).output.global_norm
    run.network.double()
    for state in run.optimizer.state.values():
        state.update({name: state[name].double() for name in ("exp_avg", "exp_avg_sq")})
    batch = torch.randn(5, 4, dtype=torch.float64)
    run.network(batch).square().mean().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in run.network.parameters()])

    second = run.update(Accumulated(torch.zeros(()), None)).output.global_norm

    assert first.isfinite()
    torch.testing.assert_close(second.double(), expected, rtol=1e-6, atol=0)


def test_replaced_parameters_are_read_and_updated():
    """An update whose parameters are replaced reads and updates the new ones."""
    run = Run(local_norm=True)
    run.step(0)
    for network, optimizer in ((run.network, run.optimizer), (run.plain, run.plain_optimizer)):
        torch.manual_seed(9)
        network.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": network[-1].parameters()})
    run.backward(1)
    with pytest.raises(RuntimeError, match="must hold the same 6 parameters"):
        run.update.measure()
    run.update.replace_parameters(run.parameters(), None, None)

    report = run.update(Accumulated(torch.zeros(()), None))

    run.plain_optimizer.step()
    assert len(report.local_norm_names) == 8
    run.assert_equal()


def test_an_error_releases_the_gradients():
    """The gradients of an update that has failed are not added to those of the next."""
    run = Run()
    run.backward(0)
    run.optimizer.param_groups[0]["lr"] = float("nan")

    with pytest.raises(ValueError, match="learning rate of parameter group 0 must be finite"):
        run.update(Accumulated(torch.zeros(()), None))
    assert all(parameter.grad is None for parameter in run.network.parameters())


class _Operators(TorchDispatchMode):
    """Count the operators that are called, apart from views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("settings", "most"), [({}, 35), ({"use_clip_grad": True, "local_norm": True}, 45)]
)
def test_the_number_of_operators_does_not_depend_on_the_number_of_parameters(settings, most):
    """An update calls few operators, and no more of them for more layers.

    On a GPU each of them takes the host about as long as ten small ones take the device.
    """
    counts = []
    for layers in (3, 30):
        network = network_of(layers)
        optimizer = torch.optim.AdamW(network.parameters(), 0.1, fused=True)
        parameters = TrainedParameters(network_parameters(network), optimizer, None)
        update = StepUpdate(parameters, optimizer, StepConfig(**settings), LossScale(1.0, CPU))
        for _ in range(2):
            network(torch.ones(5, 4)).mean().backward()
            with _Operators() as operators:
                update(Accumulated(torch.zeros(()), None))
        counts.append(operators.count)

    assert counts[0] == counts[1] <= most


def update_of(gradients, loss_scale, groups=None):
    """Return an update of the weights a, b, c, ... with these gradients."""
    weights = {
        chr(ord("a") + index): nn.Parameter(torch.ones(1) if each is None else each.clone())
        for index, each in enumerate(gradients)
    }
    for weight, gradient in zip(weights.values(), gradients, strict=True):
        weight.grad = gradient
    optimizer = torch.optim.SGD(weights.values(), 0.1)
    parameters = TrainedParameters(weights, optimizer, groups)
    return StepUpdate(parameters, optimizer, StepConfig(), loss_scale)


def measured(gradients, scale=1.0, groups=None, normalizer=None):
    """Measure gradients with a loss scale."""
    loss_scale = LossScale(1.0, CPU)
    if scale != 1:
        # A loop may set a scale that a constructor refuses.
        loss_scale.set(torch.tensor(scale))
    return update_of(gradients, loss_scale, groups).measure(normalizer, may_be_absent=True)


@given(st.lists(st.lists(FINITE, min_size=1, max_size=5), min_size=1, max_size=4), SCALES)
def test_norms_are_those_of_the_unscaled_gradients(rows, scale):
    """Global and local norms agree with float64, and finite gradients do not overflow."""
    gradients = [torch.tensor(row) * scale for row in rows]
    exact = [torch.tensor(row, dtype=torch.float64) for row in rows]

    result = measured(gradients, scale)

    torch.testing.assert_close(
        result.global_norm.double(), torch.cat(exact).norm(), rtol=1e-5, atol=1e-20
    )
    torch.testing.assert_close(
        result.local_norm().double(), torch.stack([e.norm() for e in exact]), rtol=1e-5, atol=1e-20
    )
    assert not result.overflow
    assert result.divisor == (None if scale == 1 else scale)
    assert result.totals.normalizer is None


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1])
def test_one_element_that_is_not_finite_is_an_overflow(place, value):
    """One non-finite element is an overflow, and the other group's norm stays finite."""
    gradients = [torch.ones(3), torch.ones(4)]
    gradients[place][1] = value

    result = measured(gradients)

    assert result.overflow
    assert not result.global_norm.isfinite()
    assert result.local_norm().isfinite().tolist() == [place == 1, place == 0]


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN])
def test_a_scale_that_is_none_is_an_overflow(scale):
    """A scale that is zero, negative or NaN is reported as an overflow."""
    assert measured([torch.ones(3)], scale).overflow


def test_an_absent_gradient_is_a_gradient_of_zeros():
    """A missing gradient has the local norm 0."""
    result = measured([None, torch.tensor([3.0, 4.0])])

    assert result.global_norm == 5
    assert result.local_norm().tolist() == [0, 5]


def test_no_gradient_at_all_is_no_overflow():
    """A step without any gradient has the norm 0 and no overflow."""
    result = measured([None, None], 8.0)

    assert not result.overflow
    assert result.global_norm == 0


def test_local_norms_are_those_of_the_groups():
    """All gradients in a group share one norm."""
    gradients = [torch.tensor([3.0]), torch.tensor([5.0]), torch.tensor([4.0])]

    result = measured(gradients, groups=["a|c", "b"])

    assert result.local_norm().tolist() == [5, 5]


def test_the_divisor_is_a_copy_of_the_scale():
    """A later change of the scale does not change the divisor."""
    scale = LossScale(8.0, CPU)

    result = update_of([torch.ones(2)], scale).measure()
    scale.value.fill_(4.0)

    assert result.divisor == 8


def test_a_normalizer_divides_beside_the_scale():
    """The reduced normalizer divides update and global norm; the local one divides local norms."""
    normalizer = Normalizer(reduced=torch.tensor(5.0), local=torch.tensor(2.0))

    result = measured([torch.tensor([30.0, 40.0])], 10.0, normalizer=normalizer)

    assert result.divisor == 50
    assert result.global_norm == 1
    assert result.local_norm() == 2.5


@pytest.mark.usefixtures("_one_rank")
def test_a_partial_normalizer_is_summed_with_the_shards():
    """A partial divisor takes part in the sum over the shards; without a divisor it is the scale.

    The local divisor is this rank's own, so it stays as it is.
    """
    mesh = init_device_mesh("cpu", (1,))
    shard = torch.tensor([30.0, 40.0])
    gradient = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
    normalizer = Normalizer(torch.tensor(5.0), torch.tensor(2.0), is_partial=True)

    result = measured([gradient], 10.0, normalizer=normalizer)
    assert (result.divisor, result.global_norm, result.local_norm()) == (50, 1, 2.5)

    result = measured([gradient], 10.0)
    assert (result.divisor, result.global_norm, result.local_norm()) == (10, 5, 5)


def test_without_targets_the_norms_are_zero():
    """A batch without targets has norms of 0 and no overflow."""
    nothing = torch.zeros(())

    result = measured([torch.zeros(2)], 8.0, normalizer=Normalizer(nothing, nothing))

    assert not result.overflow
    assert result.global_norm == result.local_norm() == 0


def test_measuring_reads_nothing_on_the_host():
    """Measuring does not synchronize with the device."""
    update = update_of([torch.ones(2), None], LossScale(2.0, CPU))
    normalizer = Normalizer(torch.ones(()), torch.ones(()))

    with HostReads() as counted:
        update.measure(normalizer)

    assert counted.reads == []


@pytest.mark.parametrize("reduced", [NAN, INF, -INF, -3.0, 1e-45])
def test_a_denominator_that_is_none_is_an_overflow(reduced):
    """A denominator that is negative, non-finite or too small is an overflow."""
    denominator = torch.tensor(reduced)

    assert measured([torch.ones(3)], 2.0, normalizer=Normalizer(denominator, denominator)).overflow


def test_a_divisor_beyond_float32_is_an_overflow():
    """A product of scale and denominator above float32's range is an overflow."""
    denominator = torch.tensor(4096.0)
    normalizer = Normalizer(denominator, denominator)

    assert measured([torch.ones(3)], 2.0**120, normalizer=normalizer).overflow
    assert not measured([torch.ones(3)], 2.0**100, normalizer=normalizer).overflow


@pytest.mark.usefixtures("_one_rank")
def test_a_stage_of_a_pipeline_may_have_no_gradient():
    """Its rank takes part in the sum of the squares, instead of raising an error alone."""
    run = Run()
    run.update.replace_parameters(run.parameters(), None, StageTotals(None))

    measured = run.update.measure(loss=torch.tensor(2.0))

    assert (measured.global_norm, measured.totals.loss) == (0, 2)


@needs("torch", "2.10", "Tensor.grad_dtype")
@pytest.mark.parametrize("in_float32", [True, False])
def test_a_sum_that_float16_cannot_hold_is_an_overflow(in_float32):
    """A float32 gradient that becomes infinite when it is rounded skips the update."""
    network = nn.Linear(2, 1, bias=False).half()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    update = StepUpdate(
        TrainedParameters(network_parameters(network), optimizer, None),
        optimizer,
        StepConfig(accumulate_allreduce_grads_in_fp32=in_float32),
        LossScale(1.0, CPU),
    )
    set_gradient_dtype(network.weight, torch.float32)
    network.weight.grad = torch.full((1, 2), 70000.0)

    assert update.measure().overflow == in_float32
