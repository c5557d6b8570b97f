"""`SkippableOptimizer` divides gradients and skips steps, for every kind of optimizer."""

import math
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.optim import SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, RMSprop

from mfwrap.step.rates import learning_rates
from mfwrap.step.skipping import SkippableOptimizer
from support.host_reads import HostReads
from support.optimizer_runs import (
    ALL,
    CLOSE,
    EACH,
    EACH_OF_EACH_TYPE,
    FOLDED,
    HALF,
    IN_PLACE,
    Run,
    assert_same,
    flag,
    fused,
    give,
    gradients_of,
    kind,
    parameters_of,
    rate,
    scalar,
)


@EACH
@pytest.mark.parametrize("divisor", [2.0**16, 0.25])
def test_a_power_of_two_is_divided_exactly(kind, divisor):
    """Multiplying gradients by a power of two, then dividing by the same number, changes no bit."""
    wrapped, alone = Run(kind), Run(kind)
    for step in range(4):
        wrapped.divided(gradients_of(step), divisor)
        alone.plain(gradients_of(step))

    assert_same(wrapped.weights(), alone.weights())
    # Compare the states only after a step: before the first step, the momentum is zeros in the
    # wrapper and None in torch.
    assert_same(wrapped.state(), alone.state())


@EACH
@given(divisor=st.floats(2.0**-10, 2.0**20))
def test_any_divisor_divides(kind, divisor):
    """For any divisor, weights agree with a plain step on gradients divided by hand."""
    wrapped, alone = Run(kind), Run(kind)
    for step in range(3):
        wrapped.divided(gradients_of(step), divisor)
        alone.plain([g * divisor / scalar(divisor) for g in gradients_of(step)])

    for ours, expected in zip(wrapped.weights(), alone.weights(), strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)


@EACH
def test_no_divisor_stands_for_one(kind):
    """Without a divisor, weights equal those of a plain step, and gradients are unchanged."""
    wrapped, alone = Run(kind), Run(kind)
    give(wrapped.parameters, gradients_of(0))
    wrapped.skippable.step(None, flag(skip=False))
    alone.plain(gradients_of(0))

    assert_same(wrapped.weights(), alone.weights())
    assert_same([p.grad for p in wrapped.parameters], [p.grad for p in alone.parameters])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", [FOLDED["fused AdamW"], IN_PLACE["AdamW"], IN_PLACE["RMSprop"]])
@given(divisor=st.floats(0.1, 10.0))
def test_half_precision_gradients_are_rounded_once(kind, dtype, divisor):
    """The division is done in float32, and only the quotient is rounded to half precision.

    A kernel may multiply by the reciprocal instead of dividing. Near ties then round differently,
    for at most 1 in 200 gradients. A reciprocal in bfloat16 would be wrong for 1 in 3 gradients.
    """
    gradient = (torch.rand(2000, generator=torch.Generator().manual_seed(2)) + 0.5).to(dtype)
    run = Run(kind, [nn.Parameter(torch.zeros(2000, dtype=dtype))])
    give(run.parameters, [gradient])
    run.skippable.step(scalar(divisor), flag(skip=False))

    expected = (gradient.double() / scalar(divisor).double()).to(dtype)
    assert (run.parameters[0].grad != expected).sum() <= 10


@pytest.mark.parametrize("kind", [FOLDED["fused AdamW"], IN_PLACE["AdamW"]])
def test_a_divisor_beyond_float16_leaves_its_quotient(kind):
    """A divisor of 2**26, whose reciprocal is 0 in float16, gives the correct quotient."""
    run = Run(kind, [nn.Parameter(torch.zeros(20, dtype=torch.float16))])
    give(run.parameters, [torch.full((20,), 2.0**15, dtype=torch.float16)])
    run.skippable.step(scalar(2.0**26), flag(skip=False))

    assert (run.parameters[0].grad == 2.0**-11).all()


@EACH_OF_EACH_TYPE
def test_weights_of_each_type_are_the_optimizers(kind, dtype):
    """With a divisor of 16, weights equal those of the optimizer without the wrapper bitwise."""
    wrapped, alone = (Run(kind, parameters_of(dtype)) for _ in range(2))
    for step in range(3):
        wrapped.divided(gradients_of(step, dtype), 16.0)
        alone.plain(gradients_of(step, dtype))

    assert_same(wrapped.weights(), alone.weights())


@pytest.mark.fast_sample(24)
@EACH_OF_EACH_TYPE
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_later_skip_changes_nothing(kind, dtype, bad):
    """A skip after applied updates leaves weights, state and step counts unchanged."""
    run = Run(kind, parameters_of(dtype))
    for step in range(2):
        run.divided(gradients_of(step, dtype), 4.0)
    weights, state = run.weights(), run.state()
    run.skipped(bad=bad)

    assert_same(run.weights(), weights)
    assert_same(run.state(), state)


@EACH_OF_EACH_TYPE
def test_a_first_skip_changes_nothing(kind, dtype):
    """A skipped first step leaves weights unchanged and creates only zeros as state."""
    run = Run(kind, parameters_of(dtype))
    weights, state = run.weights(), run.state()
    run.skipped()

    assert_same(run.weights(), weights)
    after = run.state()
    assert_same({key: after[key] for key in state}, state)
    for key in after.keys() - state.keys():
        assert not after[key].any(), key


@pytest.mark.fast_sample(20)
@EACH
@pytest.mark.parametrize("divisor", [8.0, None])
@pytest.mark.parametrize("num_skips", [1, 2])
def test_a_run_goes_on_as_if_it_had_never_seen_skipped_steps(kind, divisor, num_skips):
    """A run with skipped steps ends bitwise like the run without them."""
    with_skips, without = Run(kind), Run(kind)
    for _ in range(num_skips):
        with_skips.skipped(divisor=divisor)
    for step in range(3):
        with_skips.divided(gradients_of(step), 8.0)
        without.divided(gradients_of(step), 8.0)
        with_skips.skipped(divisor=divisor)

    assert_same(with_skips.weights(), without.weights())
    assert_same(with_skips.state(), without.state())


@EACH
@pytest.mark.parametrize("skip", [False, True])
def test_no_attribute_is_left_for_a_later_plain_step(kind, skip):
    """A plain optimizer step after a wrapped one neither divides nor skips."""
    wrapped, alone = Run(kind), Run(kind)
    for run in (wrapped, alone):
        give(run.parameters, gradients_of(0))
        run.skippable.step(scalar(1.0), flag(skip=skip))
        assert not hasattr(run.optimizer, "found_inf")
        assert not hasattr(run.optimizer, "grad_scale")
    wrapped.plain(gradients_of(1))
    alone.divided(gradients_of(1), 1.0)

    assert_same(wrapped.weights(), alone.weights())


@EACH
def test_no_attribute_is_left_when_the_step_raises(kind):
    """An error in the optimizer is raised, and the attributes for skipping are removed."""
    run = Run(kind)

    def refuse(*_):
        message = "no step today"
        raise KeyError(message)

    hook = run.optimizer.register_step_pre_hook(refuse)
    give(run.parameters, gradients_of(0))
    with pytest.raises(KeyError, match="no step today"):
        run.skippable.step(scalar(2.0), flag(skip=False))
    hook.remove()

    assert not hasattr(run.optimizer, "found_inf")
    assert not hasattr(run.optimizer, "grad_scale")


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", FOLDED.values(), ids=FOLDED)
def test_folding_reads_nothing_on_the_host(kind, skip):
    """Fused optimizers read neither flag nor divisor on the host."""
    run = Run(kind)
    gradients, flags = gradients_of(0), flag(skip=skip)
    with HostReads() as host:
        for _ in range(2):
            give(run.parameters, gradients)
            run.skippable.step(scalar(4.0), flags)

    assert host.reads == []


@pytest.mark.parametrize("divisor", [None, 1.0, 4.0])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_reads_flag_and_divisor_at_once(kind, skip, divisor):
    """Other optimizers read flag and divisor in one host read before their step."""
    run, reads_before = Run(kind), []
    divisor = None if divisor is None else scalar(divisor)
    give(run.parameters, gradients_of(0))
    with HostReads() as host:
        run.optimizer.register_step_pre_hook(lambda *_: reads_before.append(len(host.reads)))
        run.skippable.step(divisor, flag(skip=skip))

    assert reads_before == ([] if skip else [1])
    assert not skip or len(host.reads) == 1


@pytest.mark.parametrize("fused_groups", [(False, True), (False, False)], ids=str)
def test_a_momentum_may_begin_late_where_not_all_groups_are_fused(fused_groups):
    """A late momentum agrees with unfused SGD if its group, or no group, is fused."""
    groups = ({"fused": each} for each in fused_groups)
    run = Run(grouped(SGD, *groups, lr=0.1, momentum=0.9, dampening=0.5))
    expected = Run(kind(SGD, lr=0.1, momentum=0.9, dampening=0.5))
    for step in range(3):
        gradients = gradients_of(step)
        if step == 0:
            gradients[1] = None
        run.divided(gradients, 4.0)
        expected.plain(gradients)

    assert tuple(group["fused"] for group in run.optimizer.param_groups) == fused_groups
    for ours, theirs in zip(run.weights(), expected.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@EACH
def test_a_parameter_without_a_gradient_is_left_alone(kind):
    """A parameter without a gradient keeps its value while other parameters change."""
    run = Run(kind)
    before = run.weights()
    gradients = gradients_of(0)
    gradients[1] = None
    run.divided(gradients, 4.0)

    assert torch.equal(run.weights()[1], before[1])
    assert not torch.equal(run.weights()[0], before[0])


def grouped(cls, first, second, **settings):
    """Return a builder of optimizers whose first group has only the first parameter."""
    return lambda parameters: cls(
        [{"params": parameters[:1]} | first, {"params": parameters[1:]} | second], **settings
    )


@pytest.mark.parametrize(
    "build",
    [
        grouped(AdamW, {"lr": 0.1}, {"lr": 0.01, "weight_decay": 0.5}, fused=True),
        grouped(AdamW, {"lr": rate()}, {"lr": 0.01}, fused=True),
        grouped(SGD, {"momentum": 0.9}, {"momentum": 0}, lr=0.1, fused=True),
        grouped(SGD, {"dampening": 0.5}, {"dampening": 0}, lr=0.1, momentum=0.9, fused=True),
        grouped(Adagrad, {"lr": 0.1}, {"lr": 0.01}, fused=True),
        grouped(Adam, {"lr": 0.1}, {"lr": 0.01}),
        grouped(Adam, {"fused": True}, {}, lr=0.1),
        grouped(SGD, {"fused": True}, {}, lr=0.1, momentum=0.9),
    ],
    ids=["decay", "tensor", "momentum", "dampening", "Adagrad", "plain", "half Adam", "half SGD"],
)
def test_groups_keep_their_settings(build):
    """Several groups, even if only some are fused, are divided and skipped together."""
    run, alone = Run(build), Run(build)
    run.skipped()
    for step in range(3):
        run.divided(gradients_of(step), 4.0)
        alone.plain(gradients_of(step))
        run.skipped()

    assert_same(run.weights(), alone.weights())


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        *((kind, kind.folds) for kind in ALL.values()),
        (grouped(Adam, {"fused": True}, {}, lr=0.1), False),
        (fused(type("Subclass", (AdamW,), {})), True),
    ],
    ids=[*ALL, "half fused", "subclass"],
)
def test_skips_on_device_tells_the_way(build, expected):
    """``skips_on_device`` is True for fused optimizers, `Muon` and their subclasses."""
    assert Run(build).skippable.skips_on_device is expected


def test_a_scheduler_does_not_hide_the_step():
    """An optimizer whose ``step`` a scheduler has replaced still skips on the device."""
    run = Run(FOLDED["fused AdamW"])
    torch.optim.lr_scheduler.StepLR(run.optimizer, 1)

    assert SkippableOptimizer(run.optimizer).skips_on_device
    run.skipped()
    assert_same(run.weights(), parameters_of())


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("is_fused", [True, False])
def test_fused_kernels_run_on_local_shards(is_fused):
    """The update of distributed weights is that of plain ones; only kernels get the shards."""
    mesh = init_device_mesh("cpu", (1,))
    plain = nn.Parameter(torch.arange(6.0).view(3, 2))
    split = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
    seen = []
    for weight in (plain, split):
        weight.grad = torch.ones_like(weight)
        optimizer = AdamW([weight], lr=0.1, fused=is_fused)
        optimizer.register_step_pre_hook(
            lambda opt, *_: seen.append(isinstance(opt.param_groups[0]["params"][0], DTensor))
        )
        SkippableOptimizer(optimizer).step(torch.tensor(4.0), torch.tensor(data=False))

    assert torch.equal(split.full_tensor(), plain)
    assert seen == [False, not is_fused]


def test_lbfgs_is_refused():
    """LBFGS raises an error, because it evaluates the loss more than once."""
    with pytest.raises(TypeError, match=r"`optimizer` must update from the gradients .* got LBFGS"):
        SkippableOptimizer(torch.optim.LBFGS(parameters_of()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "build",
    [
        Adam,
        AdamW,
        partial(AdamW, fused=True),
        partial(AdamW, eps=1e-6),
        RMSprop,
        Adagrad,
        Adadelta,
        Adafactor,
        partial(SGD, lr=0.1),
    ],
    ids=str,
)
def test_an_eps_that_makes_weights_nan_is_told(build, dtype):
    """An optimizer warns exactly if torch's own step makes the weights NaN with zero gradients."""
    weight = nn.Parameter(torch.ones(2, 2, dtype=dtype))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        SkippableOptimizer(build([weight]))
    weight.grad = torch.zeros_like(weight)
    build([weight]).step()

    is_told = any("is 0 in float16; load the weights" in str(one.message) for one in told)
    assert is_told == weight.isnan().any()


@pytest.mark.parametrize("build", [FOLDED["fused AdamW"], FOLDED["fused SGD momentum"]])
@pytest.mark.cuda
def test_folding_waits_for_no_device(build):
    """No step of a fused optimizer synchronizes with the device."""
    run = Run(build, [nn.Parameter(parameter.detach().cuda()) for parameter in parameters_of()])
    gradients = [gradient.cuda() for gradient in gradients_of(0)]
    divisor, flags = scalar(4.0).cuda(), [flag(skip=skip).cuda() for skip in (True, False, True)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for skip in flags:
            give(run.parameters, gradients)
            run.skippable.step(divisor, skip)
            learning_rates(run.optimizer, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")

    alone = Run(build)
    alone.plain([gradient / 4 for gradient in gradients_of(0)])
    for ours, expected in zip(run.weights(), alone.weights(), strict=True):
        torch.testing.assert_close(ours.cpu(), expected, **CLOSE)


def test_a_loaded_state_may_change_whether_an_optimizer_is_fused():
    """A fused optimizer that loads an unfused optimizer's state trains like that optimizer."""
    plain = torch.nn.Parameter(torch.ones(3))
    fused = torch.nn.Parameter(torch.ones(3))
    optimizers = [AdamW([plain], lr=0.1, fused=False), AdamW([fused], lr=0.1, fused=True)]
    ours = SkippableOptimizer(optimizers[1])
    assert ours.skips_on_device

    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert not ours.skips_on_device
    for parameter in (plain, fused):
        parameter.grad = torch.full((3,), 8.0)
    no_skip = torch.zeros((), dtype=torch.bool)
    SkippableOptimizer(optimizers[0]).step(torch.full((), 4.0), no_skip)
    ours.step(torch.full((), 4.0), no_skip)
    assert torch.equal(plain, fused)
