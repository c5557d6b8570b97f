"""The newest intact checkpoint is found, and rank 0 finds it for all ranks."""

import warnings

import pytest

from mfwrap.checkpoints import newest_checkpoint
from support.checkpoint_folders import write_checkpoint
from support.ranks.checkpoints import newest_of_rank


def damage(folder):
    """Flip a bit of a checkpoint's weights."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_no_checkpoint(tmp_path):
    """A missing folder, and a folder without files in checkpoints of the prefix, give None."""
    write_checkpoint(tmp_path / "_abandoned-checkpoint-9")
    write_checkpoint(tmp_path / "step_9")
    (tmp_path / "checkpoint-8" / "part").mkdir(parents=True)
    (tmp_path / "checkpoint-7").touch()

    assert newest_checkpoint(tmp_path / "missing") is None
    assert newest_checkpoint(tmp_path) is None


def test_the_newest_by_number(tmp_path):
    """The number in the name counts, not the order of names or of times."""
    for number in (10, 9):
        write_checkpoint(tmp_path / f"step_{number}")
    (tmp_path / "step_11").mkdir()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest_checkpoint(tmp_path, "step_") == tmp_path / "step_10"


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    """The newest intact checkpoint is returned, and a warning says what is damaged."""
    for number in (1, 2, 3):
        write_checkpoint(tmp_path / f"checkpoint-{number}")
    damage(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "model.safetensors").touch()

    with pytest.warns(UserWarning, match=r"cannot resume from .*checkpoint-4: .*checkpoint-2$"):
        assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_no_intact_checkpoint(tmp_path):
    """If all checkpoints are damaged, an error names the newest: a fresh start would lose them."""
    for number in (1, 2):
        damage(write_checkpoint(tmp_path / f"checkpoint-{number}"))

    with pytest.raises(
        ValueError, match=r"checkpoint-2: model.safetensors is damaged .*there is no"
    ):
        newest_checkpoint(tmp_path)


def test_a_checkpoint_that_was_being_replaced(tmp_path):
    """A replacement that was killed between its two renames is completed first."""
    for place in ("replaced/checkpoint-5", "checkpoint-5"):
        write_checkpoint(tmp_path / "_checkpoint-5.partial" / place)

    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-5"


def test_rank_0_decides(two_ranks, tmp_path):
    """Both ranks get the checkpoint in rank 0's folder, and both raise its error."""
    write_checkpoint(tmp_path / "0" / "checkpoint-1")
    write_checkpoint(tmp_path / "1" / "checkpoint-2")
    found = str(tmp_path / "0" / "checkpoint-1")

    assert two_ranks.run(newest_of_rank, str(tmp_path)) == [found, found]
    damage(tmp_path / "0" / "checkpoint-1")
    first, last = two_ranks.run(newest_of_rank, str(tmp_path))
    assert first == last
    assert first.startswith("ValueError: cannot resume from")
