"""A verdict says whether a step fails again, and blames nothing that it cannot see."""

import math

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.culprit.replay.replay import Origin
from mfwrap.callbacks.culprit.replay.verdict import TOO_LARGE, Verdict, verdict_of


class Network(nn.Module):
    """A linear layer that fails in the calls listed in `bad`; returns its loss."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.bad = bad
        self.num_calls = 0

    def forward(self, inputs, targets=None):
        """Return the mean squared error; without targets, the outputs."""
        self.num_calls += 1
        outputs = self.linear(inputs)
        if targets is None:
            return outputs.squeeze(1)
        loss = (outputs - targets).square().mean()
        return loss * math.nan if self.num_calls in self.bad else loss


def verdict(network, factor=1.0, *, is_exact=True, targets=True, error=None) -> Verdict:
    """Run a step whose loop multiplies the loss by a factor, and return the verdict about it."""
    recorder = StepRecorder(network)
    inputs = torch.randn(3, 2)
    outputs = network(inputs, torch.randn(3, 1)) if targets else network(inputs)
    loss = outputs.mean() * factor
    loss.backward()
    recorder.end_step()
    if error is not None:

        def fail(*_):
            raise error

        network.linear.register_forward_pre_hook(fail)
    return verdict_of(recorder, 1.0, loss_is_finite=bool(loss.isfinite()), is_exact=is_exact)


def test_a_transient_fault():
    """Three clean exact replays, one of them with deterministic kernels, are needed."""
    network = Network(1)
    assert verdict(network) == Verdict("not_reproduced", "transient", None, 3)
    assert network.num_calls == 4
    assert not torch.are_deterministic_algorithms_enabled()
    later = verdict(Network(1), is_exact=False)
    assert later == Verdict("not_reproduced", "later weights", None, 1)


@pytest.mark.parametrize(
    ("bad", "detail", "num_clean"),
    [
        (2, "", 0),
        (3, "only by the second of two replays", 1),
        (4, "only with deterministic kernels", 2),
    ],
)
def test_a_fault_that_comes_again(bad, detail, num_clean):
    """The verdict tells which of the replays found the fault."""
    found = verdict(Network(1, bad))
    assert found == Verdict("reproduced", detail, Origin("loss", "", 0), num_clean)


@pytest.mark.parametrize(
    ("factor", "targets", "outside"),
    [
        (1.0, False, "computed outside of the network"),
        (math.nan, True, "became non-finite outside of the network"),
        (math.inf, True, "became non-finite outside of the network"),
    ],
)
def test_a_fault_outside_of_the_network(factor, targets, outside):
    """A clean replay of a network that was never at fault is not evidence against the hardware."""
    found = verdict(Network(), factor, targets=targets)
    assert (found.result, found.num_clean) == ("not_covered", 1)
    assert outside in found.detail


def test_a_factor_that_only_spoils_the_gradient():
    """If only the gradient that reaches the network's loss is non-finite, the verdict says so."""
    recorder = StepRecorder(Network())
    loss = recorder.network(torch.randn(3, 2), torch.randn(3, 1))
    # `where` selects the finite branch, but in the backward the other branch gives 0 * NaN.
    torch.where(loss.detach() >= 0, loss, loss * math.nan).backward()
    recorder.end_step()
    found = verdict_of(recorder, 1.0, loss_is_finite=True, is_exact=True)

    assert found.result == "not_covered"
    assert "got a non-finite gradient" in found.detail


def test_gradients_whose_norm_alone_is_too_large():
    """The step overflows because of the square of the norm, and so it does again."""
    found = verdict(Network(), 1e30)

    assert found == Verdict("reproduced", TOO_LARGE, None, 0)
    assert found.norm_without_scale(in_float16=False) == math.inf


class Half(nn.Module):
    """A network that computes in float16 by itself; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, inputs):
        """Return the mean square of outputs in float16."""
        return self.linear(inputs).half().square().mean(dtype=torch.float32)


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_a_scale_that_is_too_high_for_a_part_of_the_network(is_spoilt):
    """A replay without the loss scale has the gradients that the step would have had."""
    network, scale = Half(), 2.0**40
    inputs = torch.randn(3, 2)
    network(inputs).backward()
    norm = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
    if is_spoilt:
        network.linear.weight.register_hook(lambda gradient: gradient * math.nan)
    recorder = StepRecorder(network)
    (network(inputs) * scale).backward()
    recorder.end_step()

    found = verdict_of(recorder, scale, loss_is_finite=True, is_exact=True)

    assert (found.result, found.origin.where) == ("reproduced", "gradient")
    expected = math.nan if is_spoilt else norm.item()
    assert found.unscaled_norm == pytest.approx(expected, rel=1e-3, nan_ok=True)


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried"),
            "out of memory: CUDA out of memory.",
        ),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_replay_that_fails(error, detail):
    """An error in the replay is the verdict; it neither ends the training nor blames hardware."""
    found = verdict(Network(), error=error)
    assert (found.result, found.detail) == ("failed", detail)


@pytest.mark.parametrize(
    ("verdict", "in_float32", "in_float16"),
    [
        (Verdict("reproduced", unscaled_norm=2.0), 2.0, 2.0),
        (Verdict("reproduced"), math.inf, math.inf),
        (Verdict("not_reproduced", "transient"), None, math.inf),
        (Verdict("not_reproduced", "later weights"), None, None),
        (Verdict("failed"), None, None),
    ],
)
def test_what_a_verdict_says_about_the_loss_scale(verdict, in_float32, in_float16):
    """In float16 a finite exact replay clears the scale; in float32 the norm may overflow alone."""
    assert verdict.norm_without_scale(in_float16=False) == in_float32
    assert verdict.norm_without_scale(in_float16=True) == in_float16
