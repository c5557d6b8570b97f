"""Learning rates fall as with torch's own scheduler."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.callbacks import LambdaCallback, ReduceLROnPlateau
from support.callback_runs import fit_with_values
from support.model_runs import classifier, sgd


def rates_of(values, optimizer=None, network=None, **settings):
    """Return the rates of the first group after each epoch."""
    network = classifier() if network is None else network
    optimizer = sgd(network, lr=1.0) if optimizer is None else optimizer
    rates = []
    note = LambdaCallback(
        on_train_epoch_end=lambda _: rates.append(float(optimizer.param_groups[0]["lr"]))
    )
    plateau = ReduceLROnPlateau(**settings)
    fit_with_values(values, [plateau, note], optimizer=optimizer, network=network)
    return rates


@given(
    values=st.lists(st.integers(0, 4).map(float), min_size=1, max_size=12),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 3),
    mode=st.sampled_from(["min", "max"]),
)
def test_rates_are_those_of_torch(values, patience, cooldown, mode):
    """Rates equal torch's if torch's patience and cooldown are one epoch shorter."""
    (weight,) = [torch.nn.Parameter(torch.zeros(1))]
    reference = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        reference, mode, 0.5, max(patience - 1, 0), 0.1, "abs", max(cooldown - 1, 0), 0.1
    )
    expected = []
    for value in values:
        schedule.step(value)
        expected.append(reference.param_groups[0]["lr"])

    assert expected == rates_of(
        values, factor=0.5, patience=patience, cooldown=cooldown, mode=mode, min_delta=0.1,
        min_lr=0.1,
    )  # fmt: skip


@given(
    values=st.lists(st.integers(0, 4).map(float), min_size=2, max_size=9),
    patience=st.integers(1, 3),
    cooldown=st.integers(0, 2),
    data=st.data(),
)
def test_a_state_continues_a_training(values, patience, cooldown, data):
    """With the saved state, the rates fall as in a training that was not interrupted."""
    settings = {"factor": 0.5, "patience": patience, "cooldown": cooldown}
    split = data.draw(st.integers(1, len(values) - 1))
    network = classifier()
    optimizer = sgd(network, lr=1.0)
    first, second = ReduceLROnPlateau(**settings), ReduceLROnPlateau(**settings)
    fit_with_values(values[:split], [first], optimizer=optimizer, network=network)
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    load = LambdaCallback(on_train_begin=lambda _: second.load_state_dict(state))
    fit_with_values(values[split:], [second, load], optimizer=optimizer, network=network)

    assert optimizer.param_groups[0]["lr"] == rates_of(values, **settings)[-1]


def test_every_group_falls_from_its_own_rate(capsys):
    """Each group's rate falls by itself, but not below `min_lr`; a tensor changes in place."""
    network = classifier()
    tensor = torch.tensor(0.5)
    groups = [
        {"params": network[0].parameters(), "lr": 1.0},
        {"params": network[2].parameters(), "lr": tensor},
    ]
    optimizer = torch.optim.AdamW(groups, fused=True)
    rates_of([1.0, 1.0], optimizer, network, factor=0.5, patience=1, min_lr=0.3, verbose=True)

    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[1]["lr"] is tensor
    assert float(tensor) == pytest.approx(0.3)
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 00002: ReduceLROnPlateau reducing learning rate to 0.5.",
        "Epoch 00002: ReduceLROnPlateau reducing learning rate to 0.3.",
    ]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"factor": 1.0}, ValueError),
        ({"factor": "0.1"}, TypeError),
        ({"min_lr": -1}, ValueError),
        ({"patience": 1.5}, TypeError),
        ({"cooldown": -1}, ValueError),
        ({"verbose": None}, TypeError),
    ],
)
def test_bad_arguments_are_refused_by_name(settings, error):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=f"`{next(iter(settings))}` must be"):
        ReduceLROnPlateau(**settings)
