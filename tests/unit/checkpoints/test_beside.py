"""Other people's code writes beside a checkpoint as if it were written in the run folder."""

import pytest

from mfwrap.checkpoints.beside import move_back, show_files
from mfwrap.checkpoints.whole import clear_staging
from mfwrap.checkpoints.written_files import LIST

NAME = "checkpoint-4"


@pytest.fixture
def folders(tmp_path):
    """Return a run folder with files and a link, and the staging folder that shows them."""
    run, staging = tmp_path / "run", tmp_path / "run" / f"_{NAME}.partial"
    (run / "checkpoint-2").mkdir(parents=True)
    (run / "checkpoint-2" / "weights").write_text("2")
    (run / "saves.log").write_text("2\n")
    (run / "state.json").write_text("2")
    (run / "best").mkdir()
    (run / "latest").symlink_to("checkpoint-2")
    (staging / NAME).mkdir(parents=True)
    show_files(run, staging)
    return run, staging


def write_beside(folder):
    """Write as a method of the user's own does."""
    with (folder / "saves.log").open("a") as file:
        file.write("4\n")
    (folder / "new.json").write_text("4")
    (folder / "state.json").write_text("4")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to(NAME)
    (folder / "best").mkdir(exist_ok=True)
    (folder / "best" / "link").symlink_to("../saves.log")


def contents(folder):
    """Return the texts of files and the targets of links."""
    paths = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    return {
        path.relative_to(folder).as_posix(): path.readlink().as_posix()
        if path.is_symlink()
        else path.read_text()
        for path in paths
    }


def test_written_as_in_the_run_folder(folders, tmp_path):
    """Files are appended to and replaced, links are set anew, and checkpoints are not touched."""
    run, staging = folders
    expected = tmp_path / "expected"
    (expected / "checkpoint-2").mkdir(parents=True)
    (expected / "checkpoint-2" / "weights").write_text("2")
    (expected / "saves.log").write_text("2\n")
    (expected / "latest").symlink_to("checkpoint-2")
    write_beside(expected)

    write_beside(staging)
    move_back(staging, run, but=NAME)

    assert sorted(path.name for path in staging.iterdir()) == [LIST, NAME]
    found = contents(run)
    del found[f"_{NAME}.partial/{LIST}"]
    assert found == contents(expected)


def test_nothing_is_written(folders):
    """What is only shown stays as it is."""
    run, staging = folders
    shown = {path.name for path in staging.iterdir()}
    before = {path.name: path.lstat().st_ino for path in run.iterdir()}
    assert shown == {NAME, LIST, "saves.log", "state.json", "latest"}

    move_back(staging, run, but=NAME)

    assert {path.name: path.lstat().st_ino for path in run.iterdir() if path.name != "latest"} == {
        name: number for name, number in before.items() if name != "latest"
    }
    assert (run / "latest").readlink().as_posix() == "checkpoint-2"


def test_a_save_that_is_killed(folders):
    """The staging folder is recognized, and is deleted without the files that it shows."""
    run, staging = folders
    clear_staging(staging)

    assert not staging.exists()
    assert (run / "saves.log").read_text() == "2\n"
