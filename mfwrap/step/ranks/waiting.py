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

from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives import Section, section_clock
from mfwrap.compatibility.torch import PRE_FORWARD, not_compiled, waits_before_forward


@final
class TimedCollective:
    """Call a method that waits for other ranks; its time counts as waiting.

    Args:
        method: Method to call.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    @not_compiled
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
        if waits_before_forward(part):
            time_method(part, PRE_FORWARD)
