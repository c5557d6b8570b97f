"""Write the large files of an `MFTrainer`'s checkpoint after all others, from a copy of the state.

The Trainer writes a checkpoint as it always does, except that it gets stand-ins for the weights and
for the optimizer's state. So all code of transformers, of tokenizers and of the user runs in the
thread of the training, and knows nothing of a second one. What the Trainer has written says which
weights it saves, and by which names.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor
from transformers import PreTrainedModel

from mfwrap.accelerate.attributes import replaced
from mfwrap.accelerate.state import step_content
from mfwrap.checkpoints.checksums import Extent
from mfwrap.checkpoints.hashed_files import save_object, save_tensors
from mfwrap.checkpoints.host_copies import HostCopies
from mfwrap.checkpoints.stand_ins import StandIns, fit_in_one_file
from mfwrap.checkpoints.step_files import write_step_files
from mfwrap.trainer.view import TrainerView

_OPTIMIZER = "optimizer.pt"
_LARGEST_FILE = 50_000_000_000
"""Bytes from which ``save_pretrained`` splits weights into several files."""


@final
class DeferredFiles:
    """The large files of one checkpoint, on a rank that saves.

    Args:
        trainer: Trainer that saves. Its state is copied.
        copies: Copies, whose buffers are free.

    Raises:
        MemoryError: If the host lacks memory for the copy.
    """

    def __init__(self, trainer: TrainerView, copies: HostCopies) -> None:
        self._trainer, self._copies = trainer, copies
        self._files: list[Callable[[], Mapping[Extent, str]]] = []
        saves_all = not trainer.args.save_only_model
        self._weights, self._optimizer, self._step = copies.copy(
            (
                _weights_in_one_file(trainer.model),
                trainer.optimizer.state_dict() if saves_all else None,
                step_content(trainer.attached.attachment) if saves_all else None,
            )
        )

    def save_weights(self, folder: Path, save: Callable[..., None]) -> None:
        """Let the Trainer save stand-ins for the weights; the weights replace them later.

        Args:
            folder: Folder of the checkpoint.
            save: The Trainer's ``_save``, which already has the folder.
        """
        if self._weights is None:
            save()
            return
        stand_ins = StandIns(self._weights)
        save(state_dict=stand_ins.state)
        found = list(stand_ins.files(folder))
        for tensors, path, metadata in found:
            self._defer(save_tensors, tensors, path, metadata)
        if not found:  # a format without names, or weights that are none of the state's
            save()

    def save_optimizer(self, folder: Path, save: Callable[[], None]) -> None:
        """Let the Trainer save the schedule; the state of the optimizer is written later.

        Args:
            folder: Folder of the checkpoint.
            save: The Trainer's ``_save_optimizer_and_scheduler``, which already has the folder.
        """
        with replaced(self._trainer, optimizer=_WithoutState()):
            save()
        self._defer(save_object, self._optimizer, folder / _OPTIMIZER)

    def save_step(self, folder: Path) -> None:
        """Write the files of the step later: loss scale, counts and average."""

        def write() -> dict[Extent, str]:
            checksums: dict[Extent, str] = {}
            write_step_files(folder, *self._step, checksums=checksums)
            return checksums

        self._defer(write)

    def write(self) -> dict[Extent, str]:
        """Write the files; any thread may call this.

        Returns:
            Checksums of what was written, for `write_manifest`.
        """
        self._copies.wait()
        return {extent: each for write in self._files for extent, each in write().items()}

    def _defer(self, write: Callable[..., Mapping[Extent, str]], *args: Any) -> None:
        self._files.append(lambda: write(*args))


@final
class _WithoutState:
    """Stands in for an optimizer while the Trainer saves."""

    @staticmethod
    def state_dict() -> dict[str, Any]:
        """Return no state, of which the Trainer writes a small file."""
        return {}


def _weights_in_one_file(model: Any) -> dict[str, Tensor] | None:
    """Return the weights of a model if its whole state goes to one file; ``None`` otherwise.

    Adapters and quantized models save something else. Their weights are written at once.
    """
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    if is_quantized or hasattr(model, "peft_config") or hasattr(model, "hf_device_map"):
        return None
    state: dict[str, Any] = model.state_dict()
    # Of a model that is not of transformers, safetensors refuses tied weights.
    is_one_file = fit_in_one_file(
        state, may_be_tied=isinstance(model, PreTrainedModel), largest=_LARGEST_FILE
    )
    return state if is_one_file else None
