"""A detached accelerator is as one that was never attached; so is one that was freed or copied."""

import copy
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from mfwrap import ExponentialMovingAverage
from mfwrap.accelerate import attach
from support.attached_runs import FACTORS, NAN, AttachedRun, RunSettings, new_accelerator
from support.small_networks import Classifier, labelled_batches
from support.training_state import assert_same_state

APPLIED = (1.0,) * len(FACTORS)
PLAIN = RunSettings(loss_scale="none", max_norm=None)
"""What trains as accelerate alone does, to the last bit."""

PRECISIONS = ["no", "bf16", "fp16"]


def kinds(value):
    """Return names and types of all attributes."""
    return {name: type(each) for name, each in vars(value).items()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_updates", [0, 3])
def test_a_detached_accelerator_has_the_attributes_of_a_twin(num_updates, precision):
    """Accelerator, prepared optimizer and schedule: the same classes, attributes and hooks."""
    settings = replace(PLAIN, precision=precision)
    twin = AttachedRun(settings, attached=False)
    twin.train(0, num_updates, APPLIED)
    run = AttachedRun(settings)
    run.train(0, num_updates, APPLIED)

    run.step.detach()

    assert type(run.accelerator) is Accelerator
    assert type(run.optimizer) is AcceleratedOptimizer
    assert type(run.schedule) is AcceleratedScheduler
    for name in ("accelerator", "optimizer", "schedule", "network"):
        assert kinds(getattr(run, name)) == kinds(getattr(twin, name)), name
    assert kinds(run.optimizer.optimizer) == kinds(twin.optimizer.optimizer)
    assert not run.accelerator._save_model_state_pre_hook
    assert not run.accelerator._load_model_state_pre_hook


def test_an_accelerator_of_a_class_of_ones_own_gets_it_back():
    """The Trainer, too, has an accelerator of its own class."""

    class Own(Accelerator):
        pass

    accelerator = Own(cpu=True)
    step = attach(accelerator)
    assert isinstance(accelerator, Own)

    step.detach()

    assert type(accelerator) is Own


def test_accelerates_own_scaler_comes_back_as_it_was():
    """The same object, untouched, in accelerator and optimizer."""
    accelerator = new_accelerator("fp16")
    scaler = accelerator.scaler
    before = scaler.state_dict()
    step = attach(accelerator)
    network = Classifier()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network, optimizer = accelerator.prepare(network, optimizer)
    accelerator.backward(network(*labelled_batches(1)[0], NAN))
    optimizer.step()

    step.detach()

    assert accelerator.scaler is scaler
    assert optimizer.scaler is scaler
    assert scaler.state_dict() == before


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", ["fused AdamW", "foreach AdamW", "fused SGD"])
def test_after_detaching_the_loop_goes_on_as_accelerates_own(optimizer, accumulation, precision):
    """Half of the run attached and half not is the run that never was, to the last bit."""
    settings = replace(PLAIN, optimizer=optimizer, accumulation=accumulation, precision=precision)
    alone = AttachedRun(settings, attached=False)
    expected = alone.train(0, 8, APPLIED)
    run = AttachedRun(settings)

    losses = run.train(0, 4, APPLIED)
    run.step.detach()
    losses += run.train(4, 8, APPLIED)

    assert losses == expected
    assert_same_state(alone.trained(), run.trained())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_after_a_skip_too_it_goes_on_from_where_it_was(tmp_path, precision):
    """Accelerate alone, from the checkpoint of the attached run, trains to the same weights."""
    settings = RunSettings(loss_scale="none", precision=precision)
    run = AttachedRun(settings)
    run.train(0, 6)
    run.accelerator.save_state(tmp_path)
    run.step.detach()
    losses = run.train(6, 8)

    alone = AttachedRun(replace(settings, seed=1), attached=False)
    alone.accelerator.load_state(tmp_path)
    expected = alone.train(6, 8)

    assert losses == expected
    assert_same_state(alone.trained(), run.trained())


def test_a_detached_loop_steps_its_schedule_at_once():
    """What was pending is done when detaching; nothing is late afterwards."""
    run = AttachedRun(PLAIN)
    run.train(0, 2, APPLIED)
    behind = run.schedule.scheduler.last_epoch

    run.step.detach()
    detached = run.schedule.scheduler.last_epoch
    run.train(2, 3, APPLIED)

    assert (behind, detached, run.schedule.scheduler.last_epoch) == (1, 2, 3)


def test_a_detached_step_can_be_flushed_and_read():
    """There is nothing left to wait for; its last report stays."""
    run = AttachedRun()
    run.train(0, 3)
    report = run.step.last_report
    run.step.detach()

    run.step.flush()

    assert run.step.last_report is report
    assert run.schedule.scheduler.last_epoch == 2


def test_the_average_stays_as_it_is():
    """It follows no update after the last attached one, and can still be swapped in."""
    run = AttachedRun()
    run.train(0, 3)
    ema = run.step.ema
    run.step.detach()
    averages = [average.clone() for _, average in ema.named_averages()]

    run.train(3, 4)

    for before, (_, after) in zip(averages, ema.named_averages(), strict=True):
        assert torch.equal(before, after)
    with ema.swap():
        for before, weight in zip(averages, run.network.parameters(), strict=True):
            assert torch.equal(before, weight)


def test_gradients_that_wait_for_their_step_are_unscaled():
    """A loop that is detached between backward and step continues as with accelerate alone."""
    gradients = []
    for attached in (False, True):
        run = AttachedRun(replace(PLAIN, loss_scale="number"), attached=attached)
        run.accelerator.backward(run.network(*labelled_batches(1)[0]))
        if attached:
            run.step.detach()
        gradients.append([weight.grad for weight in run.network.parameters()])

    expected, actual = gradients
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


def test_gradients_that_were_clipped_are_clipped_after_detaching():
    """Clipping is folded into the step; without it, it must have been done in place."""
    gradients = []
    for attached in (False, True):
        run = AttachedRun(PLAIN, attached=attached)
        run.accelerator.backward(run.network(*labelled_batches(1)[0]))
        run.accelerator.clip_grad_norm_(run.network.parameters(), 0.1)
        if attached:
            run.step.detach()
        gradients.append([weight.grad for weight in run.network.parameters()])

    expected, actual = gradients
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_detaching_twice_does_no_more_than_once():
    """The second call does nothing, even if another step was attached in between."""
    accelerator = new_accelerator()
    first = attach(accelerator)
    first.detach()
    first.detach()
    second = attach(accelerator)

    first.detach()

    assert accelerator.attachment is second
    assert accelerator.scaler is not None


def test_what_is_prepared_cannot_be_attached_again():
    """Its optimizer was prepared without the step; freed, the accelerator can."""
    run = AttachedRun()
    run.train(0, 1)
    run.step.detach()

    with pytest.raises(RuntimeError, match="`attach` must be called before"):
        attach(run.accelerator)

    run.accelerator.free_memory()
    run.step = attach(run.accelerator, ema=ExponentialMovingAverage)
    run.prepare()
    run.train(0, 3)
    assert run.step.last_report.applied_updates == 2
    assert run.accelerator.optimizer_step_was_skipped is False


@pytest.mark.parametrize("method", ["free_memory", "clear"])
def test_a_freed_accelerator_trains_what_is_prepared_next(method):
    """A new training starts: counts and average are new, the loss scale is kept."""
    fresh = AttachedRun(replace(PLAIN, seed=1))
    fresh.train(0, 4, APPLIED)
    expected = fresh.state()

    run = AttachedRun(PLAIN)
    run.train(0, 3)
    getattr(run.accelerator, method)()
    run.settings = replace(PLAIN, seed=1)
    run.prepare()
    run.train(0, 4, APPLIED)

    assert_same_state(expected, run.state())


def test_freeing_settles_what_is_pending():
    """The schedule that one still holds has seen the last update."""
    run = AttachedRun()
    run.train(0, 3)

    run.accelerator.free_memory()

    assert run.schedule.scheduler.last_epoch == 2


def test_the_end_of_training_settles_what_is_pending():
    """``end_training`` flushes, so that the schedule has seen the last update."""
    run = AttachedRun()
    run.train(0, 3)

    run.accelerator.end_training()

    assert run.schedule.scheduler.last_epoch == 2


def test_a_copy_of_an_attached_accelerator_is_the_accelerator_itself():
    """So accelerate has it, and so it stays."""
    accelerator = new_accelerator()
    step = attach(accelerator)

    assert copy.deepcopy(accelerator) is accelerator
    assert accelerator.attachment is step
