"""Checks that stop a training: non-finite numbers, and spikes of the global norm."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.checkpoints.file_formats import json_content
from mfwrap.checkpoints.whole import whole_file


def check_finite(numbers: StepNumbers) -> None:
    """Raise if the loss or the global norm of a step is non-finite.

    Source: MindFormers, ``check_for_nan_in_loss_and_grad``.

    Args:
        numbers: Numbers of a step. Do not check a step whose overflow the loss scale explains.

    Raises:
        ValueError: If loss or norm is nan or infinite, or the gradients overflowed.
    """
    for name, value in (("loss", numbers.loss), ("global norm", numbers.global_norm)):
        if value is not None and not math.isfinite(value):
            msg = f"the training stops: the {name} of step {numbers.step} is {value}"
            raise ValueError(msg)
    if numbers.overflow:
        msg = f"the training stops: the gradients of step {numbers.step} are not finite"
        raise ValueError(msg)


@final
class SpikeGuard:
    """Stop a training at the first spike of the global norm at a step.

    Each spike is written to ``abnormal_global_norm.json`` with its step. If a resumed run spikes
    again at a step in this file, training continues.

    Source: MindFormers, ``check_for_global_norm``.

    Args:
        threshold: Smallest norm that is a spike.
        folder: Folder of the file; ``None`` writes none.
        writes: Whether this process writes the file. All processes read it.

    Raises:
        ValueError: If the file is damaged.
    """

    def __init__(self, threshold: float, folder: Path | None, *, writes: bool) -> None:
        self._threshold = threshold
        self._path = None if folder is None else folder / "abnormal_global_norm.json"
        self._writes = writes
        self._norms: dict[str, list[float]] = {}
        if self._path is not None and self._path.exists():
            self._norms = _read(self._path)

    def check(self, step: int, norm: float) -> None:
        """Write a spike of the global norm to the file; raise if it is the first at this step.

        Raises:
            RuntimeError: If this is the first spike at this step.
        """
        if norm < self._threshold:
            return
        is_first = str(step) not in self._norms
        self._norms.setdefault(str(step), []).append(norm)
        self._save()
        if is_first:
            msg = (
                f"`global_norm` of step {step} must be < {self._threshold}, got {norm}; resume "
                "from an earlier checkpoint: if this step has a spike again, training continues"
            )
            raise RuntimeError(msg)
        run_logger(__package__).warning(
            "The global norm %s of step %d has reached the threshold %s again; training continues.",
            norm,
            step,
            self._threshold,
        )

    def _save(self) -> None:
        if self._path is None or not self._writes:
            return
        with whole_file(self._path) as partial:
            partial.write_text(json.dumps(self._norms) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, list[float]]:
    """Return the norms in a file by step."""
    try:
        content = json_content(path)
        return {str(int(step)): [float(norm) for norm in norms] for step, norms in content.items()}
    except (AttributeError, TypeError, ValueError) as error:
        msg = f"cannot read the spikes of earlier runs: {path} is damaged; delete this file"
        raise ValueError(msg) from error


@final
class SpikeCount:
    """Stop a training after too many spikes of the global norm in a row.

    By then the training step itself has skipped the updates of these spikes. A NaN norm counts as a
    spike.

    Source: MindFormers, ``use_skip_data_by_global_norm``.

    Args:
        threshold: Smallest norm that is a spike; use ``StepConfig.global_norm_spike_threshold``.
        limit: Number of spikes in a row that stops the training.
    """

    def __init__(self, threshold: float, limit: int) -> None:
        self._threshold = threshold
        self._limit = limit
        self.num_in_a_row = 0

    def check(self, step: int, norm: float) -> None:
        """Count a step, and raise if too many steps in a row were spikes.

        Raises:
            ValueError: If this step is the `limit`-th spike in a row.
        """
        if norm < self._threshold:
            self.num_in_a_row = 0
            return
        self.num_in_a_row += 1
        text = (
            f"the global norm has reached the threshold {self._threshold} in {self.num_in_a_row} "
            f"consecutive steps, last in step {step} with {norm}"
        )
        if self.num_in_a_row >= self._limit:
            msg = f"the training stops: {text}"
            raise ValueError(msg)
        run_logger(__package__).info("%s", text)

    def state_dict(self) -> dict[str, int]:
        """Return the number of spikes in a row."""
        return {"num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.num_in_a_row = int(state["num_in_a_row"])
