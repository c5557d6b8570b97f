"""Buffers that have changed tell what has changed them."""

from mfwrap.callbacks.culprit.replay.replay import Origin
from support.cause_evidence import cause, state, trace


def test_running_statistics():
    """Non-finite statistics are ruined; a step that only shifts them had an unusual batch."""
    nan = {"buffers": ("bn.running_mean",)}
    risen = {"states": (state("buffer", "bn.running_var", 1e6),)}
    by_input = cause("loss_not_finite", rank=nan, origin=Origin("input", "pixels", 0, rows=(3,)))
    assert by_input.name == cause("state_spike", rank=risen).name == "batch_norm"
    assert "non-finite values in input `pixels`" in by_input.explanation
    assert cause("spike", rank=risen).name == "data"
    assert cause("state_spike", rank={"buffers": ("mask",)}).name == "buffer_changed"


def test_inputs_of_a_normalization_that_have_grown():
    """They raise the variance by the square of what they raise the mean by."""
    mean, variance = (f"h.1.norm.running_{name}" for name in ("mean", "var"))
    grown = (state("buffer", variance, 60.0), state("buffer", mean, 7.0))
    found = cause("state_spike", rank={"states": grown})

    assert (found.name, found.tensors) == ("activation", ("h.1.norm",))
    assert "what h.1.norm receives is about" in found.explanation
    for odd in ((state("buffer", variance, 60.0),), (grown[0], state("buffer", mean, 60.0))):
        assert cause("state_spike", rank={"states": odd}).name == "batch_norm"


def test_running_statistics_follow_the_weights():
    """A weight that has grown gives other statistics."""
    buffer, weight = state("buffer", "bn.running_var", 1e6), state("weight", "h.0.weight", 900.0)
    rank = {"states": (buffer, weight), "driven": ("h.0.weight",)}
    assert cause("state_spike", trace({}), rank=rank).name == "unknown"
