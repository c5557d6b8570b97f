"""What an accelerator has prepared is found."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader

from mfwrap.compatibility import accelerate as names
from support.attached_runs import new_accelerator


def test_what_was_prepared_is_listed():
    """Models, optimizers, schedules and data loaders are in the order of `prepare`."""
    accelerator = new_accelerator()
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    given = model, optimizer, ConstantLR(optimizer), DataLoader(range(2))
    assert not names.is_prepared(optimizer)

    prepared = accelerator.prepare(*given)

    lists = names.models_of, names.optimizers_of, names.schedulers_of, names.data_loaders_of
    assert tuple(held(accelerator)[0] for held in lists) == prepared
    assert all(map(names.is_prepared, prepared[:3]))
    assert all(isinstance(getattr(accelerator, name), dict) for name in names.SAVE_HOOKS)
    assert getattr(prepared[1], names.SKIPPED) is False


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_forward_in_autocast_is_recognized(precision):
    """Accelerate wraps the forward of a model in mixed precision only."""
    model = new_accelerator(precision).prepare(nn.Linear(1, 1))

    assert names.computes_in_autocast(model) == (precision == "bf16")
    with torch.no_grad():
        assert model(torch.ones(1)).dtype == torch.float32
