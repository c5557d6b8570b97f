"""Public names: how they are resolved, and the table of MindSpore's and MindFormers' names."""

from mfwrap.names.resolution import hint, package_getattr

__all__ = ["hint", "package_getattr"]
