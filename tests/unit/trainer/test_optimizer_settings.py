"""A resumed training takes the settings of its optimizer that have changed."""

import functools

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ExponentialLR, OneCycleLR
from transformers import Trainer

from mfwrap.schedules import CosineWithWarmUpLR
from mfwrap.trainer import MFTrainer
from support.trainer_runs import messages_of, new_trainer, train, values

SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "max_grad_norm": 0.0}
LOG = "mfwrap.trainer.optimizer_settings"


def half_run(folder, kind=MFTrainer, **settings):
    """Train six steps, and return the checkpoint in the middle and the rates of all steps."""
    run = train(new_trainer(kind, folder, **{**SAVING, **settings}))
    return folder / "checkpoint-3", values(run, "learning_rate")


@pytest.mark.filterwarnings("ignore:no state of the step:UserWarning")  # of a stock checkpoint
@pytest.mark.parametrize("kind", [MFTrainer, Trainer], ids=["MFTrainer", "stock"])
@pytest.mark.parametrize("schedule", ["constant", "cosine_with_min_lr", "constant_with_warmup"])
def test_a_rate_that_was_changed(schedule, kind, tmp_path):
    """The resume has the rates of a run that began with it, also from a stock checkpoint."""
    settings = {"lr_scheduler_type": schedule, "warmup_steps": 2}
    if schedule == "cosine_with_min_lr":
        settings["lr_scheduler_kwargs"] = {"min_lr": 5e-4}
    checkpoint, _ = half_run(tmp_path / "first", kind, **settings)
    _, expected = half_run(tmp_path / "other", learning_rate=1e-3, **settings)

    settings |= SAVING | {"learning_rate": 1e-3}
    trainer = new_trainer(MFTrainer, tmp_path / "resumed", **settings)
    with messages_of(LOG) as said:
        resumed = train(trainer, resume=checkpoint)

    assert values(resumed, "learning_rate")[-3:] == pytest.approx(expected[3:], rel=1e-12)
    assert len(said) == 1
    assert "learning rate 0.001 in place of 0.01" in said[0]


@pytest.mark.filterwarnings("ignore:no state of the step:UserWarning")  # of a stock checkpoint
@pytest.mark.parametrize("kind", [MFTrainer, Trainer], ids=["MFTrainer", "stock"])
def test_a_run_that_gets_more_steps(kind, tmp_path):
    """Its first update has the rate of the longer schedule, not the 0 at the end of the shorter."""
    settings = {**SAVING, "lr_scheduler_type": "linear"}
    train(new_trainer(kind, tmp_path / "run", **settings))
    settings["max_steps"] = 12
    trainer = new_trainer(MFTrainer, tmp_path / "run", **settings)
    with messages_of(LOG) as said:
        resumed = train(trainer, resume=tmp_path / "run" / "checkpoint-6")

    rates = [0.01 * (12 - step) / 12 for step in range(6, 12)]
    assert values(resumed, "learning_rate")[-6:] == pytest.approx(rates, rel=1e-12)
    [line] = said
    assert "learning rate 0.005 in place of 0 for the next update" in line


class _Scheduled(MFTrainer):
    """A trainer that makes its schedule by the attribute `kind`, a function of the optimizer."""

    kind = None

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.kind is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = type(self).kind(optimizer or self.optimizer)
        return self.lr_scheduler


def scheduled(kind):
    """Return a class of trainers with a schedule."""
    return type("_Scheduled", (_Scheduled,), {"kind": staticmethod(kind)})


def cosine(total):
    """Return what makes a schedule of mfwrap of a length."""
    return functools.partial(CosineWithWarmUpLR, total_steps=total, warmup_steps=0)


def growing(optimizer):
    """Return a schedule that makes each rate from the one before."""
    return ExponentialLR(optimizer, 1.1)


def falling(optimizer):
    """Return a schedule of the same kind with another setting."""
    return ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (growing, None),
        (growing, cosine(12)),
        (cosine(6), cosine(12)),
        (cosine(6), None),
        (cosine(6), growing),
        (growing, falling),
    ],
    ids=[
        *("torch to transformers", "torch to mfwrap", "longer", "mfwrap to transformers"),
        *("mfwrap to torch", "another gamma"),
    ],
)
def test_another_schedule(first, second, tmp_path):
    """A schedule with a formula goes on at the step of the checkpoint, with its own settings."""
    settings = {**SAVING, "lr_scheduler_type": "linear", "max_steps": 12, "save_steps": 6}
    kind = MFTrainer if second is None else scheduled(second)
    _, rates = half_run(tmp_path / "whole", kind, **settings)
    train(new_trainer(scheduled(first), tmp_path / "run", **{**settings, "max_steps": 6}))
    trainer = new_trainer(kind, tmp_path / "run", **settings)
    with messages_of(LOG) as said:
        resumed = train(trainer, resume=tmp_path / "run" / "checkpoint-6")

    assert values(resumed, "learning_rate")[-6:] == pytest.approx(rates[6:], rel=1e-12)
    assert "because its schedule has changed" in said[0]


def test_another_schedule_that_cannot_begin_in_the_middle(tmp_path):
    """It is refused, because torch would give it the settings of the former one, or fail."""
    checkpoint, _ = half_run(tmp_path / "run")
    restarts = functools.partial(CosineAnnealingWarmRestarts, T_0=4)
    trainer = new_trainer(scheduled(restarts), tmp_path / "run", **SAVING)

    with pytest.raises(ValueError, match="of another schedule than CosineAnnealingWarmRestarts"):
        train(trainer, resume=checkpoint)


def test_other_settings(tmp_path):
    """A weight decay and the betas of Adam, of the groups that have them, are taken, too."""
    checkpoint, _ = half_run(tmp_path / "first", weight_decay=0.1)
    changed = {"weight_decay": 0.2, "adam_beta2": 0.95}
    trainer = new_trainer(MFTrainer, tmp_path / "resumed", **SAVING, **changed)
    with messages_of(LOG) as said:
        train(trainer, resume=checkpoint)

    groups = trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    assert {group["betas"] for group in groups} == {(0.9, 0.95)}
    assert "weight_decay 0.2 in place of 0.1" in said[0]


def one_cycle(trainer, *, total, max_lr=0.01):
    """Give a trainer a schedule that changes the betas, too."""
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.01)
    trainer.optimizer = optimizer
    trainer.lr_scheduler = OneCycleLR(optimizer, max_lr, total_steps=total)
    return trainer


def test_what_a_schedule_changes_is_no_changed_setting(tmp_path):
    """It goes on from the checkpoint, and nothing is said."""
    make = functools.partial(new_trainer, MFTrainer, **SAVING)
    whole = train(one_cycle(make(tmp_path / "whole"), total=7))
    resumed = one_cycle(make(tmp_path / "resumed"), total=7)
    with messages_of(LOG) as said:
        train(resumed, resume=tmp_path / "whole" / "checkpoint-3")

    assert said == []
    ends = [one.optimizer.param_groups[0] for one in (whole.trainer, resumed)]
    assert [one["betas"] for one in ends] == [ends[0]["betas"]] * 2
    assert ends[0]["betas"][0] != 0.9


def test_a_schedule_that_makes_each_rate_from_the_one_before(tmp_path):
    """It goes on as in the checkpoint, and that is said."""
    make = functools.partial(new_trainer, MFTrainer, **SAVING)
    train(one_cycle(make(tmp_path / "whole"), total=7))
    resumed = one_cycle(make(tmp_path / "resumed"), total=8, max_lr=0.1)
    with messages_of(LOG) as said:
        train(resumed, resume=tmp_path / "whole" / "checkpoint-3")

    assert resumed.optimizer.param_groups[0]["max_lr"] == 0.01
    assert len(said) == 1
    assert "keeps of its checkpoint" in said[0]
    assert "learning rate 0.0004, not 0.004" in said[0]
    assert "OneCycleLR's total_steps 7, not 8" in said[0]


def test_a_momentum_that_the_state_does_not_have(tmp_path):
    """The optimizer has no buffer for it, so it stays off, and that is said."""
    settings = {"optim": "rmsprop", "optim_args": "momentum=0.0"}
    checkpoint, _ = half_run(tmp_path / "first", **settings)
    settings |= SAVING | {"optim_args": "momentum=0.9"}
    trainer = new_trainer(MFTrainer, tmp_path / "resumed", **settings)
    with messages_of(LOG) as said:
        train(trainer, resume=checkpoint)

    assert [group["momentum"] for group in trainer.optimizer.param_groups] == [0.0, 0.0]
    assert "momentum 0.0, not 0.9" in said[0]


def test_a_second_training_of_the_same_trainer(tmp_path):
    """What the schedule has changed in the first one is no changed setting of the second."""
    trainer = one_cycle(new_trainer(MFTrainer, tmp_path, **SAVING), total=12)
    first = train(trainer)
    with messages_of(LOG) as said:
        again = train(trainer, resume=tmp_path / "checkpoint-3")

    assert said == []
    assert values(again, "learning_rate")[-3:] == values(first, "learning_rate")[3:6]
