"""Count the time in torch's own collectives as waiting for other ranks.

See `mfwrap.collectives.clock`. torch has no public hook before or after these collectives, so
`TimedCollective` takes the place of the methods that wait. It stays in place when nobody reads the
times any more, and then only calls the method.

``torch.compile`` must not compile `TimedCollective`, because reading a clock is a graph break, and
an error with ``fullgraph``. torch does not compile the methods that wait either, so the number of
graphs stays the same.
"""

from collections.abc import Callable, Iterable
from typing import Any, final

from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives import Section, section_clock


@final
class TimedCollective:
    """Call a method that waits for other ranks; its time counts as waiting.

    Args:
        method: Method to call.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    # `torch.compiler.disable` is the same, but imports the compiler here, which takes seconds.
    @_disable_dynamo
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the method, and return its result."""
        with section_clock.within(Section.WAITING):
            return self._method(*arguments, **keywords)


def time_method(owner: Any, name: str) -> None:
    """Count the time in a method of `owner` as waiting from now on, if `owner` has the method."""
    method = getattr(owner, name, None)
    if method is not None and not isinstance(method, TimedCollective):
        setattr(owner, name, TimedCollective(method))


def time_replicas(parts: Iterable[DistributedDataParallel]) -> None:
    """Count the time in which replicas wait before their forward as waiting from now on.

    There DistributedDataParallel broadcasts buffers, and the sizes of its buckets in the second
    step. Its wait for gradients is measured by `SectionClock.follow_backward`.
    """
    for part in parts:
        # A replica with a reducer in Python is compiled whole. Its method does not wait.
        if not part._use_python_reducer:  # noqa: SLF001  (torch has no public name for it)
            time_method(part, "_pre_forward")
