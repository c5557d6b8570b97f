"""Gradients are read once between backward and step, and each change is made once."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mfwrap import StepConfig
from mfwrap.accelerate.clipping import clip_grad_norm, clip_grad_value
from mfwrap.accelerate.window import Form, OptimizerWindow
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.update import StepUpdate

CPU = torch.device("cpu")
NAN = float("nan")
ONE = torch.ones(())


class Window:
    """An optimizer window over two zero weights, with plain SGD at rate 1 and loss scale 8."""

    def __init__(self, scale: float = 8.0) -> None:
        self.weights = {name: nn.Parameter(torch.zeros(2)) for name in ("first", "second")}
        optimizer = SGD(self.weights.values(), lr=1.0)
        loss_scale = LossScale(scale, CPU)
        parameters = TrainedParameters(self.weights, optimizer, None)
        update = StepUpdate(parameters, optimizer, StepConfig(), loss_scale)
        self.window = OptimizerWindow(update, loss_scale.value)

    def backward(self, first: Sequence[float], second: Sequence[float] | None = None) -> None:
        """Add scaled gradients, as a backward pass does."""
        self.window.before_backward(ONE, 1)
        for weight, values in zip(self.weights.values(), (first, second), strict=True):
            if values is not None:
                gradient = torch.tensor(values) * self.window._loss_scale
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

    @property
    def gradients(self) -> list[list[float] | None]:
        """The current gradients as lists, or None where a weight has no gradient."""
        weights = self.weights.values()
        return [None if weight.grad is None else weight.grad.tolist() for weight in weights]

    def step(self) -> list[list[float]]:
        """Apply the update and return the amount by which each weight decreased."""
        self.output = self.window.apply(self.window.measured(), 1).output
        return [(-weight.detach()).tolist() for weight in self.weights.values()]


def fold(window: Window, coefficient: float = 0.5) -> None:
    """Fold a clip of all gradients of a window."""
    window.window.fold_clip(window.window.measured(), torch.tensor(coefficient))


def window_in(form: Form) -> Window:
    """Return a window after a backward of the gradient [3, 4], with the gradient in this form."""
    window = Window()
    window.backward([3.0, 4.0])
    if form in {Form.FOLDED, Form.CLIPPED}:
        fold(window)
    if form is Form.CLIPPED:
        window.window.settle_clip()
    if form is Form.UNSCALED:
        window.window.unscale()
    assert window.window.form is form
    return window


CALLS = {
    "before_backward": lambda window: window.window.before_backward(ONE, 2),
    "fold_clip": lambda window: fold(window, 1.0),
    "settle_clip": lambda window: window.window.settle_clip(),
    "accept_clipped": lambda window: window.window.accept_clipped(),
    "unscale": lambda window: window.window.unscale(),
}
S, F, C, U = Form
TRANSITIONS = {
    ("before_backward", S): S,
    ("before_backward", F): S,
    ("before_backward", C): S,
    ("before_backward", U): S,
    ("fold_clip", S): F,
    ("fold_clip", C): F,
    ("settle_clip", S): S,
    ("settle_clip", F): C,
    ("settle_clip", C): C,
    ("settle_clip", U): U,
    ("accept_clipped", S): C,
    ("accept_clipped", C): C,
    ("accept_clipped", U): U,
    ("unscale", S): U,
    ("unscale", F): U,
    ("unscale", C): U,
    ("unscale", U): U,
}
"""The table in the docstring of the module."""


@pytest.mark.parametrize(("call", "form"), TRANSITIONS, ids=str)
def test_each_call_leads_to_the_form_of_the_table(call, form):
    """Each call brings the gradients into the form of the table, and unscales or clips once."""
    window = window_in(form)

    CALLS[call](window)

    assert window.window.form is TRANSITIONS[call, form]
    factor = 0.5 if form in {Form.FOLDED, Form.CLIPPED} else 1.0
    scale = 1.0 if window.window.form is Form.UNSCALED else 8.0
    assert window.gradients == [[3 * scale * factor, 4 * scale * factor], None]
    assert window.step() == [[3 * factor, 4 * factor], [0, 0]]
    assert window.window.form is Form.SCALED


@pytest.mark.parametrize("form", [Form.FOLDED, Form.CLIPPED])
def test_reported_norms_are_from_before_any_clipping(form):
    """The step reports the norm of the gradients that backward has left."""
    window = window_in(form)

    window.step()

    assert window.output.global_norm == 5


def test_gradients_are_read_once():
    """Measuring gradients a second time reads nothing if they have not changed."""
    window = Window()
    window.backward([3.0, 0.0], [0.0, 4.0])

    first = window.window.measured()

    assert first.global_norm == 5
    assert window.window.measured() is first


CHANGES = {
    "in place": lambda weight: weight.grad.mul_(2),
    "replaced": lambda weight: setattr(weight, "grad", weight.grad * 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_gradients_are_read_again(change):
    """Measuring gradients again reads them if they were changed in place or replaced."""
    window = Window()
    window.backward([3.0, 4.0])
    window.window.measured()

    change(window.weights["first"])

    assert window.window.measured().global_norm == 10


def test_gradients_must_stay_after_their_clipping_was_folded():
    """Changing gradients after a folded clip raises an error."""
    window = Window()
    window.backward([3.0, 4.0])
    fold(window)
    window.weights["first"].grad.mul_(2)

    with pytest.raises(RuntimeError, match="must not change between `clip_grad_norm_` and the"):
        window.window.measured()


def test_a_folded_clip_is_done_by_the_step():
    """A folded clip leaves the gradients unchanged and is applied by the step."""
    window = Window()
    window.backward([3.0, 4.0])

    fold(window)

    assert window.gradients == [[24, 32], None]
    assert window.step() == [[1.5, 2], [0, 0]]
    assert window.output.global_norm == 5


def test_a_folded_clip_can_be_settled_in_place():
    """Settling a folded clip clips the gradients in place once, and the step does not repeat it."""
    window = Window()
    window.backward([3.0, 4.0])
    fold(window)

    window.window.settle_clip()
    window.window.settle_clip()

    assert window.gradients == [[12, 16], None]
    assert window.step() == [[1.5, 2], [0, 0]]


def test_unscaling_happens_once():
    """Gradients are unscaled once, even after a second call and the step."""
    window = Window()
    window.backward([3.0, 4.0])

    window.window.unscale()
    window.window.unscale()

    assert window.gradients == [[3, 4], None]
    assert window.step() == [[3, 4], [0, 0]]


def test_a_backward_after_unscaling_adds_up_scaled_gradients():
    """A backward scales unscaled gradients again before new gradients are added."""
    window = Window()
    window.backward([3.0, 4.0])
    window.window.unscale()

    window.backward([1.0, 1.0], [2.0, 2.0])

    assert window.gradients == [[32, 40], [16, 16]]
    assert window.step() == [[4, 5], [2, 2]]


def test_a_backward_after_a_folded_clip_adds_to_clipped_gradients():
    """A backward after a folded clip adds its gradients to the clipped gradients, as in torch."""
    window = Window()
    window.backward([3.0, 4.0])
    fold(window)

    window.backward([1.0, 1.0])

    assert window.step() == [[2.5, 3], [0, 0]]


def test_an_overflow_that_is_hidden_later_still_skips():
    """An overflow that was recorded before the gradients were repaired still skips the update."""
    window = Window()
    window.backward([NAN, 4.0])
    window.window.note_overflow()
    window.weights["first"].grad.nan_to_num_()
    window.window.accept_clipped()
    window.backward([3.0, 4.0])

    assert window.step() == [[0, 0], [0, 0]]
    assert window.output.overflow


def clip(window: Window, *, norm_type: float = 2.0) -> None:
    """Clip all gradients of a window to a norm of 0.5."""
    clip_grad_norm(
        [window.window],
        window.weights.values(),
        window.window._loss_scale,
        max_norm=0.5,
        norm_type=norm_type,
    )


HIDING = {
    "unscaled": lambda window: window.window.unscale(),
    "unscaled and clipped": lambda window: (window.window.unscale(), clip(window)),
    "clipped in place": lambda window: clip(window, norm_type=1.0),
    "clamped": lambda window: clip_grad_value([window.window], window.weights.values(), 0.5),
}


@pytest.mark.parametrize("bad", [NAN, float("inf")], ids=str)
@pytest.mark.parametrize("hide", HIDING.values(), ids=HIDING)
def test_an_overflow_that_the_loop_repairs_still_skips(hide, bad):
    """An overflow skips the update even if the loop repairs the gradients after it was read."""
    window = Window()
    window.backward([bad, 4.0])

    hide(window)
    window.weights["first"].grad.nan_to_num_(0.0, 0.0, 0.0)
    clip(window)

    assert window.step() == [[0, 0], [0, 0]]
    assert window.output.overflow


@pytest.mark.parametrize("norm_types", [(2.0, 2.0), (1.0, 2.0), (2.0, 1.0), (1.0, 1.0)], ids=str)
def test_a_norm_that_overflows_skips_however_often_it_is_clipped(norm_types):
    """A finite gradient whose norm overflows skips the update, also after two clips.

    An infinite norm has a clip factor of 0, which turns the finite gradients into zeros. A second
    clip therefore finds a norm of 0, which must not hide the overflow of the first.
    """
    window = Window()
    window.backward([2.5e19, 4.0])

    for norm_type in norm_types:
        clip(window, norm_type=norm_type)

    assert window.step() == [[0, 0], [0, 0]]
    assert window.output.overflow


def test_an_overflow_does_not_outlive_its_window():
    """Opening a new window clears a recorded overflow."""
    window = Window()
    window.backward([NAN, 4.0])
    window.window.note_overflow()
    window.window.restart()
    window.weights["first"].grad = None
    window.backward([3.0, 4.0])

    assert window.step() == [[3, 4], [0, 0]]


def test_gradients_are_unused_from_backward_to_step():
    """Gradients count as unused from a backward until the next step."""
    window = Window()
    told = [window.window.has_unused_gradients()]
    for _ in range(2):
        window.backward([1.0, 1.0])
        told.append(window.window.has_unused_gradients())
        window.step()
        told.append(window.window.has_unused_gradients())

    assert told == [False, True, False, True, False]


def test_used_gradients_are_held_until_they_are_zeroed():
    """Gradients of a step that the loop has not zeroed are still there after the next backward."""
    window = Window()
    window.backward([1.0, 1.0])
    told = [window.window.holds_used_gradients()]
    window.step()
    told.append(window.window.holds_used_gradients())
    window.backward([1.0, 1.0])
    window.window.after_backward()
    told.append(window.window.holds_used_gradients())
    window.weights["first"].grad = None
    window.backward([1.0, 1.0])
    told.append(window.window.holds_used_gradients())

    assert told == [False, True, True, False]


def reported_loss(losses, accumulation_steps):
    """Return the loss that a step reports for pairs of loss and micro-batch number."""
    window = Window(scale=1.0)
    for loss, micro_batch in losses:
        window.window.before_backward(torch.tensor(loss), micro_batch)
        window.weights["first"].grad = torch.ones(2)
    return window.window.apply(window.window.measured(), accumulation_steps).output.loss.item()


LOSSES = {
    "one": ([(3.0, 1)], 1, 3.0),
    "a whole window": ([(1.0, 1), (2.0, 2)], 2, 3.0),
    "a short window": ([(1.0, 1), (2.0, 2)], 4, 6.0),
    "the only micro-batch of a short window": ([(3.0, 0)], 2, 6.0),
    "without numbers": ([(1.0, None), (2.0, None)], 4, 3.0),
    "several of one micro-batch": ([(1.0, 1), (2.0, 1), (3.0, 2)], 2, 6.0),
    "several of the only micro-batch": ([(1.0, 1), (2.0, 1)], 1, 3.0),
}


@pytest.mark.parametrize(("losses", "steps", "expected"), LOSSES.values(), ids=LOSSES)
def test_the_loss_is_the_mean_over_micro_batches(losses, steps, expected):
    """The reported loss is the mean over micro-batches, also in a shorter last window.

    Each loss has already been divided by the accumulation steps. Losses of one micro-batch add up.
    """
    assert reported_loss(losses, steps) == expected


def test_losses_whose_gradients_were_zeroed_do_not_count():
    """The reported loss excludes losses whose gradients were zeroed."""
    window = Window(scale=1.0)
    window.window.before_backward(torch.tensor(5.0), 1)
    window.weights["first"].grad = torch.ones(2)
    window.weights["first"].grad = None
    window.window.before_backward(torch.tensor(3.0), 2)

    assert window.window.apply(window.window.measured(), 1).output.loss.item() == 3


def test_without_a_backward_the_loss_is_unknown():
    """The reported loss is NaN if no backward took place."""
    assert reported_loss([], 1) != reported_loss([], 1)
