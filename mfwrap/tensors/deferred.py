"""Copy small results to the host in the background, and read them later.

Reading a tensor on the host (``item``) stops the host until the device has done everything that is
queued. Then the device idles until the host has queued more work. A training step that reads one
flag in this way loses time in every step. `DeferredReads` splits the read in two:

- `submit`, at the end of step t, queues a copy into pinned host memory, records an event after the
  copy and returns at once.
- `flush`, just before the optimizer of step t+1, waits for the event. By then the forward and
  backward of step t+1 are queued, so the device has work while the host waits. The event comes
  before that work in the queue, so the wait is short.

A maintainer must keep three rules:

- The copy needs *pinned* memory. CUDA finishes a copy to pageable memory before it returns, even
  with ``non_blocking=True``.
- Host memory must not be read or reused before the event of its copy has completed. So a *mailbox*
  goes back to the free list only in `flush`. `discard` does not wait for events, so it gives the
  mailboxes up; torch frees pinned memory only after the copies that use it.
- Nothing that `submit` calls may read a tensor on the host. Take sizes from shapes.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor


@dataclass(slots=True)
class _Mailbox:
    """Host memory for one small vector."""

    tensor: Tensor
    arrived: torch.Event | None = None
    """Event after the copy; ``None`` if the values are on the CPU already."""

    array: Any = field(init=False)
    """NumPy view of `tensor`, so that reading it needs no call of torch."""

    def __post_init__(self) -> None:
        self.array = self.tensor.numpy()

    def __deepcopy__(self, memo: object) -> "_Mailbox":
        # The default deepcopy would copy `tensor` and `array` separately, but `array` must be a
        # view of `tensor`.
        if self.arrived is None:
            return _Mailbox(self.tensor.clone())
        self.arrived.synchronize()
        return _Mailbox(self.tensor.clone().pin_memory(), torch.Event(self.arrived.device))


@final
class DeferredReads:
    """Queue of small vectors that are copied from the device to the host in the background.

    `submit` starts a copy and returns at once. `flush` waits for the copies and passes the values
    to the functions given to `submit`. Flush when the device has other work queued, for example
    just before the next optimizer step.

    Args:
        device: Device of the values; ``None`` for the device of the first vector.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._free: dict[int, list[_Mailbox]] = {}
        self._pending: deque[tuple[_Mailbox, Callable[[Sequence[float]], None]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def are_free(self) -> bool:
        """Whether `flush` never waits, because the values are on the CPU."""
        return self._device is not None and self._device.type == "cpu"

    def reserve(self, size: int) -> None:
        """Allocate host memory for a vector of `size` elements ahead of time.

        Raises:
            RuntimeError: If no device was passed and `submit` has not been called yet.
        """
        if self._device is None:
            msg = (
                "`reserve` needs the device; pass `device` to DeferredReads, or call `submit` first"
            )
            raise RuntimeError(msg)
        self._free.setdefault(size, []).append(_new_mailbox(size, self._device))

    def submit(self, values: Tensor, receive: Callable[[Sequence[float]], None]) -> None:
        """Start to copy `values` to the host.

        Args:
            values: Vector on the device, shape ``(n,)``, float32.
            receive: Function that `flush` calls with the ``n`` values.
        """
        if self._device is None:
            self._device = values.device
        free = self._free.setdefault(values.numel(), [])
        mailbox = free.pop() if free else _new_mailbox(values.numel(), self._device)
        mailbox.tensor.copy_(values, non_blocking=True)
        if mailbox.arrived is not None:
            mailbox.arrived.record(torch.accelerator.current_stream(self._device))
        self._pending.append((mailbox, receive))

    def flush(self, *, waits: bool = True) -> None:
        """Wait for all pending copies, and pass the values on in the order of submission.

        If a ``receive`` function raises, its error is raised here and later values stay pending.

        Args:
            waits: Whether to wait. ``False`` passes on the values that have arrived, up to the
                first copy that has not completed.
        """
        while self._pending and (waits or self._has_arrived(self._pending[0][0])):
            mailbox, receive = self._pending.popleft()
            if mailbox.arrived is not None:
                mailbox.arrived.synchronize()
            values = [float(value) for value in mailbox.array]
            self._free[len(values)].append(mailbox)
            receive(values)

    def _has_arrived(self, mailbox: _Mailbox) -> bool:
        return self.are_free or (mailbox.arrived is not None and bool(mailbox.arrived.query()))

    def discard(self) -> None:
        """Drop all pending values without passing them on, and without waiting for them."""
        self._pending.clear()


def _new_mailbox(size: int, device: torch.device) -> _Mailbox:
    # Set dtype and device explicitly: the program may have changed torch's defaults.
    on_host = functools.partial(torch.zeros, size, dtype=torch.float32, device="cpu")
    if device.type == "cpu":
        return _Mailbox(on_host())
    return _Mailbox(on_host(pin_memory=True), torch.Event(device))
