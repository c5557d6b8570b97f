"""Attention and experts are watched in forward passes, or a warning gives the reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mfwrap.callbacks.culprit.judges.forward import ForwardJudge
from mfwrap.callbacks.training_state import TrainingStateSettings
from mfwrap.callbacks.training_state.forward_watches import forward_watches

BOTH = {"max_attention_logit_format": "log", "expert_load_format": "log"}


class Experts(nn.Module):
    """Four experts that do nothing, with the arguments of transformers' experts."""

    num_experts = 4

    def forward(self, inputs, top_k_index):
        """Return the inputs."""
        return inputs


class Network(nn.Module):
    """One attention and one layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, inputs):
        """Attend, and send the first two tokens to expert 1, the others to expert 3."""
        attended = functional.scaled_dot_product_attention(inputs, inputs, inputs)
        return self.experts(attended, torch.tensor([1, 1, 3, 3]))


def watches(network, *, is_compiled=False, **settings):
    """Return the watches of a network."""
    return forward_watches(TrainingStateSettings(**settings), network, is_compiled=is_compiled)


def test_both_are_watched():
    """Logits and shares are recorded between `begin` and `end`; afterwards no hook is left."""
    network, inputs = Network().train(), torch.eye(4)
    both = watches(network, **BOTH)
    both.begin()
    network(inputs)
    seen = both.end()
    network(inputs)

    # The rows are unit vectors of width 4, so the largest logit is 1 / sqrt(4).
    assert {name: logits.tolist() for name, logits in seen.max_attention_logits.items()} == {
        "": [0.5]
    }
    assert {name: shares.tolist() for name, shares in seen.expert_shares.items()} == {
        "experts": [0.0, 0.5, 0.0, 0.5]
    }
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def test_numbers_are_judged():
    """A judge gets the numbers of each watched step."""
    judge, network = ForwardJudge(), Network().train()
    settings = TrainingStateSettings(**BOTH)
    both = forward_watches(settings, network, is_compiled=False, judge=judge)
    both.begin()
    network(torch.eye(4))
    both.end()
    assert judge.last.names == ("attention_logits/", "expert_load/experts")
    assert judge.last.values[:, -1].exp().tolist() == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize("name", BOTH)
def test_only_what_is_asked_for_is_watched(name, caplog):
    """With one format set, only its numbers are recorded, and there is no warning."""
    network = Network().train()
    one = watches(network, **{name: "log"})
    one.begin()
    network(torch.eye(4))
    seen = one.end()

    assert bool(seen.max_attention_logits) == (name == "max_attention_logit_format")
    assert bool(seen.expert_shares) == (name == "expert_load_format")
    assert caplog.records == []


def test_nothing_is_asked_for(caplog):
    """Without formats there are no watches and no warnings."""
    assert watches(None) is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("network", "is_compiled", "reason"),
    [(None, False, "the loop passes no `model`"), (Network(), True, "the network is compiled")],
    ids=["no model", "compiled"],
)
def test_forward_passes_that_cannot_be_watched(network, is_compiled, reason, caplog):
    """A warning gives the reason, and nothing is watched."""
    assert watches(network, is_compiled=is_compiled, **BOTH) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"TrainingStateMonitor cannot show attention logits and the load of experts: {reason}"
    ]


def test_a_network_without_attention_and_experts(caplog):
    """One warning says that there are no experts, and one that there is no attention."""
    network = nn.Linear(3, 3).train()
    both = watches(network, **BOTH)
    for _ in range(2):
        both.begin()
        network(torch.ones(1, 3))
        seen = both.end()
    said = [record.getMessage() for record in caplog.records]

    assert (seen.max_attention_logits, seen.expert_shares) == ({}, {})
    assert len(said) == 2
    assert said[0].startswith("TrainingStateMonitor cannot show the load of experts: no module")
    assert said[1].startswith("TrainingStateMonitor cannot show attention logits: the forward")
