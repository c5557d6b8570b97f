"""The section `moe_config` is read completely, and what it loses is named."""

import pytest

from mfwrap.runner import RecipeError
from mfwrap.runner.mindformers.architectures.experts import take_experts
from support.model_config import keys_of


def taken(*, adds_losses=False, **section):
    """Return the experts and the losses."""
    keys, source = keys_of({"expert_num": 8, **section}, ("moe_config",))
    return take_experts(keys, adds_losses=adds_losses), source.losses


def test_a_dense_model_has_none():
    """One expert is a dense layer."""
    assert taken(expert_num=1, capacity_factor=1.5)[0] is None


def test_defaults():
    """MindFormers sends a token to one expert, and drops tokens."""
    experts, losses = taken()

    assert (experts.number, experts.chosen, experts.shared) == (8, 1, 0)
    assert experts.is_normalized
    assert experts.first_dense == 1
    (loss,) = losses
    assert (loss.name, loss.path) == ("moe", ("moe_config", "capacity_factor"))
    assert "capacity_factor 1.1" in loss.says


@pytest.mark.parametrize("section", [{"capacity_factor": 0}, {"use_gmm": True}])
def test_no_token_is_dropped(section):
    """Without a capacity, and with grouped matrix products, there is no loss."""
    assert taken(**section)[1] == []


@pytest.mark.parametrize(
    ("section", "adds_losses", "number"),
    [
        ({"z_loss_factor": 0.1}, True, 1),
        ({"z_loss_factor": 0.1}, False, 0),
        ({"aux_loss_types": ["expert"], "aux_loss_factors": [0.1]}, True, 1),
        ({"aux_loss_types": ["expert"], "aux_loss_factors": [0.0]}, True, 0),
        ({"balance_via_topk_bias": True, "topk_bias_update_rate": 0.1}, False, 1),
        ({"topk_bias_update_rate": 0.1}, False, 0),
        ({"aux_loss_factor": 0.05}, True, 0),
    ],
)
def test_balancing_is_a_loss(section, adds_losses, number):
    """What balances the experts is a loss if the network uses it."""
    losses = taken(use_gmm=True, adds_losses=adds_losses, **section)[1]

    assert [loss.name for loss in losses] == ["moe"] * number


def test_a_wrong_number_of_dense_layers():
    """The error names the key."""
    with pytest.raises(RecipeError, match="expected an integer, got 'a'"):
        taken(first_k_dense_replace="a")
