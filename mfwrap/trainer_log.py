"""What the Trainer's log says of the steps since the last one."""

from typing import Any, final

import torch
from torch import Tensor

from mfwrap.outputs import LocalNormStepOutput, StepReport

__all__ = ["StepLog"]


@final
class StepLog:
    """Count on the device what the log reports, and leave losses out that are not finite.

    Args:
        device: The training device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart(filters=True)

    def restart(self, *, filters: bool) -> None:
        """Begin a training.

        Args:
            filters: Leave losses out that are not finite.
        """
        self.filters = filters
        self.num_steps = 0
        """Updates since the last log."""
        self._num_losses = 0
        # Since the last log, and in all.
        self._left_out = self._zero()
        self._non_finite_losses = self._zero()
        self._overflows = self._zero()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._device)

    def filtered(self, loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch, or 0 if it is not finite and so left out.

        Args:
            loss: Shape ``()``. Not read on the host.
        """
        self._num_losses += 1
        bad = ~loss.isfinite()
        self._non_finite_losses = self._non_finite_losses + bad
        if not self.filters:
            return loss
        self._left_out = self._left_out + bad
        return torch.where(bad, 0.0, loss)

    def count(self, report: StepReport) -> None:
        """Count an update."""
        self.num_steps += 1
        self._overflows = self._overflows + report.output.overflow

    def completed(
        self, logs: dict[str, float], report: StepReport
    ) -> tuple[dict[str, float], float]:
        """Return the log of the steps since the last one, and begin anew. Waits for the device.

        Args:
            logs: The Trainer's, with the mean loss of these steps.
            report: Of the last one.

        Returns:
            The log with the mean of the losses that were not left out, without a loss if all
            were; and by how much that mean is larger than the Trainer's.
        """
        left_out, scale, *counts, norms = self._read(report)
        names = ("applied_updates", "skipped_updates", "overflows", "non_finite_losses")
        logs = logs | {"loss_scale": scale}
        logs |= {name: int(count) for name, count in zip(names, counts, strict=True)}
        logs |= norms
        before = logs["loss"]
        kept = self._num_losses - left_out
        if kept > 0:
            logs["loss"] = before * (self._num_losses / kept)
        else:
            del logs["loss"]
        self.num_steps = self._num_losses = 0
        self._left_out = self._zero()
        return logs, logs.get("loss", 0.0) - before

    def _read(self, report: StepReport) -> list[Any]:
        output = report.output
        values = torch.stack(
            [
                self._left_out.double(),
                output.loss_scale.double(),
                report.applied_updates.double(),
                report.skipped_updates.double(),
                self._overflows.double(),
                self._non_finite_losses.double(),
            ]
        )
        norms: dict[str, float] = {}
        if isinstance(output, LocalNormStepOutput):
            values = torch.cat((values, output.local_norm.double()))
            read = values.tolist()
            local = zip(report.local_norm_names, read[6:], strict=True)
            norms = {f"local_norm/{name}": norm for name, norm in local}
        else:
            read = values.tolist()
        return [*read[:6], norms]

    def state_dict(self) -> dict[str, int]:
        """Return all counts; waits for the device."""
        return {
            "num_steps": self.num_steps,
            "num_losses": self._num_losses,
            "left_out": int(self._left_out),
            "non_finite_losses": int(self._non_finite_losses),
            "overflows": int(self._overflows),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore what `state_dict` returned."""
        self.num_steps, self._num_losses = state["num_steps"], state["num_losses"]
        self._left_out = self._zero() + state["left_out"]
        self._non_finite_losses = self._zero() + state["non_finite_losses"]
        self._overflows = self._zero() + state["overflows"]
