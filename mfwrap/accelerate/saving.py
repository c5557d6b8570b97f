"""Save and load the attached step in ``save_state`` and ``load_state``.

The checkpoint of ``save_state`` is written completely before an older one is replaced or deleted.
accelerate writes into the folder in place, and deletes the oldest checkpoint of ``total_limit``
before it writes the new one. A process that is killed in between would leave no complete
checkpoint.
"""

import contextlib
import functools
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, final

from accelerate import Accelerator

from mfwrap.accelerate.attachment import Attachment
from mfwrap.accelerate.attributes import replaced
from mfwrap.accelerate.background import BackgroundStates
from mfwrap.accelerate.global_batch import LoopBatch
from mfwrap.accelerate.state import (
    check_saved_step,
    is_writer,
    load_step,
    named_automatically,
)
from mfwrap.checkpoints.beside import move_back, show_files
from mfwrap.checkpoints.checksums import Extent
from mfwrap.checkpoints.file_formats import DamagedFileError, check_format
from mfwrap.checkpoints.identities import Identity, check_unchanged
from mfwrap.checkpoints.locks import PARTIAL, lock_of, owning_together, remove_dead_lock
from mfwrap.checkpoints.manifest import MANIFEST, write_manifest
from mfwrap.checkpoints.run_folders import remove_checkpoints
from mfwrap.checkpoints.verification import check_checkpoint
from mfwrap.checkpoints.whole import (
    adopt_files,
    clear_staging,
    complete_move,
    is_replaceable,
    move_files_into_place,
    move_into_place,
    staging_folder,
)
from mfwrap.collectives import gather_objects, raising_together
from mfwrap.compatibility.accelerate import (
    check_sharded_load,
    has_own_save_hooks,
    models_of,
    optimizers_of,
)
from mfwrap.records.own_names import is_own_checkpoint, refuse_others
from mfwrap.records.run_files import resume_records, save_records

_OWN_FILES = ("mfwrap_loop.json", "mfwrap_step.json", "mfwrap_step.safetensors")
"""Files that every save writes."""


_OWN_PREFIX = "mfwrap_"
"""Start of the names of all files that mfwrap itself writes into a checkpoint."""

_STATE_FILE = re.compile(
    rf"({_OWN_PREFIX}.+|(custom_checkpoint|model|optimizer|pytorch_model|random_states|sampler|scaler"
    r"|scheduler)(_\d+|-\d+-of-\d+)?)\.(bin|json|pkl|pt|safetensors)(\.index\.json)?"
)
"""Names of the files of a checkpoint. accelerate's sharded weights have folders of their own."""


@final
class AttachedCheckpoints:
    """Save and load the state of an attached step in ``save_state`` and ``load_state``.

    Registers hooks that accelerate calls before it saves and loads.

    Args:
        attached: The step.
        accelerator: Its accelerator.
        async_save: Whether ``save_state`` writes in the background.
    """

    def __init__(
        self, attached: Attachment, accelerator: Accelerator, *, async_save: bool = False
    ) -> None:
        self._attached = attached
        self.are_async = async_save
        """Whether the loop asks for checkpoints that are written in the background."""
        self._background = BackgroundStates(attached, accelerator, are_wanted=async_save)
        self._accelerator = accelerator
        self._saves_in: Path | None = None
        self._batch = LoopBatch(attached, accelerator)
        self._hooks = [
            accelerator.register_save_state_pre_hook(self._on_save),
            accelerator.register_load_state_pre_hook(self._on_load),
        ]

    def detach(self) -> None:
        """Wait for a checkpoint, and remove the hooks from the accelerator."""
        self._background.settle()
        for hook in self._hooks:
            hook.remove()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written; see `AttachedStep.wait_for_checkpoint`."""
        self._background.settle()

    def look(self) -> None:
        """Complete a checkpoint of the background, if that takes no time."""
        self._background.look()

    def saving(self, output_dir: Any, save: Callable[[str], Any], *, is_safe: bool = True) -> Any:
        """Call accelerate's ``save_state`` so that its checkpoint loads without mfwrap, too.

        If accelerate has no gradient scaler of its own, our scaler is removed during the call.
        Otherwise accelerate would write a scaler file that it could not load without mfwrap.

        Args:
            output_dir: Folder that the loop gave; ``None`` if accelerate names its checkpoints.
            save: Function that calls accelerate's ``save_state`` with a folder.
            is_safe: Whether accelerate writes weights as safetensors.

        Returns:
            Folder of the checkpoint.
        """
        if self._attached.ema is not None:
            self._attached.ema.refuse_inside_swap("save_state")
        self._background.settle()
        background = self._background if self._background.are_on(is_safe=is_safe) else None
        with whole_state(self._accelerator, output_dir, background) as (written, final):
            self._saves_in = final.parent
            scaler = self._accelerator.scaler if self._attached.has_grad_scaler else None
            with replaced(self._accelerator, scaler=scaler):
                if background is None:
                    save(str(written))
                else:
                    background.save(lambda: save(str(written)), written)
        if background is None:
            self._tell(final)
        else:
            background.then(lambda: self._tell(final))
        return final

    def _tell(self, final: Path) -> None:
        """Tell the observers that a checkpoint is complete."""
        for observer in self._attached.observers:
            observer.after_save(final)

    def loading(self, folder: str | Path | None, load: Callable[[], Any]) -> Any:
        """Verify a checkpoint, call accelerate's ``load_state``, then load the step's own files.

        The scaler is removed during accelerate's call, so that accelerate does not load its scaler
        file: that file lacks some of the counters. The step's own files restore the loss scale
        together with all counters.

        Args:
            folder: Folder of the checkpoint; ``None`` if there is no checkpoint, so that `load`
                raises accelerate's error.
            load: Function that calls accelerate's ``load_state``.

        Raises:
            ValueError: If the checkpoint is damaged, or accelerate cannot load its shards. All
                processes raise the same error, and nothing has been loaded. Also if another program
                deletes or changes a file meanwhile; parts of the checkpoint have been loaded then.
        """
        if folder is None:
            return self._load_stock(load)
        if not models_of(self._accelerator) and not optimizers_of(self._accelerator):
            msg = (
                "`accelerator.load_state` loads into what is prepared, and nothing is; call it "
                "after `accelerator.prepare`"
            )
            raise RuntimeError(msg)
        check_sharded_load(self._accelerator)
        path = Path(folder).expanduser()
        verified: dict[str, Identity] = {}
        with raising_together():
            if self._accelerator.is_local_main_process:
                # A process may have been killed while it replaced the checkpoint, or just after.
                complete_move(path.absolute())
                remove_dead_lock(lock_of(path.absolute()))
                verified.update(check_checkpoint(path).identities)
        try:
            loaded = self._load_stock(load)
        except Exception:
            # Say so if another program has deleted the checkpoint meanwhile.
            check_unchanged(path, verified)
            raise
        with raising_together():
            # Before the step's own files are loaded: they may be missing in a checkpoint that was
            # written without the step.
            check_unchanged(path, verified)
        load_step(path, self._attached)
        self._batch.apply()
        with raising_together():
            check_unchanged(path, verified)
        resume_records(path)
        for observer in self._attached.observers:
            observer.after_load(path)
        return loaded

    def _load_stock(self, load: Callable[[], Any]) -> Any:
        """Call accelerate's ``load_state`` without the scaler."""
        with replaced(self._accelerator, scaler=None), replaced(self._attached, is_loading=True):
            return load()

    def _on_save(self, _models: object, weights: Any, output_dir: str) -> None:
        folder = Path(output_dir)
        if is_writer(self._accelerator):
            # If accelerate replaces the files of an older checkpoint, their manifest is obsolete.
            (folder / MANIFEST).unlink(missing_ok=True)
        self._background.save_step(folder, weights)
        if is_writer(self._accelerator):
            self._batch.save(folder)
        for observer in self._attached.observers:
            observer.before_save(folder)
        save_records(folder, self._saves_in)

    def _on_load(self, _models: object, input_dir: str) -> None:
        # Check before accelerate loads anything, so that an error leaves the run unchanged.
        check_saved_step(Path(input_dir), self._attached)
        with raising_together():
            self._batch.check(Path(input_dir))


@contextlib.contextmanager
def whole_state(
    accelerator: Accelerator, output_dir: Any, background: BackgroundStates | None = None
) -> Iterator[tuple[Path, Path]]:
    """Let accelerate write a checkpoint within the block, then give it its name and a manifest.

    Call it on every process. Oldest checkpoints are deleted last. If a folder also has other files,
    these stay, and the files of the new checkpoint are moved one by one: while they are moved, the
    checkpoint is incomplete. A folder that cannot be renamed is written in place: its checkpoint is
    incomplete until the end of the block.

    Args:
        accelerator: Accelerator that saves. Within the block, it does not name checkpoints itself.
        output_dir: Argument of ``save_state``.
        background: Writes the rest of the checkpoint after the block; ``None`` if the block writes
            all of it.

    Yields:
        The folder that accelerate writes, and the one that the checkpoint is in when it is
        complete.

    Raises:
        BlockingIOError: If another program is saving to the same folder.
        FileExistsError: If the checkpoint would replace files that no save has written.
        ValueError: If accelerate names checkpoints and the next name is taken, or if it does not,
            and no folder is given.
    """
    configuration: Any = accelerator.project_configuration
    is_named = configuration.automatic_checkpoint_naming
    project = Path(accelerator.project_dir) if is_named else None
    if project is None and output_dir is None:
        msg = (
            "`save_state` needs `output_dir`, or a ProjectConfiguration with "
            "`automatic_checkpoint_naming=True`, got neither"
        )
        raise ValueError(msg)
    final = Path(output_dir) if project is None else _next_named(accelerator, project)
    # Not beside a checkpoint that accelerate has named: a stock accelerate would take the staging
    # folder for a checkpoint.
    staging = staging_folder((project or final.parent).absolute() / final.name)
    with contextlib.ExitStack() as owned:
        owned.enter_context(owning_together(_lock(staging, final)))
        with raising_together():
            if accelerator.is_local_main_process:
                if is_named and final.exists():
                    msg = (
                        f"{final} already exists; set `project_configuration.iteration` to the "
                        "number of the next checkpoint"
                    )
                    raise ValueError(msg)
                complete_move(final.absolute())
                _check_own(final)
                clear_staging(staging)
            may_stage = is_replaceable(final)
        choices = gather_objects((str(final), may_stage))
        stages = len(dict(choices)) == 1 and all(each for _, each in choices)
        written = staging / final.name if stages else final
        shows = stages and has_own_save_hooks(accelerator)
        if shows and accelerator.is_local_main_process:
            staging.mkdir(parents=True, exist_ok=True)
            show_files(final.parent, staging)
        with replaced(configuration, automatic_checkpoint_naming=False):
            yield written, final
        gather_objects(None)  # a barrier: the manifest lists the files of all processes
        place = _Place(accelerator, project, staging, final, stages=stages, shows=shows)
        if background is not None:
            put = functools.partial(place.put, background.write)
            background.submit(
                put if is_writer(accelerator) else None, place.complete, owned.pop_all()
            )
            return
        with raising_together():
            if is_writer(accelerator):
                place.put()
        place.complete()


@final
@dataclass(frozen=True)
class _Place:
    """Where a checkpoint is written, and where it belongs."""

    accelerator: Any
    project: Path | None
    staging: Path
    final: Path
    _: KW_ONLY
    stages: bool
    shows: bool

    @property
    def _written(self) -> Path:
        return self.staging / self.final.name if self.stages else self.final

    def put(self, write: Callable[[], Mapping[Extent, str]] | None = None) -> None:
        """Write what is missing, and the manifest; move the checkpoint; any thread may call this.

        Args:
            write: Writes what is missing, and returns the checksums; ``None`` if nothing is.
        """
        known = None if write is None else write()
        write_manifest(self._written, required=_OWN_FILES, known=known)
        if self.shows:
            move_back(self.staging, self.final.parent, but=self.final.name)
        if self.stages:
            _move(self._written, self.final)

    def complete(self) -> None:
        """Move this node's files, and delete the oldest checkpoints; call it on all ranks."""
        writes = is_writer(self.accelerator)
        with raising_together():
            if self.stages and self.accelerator.is_local_main_process and not writes:
                self.final.parent.mkdir(parents=True, exist_ok=True)
                if self.shows:
                    move_back(self.staging, self.final.parent, but=self.final.name)
                adopt_files(self._written, self.final)
            if self.project is not None and writes:
                surplus = _surplus(self.accelerator.project_configuration, self.final)
                remove_checkpoints(surplus, self.project)


def _lock(staging: Path, final: Path) -> Path:
    """Return the lock file of a checkpoint: beside it, or in it if only it can be written."""
    parent = staging.parent
    if parent.is_dir() and not os.access(parent, os.W_OK):
        return final / _lock_inside(final)
    return staging.with_suffix(".lock")


def _lock_inside(final: Path) -> str:
    """Return the name of the lock file in a folder whose parent folder cannot be written."""
    return f"_{final.name}.lock{PARTIAL}"


def _next_named(accelerator: Any, project: Path) -> Path:
    return project / "checkpoints" / f"checkpoint_{accelerator.save_iteration}"


def _move(written: Path, final: Path) -> None:
    """Move a complete checkpoint to its place, and keep the other files of a folder there."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists() and any(
        path.is_symlink() or not os.path.lexists(written / path.relative_to(final))
        for path in final.rglob("*")
        if path.name != _lock_inside(final)
    ):
        # The files that show that the folder is a checkpoint come first: if the process is killed
        # in between, the next save may replace the files.
        move_files_into_place(written, final, first=_OWN_PREFIX, last=MANIFEST)
        shutil.rmtree(written.parent, ignore_errors=True)
    else:
        move_into_place(written, final)


def _check_own(final: Path) -> None:
    """Check that a checkpoint replaces nothing but a checkpoint of mfwrap or accelerate.

    Raises:
        FileExistsError: If it would.
    """
    if os.path.lexists(final) and not final.is_dir():
        refuse_others([final])
    names = [path for path in final.glob("*") if _STATE_FILE.fullmatch(path.name)]
    is_ours = any(not path.is_symlink() and _is_proof(path) for path in names)
    refuse_others(
        [path for path in names if not is_ours or path.is_symlink() or not path.is_file()]
    )


def _is_proof(path: Path) -> bool:
    """Return whether a file shows that its folder is a checkpoint of mfwrap or accelerate.

    The folder may lack the other files: on a node with a disk of its own, or if a save was killed.
    """
    if not path.is_file():
        return False
    if path.name.startswith("random_states_"):
        return zipfile.is_zipfile(path)  # as `torch.save` writes it
    if not path.name.startswith(_OWN_PREFIX):
        return False
    try:
        check_format(path)
    except DamagedFileError:
        return path.name == MANIFEST
    return True


def _surplus(configuration: Any, newest: Path) -> list[Path]:
    """Return the oldest checkpoints of mfwrap beyond accelerate's ``total_limit``."""
    if configuration.total_limit is None:
        return []
    own = [path for path in named_automatically(configuration) if is_own_checkpoint(path)]
    older = [path for path in own if path.name != newest.name]
    return older[: max(len(own) - configuration.total_limit, 0)]
