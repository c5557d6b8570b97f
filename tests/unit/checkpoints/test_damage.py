"""A checkpoint with one flipped bit or one truncated file, whichever it is, is refused.

The damage is found before anything is loaded, so all cases share one trainer or one loop.
"""

import shutil

import pytest

from mfwrap.callbacks import (
    CheckpointMonitor,
    EMACallback,
    LocalNormMonitor,
    MFLossMonitor,
    TrainingStateMonitor,
)
from support.attached_runs import AttachedRun
from support.checkpoint_folders import copied, damages
from support.ranks.damage import DAMAGED, resume_damaged
from support.resumed_training import RunSettings, StopAfter, new_trainer
from support.training_state import assert_same_state

NUMBERS = [pytest.param(10, id="sample"), pytest.param(500, id="all", marks=pytest.mark.slow)]


def refused(intact, folder, number, resume):
    """Assert that resuming from a damaged checkpoint raises an error that names the damaged file.

    Args:
        intact: An intact checkpoint; its number is at least 1.
        folder: Folder for copies: an intact checkpoint number 0, and one damaged copy at a time.
        number: Number of damaged copies.
        resume: Function that resumes from a folder.
    """
    before = copied(intact, folder / f"{intact.name.rstrip('0123456789')}0")
    damaged = folder / intact.name
    for damage in damages(intact, number, seed=number):
        copied(intact, damaged)
        damage.do(damaged)
        with pytest.raises(ValueError, match="cannot resume from ") as caught:
            resume(damaged)
        said = str(caught.value)
        assert said.startswith(f"cannot resume from {damaged}: {damage.file} "), str(damage)
        assert said.endswith(f"; newest intact checkpoint before it: {before}"), str(damage)
        assert "\n" not in said
        shutil.rmtree(damaged)
    resume(before)


def monitors():
    """Return callbacks that write into checkpoints or beside them."""
    return [
        CheckpointMonitor(save_checkpoint_steps=2),
        EMACallback(),
        LocalNormMonitor(step_interval=1),
        MFLossMonitor(),
        TrainingStateMonitor(),
    ]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_checkpoint_of_a_trainer(tmp_path, number):
    """An `MFTrainer` with average, dynamic scale and monitors refuses each damaged checkpoint."""
    written = new_trainer(
        tmp_path / "run", RunSettings(), callbacks=[*monitors(), StopAfter(2)], save_strategy="no"
    )
    written.train()
    trainer = new_trainer(tmp_path / "resumed", RunSettings(), callbacks=monitors(), seed=1)
    trainer.args.save_strategy = "no"
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    def resume(folder):
        if folder.name.endswith("-0"):
            assert_same_state(before, trainer.model.state_dict())
            trainer.args.max_steps = 3
        trainer.train(resume_from_checkpoint=str(folder))

    refused(tmp_path / "run" / "checkpoint-2", tmp_path / "damaged", number, resume)
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("number", NUMBERS)
def test_a_checkpoint_of_an_attached_loop(tmp_path, number):
    """An attached accelerator refuses each damaged checkpoint and keeps its state."""
    written = AttachedRun()
    written.train(0, 4)
    written.accelerator.save_state(tmp_path / "step_4")
    saved = written.state()
    run = AttachedRun()
    run.train(0, 1)
    before = run.state()

    def resume(folder):
        if folder.name.endswith("_0"):
            assert_same_state(before, run.state())
        run.accelerator.load_state(folder)

    refused(tmp_path / "step_4", tmp_path / "damaged", number, resume)
    assert_same_state(saved, run.state())


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_on_two_ranks(two_ranks, tmp_path, name):
    """A flipped bit in a file that one rank reads makes both ranks raise the same error."""
    first, second = two_ranks.run(resume_damaged, name, str(tmp_path))

    assert first == second
    for file, damaged, said in first:
        assert f"{damaged}: {file} " in said
        assert f"newest intact checkpoint before it: {damaged[:-1]}1" in said
