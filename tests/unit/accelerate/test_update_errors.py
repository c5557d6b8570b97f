"""An invalid update raises an error and changes nothing."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW, SparseAdam
from torch.optim.lr_scheduler import StepLR

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.accelerate import attach
from support.attached_runs import NAN, AttachedRun, RunSettings, new_accelerator
from support.small_networks import Classifier, labelled_batches
from support.training_state import assert_same_state, assert_unchanged, training_state

[BATCH] = labelled_batches(1)


def refused_update(run, error, message, call):
    """Check that a call raises an error and changes nothing of the run."""
    before = run.state()

    with pytest.raises(error, match=message):
        call()

    assert_same_state(before, run.state())


def test_a_closure_is_refused():
    """A closure raises an error, because its loss would not be scaled."""
    run = AttachedRun()
    run.accelerator.backward(run.network(*BATCH))

    refused_update(
        run,
        TypeError,
        "`closure` must be None, got",
        lambda: run.optimizer.step(lambda: run.network(*BATCH)),
    )


@pytest.mark.parametrize("loss", [3.0, torch.ones(()).numpy()], ids=["a number", "an array"])
def test_a_loss_that_is_no_tensor_is_refused(loss):
    """A loss that is not a tensor raises an error."""
    run = AttachedRun()

    refused_update(
        run, TypeError, "`loss` must be a tensor, got", lambda: run.accelerator.backward(loss)
    )


@pytest.mark.parametrize("loss_scale", ["dynamic", "number"])
def test_gradients_of_an_unscaled_loss_are_refused(loss_scale):
    """A step with a loss scale raises if the gradients come from ``loss.backward()``."""
    run = AttachedRun(RunSettings(loss_scale=loss_scale))
    run.train(0, 1)
    run.network(*BATCH).backward()

    refused_update(
        run,
        RuntimeError,
        "gradients that do not come from `accelerator.backward",
        run.optimizer.step,
    )


ADDED = {
    "nothing added": 0,
    "one micro-batch added": 1,
    "two micro-batches added": 2,
}
each_optimizer = pytest.mark.parametrize("optimizer", ["fused AdamW", "SGD"])


@pytest.mark.parametrize("num_added", ADDED.values(), ids=ADDED)
@each_optimizer
def test_gradients_are_not_divided_by_the_scale_twice(optimizer, num_added):
    """A step raises if its gradients contain those of the last step, which were not zeroed."""
    run = AttachedRun(RunSettings(loss_scale="number", optimizer=optimizer))
    run.accelerator.backward(run.network(*BATCH))
    run.optimizer.step()
    for _ in range(num_added):
        run.accelerator.backward(run.network(*BATCH))

    refused_update(run, RuntimeError, "has already divided by the loss scale", run.optimizer.step)

    run.optimizer.zero_grad()
    run.train(0, 1)


ZEROINGS = {
    "optimizer": lambda run: run.optimizer.zero_grad(),
    "optimizer, in place": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "network": lambda run: run.network.zero_grad(),
    "network, in place": lambda run: run.network.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("zero", ZEROINGS.values(), ids=ZEROINGS)
@each_optimizer
def test_gradients_may_be_zeroed_after_another_networks_backward(optimizer, zero):
    """Gradients of the last step, and what another loss adds to them, may be zeroed in any way."""
    runs = [
        AttachedRun(RunSettings(loss_scale=scale, optimizer=optimizer))
        for scale in ("none", "number")
    ]
    for run in runs:
        for _ in range(3):
            run.accelerator.backward(run.network(*BATCH))
            run.optimizer.step()
            run.accelerator.backward(run.network(*BATCH) * 2)
            zero(run)

    alone, run = runs
    for weight, expected in zip(run.network.parameters(), alone.network.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:`optimizer.step` uses the gradients")  # and says so
def test_without_a_scale_gradients_may_be_used_again():
    """At scale 1, a second step without a new backward is that of accelerate alone."""
    settings = RunSettings(loss_scale="none")
    runs = [AttachedRun(settings, attached=attached) for attached in (False, True)]
    for run in runs:
        run.accelerator.backward(run.network(*BATCH))
        for _ in range(2):
            run.optimizer.step()

    alone, run = runs
    assert_same_state(alone.trained(), run.trained())


def test_without_a_scale_gradients_may_come_from_anywhere():
    """At scale 1, gradients of ``loss.backward()`` give the update of accelerate alone."""
    settings = RunSettings(loss_scale="none")
    runs = [AttachedRun(settings, attached=attached) for attached in (False, True)]
    for run in runs:
        run.network(*BATCH).backward()
        run.optimizer.step()

    alone, run = runs
    assert_same_state(alone.trained(), run.trained())
    assert run.step.last_output.loss.isnan()


CALLS = {
    "clip": lambda accelerator, network, _: accelerator.clip_grad_norm_(network.parameters(), 1.0),
    "clamp": lambda accelerator, network, _: accelerator.clip_grad_value_(
        network.parameters(), 1.0
    ),
    "unscale": lambda accelerator, _, __: accelerator.unscale_gradients(),
    "step": lambda _, __, optimizer: optimizer.step(),
}


@pytest.mark.parametrize("loss_scale", [None, 2.0**16], ids=["no scale", "scale"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_sparse_gradients_are_refused(call, loss_scale):
    """A sparse gradient raises an error that names the parameter, and no weight changes."""
    accelerator = new_accelerator()
    attach(accelerator, scale_sense=loss_scale)
    network = nn.Embedding(3, 2, sparse=True)
    optimizer = SparseAdam(network.parameters())
    network, optimizer = accelerator.prepare(network, optimizer)
    before = training_state(network, optimizer.optimizer)
    accelerator.backward(network(torch.tensor([1])).sum())

    with pytest.raises(TypeError, match="the gradient of `weight` must be dense"):
        call(accelerator, network, optimizer)

    assert_same_state(before, training_state(network, optimizer.optimizer))


@pytest.mark.parametrize("asks", [False, True], ids=["without questions", "asked"])
def test_training_that_only_skips_ends_with_an_error(asks):
    """Too many skips in a row raise an error, and weights, schedule and average are unchanged.

    The next update raises it, whether or not the loop asks after each update if it was skipped.
    """
    accelerator = new_accelerator()
    step = attach(
        accelerator,
        StepConfig(max_consecutive_skips=3),
        ExponentialMovingAverage,
        scale_sense=2.0**10,
    )
    network = Classifier()
    optimizer = AdamW(network.parameters(), fused=True)
    schedule = StepLR(optimizer, 1)
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    before = training_state(network, optimizer.optimizer, schedule)

    def update():
        accelerator.backward(network(*BATCH, NAN))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if asks:
            assert accelerator.optimizer_step_was_skipped is True

    for _ in range(3):
        update()
    message = r"3 updates .* at step 3; the loss scale is 1024 now; .*layers\.0\.weight"
    with pytest.raises(RuntimeError, match=message):
        update()

    assert_unchanged(before, training_state(network, optimizer.optimizer, schedule))
    for name, average in step.ema.named_averages():
        assert torch.equal(average, network.get_parameter(name))
    assert step.last_report.skipped_updates == 3
    assert accelerator.optimizer_step_was_skipped is True
