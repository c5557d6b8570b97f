"""Defer schedules on a CPU, as on a device whose results arrive late."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from mfwrap.tensors.deferred import DeferredReads

__all__ = ["late_results"]


@contextlib.contextmanager
def late_results() -> Iterator[None]:
    """Treat the results of updates on a CPU as if they were still on a device.

    On a CPU the host can read them at any time, so schedules advance at once. Within this block
    the step believes that reading would wait, and takes the way of a device with a fused optimizer.
    """
    with mock.patch.object(DeferredReads, "are_free", new=False):
        yield
