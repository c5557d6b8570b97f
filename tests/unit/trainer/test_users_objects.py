"""A training leaves the user's model, optimizer, data and Trainer as a stock Trainer does."""

import copy
import io
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import Trainer, TrainerCallback

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.callbacks import EMACallback, MFLossMonitor, TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from support.trainer_runs import (
    Counting,
    new_trainer,
    padded,
    tiny_llama,
)

KINDS = [Trainer, MFTrainer]


def pickled(model):
    """Return what ``torch.save`` and ``torch.load`` make of a model."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "make",
    [copy.deepcopy, AveragedModel, pickled],
    ids=["deepcopy", "AveragedModel", "torch.save"],
)
def test_a_copy_of_the_model_does_not_steer_it(make, tmp_path):
    """A teacher that is made in ``compute_loss`` and set to evaluation leaves the student alone."""
    modes = []

    def teaching(base):
        seen = []
        modes.append(seen)

        class Teaching(base):
            teacher = None

            def compute_loss(self, model, *args, **keywords):
                if self.teacher is None:
                    self.teacher = make(model).eval()
                seen.append((model.training, self.teacher.training))
                return super().compute_loss(model, *args, **keywords)

        trainer = new_trainer(Teaching, tmp_path, max_steps=2)
        trainer.train()
        trainer.teacher.train()
        trainer.model.eval()
        seen.append((trainer.model.training, trainer.teacher.training))
        names = vars(trainer.teacher).keys() - vars(make(tiny_llama())).keys()
        assert names <= {"_is_accelerate_prepared"}

    for kind in KINDS:
        teaching(kind)

    assert modes[1] == modes[0] == [(True, False)] * 8 + [(False, True)]


OWN_METHODS = {
    "floating_point_ops": lambda _: 0,
    "compute_loss": lambda method: method,
    "training_step": lambda method: method,
    "get_batch_samples": lambda method: method,
    "set_initial_training_values": lambda method: method,
    "_get_num_items_in_batch": lambda method: method,
    "_clip_grad_norm": lambda method: method,
    "_run_epoch": lambda method: method,
    "log": lambda method: method,
    "_save": lambda method: method,
}
"""Names of the Trainer's methods, and what a user puts in their place."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OWN_METHODS)
def test_a_method_that_a_user_sets_is_used_and_stays(kind, name, tmp_path):
    """A function on the object is called, in two trainings, and is there afterwards."""
    calls = []
    trainer = new_trainer(kind, tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    method = getattr(trainer, name)

    def own(*args, **keywords):
        calls.append(name)
        return method(*args, **keywords)

    setattr(trainer, name, own)
    trainer.train()
    of_first = len(calls)
    trainer.train()

    assert of_first > 0
    assert len(calls) == 2 * of_first
    assert vars(trainer)[name] is own


class Loader(DataLoader):
    """A data loader of the user's own class."""


class OwnBatchSampler(BatchSampler):
    """A batch sampler of the user's own class."""


class OwnSampler(RandomSampler):
    """A sampler of the user's own class."""


def own_data(trainer, *, is_prepared):
    """Give a trainer a loader of the user's; return the user's objects by name."""
    data = trainer.train_dataset
    sampler = OwnSampler(data, generator=torch.Generator().manual_seed(0))
    batches = OwnBatchSampler(sampler, 2, drop_last=False)
    loader = Loader(data, batch_sampler=batches, collate_fn=padded)
    found = trainer.accelerator.prepare(loader) if is_prepared else loader
    trainer.get_train_dataloader = lambda: found
    return {"data": data, "sampler": sampler, "batch sampler": batches, "loader": loader}


class Everything:
    """Compare the attributes and classes of a user's objects with those of another training.

    Args:
        trainer: The trainer.
        owned: Further objects of the user by name.
    """

    def __init__(self, trainer: Trainer, owned: dict[str, Any]) -> None:
        self._trainer = trainer
        self._owned = owned
        self.seen: dict[str, dict[str, tuple[type, frozenset[str]]]] = {}

    def look(self, when: str) -> None:
        """Record class and names of attributes of each object."""
        trainer = self._trainer
        modules = {f"module {name}": each for name, each in trainer.model.named_modules()}
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        owned = self._owned | modules | ({} if optimizer is None else {"optimizer": optimizer})
        found = {name: (type(each), frozenset(vars(each))) for name, each in owned.items()}
        methods = [name for name in vars(trainer) if callable(getattr(type(trainer), name, None))]
        found["methods of the trainer"] = (Trainer, frozenset(methods))
        self.seen[when] = found


class Looks(TrainerCallback):
    """Record everything at each event of a training."""

    everything: Everything | None = None

    def __getattribute__(self, name):
        if name.startswith("on_") and self.everything is not None:
            self.everything.look(name)
        return super().__getattribute__(name)


class LooksWithin(nn.Module):
    """A model that records everything in its forward and when it is saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = tiny_llama()
        self.everything: Everything | None = None

    def forward(self, input_ids, attention_mask=None, labels=None):
        if self.everything is not None:
            self.everything.look("forward")
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    def state_dict(self, *args, **keywords):
        if self.everything is not None:
            self.everything.look("state_dict")
        return super().state_dict(*args, **keywords)


OF_A_FUSED_STEP = {"grad_scale", "found_inf"}
"""Attributes by which torch's fused optimizers take a scale and a flag, during their step."""


@pytest.mark.parametrize("is_prepared", [True, False])
def test_nothing_is_put_on_the_users_objects(is_prepared, tmp_path):
    """Before, during and after a training, objects have the attributes that stock ones have."""
    found = []
    for kind in KINDS:
        extras, callbacks = {}, [Looks()]
        if kind is MFTrainer:
            extras = {
                "step": StepConfig(local_norm=True),
                "ema": lambda model: ExponentialMovingAverage(model, 0.9),
                "skip_rows": [(0, 3)],
            }
            callbacks += [EMACallback(), MFLossMonitor(), TrainingStateMonitor()]
        model = LooksWithin()
        trainer = new_trainer(
            kind,
            tmp_path / f"{kind.__name__} {is_prepared}",
            model=model,
            callbacks=callbacks,
            extras=extras,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            data=Counting(24),
        )
        everything = Everything(trainer, own_data(trainer, is_prepared=is_prepared))
        everything.look("before")
        callbacks[0].everything = model.everything = everything
        trainer.train()
        everything.look("after")
        found.append(everything.seen)

    stock, ours = found
    # Our checkpoint of an average reads the state of the model, too.
    assert stock.keys() == ours.keys()
    for when, objects in stock.items():
        for name, (kind, attributes) in objects.items():
            assert ours[when][name][0] is kind, (when, name)
            added = ours[when][name][1] - attributes
            assert added <= (OF_A_FUSED_STEP if name == "optimizer" else set()), (when, name)
            assert attributes <= ours[when][name][1], (when, name)


def test_nothing_is_put_on_a_model_that_is_saved(tmp_path):
    """While a checkpoint is written, a copy of the model is of the model's class."""
    model = tiny_llama()
    before, seen = set(vars(model)), []
    config = type(model.config)

    class Looking(config):
        def save_pretrained(self, *args, **keywords):
            seen.append((set(vars(model)), type(copy.deepcopy(model)), type(pickled(model))))
            return super().save_pretrained(*args, **keywords)

    Looking.model_type = config.model_type
    model.config = Looking(**model.config.to_dict())
    Looking.__module__, Looking.__qualname__ = __name__, "Looking"
    globals()["Looking"] = Looking
    new_trainer(
        MFTrainer, tmp_path, model=model, max_steps=1, save_strategy="steps", save_steps=1
    ).train()

    assert seen
    for names, *kinds in seen:
        assert names - before <= {"_is_accelerate_prepared"}
        assert kinds == [type(model)] * 2


def spelled(listener):
    """Return a callback whose events have transformers' keywords and no others."""

    class Spelled(TrainerCallback):
        def on_step_end(  # noqa: PLR0917  (as transformers' documents show it)
            self,
            args,
            state,
            control,
            model=None,
            processing_class=None,
            optimizer=None,
            lr_scheduler=None,
            train_dataloader=None,
            eval_dataloader=None,
        ):
            listener.append(("spelled", state.global_step, model is not None))

    return Spelled()


class Half(TrainerCallback):
    """A callback that takes one of the two results, and ends the training after two steps."""

    def __init__(self, listener):
        self._listener = listener

    def on_step_end(self, args, state, control, model, optimizer, step_output=None, **_):
        """Record the result."""
        del _
        self._listener.append(("half", state.global_step, step_output is not None))
        control.should_training_stop = state.global_step == 2
        return control


class Named(TrainerCallback):
    """A callback that takes one of the two results, and no other additional keyword."""

    def __init__(self, listener):
        self._listener = listener

    def on_step_end(
        self,
        args,
        state,
        control,
        *,
        model,
        processing_class,
        optimizer,
        lr_scheduler,
        train_dataloader,
        eval_dataloader,
        step_report=None,
    ):
        """Record the result, and whether the training is about to end."""
        is_there = step_report is not None
        self._listener.append(("named", state.global_step, is_there))
        self._listener.append(control.should_training_stop)


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_gets_the_keywords_that_it_takes(kind, tmp_path):
    """Callbacks are called in their order, with one control, and with what they take."""
    heard = []
    callbacks = [spelled(heard), Half(heard), Named(heard)]
    trainer = new_trainer(kind, tmp_path, callbacks=callbacks)
    trainer.train()

    is_ours = kind is MFTrainer
    assert heard == [
        ("spelled", 1, True),
        ("half", 1, is_ours),
        ("named", 1, is_ours),
        False,
        ("spelled", 2, True),
        ("half", 2, is_ours),
        ("named", 2, is_ours),
        True,
    ]


EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
OF_THE_STATE = {"stateful_callbacks", "log_history"}
"""Entries of the Trainer's state with which MFTrainer's callbacks and log differ."""
PATHS = {"output_dir", "logging_dir", "best_model_checkpoint"}


class Reading(TrainerCallback):
    """Note arguments, control and state at each event."""

    def __init__(self):
        self.seen = []

    def note(self, event, args, state, control):
        """Note all values but paths and the log."""
        of_state = {name: v for name, v in vars(state).items() if name not in OF_THE_STATE}
        self.seen.append((
            event,
            *(
                {name: repr(v) for name, v in held.items() if name not in PATHS}
                for held in (vars(args), of_state, vars(control) | {"should_save": None})
            ),
        ))  # fmt: skip

    def __getattribute__(self, name):
        if name not in EVENTS:
            return super().__getattribute__(name)
        return lambda args, state, control, **_: self.note(name, args, state, control)


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_arguments_control_and_state_are_the_users_at_each_event(limit, tmp_path):
    """Callbacks read what a stock Trainer's read, and checkpoints hold the user's arguments."""
    settings = {
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "save_total_limit": limit,
    }
    seen, saved = [], []
    for kind in KINDS:
        reading = Reading()
        trainer = new_trainer(kind, tmp_path / kind.__name__, callbacks=[reading], **settings)
        trainer.train()
        # MFTrainer postpones the checkpoint of the last step until the epoch's end.
        seen.append(sorted(reading.seen, key=operator.itemgetter(0)))
        file = tmp_path / kind.__name__ / "checkpoint-5" / "training_args.bin"
        args = vars(torch.load(file, weights_only=False))
        saved.append({name: repr(v) for name, v in args.items() if name not in PATHS})

    assert [event for event, *_ in seen[1]] == [event for event, *_ in seen[0]]
    for ours, theirs in zip(seen[1], seen[0], strict=True):
        assert ours == theirs
    assert saved[1] == saved[0]
