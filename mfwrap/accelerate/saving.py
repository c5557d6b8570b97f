"""Write the checkpoint of ``save_state`` completely before an older one is replaced or deleted.

accelerate writes into the folder in place, and deletes the oldest checkpoint of ``total_limit``
before it writes the new one. A process that is killed in between would leave no complete
checkpoint.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from mfwrap.accelerate.state import is_writer, named_automatically
from mfwrap.checkpoints.folders import (
    adopt_files,
    complete_move,
    is_replaceable,
    move_files_into_place,
    move_into_place,
    remove_checkpoints,
    staging_folder,
)
from mfwrap.checkpoints.manifest import MANIFEST, files_of, write_manifest
from mfwrap.collectives import gather_objects, raising_together


class Destination(NamedTuple):
    """Folders of a checkpoint."""

    written: Path
    """Folder that accelerate writes."""

    final: Path
    """Folder that the checkpoint is in when it is complete."""


@contextlib.contextmanager
def whole_state(accelerator: Accelerator, output_dir: Any) -> Iterator[Destination]:
    """Let accelerate write a checkpoint within the block, then give it its name and a manifest.

    Call it on every process. Oldest checkpoints are deleted last. If a folder also has other files,
    these stay, and the files of the new checkpoint are moved one by one: while they are moved, the
    checkpoint is incomplete. A folder that cannot be renamed is written in place: its checkpoint is
    incomplete until the end of the block.

    Args:
        accelerator: Accelerator that saves. Within the block, it does not name checkpoints itself.
        output_dir: Argument of ``save_state``.

    Raises:
        ValueError: If accelerate names checkpoints and the next name is taken.
    """
    configuration: Any = accelerator.project_configuration
    is_named = configuration.automatic_checkpoint_naming
    project = Path(accelerator.project_dir) if is_named else None
    final = Path(output_dir) if project is None else _next_named(accelerator, project)
    parent = final.absolute().parent if project is None else project.absolute()
    with raising_together():
        if accelerator.is_local_main_process:
            if is_named and final.exists():
                msg = (
                    f"{final} already exists; set `project_configuration.iteration` to the number "
                    "of the next checkpoint"
                )
                raise ValueError(msg)
            complete_move(final.absolute().parent)
            shutil.rmtree(staging_folder(parent), ignore_errors=True)
        may_stage = is_replaceable(final)
    choices = gather_objects((str(final), may_stage))
    stages = len(dict(choices)) == 1 and all(each for _, each in choices)
    written = staging_folder(parent) / final.name if stages else final
    configuration.automatic_checkpoint_naming = False
    try:
        yield Destination(written, final)
    finally:
        configuration.automatic_checkpoint_naming = is_named
    gather_objects(None)  # a barrier: the manifest lists the files of all processes
    with raising_together():
        if is_writer(accelerator):
            write_manifest(written)
            if stages:
                _move(written, final)
    with raising_together():
        if stages and accelerator.is_local_main_process and not is_writer(accelerator):
            final.parent.mkdir(parents=True, exist_ok=True)
            adopt_files(written, final)
        if project is not None and is_writer(accelerator):
            surplus = _surplus(configuration, final)
            remove_checkpoints(surplus, project)
            shutil.rmtree(staging_folder(parent), ignore_errors=True)


def _next_named(accelerator: Any, project: Path) -> Path:
    return project / "checkpoints" / f"checkpoint_{accelerator.save_iteration}"


def _move(written: Path, final: Path) -> None:
    """Move a complete checkpoint to its place, and keep the other files of a folder there."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists() and set(files_of(final)) - set(files_of(written)):
        move_files_into_place(written, final, last=MANIFEST)
        shutil.rmtree(written.parent, ignore_errors=True)
    else:
        move_into_place(written, final)


def _surplus(configuration: Any, newest: Path) -> list[Path]:
    """Return the oldest checkpoints beyond accelerate's ``total_limit``."""
    if configuration.total_limit is None:
        return []
    ordered = named_automatically(configuration)
    older = [path for path in ordered if path.name != newest.name]
    return older[: max(len(ordered) - configuration.total_limit, 0)]
