"""Tell what runs of mfwrap have written in a run folder from what is there besides."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from mfwrap.checkpoints.run_folders import ABANDONED, checkpoints_of_run
from mfwrap.checkpoints.whole import OWN_PARTIAL
from mfwrap.checkpoints.written_files import begin_list, listed_names
from mfwrap.records.json_lines import RECORD_NAMES
from mfwrap.records.run_record import read_facts

CHECKPOINT = re.compile(r"checkpoint-\d+")
"""Names of the checkpoints of a Trainer."""

_OF_CHECKPOINT = re.compile(r"mfwrap_(manifest|position|records|step)(_\d+)?\.(json|safetensors)")
"""Names of files that only mfwrap writes into a checkpoint. A node with a disk of its own may have
those of its ranks alone."""

EARLIER = "earlier_"
"""Prefix of the tracebacks of attempts before the one that has finished the run."""

RECORD = re.compile(
    rf"(({'|'.join(RECORD_NAMES)})(_rank\d+)?\.jsonl|memory_snapshot(_rank\d+)?\.pickle"
    r"|(result|rollbacks|abnormal_global_norm|trainer_state)\.json"
    r"|skip_rows\.jsonl|run\.(html|json|png)"
    rf"|({EARLIER})?error_rank_\d+\.txt)({OWN_PARTIAL})?"
)
"""Names of the files that a run writes, and of what `whole_file` leaves of them if it is killed."""

AVERAGE_SNAPSHOTS = "average_snapshots"
"""Folder of the averages that a training has stored at intervals."""

COMPLETIONS = "completions"
"""Folder of the answers and rewards that TRL writes with ``log_completions``."""

OTHER_NAMES = (
    *(AVERAGE_SNAPSHOTS, COMPLETIONS, "model", "model_ema", "recipe.yaml", "row_losses"),
    "tensorboard",
)
"""Names of the further files and folders of a run."""


def known_names(folder: Path) -> set[str]:
    """Return the names in a folder that a run may write."""
    return {
        name
        for name in [path.name for path in folder.glob("*")]
        if name in OTHER_NAMES or CHECKPOINT.fullmatch(base_name(name)) or RECORD.fullmatch(name)
    }


def base_name(name: str) -> str:
    """Return the name that a file had before mfwrap has set it aside."""
    return re.sub(rf"^{ABANDONED}(checkpoint-\d+)(\.\d+)?$|^{EARLIER}", r"\1", name)


def is_own(path: Path) -> bool:
    """Return whether a run of mfwrap has written a file or folder.

    The list of its folder tells it, and so do mfwrap's files in a checkpoint. In a folder without a
    list, a ``run.json`` of mfwrap tells it. A link is never mfwrap's.
    """
    if path.is_symlink():
        return False
    if CHECKPOINT.fullmatch(base_name(path.name)) and _has_own_files(path):
        return True
    listed = listed_names(path.parent)
    if listed is None:
        return _has_facts_of_mfwrap(path.parent)
    return bool({path.name, base_name(path.name)} & listed)


def own_names(folder: Path) -> set[str]:
    """Return the names in a run folder that runs of mfwrap have written."""
    return {name for name in known_names(folder) if is_own(folder / name)}


def is_own_checkpoint(path: Path) -> bool:
    """Return whether a training or a loop of mfwrap has written a checkpoint of any name."""
    return is_own(path) or (not path.is_symlink() and _has_own_files(path))


def own_checkpoints(run_folder: Path) -> list[Path]:
    """Return the checkpoints in a run folder that trainings of mfwrap have written, by step."""
    return [path for path in checkpoints_of_run(run_folder) if is_own_checkpoint(path)]


def begin_folder(folder: Path) -> bool:
    """Begin the list of a run folder, if it has none; return whether it had none."""
    is_new = listed_names(folder) is None
    if is_new:
        begin_list(folder, own_names(folder))
    return is_new


def check_own(paths: Iterable[Path]) -> None:
    """Check that a run may write some files, all in one folder.

    Raises:
        FileExistsError: If there are such files, and no run of mfwrap has written them.
    """
    refuse_others([path for path in paths if os.path.lexists(path) and not is_own(path)])


def refuse_others(others: Iterable[Path]) -> None:
    """Raise an error that names files and folders of one folder that mfwrap has not written.

    Raises:
        FileExistsError: If there are any.
    """
    if found := sorted(others):
        names = ", ".join(path.name for path in found)
        msg = (
            f"{found[0].parent} has {names}, which mfwrap has not written and would replace; "
            "choose another folder, or move these files away"
        )
        raise FileExistsError(msg)


def _has_own_files(checkpoint: Path) -> bool:
    """Return whether a checkpoint has a file that only mfwrap writes, perhaps without the others.

    It may be incomplete: on a node with a disk of its own, or after somebody has deleted files.
    """
    found = [each for each in checkpoint.glob("mfwrap_*") if _OF_CHECKPOINT.fullmatch(each.name)]
    return any(each.is_file() and not each.is_symlink() for each in found)


def _has_facts_of_mfwrap(folder: Path) -> bool:
    try:
        versions = read_facts(folder).get("versions")
    except (OSError, ValueError):  # of another tool
        return False
    return isinstance(versions, dict) and "mfwrap" in versions
