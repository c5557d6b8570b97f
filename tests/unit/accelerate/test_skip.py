"""An attached loop skips updates whose gradients are not finite and reports each skip."""

import functools
import itertools
import math

import pytest
import torch
from accelerate import Accelerator

from mfwrap import StepConfig
from mfwrap.accelerate import attach
from support.accelerate_loops import OPTIMIZERS, Loop, Trace, train, train_alone, weights_of
from support.training_state import assert_same_state, assert_unchanged

NAN, INF = math.nan, math.inf
PRECISIONS = ("no", "bf16", "fp16")
NUM_UPDATES = 5
FUSED = ["fused AdamW", "fused SGD"]
NOT_FUSED = ["foreach AdamW", "SGD", "Adafactor"]


def loop_with(bad_update: int, **settings) -> Loop:
    """Return a loop of `NUM_UPDATES` updates, one of which has a non-finite gradient."""
    accumulation = settings.get("accumulation", 1)
    return Loop(
        **{
            "bad_updates": (bad_update,),
            "num_batches": NUM_UPDATES * accumulation,
            "scale": 2.0**10,
            **settings,
        }
    )


@functools.cache
def attached(loop: Loop) -> Trace:
    """Return the trace of the attached loop. It is cached: callers must not change it."""
    return train(loop, attached=True)


def applied_rates(skipped: list[bool], first: float) -> list[float]:
    """Return the rates ``first / (1 + n)``, where ``n`` counts earlier applied updates."""
    return [first * (1 / (1 + skipped[:index].count(False))) for index in range(len(skipped))]


def weights_are_finite(trace: Trace, update: int) -> list[bool]:
    """Return, for each weight after an update, whether all its elements are finite."""
    return [w.isfinite().all().item() for w in weights_of(trace.states[update + 1]).values()]


each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)
each_place = pytest.mark.parametrize("bad_update", [0, 2], ids=["first update", "later update"])
each_value = pytest.mark.parametrize("bad_value", [NAN, INF], ids=str)
each_clipping = pytest.mark.parametrize(
    "max_norm", [None, 0.3, INF], ids=["not clipped", "clipped", "measured"]
)


@pytest.mark.fast_sample(48)
@pytest.mark.parametrize(
    ("max_norm", "accumulation"),
    [(None, 4), (0.3, 1), (0.3, 4), (INF, 1)],
    ids=["not clipped, accumulated", "clipped", "clipped, accumulated", "measured"],
)
@each_place
@each_value
@each_precision
@each_optimizer
def test_a_bad_element_changes_nothing(
    optimizer, precision, bad_value, bad_update, max_norm, accumulation
):
    """A non-finite gradient element leaves weights, optimizer state, average and rate unchanged."""
    trace = attached(
        loop_with(
            bad_update,
            optimizer=optimizer,
            precision=precision,
            bad_value=bad_value,
            max_norm=max_norm,
            accumulation=accumulation,
        )
    )

    expected = [index == bad_update for index in range(NUM_UPDATES)]
    assert trace.skipped == expected
    assert_unchanged(trace.states[bad_update], trace.states[bad_update + 1])
    torch.testing.assert_close(
        trace.averages[bad_update + 1], trace.averages[bad_update], rtol=0, atol=0
    )
    assert trace.rates[bad_update + 1] == trace.rates[bad_update]
    assert trace.rates == applied_rates(expected, trace.rates[0])
    assert trace.schedule["last_epoch"] == NUM_UPDATES - 1
    assert [report.skipped.item() for report in trace.reports] == expected
    assert [report.output.overflow.item() for report in trace.reports] == expected


@each_place
@each_precision
@each_optimizer
def test_the_other_updates_are_done(optimizer, precision, bad_update):
    """Every update with finite gradients changes all weights and averages."""
    trace = attached(loop_with(bad_update, optimizer=optimizer, precision=precision))

    for index in set(range(NUM_UPDATES)) - {bad_update}:
        before, after = weights_of(trace.states[index]), weights_of(trace.states[index + 1])
        assert all(not torch.equal(before[name], after[name]) for name in before)
        pairs = zip(trace.averages[index], trace.averages[index + 1], strict=True)
        assert all(not torch.equal(*pair) for pair in pairs)


@pytest.mark.fast_sample(16)
@pytest.mark.parametrize("given_ema", [False, True], ids=["callable", "object"])
@pytest.mark.parametrize("accumulation", [1, 4])
@each_place
@pytest.mark.parametrize("precision", ["no", "bf16"])
@each_optimizer
def test_training_goes_on_as_if_the_bad_batch_had_not_been(
    optimizer, precision, bad_update, accumulation, given_ema
):
    """A run with a skipped batch ends in the state of accelerate alone without that batch."""
    loop = loop_with(
        bad_update, optimizer=optimizer, precision=precision, accumulation=accumulation
    )
    without = {**vars(loop), "bad_updates": (), "left_out": (bad_update,), "scale": 1.0}
    expected = train_alone(Loop(**without))

    trace = train(loop, attached=True, given_ema=given_ema)

    assert_same_state(expected.states[-1], trace.states[-1])
    torch.testing.assert_close(trace.averages[-1], expected.averages[-1], rtol=0, atol=0)
    assert trace.schedule == expected.schedule
    kept = [rate for rate, skipped in zip(trace.rates, trace.skipped, strict=True) if not skipped]
    assert kept == expected.rates


@pytest.mark.fast_sample(12)
@pytest.mark.parametrize("bad_updates", [(0, 1), (1, 3, 4), (4,)], ids=str)
@each_precision
@each_optimizer
def test_nobody_need_ask(optimizer, precision, bad_updates):
    """Rates, weights and schedule are correct if the loop never asks about skips.

    This includes the end of training, when the last update's outcome is still pending.
    """
    loop = loop_with(0, bad_updates=bad_updates, optimizer=optimizer, precision=precision)
    expected = [index in bad_updates for index in range(NUM_UPDATES)]

    trace = train(loop, attached=True, asks=False)

    assert trace.rates == applied_rates(expected, trace.rates[0])
    assert trace.schedule["last_epoch"] == expected.count(False)
    for index in bad_updates:
        assert_unchanged(trace.states[index], trace.states[index + 1])


@each_clipping
@each_place
@pytest.mark.parametrize("optimizer", NOT_FUSED)
def test_in_fp16_without_fused_optimizers_it_is_accelerates_own_skip(
    optimizer, bad_update, max_norm
):
    """In fp16 without a fused optimizer, the attached loop skips like accelerate alone."""
    loop = loop_with(bad_update, optimizer=optimizer, precision="fp16", max_norm=max_norm)
    expected, actual = train_alone(loop), attached(loop)

    assert actual.skipped == expected.skipped == [i == bad_update for i in range(NUM_UPDATES)]
    assert actual.rates == expected.rates
    assert actual.schedule == expected.schedule
    # Clipping rounds in another order, so clipped training agrees only up to this tolerance.
    tolerance = 4e-7 if max_norm == 0.3 else 0.0
    for name, weight in expected.weights.items():
        torch.testing.assert_close(actual.weights[name], weight, rtol=0, atol=tolerance)
    torch.testing.assert_close(actual.averages[-1], expected.averages[-1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("optimizer", NOT_FUSED)
def test_a_scale_that_is_too_high_falls_as_accelerates_does(optimizer):
    """A loss scale that overflows float16 gradients falls as with accelerate alone."""
    loop = Loop(optimizer=optimizer, precision="fp16", scale=2.0**24, num_batches=12)
    expected, actual = train_alone(loop), attached(loop)

    assert 3 < expected.skipped.count(True) < 9
    assert actual.skipped == expected.skipped
    assert actual.rates == expected.rates
    assert_same_state(expected.states[-1], actual.states[-1])


@each_place
def test_accelerate_alone_denies_a_skip_in_fp16_with_a_fused_optimizer(bad_update):
    """In fp16 accelerate alone does not report a skip of a fused optimizer; the step reports it.

    Accelerate checks whether the optimizer's ``step`` was called; a fused optimizer skips inside
    that call. So accelerate still moves the schedule.
    """
    loop = loop_with(bad_update, precision="fp16")
    stock, ours = train_alone(loop), attached(loop)

    for trace in (stock, ours):
        assert_unchanged(trace.states[bad_update], trace.states[bad_update + 1])
    assert (stock.skipped[bad_update], ours.skipped[bad_update]) == (False, True)
    assert stock.rates[bad_update + 1] < stock.rates[bad_update]
    assert ours.rates[bad_update + 1] == ours.rates[bad_update]
    assert (stock.schedule["last_epoch"], ours.schedule["last_epoch"]) == (5, 4)


@each_place
@pytest.mark.parametrize("precision", ["no", "bf16"])
@each_optimizer
def test_accelerate_alone_loses_the_model_to_a_bad_element(optimizer, precision, bad_update):
    """A non-finite gradient spoils the weights with accelerate alone, but not with the step."""
    settings = {"optimizer": optimizer, "precision": precision, "scale": 1.0}
    loop = loop_with(bad_update, max_norm=0.3, **settings)
    stock, ours = train_alone(loop), attached(loop)

    assert not any(weights_are_finite(stock, bad_update))
    assert all(weights_are_finite(ours, bad_update))
    assert not any(stock.skipped)
    assert stock.rates[bad_update + 1] < stock.rates[bad_update]

    not_clipped = loop_with(bad_update, **settings)
    assert not all(weights_are_finite(train_alone(not_clipped), bad_update))
    assert all(weights_are_finite(attached(not_clipped), NUM_UPDATES - 1))


@each_precision
@each_optimizer
def test_norm_and_loss_of_a_skipped_update_are_reported_as_they_were(optimizer, precision):
    """A skipped update returns a non-finite norm and reports the loss that the loop computed."""
    loop = loop_with(2, optimizer=optimizer, precision=precision, max_norm=0.3, bad_value=INF)
    trace = attached(loop)

    finite = [norm.isfinite().item() for norm in trace.norms]
    assert finite == [index != 2 for index in range(NUM_UPDATES)]
    losses = [report.output.loss.item() for report in trace.reports]
    assert losses == trace.losses


@pytest.mark.parametrize("optimizer", ["fused AdamW", "foreach AdamW"])
def test_an_update_with_a_spike_of_its_norm_is_skipped_too(optimizer):
    """A norm at or above the spike threshold skips the update and keeps rate and loss scale."""
    loop = Loop(optimizer=optimizer, precision="fp16", scale=2.0**10, max_norm=INF, num_batches=6)
    threshold = sorted(train_alone(loop).norms)[2].item()
    config = StepConfig(
        use_clip_grad=True,
        max_grad_norm=INF,
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=threshold,
    )

    trace = train(loop, attached=True, config=config)

    expected = [norm.item() >= threshold for norm in trace.norms]
    assert 0 < expected.count(True) < 6
    assert trace.skipped == expected
    assert trace.rates == applied_rates(expected, trace.rates[0])
    assert {report.output.loss_scale.item() for report in trace.reports} == {2.0**10}
    for index in range(6):
        if expected[index]:
            assert_unchanged(trace.states[index], trace.states[index + 1])


@pytest.mark.parametrize("max_norm", [None, 0.3], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("optimizer", ["fused SGD", "foreach AdamW"])
def test_a_norm_far_above_those_before_is_skipped_or_clipped(optimizer, max_norm):
    """A finite spike is skipped, or clipped to what is usual or to the loop's own limit."""
    loop = loop_with(3, optimizer=optimizer, bad_value=1e6, max_norm=max_norm)
    skipping, clipping = (
        train(loop, attached=True, config=StepConfig(spike_policy=policy))
        for policy in ("skip", "clip")
    )

    assert skipping.skipped == [False, False, False, True, False]
    assert_unchanged(skipping.states[3], skipping.states[4])
    assert clipping.skipped == [False] * 5
    for trace in (skipping, clipping):
        scores = [report.spike_score.item() for report in trace.reports]
        assert math.isnan(scores[0])
        assert [score > 6 for score in scores] == [False, False, False, True, False]
    if optimizer == "fused SGD" and max_norm is None:
        moves = [
            torch.cat([(new - old).flatten() for old, new in zip(*pair, strict=True)]).norm().item()
            for pair in itertools.pairwise(
                list(weights_of(state).values()) for state in clipping.states
            )
        ]
        assert moves[3] < 4 * moves[2]


@pytest.mark.parametrize(
    "calls",
    [("unscale", 1.0), (1.0, 1.0), ("unscale", 1.0, 0.5), (1.0, 0.5)],
    ids=["in place", "twice", "in place, twice", "in place, then less"],
)
def test_a_spike_is_clipped_once(calls):
    """A spike that the loop has clipped in place is clipped to the lower one of both limits."""

    def trained(calls):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        attach(accelerator, StepConfig(spike_policy="clip"))
        network = torch.nn.Linear(4, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network, optimizer = accelerator.prepare(network, optimizer)
        for factor in (1.0, 2.0, 1.5, 1e4, 1.0):
            accelerator.backward(network(torch.ones(3, 4, dtype=torch.float64)).mean() * factor)
            for call in calls:
                if call == "unscale":
                    accelerator.unscale_gradients()
                else:
                    accelerator.clip_grad_norm_(network.parameters(), call)
            optimizer.step()
            optimizer.zero_grad()
        return network.weight.detach()

    limits = [call for call in calls if call != "unscale"]
    torch.testing.assert_close(trained(calls), trained([min(limits)]), rtol=1e-5, atol=1e-6)


def test_a_spike_is_clipped_where_the_loop_has_not():
    """A clip of one layer in place leaves the whole factor of a spike to the other layer."""

    def trained(*clipped):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        attach(accelerator, StepConfig(spike_policy="clip"))
        network = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(2))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        optimizer = accelerator.prepare(optimizer)
        for factor in (1.0, 2.0, 1.5, 1e4, 1.0):
            loss = sum(layer(torch.ones(3, 4)).mean() for layer in network)
            accelerator.backward(loss * factor)
            for layer in clipped:
                accelerator.clip_grad_norm_(network[layer].parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        return network[1].weight.detach()

    torch.testing.assert_close(trained(0), trained())


@each_precision
@each_optimizer
def test_training_that_only_skips_ends_with_an_error(optimizer, precision):
    """Reaching the limit of consecutive skips raises an error that names the layer."""
    loop = loop_with(0, bad_updates=(1, 2, 3), optimizer=optimizer, precision=precision)
    config = StepConfig(max_consecutive_skips=3, local_norm=True)

    message = r"3 updates in a row were skipped, the last one at step 4; .*\['layers.0.weight'\]"
    with pytest.raises(RuntimeError, match=message):
        train(loop, attached=True, config=config, asks=False)
    allowed = StepConfig(max_consecutive_skips=4)
    assert train(loop, attached=True, config=allowed).skipped == [False, True, True, True, False]
