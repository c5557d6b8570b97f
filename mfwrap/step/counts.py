"""Count applied and skipped updates on the device, and report them to the host one update later.

The host needs to know whether an update was applied: to advance a schedule, to report
``optimizer_step_was_skipped``, and to stop a training after too many skipped updates in a row.
Reading the flag right after the update would synchronize with the device. So the flag is copied to
the host in the background (`DeferredReads`), and `flush` reads the copy just before the next
update. `UpdateCounts.was_skipped` reads it earlier for a caller that asks. Where asking costs
nothing, `UpdateCounts.outcome_is_known` says so.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from mfwrap.outputs import StepReport
from mfwrap.tensors.deferred import DeferredReads
from mfwrap.tensors.saved_state import check_tensor

COUNTERS = ("applied_updates", "skipped_updates", "consecutive_skips")
"""Names of the tensors in `UpdateCounts.state_dict`."""


class _Arrival(NamedTuple):
    """Results of an update that the host needs: tensors on the device, numbers on the host."""

    skipped: Any
    consecutive_skips: Any
    loss_scale: Any
    step: Any


@final
class UpdateCounts:
    """Count applied and skipped updates, and copy the results to the host in the background.

    Args:
        device: Training device.
        max_consecutive_skips: As in `StepConfig`.
        on_applied: Function that `flush` calls for each update that was applied.
        reported: Whether the caller calls `was_skipped`. If ``False``, and both
            `max_consecutive_skips` and `on_applied` are ``None``, nothing is copied to the host.
    """

    def __init__(
        self,
        device: torch.device,
        max_consecutive_skips: int | None,
        *,
        on_applied: Callable[[], None] | None = None,
        reported: bool = True,
    ) -> None:
        zero = torch.zeros((), dtype=torch.int64, device=device)
        # Each step assigns new tensors to these counters, because reports keep the old tensors.
        self.applied_updates = zero
        self.skipped_updates = zero
        self.consecutive_skips = zero
        self.num_updates = 0
        """Number of updates, applied and skipped; the host knows it without asking the device."""
        # None while only the device knows.
        self._was_skipped: bool | None = False
        # Error about too many skips, which `flush` raises.
        self._error: RuntimeError | None = None
        self._limit = max_consecutive_skips
        self._on_applied = on_applied
        self._reported = reported or on_applied is not None or max_consecutive_skips is not None
        self._hold: Callable[[StepReport, Tensor], None] | None = None
        self._reads = DeferredReads(device)
        self._reads.reserve(len(_Arrival._fields))

    def count(self, applied: Tensor, skipped: Tensor) -> None:
        """Count one update; `applied` and its opposite `skipped` have shape ``()``, bool."""
        self.num_updates += 1
        self.applied_updates = self.applied_updates + applied
        self.skipped_updates = self.skipped_updates + skipped
        self.consecutive_skips = (self.consecutive_skips + 1) * skipped

    def submit(
        self, report: StepReport, local_norm: Callable[[], Tensor], *, skipped: bool | None = None
    ) -> None:
        """Start copying an update's results to the host.

        Args:
            report: Report of the update.
            local_norm: Returns the local norms of the update. The error about too many skips uses
                them to name the groups with non-finite gradients.
            skipped: Whether the update was skipped, if the host knows it already.
        """
        if self._hold is not None:
            self._hold(report, local_norm())
            return
        if not self._reported:
            return
        self._was_skipped = skipped
        values = _Arrival(
            skipped=report.skipped,
            consecutive_skips=report.consecutive_skips,
            loss_scale=report.output.loss_scale,
            step=report.applied_updates + report.skipped_updates,
        )
        self._reads.submit(
            torch.stack([value.float() for value in values]),
            functools.partial(self._receive, report=report, local_norm=local_norm),
        )

    @contextlib.contextmanager
    def held_by(self, hold: Callable[[StepReport, Tensor], None]) -> Iterator[None]:
        """Within the block, read nothing, and give what is submitted to `hold`.

        A captured step does neither in its graph. It does both between two replays.

        Args:
            hold: Called with the report of an update and its local norms.
        """
        self._hold = hold
        try:
            yield
        finally:
            self._hold = None

    @property
    def outcome_is_known(self) -> bool:
        """Whether `was_skipped` returns without synchronizing with the device."""
        return self._was_skipped is not None or self._reads.are_free

    def was_skipped(self) -> bool:
        """Return whether the last update was skipped; False before the first update.

        Synchronizes with the device unless `outcome_is_known`. Too many skips in a row raise no
        error here; `flush` raises it before the next update.
        """
        if self._was_skipped is None:
            self._reads.flush()
        return bool(self._was_skipped)

    def flush(self) -> None:
        """Read the last update's results: call `on_applied`, or raise after too many skips.

        Synchronizes with the device if results are pending.

        Raises:
            RuntimeError: If the update was the ``max_consecutive_skips``-th skip in a row.
        """
        if self._hold is not None:
            return
        self._reads.flush()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _receive(
        self, values: Sequence[float], *, report: StepReport, local_norm: Callable[[], Tensor]
    ) -> None:
        arrival = _Arrival(*values)
        self._was_skipped = bool(arrival.skipped)
        if not arrival.skipped and self._on_applied is not None:
            self._on_applied()
        at_limit = self._limit is not None and arrival.consecutive_skips >= self._limit
        if at_limit and self._error is None:
            finite = local_norm().isfinite().tolist()
            named = zip(report.local_norm_names, finite, strict=True)
            bad = [name for name, is_finite in named if not is_finite]
            msg = (
                f"{arrival.consecutive_skips:.0f} updates in a row were skipped, the last one at "
                f"step {arrival.step:.0f}; the loss scale is {arrival.loss_scale:g} now; "
                f"groups with a non-finite gradient norm: {bad}; learning rates: "
                f"{report.learning_rates.tolist()}; look for NaN in the batches and for a too high "
                "learning rate: TrainingStateMonitor names the module, and with `replay` the rows"
            )
            self._error = RuntimeError(msg)

    def tensors(self) -> dict[str, Tensor]:
        """Return the counters by name: shape ``()``, int64, changed in place by captured steps."""
        return {name: getattr(self, name) for name in COUNTERS}

    def replaced(self) -> list[tuple[object, str]]:
        return [(self, name) for name in COUNTERS]

    def state_dict(self) -> dict[str, Tensor]:
        """Call `flush`, and return copies of the counters."""
        self.flush()
        return {name: value.clone() for name, value in self.tensors().items()}

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the errors that `load_state_dict` would raise, without changing anything."""
        for name, counter in self.tensors().items():
            check_tensor(name, state_dict[name], counter)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counters, and drop pending results.

        Raises:
            KeyError: If a counter is missing.
            TypeError: If a counter is not a tensor.
            ValueError: If a counter has another shape or dtype.
        """
        self.check(state_dict)
        for name, counter in self.tensors().items():
            setattr(self, name, state_dict[name].detach().clone().to(counter.device))
        self.num_updates = int(self.applied_updates) + int(self.skipped_updates)
        self.discard_pending()
        self._was_skipped = bool(self.consecutive_skips > 0)

    def discard_pending(self) -> None:
        """Drop results that `flush` has not read yet, without acting on them."""
        self._reads.discard()
        self._was_skipped, self._error = False, None
