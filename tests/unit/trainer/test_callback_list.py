"""The list of callbacks is that of a stock Trainer, and is changed by the same methods."""

import pytest
from transformers import DefaultFlowCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from mfwrap.trainer import MFTrainer
from support.trainer_runs import (
    assert_same_log,
    assert_same_weights,
    messages_of,
    new_trainer,
    train,
)

KINDS = {"stock": Trainer, "MFTrainer": MFTrainer}


class Given(TrainerCallback):
    """Record the class names of the trainer's callbacks when a training begins and ends."""

    def __init__(self) -> None:
        self.handler = None
        self.seen = []

    def on_train_begin(self, *_, **__):
        """Record the names."""
        self.seen.append(names(self.handler))

    def on_step_begin(self, *_, **__):
        """Record the names."""
        self.seen.append(names(self.handler))

    def on_train_end(self, *_, **__):
        """Record the names."""
        self.seen.append(names(self.handler))


def names(handler):
    """Return the class names of a handler's callbacks, in order, with those of the same bar."""
    kinds = [type(each).__name__ for each in handler.callbacks]
    return ["ProgressCallback" if kind == "StepProgressCallback" else kind for kind in kinds]


def both(tmp_path, change=lambda _: None, **settings):
    """Return the names in a stock Trainer and in MFTrainer after a change of the trainer."""
    listed = []
    for kind in KINDS.values():
        trainer = new_trainer(kind, tmp_path, **settings)
        change(trainer)
        listed.append(names(trainer.callback_handler))
        real = [type(each).__name__ for each in trainer.callback_handler.callbacks]
        assert trainer.callback_handler.callback_list == "\n".join(real)
    return listed


@pytest.mark.parametrize("disable_tqdm", [True, False])
@pytest.mark.parametrize("given", [[], [Given], [Given(), TrainerCallback()]], ids=len)
def test_the_default_list(tmp_path, given, disable_tqdm):
    """The list has the Trainer's own callbacks and the user's; only the bar is MFTrainer's."""
    stock, ours = both(tmp_path, callbacks=given, disable_tqdm=disable_tqdm)

    assert ours == stock
    assert ours.count("Given") == min(len(given), 1)
    assert ("ProgressCallback" in ours) is not disable_tqdm


def test_the_bar_is_removed_by_its_name_in_transformers(tmp_path):
    """``remove_callback(ProgressCallback)`` removes the bar."""

    def remove(trainer):
        trainer.remove_callback(ProgressCallback)

    stock, ours = both(tmp_path, remove, disable_tqdm=False)

    assert ours == stock
    assert "ProgressCallback" not in ours


CHANGES = {
    "add a class": lambda trainer: trainer.add_callback(Given),
    "add an object": lambda trainer: trainer.add_callback(Given()),
    "remove a class": lambda trainer: trainer.remove_callback(DefaultFlowCallback),
    "remove an object": lambda trainer: trainer.remove_callback(
        trainer.callback_handler.callbacks[1]
    ),
    "remove a base class": lambda trainer: trainer.remove_callback(TrainerCallback),
    "remove a missing class": lambda trainer: trainer.remove_callback(Given),
    "pop a class": lambda trainer: trainer.pop_callback(DefaultFlowCallback),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_list(tmp_path, change):
    """Adding, removing and popping changes the list as in a stock Trainer."""
    stock, ours = both(tmp_path, CHANGES[change], callbacks=[TrainerCallback()])

    assert ours == stock
    assert (ours == both(tmp_path, callbacks=[TrainerCallback()])[1]) == ("missing" in change)


def test_a_popped_callback_is_returned(tmp_path):
    """``pop_callback`` returns the object that it removes, and None for a missing class."""
    given = Given()
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=[given])

    assert trainer.pop_callback(TrainerCallback()) is None
    assert trainer.pop_callback(Given) is given
    assert trainer.pop_callback(Given) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_callback_of_a_class_gives_a_warning(tmp_path, kind):
    """Two callbacks of a class give the Trainer's warning, at construction and when one is added.

    The warning names the class and lists the callbacks, without any of MFTrainer's.
    """
    with messages_of("transformers.trainer_callback") as said:
        callbacks = [Given(), Given]
        trainer = new_trainer(KINDS[kind], tmp_path, callbacks=callbacks, log_level="warning")
        trainer.add_callback(Given())

    assert len(said) == 2
    for line in said:
        assert "Given" in line.partition(" to the callbacks")[0]
        assert "Termination" not in line


def test_the_list_in_a_training(tmp_path):
    """During and after a training, the list is the same as before it."""
    given = Given()
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=[given], max_steps=1)
    given.handler, before = trainer.callback_handler, names(trainer.callback_handler)
    train(trainer)

    assert [*given.seen, names(trainer.callback_handler)] == [before] * 4


class Replacing(TrainerCallback):
    """Give the trainer a new list of the same callbacks after each step."""

    def __init__(self) -> None:
        self.handler = None

    def on_step_end(self, *_, **__):
        """Replace the list."""
        self.handler.callbacks = list(self.handler.callbacks)


def test_a_list_that_is_replaced_in_a_training(tmp_path):
    """After a callback has assigned a new list, the list holds what it held before."""
    replacing = Replacing()
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=[replacing], max_steps=2)
    replacing.handler, before = trainer.callback_handler, names(trainer.callback_handler)
    train(trainer)

    assert names(trainer.callback_handler) == before


class Own(CallbackHandler):
    """A handler of a user's own, which counts events."""

    num_events = 0

    def call_event(self, *args, **keywords):
        self.num_events += 1
        return super().call_event(*args, **keywords)


class Reports(TrainerCallback):
    """Record whether each step has its report."""

    def __init__(self) -> None:
        self.seen = []

    def on_step_end(self, args, state, control, step_report=None, **_):
        """Record it."""
        self.seen.append(step_report is not None)


def with_own_handler(kind, folder, reports):
    """Return a trainer whose handler a user has replaced after its construction."""
    trainer = new_trainer(kind, folder, callbacks=[reports], save_strategy="steps", save_steps=2)
    before = trainer.callback_handler
    parts = ("callbacks", "model", "processing_class", "optimizer", "lr_scheduler")
    trainer.callback_handler = Own(*(getattr(before, part) for part in parts))
    return trainer


def test_a_handler_of_the_users_own(tmp_path):
    """A handler that is set after the construction keeps its methods, and its callbacks work."""
    runs, ours = [], Reports()
    for label, kind in KINDS.items():
        trainer = with_own_handler(kind, tmp_path / label, ours)
        runs.append(train(trainer))
        assert trainer.callback_handler.num_events > 4
    resumed = with_own_handler(MFTrainer, tmp_path / "again", Reports())
    resumed = train(resumed, tmp_path / "MFTrainer" / "checkpoint-2")

    assert_same_log(*runs)
    assert_same_weights(*runs, difference=1e-6)
    assert_same_weights(runs[1], resumed)
    assert ours.seen == [False] * 4 + [True] * 4
