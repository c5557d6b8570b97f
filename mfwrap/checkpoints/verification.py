"""Verify checkpoints before they are used, and find the newest intact checkpoint of a run."""

import fnmatch
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mfwrap.arguments import callers_stacklevel
from mfwrap.checkpoints.file_formats import DamagedFileError, check_format, json_content
from mfwrap.checkpoints.identities import identity
from mfwrap.checkpoints.locks import PARTIAL
from mfwrap.checkpoints.manifest import (
    HAS_MANIFEST,
    MANIFEST,
    Verified,
    files_of,
    verify_by_manifest,
)
from mfwrap.checkpoints.required_files import TRAINER_STATE, missing_part
from mfwrap.collectives import this_rank

_OURS = "mfwrap_*.json"
_PREFIX = "checkpoint-"
_NUMBERED = re.compile(r"(.*?)(\d+)")

Refusal = Callable[[Path], str | None]
"""Function that returns why the weights of a checkpoint cannot be used; ``None`` if they can."""


def verify(folder: Path, required: Sequence[str] = ()) -> Verified:
    """Verify the content of a checkpoint: with its manifest, or else by the formats of its files.

    Reads every file once. No tensor is kept in memory, and nothing is unpickled.

    Args:
        folder: Folder of the checkpoint.
        required: Names of files that the checkpoint must have.

    Raises:
        ValueError: If the checkpoint is damaged or incomplete. The message begins with the name of
            the file, relative to `folder`.
    """
    try:
        return _verify(folder, required)
    except DamagedFileError as error:
        msg = f"{_relative(error.path, folder)} {error.reason}"
        raise ValueError(msg) from error
    except OSError as error:
        msg = f"{_relative(Path(str(error.filename)), folder)} cannot be read ({error.strerror})"
        raise ValueError(msg) from error


def verify_of_run(folder: Path) -> Verified | None:
    """Verify a checkpoint of a run that may go on.

    If the run replaces the checkpoint meanwhile, the new one is verified.

    Returns:
        ``None`` if the run has deleted the checkpoint meanwhile.

    Raises:
        ValueError: If the checkpoint is damaged or incomplete, as in `verify`.
    """
    while True:
        before = _inode(folder)
        try:
            return verify(folder)
        except ValueError:
            after = _inode(folder)
            if after is None:
                return None
            if after == before:
                raise


def _inode(folder: Path) -> int | None:
    """Return the number by which the disk knows a folder; ``None`` if there is no such folder."""
    try:
        return folder.stat().st_ino
    except FileNotFoundError:
        return None


def check_checkpoint(
    folder: Path, refusal: Refusal | None = None, required: Sequence[str] = ()
) -> Verified:
    """Check that a checkpoint is intact, and that its weights belong to a network.

    If a checkpoint of mfwrap has no checksums of its content, rank 0 gives a warning.

    Args:
        folder: Folder of the checkpoint.
        refusal: Function that compares the weights with a network, such as `foreign_weights`;
            ``None`` to check the files only.
        required: Names of files that the checkpoint must have.

    Raises:
        ValueError: If a check fails. The message names the newest intact checkpoint of an earlier
            step.

    Returns:
        Extent of the verification. Give its identities to `check_unchanged` after loading.
    """
    try:
        verified = verify(folder, required)
        if refusal is not None and (reason := refusal(folder)):
            msg = f"{reason}; build the model as in the run of the checkpoint, or start a new run"
            raise ValueError(msg)  # noqa: TRY301  (both errors get the same offer)
    except ValueError as error:
        other = newest_whole_checkpoint(folder.parent, folder, refusal, required)
        offer = (
            "there is no intact checkpoint before it"
            if other is None
            else f"newest intact checkpoint before it: {other}"
        )
        is_found = folder.is_dir() and (not required or is_checkpoint(folder))
        # The Trainer's words: tools look for them to tell a wrong path from a damaged checkpoint.
        problem = "cannot resume from" if is_found else "Can't find a valid checkpoint at"
        msg = f"{problem} {folder}: {error}; {offer}"
        raise ValueError(msg) from error
    is_ours = any(folder.glob(_OURS))
    if verified.caveat is not None and is_ours and this_rank() == 0:
        warnings.warn(
            f"damage in {folder} may be unnoticed, because {verified.caveat}; the next checkpoint "
            "will have checksums",
            stacklevel=callers_stacklevel(),
        )
    return verified


def newest_whole_checkpoint(
    run_folder: Path,
    before: Path | None = None,
    refusal: Refusal | None = None,
    required: Sequence[str] = (),
) -> Path | None:
    """Return the folder of `newest_verified`; ``None`` if there is none."""
    found = newest_verified(run_folder, before, refusal, required)
    return None if found is None else found[0]


def newest_verified(
    run_folder: Path,
    before: Path | None = None,
    refusal: Refusal | None = None,
    required: Sequence[str] = (),
) -> tuple[Path, Verified] | None:
    """Return the intact checkpoint of the highest step; ``None`` if there is none.

    Verifies the content of one checkpoint after the other, the newest first, and stops at the first
    intact one.

    Args:
        run_folder: Folder of the checkpoints. Their names end with the number of a step.
        before: A checkpoint such as ``step_30``: the search is then limited to ``step_<number>``
            with lower numbers. If its name has no number, or for ``None``, all folders
            ``checkpoint-<step>`` are searched.
        refusal: Function that returns why the weights of a checkpoint cannot be used; ``None`` to
            accept any weights.
        required: Names of files that a checkpoint must have.
    """
    prefix, limit = _PREFIX, None
    if before is not None and (match := _NUMBERED.fullmatch(before.name)):
        prefix, limit = match[1], int(match[2])
    steps = {}
    for path in run_folder.glob("*"):
        match = _NUMBERED.fullmatch(path.name)
        if match and match[1] == prefix and is_checkpoint(path):
            steps[int(match[2])] = path
    for step in sorted(steps, reverse=True):
        if limit is not None and step >= limit:
            continue
        if verified := _verified(steps[step], refusal, required):
            return steps[step], verified
    return None


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has files of a checkpoint of mfwrap or the Trainer."""
    return (folder / TRAINER_STATE).is_file() or any(folder.glob(_OURS))


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder and its subfolders, in the order of their numbers.

    A checkpoint that is still being written or deleted is left out. If there is no checkpoint in
    the folder, but it is itself a checkpoint, it is returned.

    Raises:
        OSError: If a folder cannot be read.
    """
    found = sorted(_walk(folder), key=_by_number)
    return found or ([folder] if is_checkpoint(folder) else [])


def _walk(folder: Path) -> Iterator[Path]:
    for parent, subfolders, files in os.walk(folder, onerror=_raise_if_it_exists):
        if parent != str(folder) and (TRAINER_STATE in files or fnmatch.filter(files, _OURS)):
            yield Path(parent)
            subfolders.clear()
        subfolders[:] = [name for name in subfolders if Path(name).suffix != PARTIAL]


def _raise_if_it_exists(error: OSError) -> None:
    """Raise the error of a folder that cannot be read; ignore a folder that no longer exists."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _by_number(path: Path) -> tuple[str, str, int]:
    match = _NUMBERED.fullmatch(path.name)
    return (str(path.parent), match[1], int(match[2])) if match else (str(path), "", 0)


def _verified(folder: Path, refusal: Refusal | None, required: Sequence[str]) -> Verified | None:
    """Verify a checkpoint; return ``None`` if it is damaged or refused."""
    try:
        # Compare with the network first: this reads headers only.
        if refusal is not None and refusal(folder) is not None:
            return None
        return verify(folder, required)
    except (OSError, ValueError):
        return None


def _verify(folder: Path, required: Sequence[str]) -> Verified:
    if not folder.is_dir():
        msg = "there is no such folder"
        raise ValueError(msg)
    for name in required:
        if not (folder / name).is_file():
            raise DamagedFileError(folder / name, "is missing")
    # Before the contents are read: a file that is replaced afterwards then has another identity.
    files = [MANIFEST, *files_of(folder)] if (folder / MANIFEST).exists() else files_of(folder)
    identities = {name: identity(folder / name) for name in files}
    return _verified_contents(folder)._replace(identities=identities)


def _verified_contents(folder: Path) -> Verified:
    if (folder / MANIFEST).exists():
        return verify_by_manifest(folder)
    ours = sorted(folder.glob(_OURS))
    if any(_says_manifest(path) for path in ours) or (ours and (folder / TRAINER_STATE).exists()):
        raise DamagedFileError(folder / MANIFEST, "is missing")
    names = files_of(folder)
    if TRAINER_STATE in names and (missing := missing_part(names)):
        msg = f"it has no {missing}"
        raise ValueError(msg)
    for name in names:
        check_format(folder / name)
    return Verified(len(names), 0, "it has no manifest")


def _says_manifest(path: Path) -> bool:
    content = json_content(path)
    return isinstance(content, dict) and content.get(HAS_MANIFEST) is True


def _relative(path: Path, folder: Path) -> str:
    return (path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix()
