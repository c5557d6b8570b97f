"""The load of experts, as formulas of their shares."""

import pytest
import torch

from mfwrap.callbacks.training_state.expert_load import drop_rate, imbalance, shares_of


def test_shares():
    """Shares are the counts divided by their sum."""
    [(name, shares)] = shares_of({"experts": torch.tensor([3, 1, 0, 4])}).items()

    assert name == "experts"
    assert shares.tolist() == [0.375, 0.125, 0.0, 0.5]
    assert shares.dtype == torch.float32


@pytest.mark.parametrize(
    ("shares", "busiest", "dropped"),
    [([0.25] * 4, 1.0, 0.0), ([1.0, 0, 0, 0], 4.0, 0.625), ([0.5, 0.4, 0.1, 0], 2.0, 0.15)],
)
def test_balance(shares, busiest, dropped):
    """Imbalance and drop rate, at a capacity of 1.5, agree with their formulas."""
    tensor = torch.tensor(shares)

    assert imbalance(tensor).item() == pytest.approx(busiest)
    assert drop_rate(tensor, 1.5).item() == pytest.approx(dropped)
