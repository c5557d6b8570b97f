"""Detaching, freeing and copying an attached accelerator behave as with accelerate alone."""

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
from support.deferral import late_results
from support.small_networks import Classifier, labelled_batches
from support.training_state import assert_same_state

APPLIED = (1.0,) * len(FACTORS)


PLAIN = RunSettings(loss_scale="none", max_norm=None)
"""Settings with which an attached run is bitwise equal to accelerate alone."""


PRECISIONS = ["no", "bf16", "fp16"]


def kinds(value):
    """Return the types of all attributes by name."""
    return {name: type(each) for name, each in vars(value).items()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_updates", [0, 3])
def test_a_detached_accelerator_has_the_attributes_of_a_twin(num_updates, precision):
    """Detached objects have the classes, attributes and hooks of objects that never had a step."""
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
    """Detaching restores the accelerator's class if it is a subclass of Accelerator."""

    class Own(Accelerator):
        pass

    accelerator = Own(cpu=True)
    step = attach(accelerator)
    assert isinstance(accelerator, Own)

    step.detach()

    assert type(accelerator) is Own


def test_accelerates_own_scaler_comes_back_with_the_present_scale():
    """Detaching restores accelerate's own scaler, which continues from the step's loss scale."""
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
    assert scaler.state_dict() == before | {"scale": before["scale"] / 2}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", ["fused AdamW", "foreach AdamW", "fused SGD"])
def test_after_detaching_the_loop_goes_on_as_accelerates_own(optimizer, accumulation, precision):
    """A run that is detached halfway is bitwise equal to a run with accelerate alone."""
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
    """A run detached after a skip continues like plain accelerate from the same checkpoint."""
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
    """Detaching applies the pending schedule step; later schedule steps take effect at once."""
    run = AttachedRun(PLAIN)
    schedule = run.schedule.scheduler
    with late_results():
        run.train(0, 2, APPLIED)
        behind = schedule.last_epoch

        run.step.detach()
        detached = schedule.last_epoch
        run.train(2, 3, APPLIED)

    assert (behind, detached, schedule.last_epoch) == (1, 2, 3)


def test_a_detached_step_can_be_flushed_and_read():
    """A detached step can be flushed and keeps its last report."""
    run = AttachedRun()
    run.train(0, 3)
    report = run.step.last_report
    run.step.detach()

    run.step.flush()

    assert run.step.last_report is report
    assert run.schedule.scheduler.last_epoch == 2


def test_the_average_stays_as_it_is():
    """After detaching, updates no longer change the average, and `swap` still works."""
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
    """Detaching between backward and step unscales the gradients."""
    gradients = []
    for attached in (False, True):
        run = AttachedRun(replace(PLAIN, loss_scale="number"), attached=attached)
        run.accelerator.backward(run.network(*labelled_batches(1)[0]))
        if attached:
            run.step.detach()
        gradients.append([weight.grad for weight in run.network.parameters()])

    expected, actual = gradients
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


@pytest.mark.parametrize("unscales", [False, True])
def test_accelerates_scaler_unscales_the_gradients_that_wait(unscales):
    """After detaching, accelerate's scaler unscales the pending gradients by their own scale."""
    run = AttachedRun(RunSettings(loss_scale="none", precision="fp16"))
    grown = run.accelerator.scaler.get_scale()
    run.train(0, 4, APPLIED)
    run.accelerator.backward(run.network(*labelled_batches(1)[0]))
    run.accelerator.unscale_gradients()
    expected = [weight.grad.clone() for weight in run.network.parameters()]
    run.optimizer.zero_grad()

    run.accelerator.backward(run.network(*labelled_batches(1)[0]))
    if unscales:
        run.accelerator.unscale_gradients()
    run.step.detach()
    run.accelerator.unscale_gradients()

    assert run.accelerator.scaler.get_scale() == run.step.loss_scale.item() > grown
    actual = [weight.grad for weight in run.network.parameters()]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


def test_a_disabled_scaler_gets_unscaled_gradients():
    """Detaching unscales the gradients if accelerate's scaler is disabled."""
    accelerator = new_accelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    step = attach(accelerator, scale_sense=4.0)
    weight = torch.nn.Linear(1, 1, bias=False)
    accelerator.prepare(weight, torch.optim.SGD(weight.parameters(), lr=0.1))
    accelerator.backward(weight(torch.ones(1, 1)).sum())

    step.detach()

    assert weight.weight.grad.item() == 1


def test_gradients_that_were_clipped_are_clipped_after_detaching():
    """Detaching applies a folded clip to the gradients in place."""
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
    """A second `detach` does nothing, even if another step was attached in between."""
    accelerator = new_accelerator()
    first = attach(accelerator)
    first.detach()
    first.detach()
    second = attach(accelerator)

    first.detach()

    assert accelerator.attachment is second.attachment
    assert accelerator.scaler is not None


def test_what_is_prepared_cannot_be_attached_again():
    """A detached accelerator can be attached again only after its memory is freed."""
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


def test_a_copy_of_an_attached_accelerator_is_the_accelerator_itself():
    """A deep copy of an attached accelerator is the accelerator itself, as in accelerate."""
    accelerator = new_accelerator()
    step = attach(accelerator)

    assert copy.deepcopy(accelerator) is accelerator
    assert accelerator.attachment is step.attachment


def test_what_a_user_holds_is_thin():
    """Everything else is behind `attachment`."""
    step = attach(Accelerator(cpu=True))

    assert {name for name in dir(step) if not name.startswith("_")} == {
        *("accelerator", "attachment", "config", "detach", "ema", "flush", "last_output"),
        *("last_report", "last_reports", "local_norm_names", "loss_scale", "report_losses"),
        "wait_for_checkpoint",
    }
