"""Save checkpoints in files, and keep the newest ones."""

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, final

import torch
from safetensors.torch import save_model
from torch import nn

from mfwrap import MFTrainOneStepCell, TrainOneStepWithLossScaleCell
from mfwrap.arguments import described
from mfwrap.average.swap import training_weights
from mfwrap.callbacks.mindspore.checkpoint_config import CheckpointConfig
from mfwrap.checkpoints.locks import lock_of, owning
from mfwrap.checkpoints.whole import whole_file
from mfwrap.model import Callback, CallbackParameters, RunContext

_BREAKPOINT = "_breakpoint"
"""End of the name of a checkpoint that is saved when a training raises an error."""


class _Saved(NamedTuple):
    """A checkpoint and the time it was written."""

    path: Path
    seconds: float


@final
class ModelCheckpoint(Callback):
    """Save checkpoints during a training and at its end.

    The main process writes ``<directory>/<prefix>-<epoch>_<step in the epoch>.ckpt`` under a
    temporary name and renames it. Saving synchronizes with the device. The file holds a dictionary
    with these entries:

    - ``network`` and ``optimizer``: their ``state_dict()``.
    - ``cell``: the ``state_dict()`` of the training cell: loss scale, counters, average.
    - ``lr_scheduler``: the ``state_dict()`` of the schedule, if there is a schedule.
    - ``loss_fn``: the ``state_dict()`` of the loss function, if it has weights.
    - ``epoch_num`` and ``step_num``, and the entries of `CheckpointConfig.append_info`.

    To resume from a checkpoint::

        state = torch.load(file, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        cell.load_state_dict(state["cell"])
        schedule.load_state_dict(state["lr_scheduler"])

    If `directory` already has checkpoints with the prefix, or another training is writing them,
    this training uses ``<prefix>_1``, and so on.

    Source: MindSpore, ``train.ModelCheckpoint``, which also writes a graph, and writes files in
    place.

    Args:
        prefix: Start of the file names, without ``/``.
        directory: Folder for the files, created if missing; ``None`` for the working directory.
        config: When to save and what to keep; ``None`` saves each step and keeps the newest five.
        clock: Returns seconds from an arbitrary start.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `prefix` is empty or has a ``/``.
    """

    def __init__(
        self,
        prefix: str = "CKP",
        directory: str | Path | None = None,
        config: CheckpointConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(prefix, str) or not prefix or "/" in prefix:
            msg = f"`prefix` must be a name without `/`, got {prefix!r}"
            raise ValueError(msg)
        if config is not None and not isinstance(config, CheckpointConfig):
            msg = f"`config` must be a CheckpointConfig or None, got {described(config)}"
            raise TypeError(msg)
        self._given_prefix = self._prefix = prefix
        self._directory = Path("." if directory is None else directory)
        self._config = CheckpointConfig() if config is None else config
        self._clock = clock
        self._saved: list[_Saved] = []
        self._owned = contextlib.ExitStack()
        self._parameters: CallbackParameters | None = None
        self._last_step: int | None = None
        self._last_seconds = 0.0
        self.latest_ckpt_file_name = ""
        """Path of the newest checkpoint; empty before the first."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """Choose a prefix that no earlier checkpoint and no other training has."""
        self._parameters = run_context.original_args()
        self._owned.close()
        if self._parameters.is_world_process_zero:
            self._prefix = _own_prefix(
                self._owned, self._directory, self._given_prefix, self._config.format
            )
        self._saved, self._last_step = [], None
        self._last_seconds = self._clock()

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Save if a checkpoint is due."""
        step: int = run_context.original_args().cur_step_num
        if self._config.save_checkpoint_steps:
            due = step % self._config.save_checkpoint_steps == 0
        else:
            due = self._clock() - self._last_seconds >= self._config.save_checkpoint_seconds
        if due:
            self._save(run_context.original_args())

    def on_train_end(self, run_context: RunContext) -> None:
        """Save if the last step has no checkpoint yet."""
        self._save(run_context.original_args())
        self._owned.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and self._config.exception_save and self._parameters is not None:
            self._save(self._parameters, suffix=_BREAKPOINT)
        self._parameters = None
        self._owned.close()

    def _save(self, parameters: CallbackParameters, suffix: str = "") -> None:
        step: int = parameters.cur_step_num
        if not step or (step == self._last_step and not suffix):
            return
        self._last_step, self._last_seconds = step, self._clock()
        if not parameters.is_world_process_zero:
            return
        step_in_epoch = (step - 1) % parameters.batch_num + 1
        name = f"{self._prefix}-{parameters.cur_epoch_num}_{step_in_epoch}{suffix}"
        path = self._directory / f"{name}.{self._config.format}"
        # Another callback may have put averages into the network, for an evaluation.
        with training_weights(), whole_file(path) as partial:
            self._write(parameters, partial)
        self.latest_ckpt_file_name = str(path)
        parameters.update(latest_ckpt_file=str(path), last_save_ckpt_step=step)
        self._remove_old(_Saved(path, self._last_seconds))

    def _write(self, parameters: CallbackParameters, path: Path) -> None:
        network: nn.Module = parameters.network
        if self._config.saved_network is not None:
            network = self._config.saved_network
        if self._config.format == "safetensors":
            save_model(network, str(path))
            return
        # Call `_state_of` first: it flushes the cell. The flush steps the schedule, which changes
        # the learning rates in the optimizer's state below.
        state = _state_of(parameters)
        state |= {
            "network": network.state_dict(),
            "optimizer": parameters.optimizer.state_dict(),
            "epoch_num": parameters.cur_epoch_num,
            "step_num": parameters.cur_step_num,
        }
        if taken := state.keys() & self._config.info.keys():
            msg = f"`append_info` must not use names of a checkpoint's own entries: {sorted(taken)}"
            raise ValueError(msg)
        torch.save(state | self._config.info, path)

    def _remove_old(self, saved: _Saved) -> None:
        self._saved.append(saved)
        if self._config.keep_checkpoint_max:
            old = self._saved[: -self._config.keep_checkpoint_max]
        elif self._config.keep_checkpoint_per_n_minutes:
            # Delete the second newest checkpoint if it is less than `span` seconds newer than the
            # third newest.
            span = self._config.keep_checkpoint_per_n_minutes * 60
            last = self._saved[-3:]
            old = [last[1]] if len(last) == 3 and last[1].seconds - last[0].seconds < span else []
        else:
            old = []
        for checkpoint in old:
            checkpoint.path.unlink(missing_ok=True)
            self._saved.remove(checkpoint)


def _state_of(parameters: CallbackParameters) -> dict[str, Any]:
    """Return the ``state_dict()`` of the training cell, schedule and loss function, if present."""
    cell, schedule = parameters.train_network, parameters.get("lr_scheduler")
    loss_fn = parameters.get("loss_fn")
    state: dict[str, Any] = {}
    if isinstance(cell, (TrainOneStepWithLossScaleCell, MFTrainOneStepCell)):
        cell.flush()
        state["cell"] = cell.state_dict()
    if schedule is not None:
        state["lr_scheduler"] = schedule.state_dict()
    if isinstance(loss_fn, nn.Module) and (weights := loss_fn.state_dict()):
        state["loss_fn"] = weights
    return state


def _own_prefix(owned: contextlib.ExitStack, directory: Path, prefix: str, suffix: str) -> str:
    """Own the prefix, followed by a number if a checkpoint or another training has it.

    Args:
        owned: Gets the lock of the prefix that is returned.
        directory: Folder of the checkpoints.
        prefix: Prefix to begin with.
        suffix: Suffix of the files.
    """
    number = 0
    while True:
        number = max(number, _first_free(directory, prefix, suffix))
        name = f"{prefix}_{number}" if number else prefix
        with contextlib.ExitStack() as stack, contextlib.suppress(BlockingIOError):
            is_new = stack.enter_context(owning(lock_of(directory / name)))
            # Another training may have saved and ended since the first look.
            if is_new and _first_free(directory, prefix, suffix) <= number:
                owned.enter_context(stack.pop_all())
                return name
        number += 1


def _first_free(directory: Path, prefix: str, suffix: str) -> int:
    """Return the number after those of all checkpoints with the prefix; 0 without a checkpoint."""
    names = [path.name for path in directory.glob(f"*.{suffix}")] if directory.is_dir() else []
    pattern = rf"{re.escape(prefix)}(?:_(\d+))?-\d+_\d+({_BREAKPOINT})?\.{suffix}"
    taken = [int(match[1] or 0) for name in names if (match := re.fullmatch(pattern, name))]
    return max(taken) + 1 if taken else 0
