"""Rows of layouts that cannot run on a CPU, or with the installed versions."""

from collections.abc import Callable

from support.layouts.layout import Layout

__all__ = ["Unable"]


class Unable(Layout):
    """A layout that fails before mfwrap is concerned.

    Args:
        name: First cell of the row.
        ranks: Number of ranks.
        attempt: Program of a rank that tries the layout, and returns the error.
        error: Beginning of the error.
        reason: Text in the row.
    """

    def __init__(
        self, name: str, ranks: int, attempt: Callable[[int], str], error: str, reason: str
    ) -> None:
        super().__init__(name, ranks, lambda whole: whole)
        self.attempt = attempt
        self.error = error
        self.reason = reason
