"""Saved states of callbacks and of the control are restored when a stock Trainer restores them."""

import pytest
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from mfwrap.trainer import MFTrainer
from support.trainer_runs import messages_of, new_trainer, train

pytestmark = pytest.mark.filterwarnings("ignore:no state of the step in")  # of a stock Trainer
KINDS = {"stock": Trainer, "MFTrainer": MFTrainer}


class Note(TrainerCallback, ExportableState):
    """Hold a text, and count steps."""

    def __init__(self, text="default") -> None:
        self.text, self.num_steps, self.owner = text, 0, None

    def on_step_end(self, *_, **__):
        """Count the step."""
        self.num_steps += 1

    def state(self):
        """Return the text as an argument and the count as an attribute."""
        return {"args": {"text": self.text}, "attributes": {"num_steps": self.num_steps}}


def trainer_of(kind, folder, callbacks, **arguments):
    """Return a trainer that evaluates and saves after its second and last step."""
    both = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"load_best_model_at_end": True, "gradient_accumulation_steps": 1}
    arguments = {"max_steps": 2} | both | best | arguments
    return new_trainer(kind, folder, callbacks=callbacks, **arguments)


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    """Return a checkpoint with the states of three callbacks, of a stock Trainer or MFTrainer."""
    folder = tmp_path_factory.mktemp("written")
    callbacks = [Note("first"), EarlyStoppingCallback(5, 0.2), Note("second")]
    train(trainer_of(KINDS[request.param], folder, callbacks))
    return folder / "checkpoint-2"


def resumed(kind, folder, checkpoint, callbacks, *, restores=True, **arguments):
    """Resume a training that is complete, and return the trainer."""
    option = {"restore_callback_states_from_checkpoint": restores}
    trainer = trainer_of(kind, folder, callbacks, **option, **arguments)
    train(trainer, resume=checkpoint)
    return trainer


def found(trainer, kind):
    """Return the trainer's callbacks of a class."""
    return [each for each in trainer.callback_handler.callbacks if type(each) is kind]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_and_attributes_are_restored(checkpoint, tmp_path, kind):
    """Callbacks get the saved arguments and attributes, whatever the order of their classes."""
    callbacks = [EarlyStoppingCallback(), TrainerCallback(), Note(), Note()]
    trainer = resumed(KINDS[kind], tmp_path, checkpoint, callbacks)

    (stopping,) = found(trainer, EarlyStoppingCallback)
    assert (stopping.early_stopping_patience, stopping.early_stopping_threshold) == (5, 0.2)
    notes = found(trainer, Note)
    assert [note.text for note in notes] == ["first", "second"]
    # For two callbacks of a class, a stock Trainer restores the states before the first step if it
    # wrote the checkpoint itself.
    if kind == "MFTrainer":
        assert [note.num_steps for note in notes] == [2, 2]


def test_a_restored_callback_is_the_same_object(checkpoint, tmp_path):
    """MFTrainer restores callbacks in place: references, order and other attributes stay."""
    held = [Note(), EarlyStoppingCallback(), Note()]
    held[0].owner = "user"
    trainer = trainer_of(MFTrainer, tmp_path, held, restore_callback_states_from_checkpoint=True)
    before, control = list(trainer.callback_handler.callbacks), trainer.control

    train(trainer, resume=checkpoint)

    assert trainer.callback_handler.callbacks == before
    assert trainer.control is control
    assert [held[0].text, held[1].early_stopping_patience, held[2].text] == ["first", 5, "second"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_two_callbacks_is_left(checkpoint, tmp_path, kind):
    """A state is restored if there are fewer callbacks of its class than were saved."""
    trainer = resumed(KINDS[kind], tmp_path, checkpoint, [Note()])

    (note,) = found(trainer, Note)
    # A list that a stock Trainer wrote does not tell how many callbacks there were.
    assert note.text in {"first", "second"}
    if kind == "MFTrainer" and (checkpoint / "mfwrap_manifest.json").exists():
        assert (note.text, note.num_steps) == ("first", 2)


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_option_nothing_is_restored(checkpoint, tmp_path, kind):
    """Without the option, callbacks of others keep arguments and attributes."""
    callbacks = [Note("own"), Note(), EarlyStoppingCallback()]
    trainer = resumed(KINDS[kind], tmp_path, checkpoint, callbacks, restores=False)

    notes = found(trainer, Note)
    assert [note.text for note in notes] == ["own", "default"]
    # The stock Trainer makes one more update when it resumes a training that is complete.
    assert [note.num_steps for note in notes] == [int(kind == "stock")] * 2
    assert found(trainer, EarlyStoppingCallback)[0].early_stopping_patience == 1


@pytest.mark.parametrize("restores", [True, False])
def test_a_callback_that_is_missing(checkpoint, tmp_path, restores):
    """With the option, both Trainers warn with the same words about a callback that is missing."""
    said = {}
    for name, kind in KINDS.items():
        with messages_of("transformers.trainer") as said[name]:
            folder = tmp_path / name
            resumed(kind, folder, checkpoint, [Note()], restores=restores, log_level="warning")

    warned = [line for line in said["MFTrainer"] if line.startswith("Checkpoint included callb")]
    assert [line.rpartition(" ")[2] for line in warned] == ["(EarlyStoppingCallback)"] * restores
    assert said["MFTrainer"] == said["stock"]


@pytest.mark.parametrize("restores", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_control_is_restored(checkpoint, tmp_path, kind, restores):
    """With the option, the control has the flags of the moment of the save, until training begins.

    The training was saved after its last step, when it had been asked to stop.
    """
    option = {"restore_callback_states_from_checkpoint": restores}
    trainer = trainer_of(KINDS[kind], tmp_path, [], **option)
    trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))

    trainer._load_callback_state()

    assert trainer.control.should_training_stop is restores
    longer = resumed(KINDS[kind], tmp_path, checkpoint, [], restores=restores, max_steps=3)
    assert longer.state.global_step == 3
