"""What mfwrap knows about a name of another library."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import final

from packaging.version import Version


@final
@dataclass(frozen=True)
class ForeignName:
    """A private or version-dependent name of another library.

    Args:
        module: Module that has the name, or that has the class of `attribute`.
        attribute: The name inside the module. ``"Class.name"`` is an attribute of the class or of
            its instances.
        since: First version of the library that has it; ``None`` if all supported versions do.
        before: First version of the library that no longer has it; ``None`` if there is none yet.
    """

    module: str
    attribute: str
    since: str | None = None
    before: str | None = None


class ReleaseError(ImportError):
    """An installed library is too old for what was asked for."""


def is_installed(library: str, release: str) -> bool:
    """Return whether the installed version of a library is a release or newer.

    A pre-release counts as its release: ``5.5.0.dev0`` as 5.5.0.

    Args:
        library: Name of the library's distribution.
        release: Release such as ``"5.5"``.

    Raises:
        importlib.metadata.PackageNotFoundError: If the library is not installed.
    """
    return Version(version(library)).release >= Version(release).release
