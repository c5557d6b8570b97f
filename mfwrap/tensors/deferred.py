"""Device-to-host reads that never wait where the device could be working."""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["DeferredReads"]


@dataclass(slots=True)
class _Mailbox:
    """Host memory that one small vector is copied into."""

    tensor: Tensor
    arrived: torch.Event | None = None
    array: Any = field(init=False)
    """A view of `tensor` that is read without a torch call."""

    def __post_init__(self) -> None:
        self.array = self.tensor.numpy()

    def __deepcopy__(self, memo: object) -> "_Mailbox":
        # An array that is copied by itself would be no view of the copied tensor.
        if self.arrived is None:
            return _Mailbox(self.tensor.clone())
        self.arrived.synchronize()
        return _Mailbox(self.tensor.clone().pin_memory(), torch.Event(self.arrived.device))


@final
class DeferredReads:
    """A queue of small vectors on their way from the device to the host.

    `submit` starts a copy into pinned memory and returns at once; `flush` waits for the copies
    and hands the values on. Flushing just before the optimizer of the next step waits for values
    of the last one, when this step's forward and backward are queued already, so the device is
    never idle for it.

    Args:
        device: Where the values are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[_Mailbox]] = {}
        self._pending: deque[tuple[_Mailbox, Callable[[Sequence[float]], None]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def reserve(self, size: int) -> None:
        """Make a mailbox for vectors of `size` elements ahead of time."""
        self._free.setdefault(size, []).append(self._new_mailbox(size))

    def submit(self, values: Tensor, receive: Callable[[Sequence[float]], None]) -> None:
        """Start copying `values` to the host.

        Args:
            values: Shape ``(n,)``, float32, on the device.
            receive: Called by `flush` with the ``n`` values.
        """
        free = self._free.setdefault(values.numel(), [])
        mailbox = free.pop() if free else self._new_mailbox(values.numel())
        mailbox.tensor.copy_(values, non_blocking=True)
        if mailbox.arrived is not None:
            mailbox.arrived.record(torch.accelerator.current_stream(self._device))
        self._pending.append((mailbox, receive))

    def flush(self) -> None:
        """Wait for all pending values and hand them on, in the order of submission.

        What `receive` raises is raised here; values behind it stay pending.
        """
        while self._pending:
            mailbox, receive = self._pending.popleft()
            if mailbox.arrived is not None:
                mailbox.arrived.synchronize()
            values = [float(value) for value in mailbox.array]
            self._free[len(values)].append(mailbox)
            receive(values)

    def discard(self) -> None:
        """Forget all pending values."""
        for mailbox, _ in self._pending:
            self._free[mailbox.tensor.numel()].append(mailbox)
        self._pending.clear()

    def _new_mailbox(self, size: int) -> _Mailbox:
        # Said in full, because a program may have set another default device or dtype.
        on_host = functools.partial(torch.zeros, size, dtype=torch.float32, device="cpu")
        if self._device.type == "cpu":
            return _Mailbox(on_host())
        return _Mailbox(on_host(pin_memory=True), torch.Event(self._device))
