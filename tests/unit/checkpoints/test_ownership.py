"""A loop owns its run folders on all ranks, without a collective."""

import pytest

from mfwrap.checkpoints.locks import RUN_LOCK, owning
from mfwrap.checkpoints.ownership import OwnedFolders
from support.ranks.locks import (
    own_folders_of_ranks,
    own_one_after_the_other,
    refuse_on_all,
)


def test_the_ranks_of_a_loop_own_its_folder(two_ranks, tmp_path):
    """Rank 0 owns it for both; a second loop of the same program may enter, too."""
    assert two_ranks.run(own_one_after_the_other, str(tmp_path)) == [["owned", "owned"]] * 2


def test_all_ranks_of_a_loop_are_refused(two_ranks, tmp_path):
    """Each rank raises the error of rank 0, although none starts a collective."""
    with owning(tmp_path / RUN_LOCK):
        first, second = two_ranks.run(own_one_after_the_other, str(tmp_path))
    assert first == second
    assert all(said.startswith(f"BlockingIOError: {tmp_path} is in use: ") for said in first)


@pytest.mark.timeout(25)  # no rank waits the half minute for rank 0
def test_ranks_with_folders_of_their_own(two_ranks, tmp_path):
    """Each rank owns its own folder at once, and one that another rank owns."""
    assert two_ranks.run(own_folders_of_ranks, str(tmp_path)) == [[[True, True]] * 3] * 2


def test_all_ranks_learn_what_rank_0_refuses(two_ranks, tmp_path):
    """An error of the check on rank 0 is raised on the others, too, and no later one."""
    said = ["FileExistsError: in the way", "owned"]
    assert two_ranks.run(refuse_on_all, str(tmp_path)) == [said] * 2


def test_folders_of_a_loop(tmp_path):
    """A loop owns folders from its first file there until it gives them back, and again."""
    owned = OwnedFolders()
    for _ in range(2):
        for name in ("a", "b", "a"):
            owned.own(tmp_path / name)
        assert (tmp_path / "a" / RUN_LOCK).exists()
        assert (tmp_path / "b" / RUN_LOCK).exists()
        owned.close()
        assert not list(tmp_path.iterdir())


def test_what_a_killed_loop_has_left(tmp_path):
    """It is deleted by the loop that gets the folder."""
    for name in ("run.json.0123456789abcdef.partial", "notes.partial"):
        (tmp_path / name).touch()
    OwnedFolders().own(tmp_path)

    assert [path.name for path in tmp_path.glob("*.partial")] == ["notes.partial"]
