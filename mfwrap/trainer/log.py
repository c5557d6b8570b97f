"""What the Trainer's log says of the steps since the last one."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from mfwrap.outputs import LocalNormStepOutput, StepReport

__all__ = ["StepLog"]


# Losses that wait to be counted, at most: a few kilobytes.
_MOST_PENDING = 64


@final
class StepLog:
    """Count on the device what the log reports, and leave losses out that are not finite.

    A micro-batch costs one operation; losses are counted together, when someone asks.

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
        self.begin = 0
        """After which step the losses begin that the Trainer has added up."""
        self.num_steps = 0
        """Updates since the last log."""
        self._num_losses = 0
        # Losses that are not counted yet, with their shares.
        self._pending: list[tuple[Tensor, Tensor | float]] = []
        # Since the last log: how many losses were left out, and of how many updates.
        self._left_out = self._zero()
        self._left_share = self._zero().double()
        # In all.
        self._non_finite_losses = self._zero()
        self._overflows = self._zero()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._device)

    def filtered(self, loss: Tensor, share: Tensor | float) -> Tensor:
        """Return the loss of a micro-batch, or 0 if it is not finite and so left out.

        Args:
            loss: Shape ``()``. Not read on the host.
            share: Of the update that the micro-batch is: shares of an update add up to 1.
        """
        self._num_losses += 1
        self._pending.append((loss, share))
        if len(self._pending) == _MOST_PENDING:
            self._settle()
        return loss.nan_to_num(0.0, 0.0, 0.0) if self.filters else loss

    def _settle(self) -> None:
        """Count the losses that wait."""
        if not self._pending:
            return
        losses, shares = zip(*self._pending, strict=True)
        self._pending = []
        bad = ~torch.stack(losses).isfinite()
        self._non_finite_losses = self._non_finite_losses + bad.sum()
        if self.filters:
            self._left_out = self._left_out + bad.sum()
            # Filled on the device: a copy from the host would wait for it.
            weights = [
                torch.as_tensor(share, dtype=torch.float64)
                if isinstance(share, Tensor)
                else torch.full((), share, dtype=torch.float64, device=self._device)
                for share in shares
            ]
            self._left_share = self._left_share + (bad * torch.stack(weights)).sum()

    def count(self, report: StepReport) -> None:
        """Count an update."""
        self.num_steps += 1
        self._overflows = self._overflows + report.output.overflow

    def completed_sum(self, losses: Tensor) -> Tensor:
        """Return the sum of losses since the last log as if those left out were like the others.

        Args:
            losses: Shape ``()``: the sum without them.
        """
        self._settle()
        kept = self.num_steps - self._left_share
        return torch.where(kept > 0, losses * (self.num_steps / kept), losses).to(losses.dtype)

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
        self._settle()
        output = report.output
        scalars = {
            "loss_scale": output.loss_scale,
            "applied_updates": report.applied_updates,
            "skipped_updates": report.skipped_updates,
            "overflows": self._overflows,
            "non_finite_losses": self._non_finite_losses,
        }
        names = report.local_norm_names if isinstance(output, LocalNormStepOutput) else ()
        local_norms = output.local_norm if isinstance(output, LocalNormStepOutput) else None
        left_out, left_share, *values = _read(
            [self._left_out, self._left_share, *scalars.values()], local_norms
        )
        keys = [*scalars, *(f"local_norm/{name}" for name in names)]
        logs = logs | dict(zip(keys, values, strict=True))
        for name in list(scalars)[1:]:
            logs[name] = int(logs[name])
        before = logs["loss"]
        if left_out < self._num_losses:
            logs["loss"] = before * (self.num_steps / (self.num_steps - left_share))
        else:
            del logs["loss"]
        self.num_steps = self._num_losses = 0
        self._left_out, self._left_share = self._zero(), self._zero().double()
        return logs, logs.get("loss", 0.0) - before

    def state_dict(self) -> dict[str, float]:
        """Return all counts; waits for the device."""
        self._settle()
        return {
            "begin": self.begin,
            "num_steps": self.num_steps,
            "num_losses": self._num_losses,
            "left_out": int(self._left_out),
            "left_share": float(self._left_share),
            "non_finite_losses": int(self._non_finite_losses),
            "overflows": int(self._overflows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._pending = []
        self.begin = state["begin"]
        self.num_steps, self._num_losses = state["num_steps"], state["num_losses"]
        self._left_out = self._zero() + state["left_out"]
        self._left_share = self._zero().double() + state["left_share"]
        self._non_finite_losses = self._zero() + state["non_finite_losses"]
        self._overflows = self._zero() + state["overflows"]


def _read(scalars: Sequence[Tensor], vector: Tensor | None) -> list[float]:
    """Return the values of all, with one wait."""
    values = torch.stack([scalar.double() for scalar in scalars])
    if vector is not None:
        values = torch.cat((values, vector.double()))
    read: list[float] = values.tolist()
    return read
