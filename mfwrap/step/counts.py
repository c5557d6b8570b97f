"""How many updates were applied and skipped: on the device, and a step later on the host."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from mfwrap.arguments import described
from mfwrap.outputs import StepReport
from mfwrap.tensors.deferred import DeferredReads

__all__ = ["UpdateCounts"]

_COUNTERS = ("applied_updates", "skipped_updates", "consecutive_skips")


class _Arrival(NamedTuple):
    """What the host needs of a step: scalar tensors as they leave, numbers as they arrive."""

    skipped: Any
    consecutive_skips: Any
    loss_scale: Any
    step: Any


@final
class UpdateCounts:
    """Count updates, and tell the host without making it wait.

    Args:
        device: The training device.
        max_consecutive_skips: As in `StepConfig`.
        on_applied: Called by `flush` for each update that was applied.
        reported: Whether anyone asks on the host; if not, nothing is copied to it.
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
        # Replaced at every step, so that reports keep their values.
        self.applied_updates = zero
        self.skipped_updates = zero
        self.consecutive_skips = zero
        self.last_was_skipped = False
        """Whether the last update was skipped, as far as `flush` has learned."""
        self._limit = max_consecutive_skips
        self._on_applied = on_applied
        self._reported = reported or on_applied is not None or max_consecutive_skips is not None
        self._reads = DeferredReads(device)
        self._reads.reserve(len(_Arrival._fields))

    def count(self, applied: Tensor) -> None:
        """Count one update; `applied` has shape ``()``, bool."""
        skipped = ~applied
        self.applied_updates = self.applied_updates + applied
        self.skipped_updates = self.skipped_updates + skipped
        self.consecutive_skips = (self.consecutive_skips + 1) * skipped

    def submit(self, report: StepReport, local_norm: Tensor) -> None:
        """Start copying what the host needs to know of an update."""
        if not self._reported:
            return
        values = _Arrival(
            skipped=report.skipped,
            consecutive_skips=report.consecutive_skips,
            loss_scale=report.output.loss_scale,
            step=report.applied_updates + report.skipped_updates,
        )
        self._reads.submit(
            torch.stack([value.float() for value in values]),
            functools.partial(self._receive, local_norm=local_norm, names=report.local_norm_names),
        )

    def flush(self) -> None:
        """Wait for what is pending of the last update and act on it.

        Raises:
            RuntimeError: If it was the ``max_consecutive_skips``-th skip in a row.
        """
        self._reads.flush()

    def _receive(
        self, values: Sequence[float], *, local_norm: Tensor, names: tuple[str, ...]
    ) -> None:
        arrival = _Arrival(*values)
        self.last_was_skipped = bool(arrival.skipped)
        if not arrival.skipped and self._on_applied is not None:
            self._on_applied()
        if self._limit is not None and arrival.consecutive_skips >= self._limit:
            finite = local_norm.isfinite().tolist()
            bad = [name for name, fine in zip(names, finite, strict=True) if not fine]
            msg = (
                f"{arrival.consecutive_skips:.0f} updates in a row were skipped, the last one at "
                f"step {arrival.step:.0f} with loss scale {arrival.loss_scale:g}; "
                f"groups whose gradient norm is not finite: {bad}"
            )
            raise RuntimeError(msg)

    def tensors(self) -> dict[str, Tensor]:
        """Return the counters by name: shape ``()``, int64, never changed in place."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the counters, after a flush."""
        self.flush()
        return {name: value.clone() for name, value in self.tensors().items()}

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would raise, and change nothing."""
        for name in _COUNTERS:
            _check_counter(name, state_dict[name])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counters, and drop what is pending of the last update.

        Raises:
            KeyError: If a counter is missing.
            TypeError: If a counter is not a tensor.
            ValueError: If a counter has another shape or dtype.
        """
        self.check(state_dict)
        for name, counter in self.tensors().items():
            setattr(self, name, state_dict[name].detach().clone().to(counter.device))
        self.last_was_skipped = bool(self.consecutive_skips > 0)
        self.discard_pending()

    def discard_pending(self) -> None:
        """Forget what is pending of the last update, without acting on it."""
        self._reads.discard()


def _check_counter(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.shape != () or value.dtype != torch.int64:
        kind = (
            f"shape {tuple(value.shape)} and {value.dtype}"
            if isinstance(value, Tensor)
            else described(value)
        )
        msg = f"`state_dict[{name!r}]` must be a tensor of shape () and dtype int64, got {kind}"
        raise (ValueError if isinstance(value, Tensor) else TypeError)(msg)
