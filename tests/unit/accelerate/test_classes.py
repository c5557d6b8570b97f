"""Attached accelerators, optimizers and schedules keep their identity and accelerate's methods."""

import contextlib

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from mfwrap.accelerate import attach
from mfwrap.accelerate.classes import AttachedOptimizer, StepScaler
from mfwrap.accelerate.schedules import AttachedScheduler
from support.attached_runs import new_accelerator
from support.deferral import late_results
from support.small_llama import needs_stages, small_llama, split_for_generation

SCALE = 2.0**10


class Prepared:
    """A linear network with an optimizer and a schedule, prepared by an attached accelerator."""

    def __init__(self, wrap=lambda optimizer: optimizer) -> None:
        torch.manual_seed(0)
        self.accelerator = new_accelerator()
        self.attached = attach(self.accelerator, scale_sense=SCALE)
        network = nn.Linear(2, 1)
        self.inner = SGD(network.parameters(), lr=0.5)
        self.network, self.optimizer, self.schedule = self.accelerator.prepare(
            network, wrap(self.inner), StepLR(self.inner, 1, 0.5)
        )

    def backward(self) -> None:
        """Run backward on a loss whose gradients are 1 for each weight and the bias."""
        self.accelerator.backward(self.network(torch.ones(1, 2)).sum())


def test_prepared_objects_stay_accelerates():
    """Attached objects remain instances of accelerate's classes, which `detach` restores."""
    prepared = Prepared()
    accelerator, optimizer, schedule = (
        prepared.accelerator,
        prepared.optimizer,
        prepared.schedule,
    )

    assert isinstance(accelerator, Accelerator)
    assert isinstance(optimizer, AttachedOptimizer)
    assert isinstance(schedule, AttachedScheduler)
    prepared.attached.detach()
    assert type(accelerator) is Accelerator
    assert type(optimizer) is AcceleratedOptimizer
    assert type(schedule) is AcceleratedScheduler


@pytest.mark.parametrize(
    "wrap",
    [lambda optimizer: optimizer, AcceleratedOptimizer],
    ids=["bare", "wrapped by hand"],
)
def test_a_prepared_optimizer_has_one_wrapper(wrap):
    """A bare or wrapped optimizer has one wrapper after `prepare`, and updates and skips."""
    prepared = Prepared(wrap)
    before = prepared.network.weight.detach().clone()

    prepared.backward()
    prepared.optimizer.step()

    assert prepared.optimizer.optimizer is prepared.inner
    assert torch.equal(prepared.network.weight, before - 0.5)
    prepared.optimizer.zero_grad()
    prepared.network.weight.data.fill_(torch.nan)
    prepared.backward()
    prepared.network.weight.grad.fill_(torch.nan)
    prepared.optimizer.step()
    assert prepared.optimizer.step_was_skipped


@pytest.mark.parametrize("choice", ["all", "one", "a list", "the optimizer itself"])
def test_gradients_are_unscaled_once(choice):
    """`unscale_gradients` divides once, even if it is called twice before the step."""
    prepared = Prepared()
    before = prepared.network.weight.detach().clone()
    chosen = {
        "all": None,
        "one": prepared.optimizer,
        "a list": [prepared.optimizer],
        "the optimizer itself": prepared.inner,
    }[choice]

    prepared.backward()
    assert torch.equal(prepared.network.weight.grad, torch.full((1, 2), SCALE))
    prepared.accelerator.unscale_gradients(chosen)
    prepared.accelerator.unscale_gradients(chosen)

    assert torch.equal(prepared.network.weight.grad, torch.ones(1, 2))
    prepared.optimizer.step()
    assert torch.equal(prepared.network.weight, before - 0.5)


def test_the_scaler_takes_accelerates_wrapper():
    """GradScaler's methods work with the prepared optimizer and with the optimizer itself."""
    prepared = Prepared()
    scaler = prepared.accelerator.scaler
    before = prepared.network.weight.detach().clone()

    prepared.backward()
    scaler.unscale_(prepared.optimizer)
    scaler.step(prepared.optimizer)

    assert isinstance(scaler, StepScaler)
    assert torch.equal(prepared.network.weight, before - 0.5)
    assert scaler.is_enabled()
    assert scaler.get_scale() == SCALE
    scaler.update(4.0)
    assert scaler.get_scale() == 4
    scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0})
    assert scaler.get_scale() == 8


@pytest.mark.parametrize("is_late", [True, False])
def test_an_answer_that_may_come_late(is_late):
    """For the Trainer, a skip that only the device knows is not answered by a wait."""
    prepared = Prepared()
    prepared.inner.param_groups[0]["fused"] = True
    prepared.attached.attachment.answers_late = True
    prepared.backward()
    prepared.network.weight.grad.fill_(torch.nan)
    with late_results() if is_late else contextlib.nullcontext():
        prepared.optimizer.step()

        assert prepared.optimizer.step_was_skipped is not is_late


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_after_zeroing_changes_nothing(set_to_none):
    """A step without a backward since `zero_grad` is allowed, as in torch."""
    prepared = Prepared()
    prepared.backward()
    prepared.optimizer.zero_grad(set_to_none)
    before = prepared.network.weight.detach().clone()

    prepared.optimizer.step()

    assert torch.equal(prepared.network.weight, before)


def test_each_of_several_optimizers_has_one_report():
    """`last_reports` has one entry for each prepared optimizer."""
    accelerator = new_accelerator()
    attached = attach(accelerator)
    network = nn.Linear(2, 1)
    accelerator.prepare(network, *(SGD([weight], lr=0.5) for weight in network.parameters()))

    assert attached.last_reports == (None, None)


def test_clamping_hides_no_infinite_gradient_from_a_plain_backward():
    """Clipping by value does not hide an overflow, even if it comes before the first backward.

    The optimizer's weight is in no prepared model, so `prepare` does not add the optimizer yet, and
    a plain `loss.backward` does not, either.
    """
    accelerator = new_accelerator()
    attach(accelerator)
    weight = nn.Parameter(torch.ones(2))
    optimizer = accelerator.prepare(SGD([weight], lr=0.5))

    (weight * torch.tensor([1.0, torch.inf])).sum().backward()
    accelerator.clip_grad_value_([weight], 1.0)
    optimizer.step()

    assert optimizer.step_was_skipped
    assert torch.equal(weight, torch.ones(2))


def test_zeroing_gradients_gives_up_what_is_known_of_them():
    """Zeroing gradients discards their folded clip, so the next gradients are not clipped."""
    prepared = Prepared()
    before = prepared.network.weight.detach().clone()
    prepared.backward()
    prepared.accelerator.clip_grad_norm_(prepared.network.parameters(), 1e-3)

    prepared.optimizer.zero_grad()
    prepared.backward()
    prepared.optimizer.step()

    assert torch.equal(prepared.network.weight, before - 0.5)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_the_loss_of_a_last_window_of_one_micro_batch(num_batches):
    """The loss of a last window with a single micro-batch is that micro-batch's own loss."""
    accelerator = new_accelerator(gradient_accumulation_steps=2)
    step = attach(accelerator)
    network = nn.Linear(1, 1)
    loader = DataLoader(torch.ones(num_batches, 1), batch_size=1)
    network, optimizer, loader = accelerator.prepare(
        network, SGD(network.parameters(), lr=0.1), loader
    )

    for batch in loader:
        with accelerator.accumulate(network):
            loss = network(batch).sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    assert step.last_output.loss == loss


def test_the_loss_of_micro_batches_that_the_loop_counts():
    """Without `accumulate`, the reported loss is the mean over `gradient_accumulation_steps`."""
    accelerator = new_accelerator(gradient_accumulation_steps=2)
    step = attach(accelerator)
    network = nn.Linear(1, 1)
    network, optimizer = accelerator.prepare(network, SGD(network.parameters()))

    losses = [network(torch.full((1, 1), value)).sum() for value in (1.0, 2.0)]
    for loss in losses:
        accelerator.backward(loss)
    optimizer.step()

    assert step.last_output.loss == sum(losses) / 2


@needs_stages
def test_stages_of_transformers_are_refused():
    """`prepare` refuses a network that transformers has split for generation."""
    accelerator = new_accelerator()
    attach(accelerator)

    with pytest.raises(ValueError, match="must not be split by transformers, got pp_size=2"):
        accelerator.prepare(split_for_generation(small_llama()))


def _backward(loss_of, *, by_hand: bool, **keywords):
    """Return the gradient of a weight at loss scale 2**16, and the loss as the step reports it."""
    accelerator = new_accelerator(gradient_accumulation_steps=3)
    attached = attach(accelerator, scale_sense=2.0**16)
    network = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[0.3, -1.7]]))
    network, optimizer = accelerator.prepare(network, SGD(network.parameters(), lr=0.1))
    loss = loss_of(network(torch.tensor([[0.7, 0.9]])))
    if by_hand:
        accelerator.scaler.scale(loss / 3).backward(**keywords)
    else:
        accelerator.backward(loss, **keywords)
    assert accelerator.scaler.multiplies
    gradient = network.weight.grad.clone()
    optimizer.step()
    return gradient, attached.last_output.loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "vector"])
def test_backward_begins_with_the_loss_scale(dtype, shape):
    """The gradients and the reported loss are, to the bit, those of the multiplied loss."""
    found = [
        _backward(lambda y: y.to(dtype).square().sum().reshape(shape), by_hand=by_hand)
        for by_hand in (True, False)
    ]

    (gradient, loss), (other, other_loss) = found
    assert gradient.abs().max() > 2.0**10
    assert torch.equal(gradient, other)
    assert torch.equal(loss, other_loss)


def test_a_gradient_of_the_loop_is_multiplied_by_the_loss_scale():
    """With a ``gradient`` of its own, the loop's loss is multiplied as before."""
    first = torch.tensor(0.25)
    expected, _ = _backward(lambda y: y.square().sum(), by_hand=True, gradient=first)
    found, _ = _backward(lambda y: y.square().sum(), by_hand=False, gradient=first)

    assert torch.equal(found, expected)


def test_after_an_error_in_backward_a_loss_is_multiplied():
    """A backward that raises leaves the gradient scaler as it was."""
    accelerator = Accelerator(cpu=True)
    attach(accelerator, scale_sense=8.0)
    network = nn.Linear(2, 1)
    network, _ = accelerator.prepare(network, SGD(network.parameters(), lr=0.1))

    with pytest.raises(RuntimeError, match="does not require grad"):
        accelerator.backward(torch.ones(()))

    assert accelerator.scaler.scale(network(torch.ones(1, 2)).sum().detach() * 0 + 1) == 8.0


class Observer:
    """Keep what an attached step tells its observers."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def after_backward(self) -> None:
        """Keep the call."""
        self.calls.append(("after_backward",))

    def before_log(self, step):
        """Keep the call."""
        self.calls.append(("before_log", step))


class Tracker:
    """Keep what accelerate logs."""

    name = "kept"

    def __init__(self, calls) -> None:
        self.calls = calls

    def log(self, values, step, **keywords):
        """Keep the call."""
        self.calls.append((values, step, keywords))


def test_observers_are_told_before_the_loop_logs():
    """Observers see each update's last backward, and each log before the trackers get it."""
    prepared, observer = Prepared(), Observer()
    prepared.attached.attachment.observers.append(observer)
    prepared.accelerator.trackers = [Tracker(observer.calls)]
    for is_last in (False, True):
        prepared.accelerator.gradient_state._set_sync_gradients(is_last)
        observer.calls.append(("backward", is_last))
        prepared.backward()
    prepared.accelerator.log({"loss": 1.0}, step=3, log_kwargs={"kept": {"tags": ["a"]}})
    prepared.accelerator.log(values={"loss": 2.0})

    assert observer.calls == [
        ("backward", False),
        ("backward", True),
        ("after_backward",),
        ("before_log", 3),
        ({"loss": 1.0}, 3, {"tags": ["a"]}),
        ("before_log", None),
        ({"loss": 2.0}, None, {}),
    ]
