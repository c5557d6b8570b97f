"""Write the large files of ``save_state`` in the background: ``attach(..., async_save=True)``."""

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from accelerate import Accelerator
from torch import Tensor

from mfwrap.accelerate.attachment import Attachment
from mfwrap.accelerate.attributes import replaced
from mfwrap.accelerate.state import is_writer, save_step, step_content
from mfwrap.checkpoints.background import BackgroundWriter
from mfwrap.checkpoints.checksums import Extent
from mfwrap.checkpoints.hashed_files import save_object, save_tensors
from mfwrap.checkpoints.host_copies import HostCopies
from mfwrap.checkpoints.stand_ins import StandIns, fit_in_one_file
from mfwrap.checkpoints.step_files import write_step_files
from mfwrap.collectives import num_ranks, raising_together, this_rank
from mfwrap.compatibility.accelerate import has_own_save_hooks, models_of, optimizers_of
from mfwrap.tensors.shards import is_distributed

_LOG = logging.getLogger(__name__)

_SHARDING = frozenset({"FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"})
"""Kinds of training in which rank 0 does not have the whole state."""


@final
class BackgroundStates:
    """Copy the state that accelerate saves, and write it in a thread.

    accelerate saves stand-ins for the weights, and no state of the optimizers; the thread replaces
    these files. The thread starts no collective. All ranks meet again in `settle`.

    Args:
        attached: The step.
        accelerator: Its accelerator.
        are_wanted: Whether the loop asks for it.
    """

    def __init__(self, attached: Attachment, accelerator: Accelerator, *, are_wanted: bool) -> None:
        self._attached, self._accelerator = attached, accelerator
        self._are_wanted = are_wanted
        self._copies, self._writer = HostCopies(), BackgroundWriter()
        self._pending: tuple[Callable[[], None], contextlib.ExitStack] | None = None
        self._is_saving = False
        self._stand_ins: list[StandIns] = []
        self._files: list[Callable[[], Mapping[Extent, str]]] = []
        self._said: str | None = None

    def are_on(self, *, is_safe: bool) -> bool:
        """Return whether the next save is written in the background; the same on all ranks.

        Args:
            is_safe: Whether accelerate writes weights as safetensors.
        """
        if not self._are_wanted:
            return False
        reason = self._why_at_once(is_safe=is_safe)
        if reason is not None and reason != self._said:
            self._said = reason
            if this_rank() == 0:
                _LOG.warning("save_state does not write in the background: %s", reason)
        return reason is None

    def _why_at_once(self, *, is_safe: bool) -> str | None:
        kind = str(self._accelerator.distributed_type).rpartition(".")[2]
        parameters = (each for model in models_of(self._accelerator) for each in model.parameters())
        if kind in _SHARDING or any(map(is_distributed, parameters)):
            return "no rank has the whole state"
        if not is_safe:
            return "the weights are not saved as safetensors"
        if has_own_save_hooks(self._accelerator):
            return "the loop has hooks of save_state of its own, which may read what is written"
        return None

    def save(self, save: Callable[[], object], folder: Path) -> None:
        """Let accelerate save, with `take` in its hook; note which files are written later."""
        self._stand_ins, self._files = [], []
        try:
            with replaced(self, _is_saving=True):
                save()
        except BaseException:
            self._copies.release()
            raise
        finally:
            self._attached.hides_optimizers = False
        for stand_ins in self._stand_ins:
            for tensors, path, metadata in stand_ins.files(folder):
                self._defer(save_tensors, tensors, path, metadata)

    def save_step(self, folder: Path, weights: list[dict[str, Tensor]]) -> None:
        """Save the step; within `save`, copy all states first, and put stand-ins into `weights`.

        Call it in accelerate's hook, on all ranks.

        Raises:
            MemoryError: On all ranks, if a rank lacks memory for the copy.
        """
        if not self._is_saving:
            save_step(folder, self._attached)
            return
        with raising_together():
            if is_writer(self._accelerator):
                self._take(folder, weights)

    def _take(self, folder: Path, weights: list[dict[str, Tensor]]) -> None:
        fit = [fit_in_one_file(each, may_be_tied=True, largest=sys.maxsize) for each in weights]
        states = [each if fits else None for each, fits in zip(weights, fit, strict=True)]
        optimizers = [each.state_dict() for each in optimizers_of(self._accelerator)]
        content = step_content(self._attached)
        states, optimizers, content = self._copies.copy((states, optimizers, content))
        for number, state in enumerate(states):
            if state is not None:
                self._stand_ins.append(StandIns(state))
                weights[number] = self._stand_ins[-1].state
        self._attached.hides_optimizers = True
        for number, state in enumerate(optimizers):
            name = f"optimizer_{number}.bin" if number else "optimizer.bin"
            self._defer(save_object, state, folder / name)

        def write() -> dict[Extent, str]:
            checksums: dict[Extent, str] = {}
            write_step_files(folder, *content, checksums=checksums)
            return checksums

        self._defer(write)

    def _defer(self, write: Callable[..., Mapping[Extent, str]], *args: Any) -> None:
        self._files.append(lambda: write(*args))

    def write(self) -> dict[Extent, str]:
        """Write what was deferred, in any thread; return the checksums."""
        self._copies.wait()
        return {extent: each for write in self._files for extent, each in write().items()}

    def submit(
        self,
        put: Callable[[], None] | None,
        complete: Callable[[], None],
        owned: contextlib.ExitStack,
    ) -> None:
        """Begin to write; call it on all ranks, after `settle`.

        Args:
            put: Writes the checkpoint and moves it into place; ``None`` on ranks that do not.
            complete: What `settle` does on all ranks afterwards.
            owned: Owns the folder until then.
        """
        self._pending = complete, owned
        if put is not None:
            self._writer.submit(put)

    def then(self, call: Callable[[], None]) -> None:
        """Call a function on all ranks when the checkpoint that is being written is complete."""
        if self._pending is not None:
            complete, owned = self._pending

            def both() -> None:
                complete()
                call()

            self._pending = both, owned

    def look(self) -> None:
        """With one rank, complete a checkpoint that is written; raise the error of its thread."""
        if self._pending is not None and num_ranks() == 1 and not self._writer.is_running:
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if any; call it on all ranks.

        Raises:
            Exception: On all ranks, if it could not be written.
        """
        if self._pending is None:
            return
        (complete, owned), self._pending = self._pending, None
        with owned:
            with raising_together():
                try:
                    self._writer.wait()
                finally:
                    self._copies.release()
            complete()
