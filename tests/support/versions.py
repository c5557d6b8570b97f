"""Skip what an installed version of a library cannot do, with the reason."""

import pytest

from mfwrap.compatibility.foreign import is_installed

__all__ = ["COUNTS_SHIFTED", "needs"]


def needs(library: str, release: str, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests unless a library's installed version is new enough.

    Args:
        library: Name of the library's distribution.
        release: First release with which the tests can pass.
        reason: What older releases lack.
    """
    return pytest.mark.skipif(
        not is_installed(library, release), reason=f"needs {library} {release}: {reason}"
    )


COUNTS_SHIFTED = needs("transformers", "5.11", "the Trainer counts first labels as targets")
"""Mark of tests whose losses older Trainers divide by too many targets."""
