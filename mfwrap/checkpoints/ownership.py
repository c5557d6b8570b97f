"""Own the folders of runs: a run together on all ranks, a loop from its first file in a folder."""

import builtins
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, final

from mfwrap.checkpoints.locks import RUN_LOCK, owner_token, owning, owning_together, process_token
from mfwrap.checkpoints.run_folders import remove_leftovers
from mfwrap.collectives import is_first_on_node, num_ranks, raising_together, this_rank
from mfwrap.collectives.store import has_keys, new_connection
from mfwrap.compatibility.torch import default_store

_SECONDS_FOR_RANK_0 = 30.0


@contextlib.contextmanager
def owning_run(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Own a run folder within the block, and delete what killed runs have left in it.

    Call it on all ranks. Arguments and errors are those of `owning_together`.
    """
    with owning_together(folder / RUN_LOCK, waits=waits) as is_new:
        if is_new:
            with raising_together():
                if is_first_on_node():
                    remove_leftovers(folder)
        yield


@contextlib.contextmanager
def exiting_when_in_use() -> Iterator[None]:
    """End the program as `mfwrap train` does if another program owns a run folder of the block.

    Rank 0 prints the sentence to standard error. The exit code is 2.
    """
    try:
        yield
    except BlockingIOError as error:
        if this_rank() == 0:
            sys.stderr.write(f"mfwrap: {error}\n")
        sys.exit(2)


@final
class OwnedFolders:
    """The run folders that a loop owns, each from the first file in it to `close`.

    What killed loops have left in a folder is deleted when rank 0 gets it.
    Rank 0 owns a folder for all ranks. The other ranks take its answer from the key-value store of
    the process group, because a rank may begin to write without the others, for example after it
    has restored a monitor. So no rank starts a collective here. If the first folder of a rank is
    not that of rank 0, the rank owns its folders itself. A folder that another rank of the same
    process group owns counts as owned.
    """

    _count: ClassVar[Iterator[int]] = itertools.count()
    """Numbers of the loops of this process, which begin on all ranks in the same order."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._folders: set[Path] = set()
        self._loop, self._num_ends = next(self._count), 0
        self._is_apart = False

    def own(self, folder: Path, check: Callable[[], None] | None = None) -> None:
        """Own a run folder; does nothing if this loop owns it already.

        A rank other than 0 waits for rank 0, but at most half a minute: rank 0 may have no files in
        the folder.

        Args:
            folder: Run folder.
            check: Called on rank 0 when it owns the folder. Its ``OSError`` is raised on each rank
                that calls this.

        Raises:
            BlockingIOError: If another program owns the folder; on each rank that calls this.
            OSError: If the lock file cannot be written.
        """
        if folder.absolute() in self._folders:
            return
        store = new_connection(default_store(), "mfwrap/owned") if num_ranks() > 1 else None
        try:
            if this_rank() == 0 or store is None:
                self._own_for_all(folder, check, store)
            else:
                self._follow(folder, store)
        except OSError:
            self._num_ends += 1
            raise
        self._folders.add(folder.absolute())

    def _own_for_all(self, folder: Path, check: Callable[[], None] | None, store: Any) -> None:
        answer = [str(folder), "", ""]
        try:
            if self._take(folder, store):
                remove_leftovers(folder)
            if check is not None:
                check()
        except OSError as error:
            answer[1:] = [type(error).__name__, str(error)]
            raise
        finally:
            if store is not None:
                store.set(self._key(str(folder)), json.dumps(answer))
                if not self._folders:
                    store.set(self._key("first"), json.dumps(answer))

    def _follow(self, folder: Path, store: Any) -> None:
        """Take the answer of rank 0, or own a folder that rank 0 does not have."""
        key = self._key(str(folder) if self._folders else "first")
        if not self._is_apart and has_keys(store, [key], _SECONDS_FOR_RANK_0):
            first, kind, said = json.loads(store.get(key))
            self._is_apart = first != str(folder)
            if not self._is_apart and kind:
                raise getattr(builtins, kind, OSError)(said)
        if self._is_apart:
            self._take(folder, store)

    def _key(self, what: str) -> str:
        return f"{self._loop}.{self._num_ends} {what}"

    def _take(self, folder: Path, store: Any) -> bool:
        """Own a folder; return whether it was free until now."""
        if store is not None:
            store.set(f"process {process_token()}", "")
        try:
            return self._stack.enter_context(owning(folder / RUN_LOCK))
        except BlockingIOError:
            token = owner_token(folder / RUN_LOCK)
            if store is None or token is None or not store.check([f"process {token}"]):
                raise
            return False

    def close(self) -> None:
        """Give the folders back."""
        self._folders.clear()
        self._is_apart = False
        self._num_ends += 1
        self._stack.close()
