"""What ends a training: numbers that are not finite, and spikes of the global norm."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.checkpoints.folders import whole_file

__all__ = ["SpikeCount", "SpikeGuard", "check_finite"]


def check_finite(numbers: StepNumbers) -> None:
    """Raise if the loss or the global norm of a step is not finite.

    Source: MindFormers, ``check_for_nan_in_loss_and_grad``.

    Args:
        numbers: Of a step whose overflow is not an ordinary one of the loss scale.

    Raises:
        ValueError: If one is nan or infinite, or the gradients overflowed.
    """
    for name, value in (("loss", numbers.loss), ("global_norm", numbers.global_norm)):
        if value is not None and not math.isfinite(value):
            kind = "nan" if math.isnan(value) else "inf"
            msg = (
                f"there is {kind} in {name} of step {numbers.step} with value {value}, terminate "
                "training"
            )
            raise ValueError(msg)
    if numbers.overflow:
        msg = f"the gradients of step {numbers.step} are not finite, terminate training"
        raise ValueError(msg)


@final
class SpikeGuard:
    """Stop a training at a spike of the global norm; let it pass if it comes back.

    Source: MindFormers, ``check_for_global_norm``.

    Args:
        threshold: Norms from it on are spikes.
        folder: Of ``abnormal_global_norm.json``, which a resumed run reads; ``None`` for none.
        writes: Whether this process writes the file.
    """

    def __init__(self, threshold: float, folder: Path | None, *, writes: bool) -> None:
        self._threshold = threshold
        self._path = None if folder is None else folder / "abnormal_global_norm.json"
        self._writes = writes
        self._norms: dict[str, list[float]] = {}
        if self._path is not None and self._path.exists():
            self._norms = json.loads(self._path.read_text(encoding="utf-8"))

    def check(self, step: int, norm: float) -> None:
        """Look at the global norm of a step.

        Raises:
            RuntimeError: If it is the first spike at this step.
        """
        if norm < self._threshold:
            return
        is_first = str(step) not in self._norms
        self._norms.setdefault(str(step), []).append(norm)
        self._save()
        if is_first:
            msg = (
                f"`global_norm` of step {step} must be < {self._threshold}, got {norm}; resume "
                "from a checkpoint before it: if the norm is as large again, training continues"
            )
            raise RuntimeError(msg)
        run_logger(__package__).warning(
            "The global norm %s of step %d is still greater or equal than threshold %s, continue "
            "training.",
            norm,
            step,
            self._threshold,
        )

    def _save(self) -> None:
        if self._path is None or not self._writes:
            return
        with whole_file(self._path) as partial:
            partial.write_text(json.dumps(self._norms) + "\n", encoding="utf-8")


@final
class SpikeCount:
    """Count consecutive updates that the step skipped because of their global norm.

    Source: MindFormers, ``use_skip_data_by_global_norm``. A norm that is nan counts, too.

    Args:
        threshold: That of the step, ``StepConfig.global_norm_spike_threshold``.
        limit: How many in a row end the training.
    """

    def __init__(self, threshold: float, limit: int) -> None:
        self._threshold = threshold
        self._limit = limit
        self.num_in_a_row = 0

    def check(self, step: int, norm: float) -> None:
        """Count a step.

        Raises:
            ValueError: If there are too many spikes in a row.
        """
        if norm < self._threshold:
            self.num_in_a_row = 0
            return
        self.num_in_a_row += 1
        text = (
            f"Current global norm {norm} of step {step} has been {self.num_in_a_row} consecutive "
            f"times greater than threshold {self._threshold}"
        )
        if self.num_in_a_row >= self._limit:
            msg = f"{text}, stop training..."
            raise ValueError(msg)
        run_logger(__package__).info("%s", text)

    def state_dict(self) -> dict[str, int]:
        """Return the count, as JSON can hold it."""
        return {"num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.num_in_a_row = int(state["num_in_a_row"])
